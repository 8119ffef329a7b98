"""A child process that takes and gives back memory when it is told to, and trees of fake files."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MIB = 1 << 20
PAGE = mmap.PAGESIZE

#: What an interpreter may take for itself while it serves a command.
NOISE = 32 * PAGE

#: Kernels 6.2 to 6.16 let the counters of /proc/PID/status lag by 32 pages on every CPU.
COUNTER_LAG = NOISE + 32 * PAGE * (os.cpu_count() or 1)

# The child serves one command per line and answers when it is done: nothing has to wait for a
# time. Only anonymous private memory counts as allocated; mmap's default is shared memory.
_CHILD = """
import mmap, os, sys
maps = []
def touch(view, write):
    for at in range(0, len(view), mmap.PAGESIZE):
        if write:
            view[at] = 1
        else:
            view[at]
def serve(word, argument):
    if word == "allocate":
        maps.append(mmap.mmap(-1, int(argument), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        touch(maps[-1], True)
    elif word == "map":
        with open(argument, "rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        touch(maps[-1], False)
    elif word == "free":
        maps.pop().close()
    elif word == "fork":
        child, parent = os.pipe()
        if os.fork() == 0:
            os.close(parent)
            os.read(child, 1)
            os._exit(0)
        os.close(child)
    elif word == "reset":
        from localkv.probes.process import reset_peak
        done, why = reset_peak()
        return why if not done else "ok"
    return "ok"
print("ready", flush=True)
for line in sys.stdin:
    print(serve(*line.rstrip("\\n").split(" ", 1)), flush=True)
"""


class Child:
    """The process of :func:`memory_child`."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.pid = popen.pid

    def answer(self) -> str:
        assert self.popen.stdout
        return self.popen.stdout.readline().strip()

    def do(self, word: str, argument: object = "") -> str:
        assert self.popen.stdin
        self.popen.stdin.write(f"{word} {argument}\n")
        self.popen.stdin.flush()
        return self.answer()

    def finish(self) -> None:
        """Let the process end, without reaping it."""
        assert self.popen.stdin
        self.popen.stdin.close()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


@contextmanager
def memory_child(marker: str = "", env: Mapping[str, str] | None = None) -> Iterator[Child]:
    """Start a child that serves allocate N, map PATH, free, fork and reset over its pipes."""
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, marker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})},
    ) as popen:
        child = Child(popen)
        assert child.answer() == "ready"
        try:
            yield child
        finally:
            popen.kill()


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write ``files`` (path below root -> text; a text ``-> X`` makes a link to X)."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text[3:])
        else:
            path.write_text(text, encoding="utf-8")
    return root
