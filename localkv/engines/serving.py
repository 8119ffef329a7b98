"""Start a server program, wait until it answers, and stop it with all that it started.

The server runs under :mod:`localkv.engines.keeper`, so that it ends with localkv even when localkv
is killed. It listens on a port that the kernel picks, which its log tells.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localkv.engines.channel import child_environment
from localkv.engines.keeper import GRACE
from localkv.errors import EngineError

_POLL = 0.02
_TAIL_BYTES = 16_384


class ServerEnded(EngineError):
    """A server ended before it was ready; ``exit_code`` is 128 and the number for a signal."""

    def __init__(self, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


@dataclass
class Serving:
    """A running server: ``pid`` is its own process, ``log`` the file that it writes to."""

    name: str
    pid: int
    log: Path
    url: str = ""

    def lines(self) -> list[str]:
        """Return the log line by line; the last may be unfinished."""
        return self.log.read_bytes().decode("utf-8", "replace").splitlines()


@contextmanager
def serving(
    command: Sequence[str],
    *,
    name: str,
    log: Path,
    listening: re.Pattern[str],
    ready: Callable[[str], bool],
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[Serving]:
    """Run ``command`` and give it when it is ready; at the end nothing of it is left.

    ``listening`` finds the port (group 1) in the log; ``ready`` is asked with the server's URL
    until it says yes. ``env`` is added to this process's environment.

    Raises:
        EngineError: the program cannot be started, ended by itself (:class:`ServerEnded`), or was
            not ready within ``timeout`` seconds; with the last lines of its log.
    """
    keeper = _start(command, log, env)
    try:
        server = Serving(name, _server_pid(keeper, command, log), log)
        _wait_until_ready(keeper, server, listening, ready, timeout)
        yield server
    finally:
        _stop(keeper)


def _start(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "localkv.engines.keeper", *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            env=_environment(env or {}),
            # Ctrl-C reaches the whole foreground group; localkv decides when the server ends.
            start_new_session=os.name == "posix",
        )


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with ``env``, without settings of other llama-servers.

    Whatever flag is left away, llama-server takes from ``LLAMA_ARG_...``; what a person has set
    there for a server of their own is not meant for this one.
    """
    return {
        name: value
        for name, value in child_environment(env).items()
        if name in env or not name.startswith("LLAMA_ARG_")
    }


def _server_pid(keeper: subprocess.Popen[bytes], command: Sequence[str], log: Path) -> int:
    assert keeper.stdout is not None
    said = keeper.stdout.readline().decode("utf-8", "replace").strip()
    if not said.isdigit():
        reason = said or tail(log) or "no reason given"
        raise EngineError(
            f"{command[0]} cannot be started ({reason})", "check that the file is a program"
        )
    return int(said)


def _wait_until_ready(
    keeper: subprocess.Popen[bytes],
    server: Serving,
    listening: re.Pattern[str],
    ready: Callable[[str], bool],
    timeout: float,
) -> None:
    deadline = time.monotonic() + timeout
    while True:
        if not server.url and (found := listening.search("\n".join(server.lines()))):
            server.url = f"http://127.0.0.1:{found[1]}"
        if server.url and ready(server.url):
            return
        if (code := keeper.poll()) is not None:
            raise ServerEnded(
                f"{server.name} ended before it was ready (exit code {code}): {tail(server.log)}",
                f"its log is {server.log}",
                code,
            )
        if time.monotonic() > deadline:
            raise EngineError(
                f"{server.name} was not ready within {timeout:g} s: {tail(server.log)}",
                f"its log is {server.log}",
            )
        time.sleep(_POLL)


def _stop(keeper: subprocess.Popen[bytes]) -> None:
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    keeper.stdin.close()
    keeper.stdout.close()
    try:
        keeper.wait(3 * GRACE)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()


def tail(log: Path, lines: int = 3) -> str:
    """Return the last ``lines`` lines of ``log`` that say something, in one line."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(said[-lines:])
