"""A server process that localkv starts: ready when it answers, and never left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from server_helpers import alive, answers, family_of
from sweep_helpers import wait_until

from localkv.engines.serving import Serving, serving
from localkv.errors import EngineError

# A server with a child of its own, which is what Ollama is.
_SERVER = """
import http.server, signal, subprocess, sys
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session="apart" in sys.argv)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print("child", child.pid, flush=True)
print("listening on", server.server_port, flush=True)
server.serve_forever()
"""
_LISTENING = re.compile(r"listening on (\d+)")


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", _SERVER, *words]


@contextmanager
def started(words: Sequence[str], folder: Path, timeout: float = 60) -> Iterator[Serving]:
    with serving(
        words,
        name="server",
        log=folder / "server.log",
        listening=_LISTENING,
        ready=answers("/"),
        timeout=timeout,
    ) as running:
        yield running


def test_it_is_given_when_it_answers_and_gone_after(tmp_path: Path) -> None:
    with started(command(), tmp_path) as running:
        assert answers("/")(running.url)
        family = family_of(running.pid)
        assert len(family) == 2
        assert running.lines()[0].startswith("child")
    assert [p for p in family if alive(p)] == []


@pytest.mark.skipif(os.name != "posix", reason="sessions are POSIX's")
def test_a_child_with_a_session_of_its_own_is_gone_too(tmp_path: Path) -> None:
    with started(command("apart"), tmp_path) as running:
        family = family_of(running.pid)
    assert len(family) == 2
    assert [p for p in family if alive(p)] == []


def test_it_is_gone_after_an_error_in_the_block(tmp_path: Path) -> None:
    family: list[psutil.Process] = []

    def fail() -> None:
        with started(command(), tmp_path) as running:
            family.extend(family_of(running.pid))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(family) == 2
    assert [p for p in family if alive(p)] == []


def test_a_server_that_does_not_listen_to_signals_is_killed(tmp_path: Path) -> None:
    with started(command("deaf"), tmp_path) as running:
        family = family_of(running.pid)
    assert [p for p in family if alive(p)] == []


@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
def test_what_a_dead_server_leaves_behind_is_killed(tmp_path: Path) -> None:
    with started(command(), tmp_path) as running:
        family = family_of(running.pid)
        os.kill(running.pid, signal.SIGKILL)
    assert len(family) == 2
    assert [p for p in family if alive(p)] == []


_PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_engines_serving import command, started
with started(command(), Path(sys.argv[2])) as running:
    print(running.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")
def test_it_ends_with_localkv_even_when_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(Path(__file__).parent), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        family = family_of(int(parent.stdout.readline()))
        assert len(family) == 2
        parent.kill()
    wait_until(lambda: not any(alive(p) for p in family))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/no/such/program"], "cannot be started"),
        ([sys.executable, "-c", "raise SystemExit('the model is broken')"], "the model is broken"),
        ([sys.executable, "-c", "import os; os.abort()"], "exit code 134"),
    ],
)
def test_one_that_does_not_come_up_says_why(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(EngineError) as caught, started(words, tmp_path):
        pass
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_that_never_answers_is_given_up(tmp_path: Path) -> None:
    silent = [sys.executable, "-c", "print('hello', flush=True); import time; time.sleep(600)"]
    with (
        pytest.raises(EngineError, match=r"not ready within 1 s: hello"),
        started(silent, tmp_path, timeout=1),
    ):
        pass
