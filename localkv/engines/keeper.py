"""The process that stands between localkv and a server it starts, and outlives neither.

``python -m localkv.engines.keeper COMMAND...`` runs COMMAND and writes its process id as one line
on a private copy of standard output; the server's own output goes to standard error, which the
caller points at a file. Standard input is a life line: when it ends, because the caller closed it
or is gone however it went, the server is asked to stop, and what is then left of it is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

#: Seconds that a server has for its own way of stopping.
GRACE = 5.0


def main(command: list[str]) -> int:
    """Run ``command`` until it ends or the life line does; return its exit code."""
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        os.write(answer, f"{error.strerror}\n".encode())
        return 127
    os.write(answer, f"{server.pid}\n".encode())
    os.close(answer)
    ended = threading.Event()
    threading.Thread(target=_wait_for_eof, args=(ended,), daemon=True).start()
    threading.Thread(target=_wait_for_end, args=(server, ended), daemon=True).start()
    ended.wait()
    return _end(server)


def _wait_for_eof(ended: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    ended.set()


def _wait_for_end(server: subprocess.Popen[bytes], ended: threading.Event) -> None:
    server.wait()
    ended.set()


def _end(server: subprocess.Popen[bytes]) -> int:
    """Stop ``server`` and everything that it started; return its exit code."""
    import psutil

    family = set(_descendants(server.pid))
    server.terminate()
    try:
        server.wait(GRACE)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    # What a server left behind that died by itself is nobody's child, but still in this group.
    family.update(_group())
    for process in family:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(family, timeout=GRACE)
    return server.returncode


def _descendants(pid: int) -> list[psutil.Process]:
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _group() -> list[psutil.Process]:
    """Return the other processes of the group that this process leads."""
    import psutil

    if os.name != "posix" or os.getpgrp() != os.getpid():
        return []
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if process.pid != os.getpid() and os.getpgid(process.pid) == os.getpgrp():
                found.append(process)
    return found


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # A thread still waits for the life line; there is nothing to wait for.
    os._exit(code if code >= 0 else 128 - code)
