"""The measured child process and the private channel on which it answers.

A child runs ``python -m MODULE``. It gets one JSON job on standard input and answers JSON lines on
a private copy of its standard output; descriptor 1 itself is pointed at standard error before the
engine is loaded, so that nothing an engine prints can corrupt an answer. Standard input stays open
as a life line: when it ends, the parent is gone and the child ends too, on every system.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STDERR_TAIL_BYTES = 16_384
_KILL_GRACE_S = 5.0


@dataclass(frozen=True)
class Exit:
    """How a child ended: ``code`` as subprocess reports it (negative: the signal's number)."""

    code: int
    timed_out: bool
    stderr_tail: tuple[str, ...]

    @property
    def signal_name(self) -> str | None:
        """Return the name of the signal that ended the child, None when it exited by itself."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


class Child:
    """A running child; a context manager that always reaps it.

    ``messages`` yields what the child sends until it ends or ``timeout`` seconds have passed, and
    calls ``tick`` every ``interval`` seconds in between, in the caller's thread.
    """

    def __init__(
        self, module: str, job: Mapping[str, Any], *, env: Mapping[str, str] | None = None
    ) -> None:
        """Start ``python -m module`` and hand it ``job``."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._timed_out = False
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module]
            if sys.version_info >= (3, 11)
            else [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=child_environment(env),
            # Ctrl-C reaches the whole foreground group; the parent decides when a child ends.
            start_new_session=os.name == "posix",
        )
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # A job larger than the pipe would block here while the child is stuck before reading it.
        self._writer = threading.Thread(target=self._send, args=(job,), daemon=True)
        self._writer.start()

    @property
    def pid(self) -> int:
        """Return the child's process id."""
        return self._process.pid

    def messages(
        self,
        *,
        timeout: float,
        interval: float = 0.02,
        tick: Callable[[], None] = lambda: None,
    ) -> Iterator[dict[str, Any]]:
        """Yield the child's messages; stop when it has ended or ``timeout`` seconds are over."""
        deadline = self.started + timeout
        while True:
            try:
                line = self._queue.get(timeout=interval)
            except queue.Empty:
                tick()
            else:
                if line is None:
                    return
                message = _decode(line)
                if message is not None:
                    yield message
            if time.monotonic() > deadline:
                self._timed_out = True
                return

    def finish(self) -> Exit:
        """Wait for the child to end, or end it where it does not; return how it ended."""
        process = self._process
        if self._timed_out or self._writer.is_alive():
            process.kill()
        self._writer.join()
        # Ends a child that nobody listens to any more. One that ended the messages by itself is
        # gone already: its channel closes with the process, not before.
        self._close(process.stdin)
        try:
            process.wait(_KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()
        self._close(process.stdout)
        return Exit(process.returncode, self._timed_out, self._tail())

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self.finish()
        self._stderr.close()

    def _send(self, job: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it died at once; finish() tells how
            stdin.write(json.dumps(job).encode() + b"\n")
            stdin.flush()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            self._queue.put(line)
        self._queue.put(None)

    @staticmethod
    def _close(stream: Any) -> None:
        with suppress(BrokenPipeError):
            stream.close()

    def _tail(self) -> tuple[str, ...]:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        text = self._stderr.read().decode("utf-8", "replace")
        return tuple(line for line in text.splitlines() if line.strip())[-20:]


def _decode(line: bytes) -> dict[str, Any] | None:
    # A line torn by the child's death is not a message; the exit status tells the story.
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a measured child.

    The child finds this very localkv, installed or not. ``GGML_NO_BACKTRACE`` keeps an aborting
    engine from starting a debugger on itself.
    """
    ours = {"GGML_NO_BACKTRACE": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}
    home = str(Path(__file__).parents[2])
    paths = [home, ours.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    return {**os.environ, **ours, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


# -- the child's side ------------------------------------------------------------------------


class Channel:
    """The child's end: ``job`` is what the parent asked; ``send`` answers."""

    def __init__(self) -> None:
        """Take over standard output before any engine code runs, and watch the life line."""
        _die_with_parent()
        sys.stdout.flush()
        # A duplicate is not inherited and has a number of its own that no engine writes to. No
        # file object owns it, so it stays open until the process is gone and its exit code set.
        self._out = os.dup(1)
        os.dup2(2, 1)
        source = sys.stdin.buffer
        self.job: dict[str, Any] = json.loads(source.readline())
        threading.Thread(target=_end_at_eof, args=(source.fileno(),), daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; it has reached the pipe when this returns."""
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            rest = rest[os.write(self._out, rest) :]


def _end_at_eof(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    finally:
        os._exit(1)


def _die_with_parent() -> None:
    """On Linux, ask the kernel to end this process with its parent, even if threads are stuck."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
