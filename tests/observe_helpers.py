"""``localkv observe`` in a process of its own, and a server whose every answer a test decides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from url_helpers import Handler, Reply, Site, serving, status

PATHS = ("/metrics", "/slots", "/props")
PROPS = {
    "total_slots": 2,
    "model_path": "/nowhere/model.gguf",
    "default_generation_settings": {"n_ctx": 512},
    "is_sleeping": False,
}


class FakeServer:
    """Answers as llama-server does at work; ``metrics`` and ``slots`` can be changed."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.url = site.url
        self.metrics = {
            "requests_processing": 1,
            "requests_deferred": 0,
            "n_decode_total": 9,
            "prompt_tokens_total": 100,
            "tokens_predicted_total": 40,
        }
        self.more_metrics = ""
        self.slots = [slot(0, 30, busy=True), slot(1, 12)]
        self.props = dict(PROPS)
        self.pending = self.most_pending = 0
        self._lock = threading.Lock()
        self.restore()

    def restore(self) -> None:
        """Answer as it should."""
        self.site.add("/metrics", lambda h: h.answer(200, self._metrics()))
        self.site.add("/slots", lambda h: h.answer(200, json.dumps(self.slots).encode()))
        self.site.add("/props", lambda h: h.answer(200, json.dumps(self.props).encode()))

    def answer(self, reply: Reply) -> None:
        """Answer every question by ``reply``."""
        for path in PATHS:
            self.site.add(path, reply)

    def hang(self, handler: Handler) -> None:
        """Say nothing until the client gives up."""
        with self._lock:
            self.pending += 1
            self.most_pending = max(self.most_pending, self.pending)
        handler.connection.settimeout(60)
        assert handler.rfile.read(1) == b""
        with self._lock:
            self.pending -= 1
        handler.close_connection = True

    def asked(self, path: str) -> int:
        """Return how often ``path`` was asked for."""
        return sum(asked == path for asked, _ in self.site.asked)

    def _metrics(self) -> bytes:
        lines = [f"llamacpp:{name} {value}" for name, value in self.metrics.items()]
        return ("\n".join(lines) + "\n" + self.more_metrics).encode()


def slot(
    number: int, tokens: int, *, busy: bool = False, n_ctx: int = 512, **more: Any
) -> dict[str, Any]:
    """Return a slot as llama-server gives it."""
    known = {"id": number, "n_ctx": n_ctx, "is_processing": busy, "n_prompt_tokens": tokens}
    return {**known, **more}


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Run a :class:`FakeServer` until the block ends."""
    with serving() as site:
        yield FakeServer(site)


class Watch:
    """A running ``localkv observe --json``: its looks as they come, and how it ended."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self.process = process
        self.text = ""
        self._errors = errors

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the next line that is ``wanted``, reading on until it comes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if wanted(found := json.loads(line)):
                return found
        raise AssertionError(f"it ended: {self.errors()}")

    def answered(self) -> dict[str, Any]:
        """Return the next look with an answer."""
        return self.until(lambda look: bool(look.get("snapshot")))

    def failed(self) -> dict[str, Any]:
        """Return the next look without one."""
        return self.until(lambda look: bool(look.get("error")))

    def interrupt(self) -> int:
        """Press Ctrl-C and return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        """Return the exit code, once it ended by itself."""
        assert self.process.stdout is not None
        self.text += self.process.stdout.read()
        return self.process.wait(120)

    def errors(self) -> str:
        """Return what stands on standard error so far."""
        self._errors.seek(0)
        return self._errors.read()


@contextmanager
def watching(*arguments: object, env: Mapping[str, str] | None = None) -> Iterator[Watch]:
    """Run ``localkv observe ARGUMENTS --json``; it ends by itself after two minutes."""
    command = [sys.executable, "-m", "localkv", "observe", *map(str, arguments), "--json"]
    command += ["--interval", "0.05", "--duration", "120"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(env or {})},
        ) as process,
    ):
        try:
            yield Watch(process, errors)
        finally:
            process.kill()


def html(code: int = 200) -> Reply:
    """Return a reply with a page as proxies send it."""
    return status(code, b"<html><body>nothing here</body></html>")
