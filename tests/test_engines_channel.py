from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from localkv.engines.channel import Child, Exit, child_environment

REPOSITORY = Path(__file__).resolve().parents[1]
ENV = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "children")])}
#: Bounds of what never takes this long; no test waits for them to pass.
PATIENCE_S = 120.0

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX signals and descriptors")
pidfd = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="watching a process that is not a child needs pidfd"
)


def run(
    do: str, *, module: str = "acting", timeout: float = PATIENCE_S, **job: Any
) -> tuple[list[dict[str, Any]], Exit]:
    """Return what a child said, and how it ended."""
    with Child(module, {"do": do, **job}, env=ENV) as child:
        messages = list(child.messages(timeout=timeout))
        return messages, child.finish()


# -- messages --------------------------------------------------------------------------------


def test_the_child_gets_its_job_and_answers() -> None:
    job = {"do": "echo", "text": "kv \u2192 \U0001f600 \n\r\x1b", "list": [1, None, 2.5, "x"]}
    with Child("acting", job, env=ENV) as child:
        assert list(child.messages(timeout=PATIENCE_S)) == [{"job": job}]
        end = child.finish()
    assert end == Exit(0, False, ())
    assert end.signal_name is None


@posix
def test_nothing_that_is_printed_reaches_the_messages() -> None:
    messages, end = run("noise")
    assert messages == [{"number": number} for number in range(5)]
    assert end.code == 0
    # It is not lost either: it went where the engine's last words are kept.
    assert any("forged" in line for line in end.stderr_tail)


def test_big_messages_arrive_whole_and_in_order() -> None:
    messages, end = run("count", messages=8, bytes=1 << 20)
    assert [message["number"] for message in messages] == list(range(8))
    assert {len(message["filler"]) for message in messages} == {1 << 20}
    assert end.code == 0


def test_a_big_job_arrives_whole() -> None:
    messages, end = run("echo", filler="x" * (1 << 20))
    assert messages[0]["job"]["filler"] == "x" * (1 << 20)
    assert end.code == 0


def test_parent_and_child_may_both_write_first() -> None:
    messages, end = run("", module="writes_first", filler="x" * (1 << 20))
    assert messages == [{"bytes": 1 << 20}]
    assert end.code == 0


@posix
def test_a_message_torn_by_death_is_dropped() -> None:
    messages, end = run("torn")
    assert messages == [{"whole": True}]
    assert end.signal_name == "SIGKILL"


# -- ends ------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize(
    ("do", "job", "name"),
    [
        ("signalled", {"signal": signal.SIGKILL}, "SIGKILL"),
        ("signalled", {"signal": signal.SIGSEGV}, "SIGSEGV"),
        ("signalled", {"signal": signal.SIGILL}, "SIGILL"),
        ("abort", {}, "SIGABRT"),
        ("segfault", {}, "SIGSEGV"),
    ],
    ids=["SIGKILL", "SIGSEGV", "SIGILL", "abort", "segfault"],
)
def test_death_by_a_signal_is_named_and_what_was_said_before_is_kept(
    do: str, job: Mapping[str, Any], name: str
) -> None:
    messages, end = run(do, **job)
    assert messages == [{"before": True}]
    assert (end.signal_name, end.timed_out) == (name, False)


@pytest.mark.parametrize("code", [0, 1, 3])
def test_an_exit_code_is_kept(code: int) -> None:
    messages, end = run("leave", code=code)
    assert messages == [{"before": True}]
    assert (end.code, end.signal_name) == (code, None)


def test_a_module_that_cannot_start_tells_why() -> None:
    messages, end = run("", module="there_is_no_such_module")
    assert (messages, end.code) == ([], 1)
    assert "there_is_no_such_module" in end.stderr_tail[-1]


def test_the_last_words_on_standard_error_are_kept_and_bounded() -> None:
    _, end = run("complain", lines=50_000, bytes=100)
    assert end.code == 3
    assert end.stderr_tail[-1] == "the last words"
    assert any("bad bytes" in line for line in end.stderr_tail)
    assert 1 < len(end.stderr_tail) <= 20


def test_an_endless_line_on_standard_error_is_bounded() -> None:
    _, end = run("complain", lines=0, bytes=4 << 20)
    assert end.stderr_tail[-1] == "the last words"
    assert sum(map(len, end.stderr_tail)) <= 1 << 16


@posix
def test_a_child_that_is_done_may_take_its_time_to_leave(tmp_path: Path) -> None:
    """Freeing a large model takes seconds; cutting the life line or killing would spoil the end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def let_it_go() -> None:
        with suppress(OSError):  # it is not there yet; the next tick asks again
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))

    with Child("acting", {"do": "leave_slowly", "pipe": str(pipe)}, env=ENV) as child:
        messages = list(child.messages(timeout=PATIENCE_S, tick=let_it_go))
        end = child.finish()
    assert messages == [{"done": True}]
    assert end == Exit(0, False, ())


@posix
def test_a_program_that_outlives_the_child_does_not_hold_up_the_parent() -> None:
    messages, end = run("leave_a_helper")
    try:
        assert (end.code, end.timed_out) == (0, False)
        os.kill(messages[0]["helper"], 0)  # it is indeed still there
    finally:
        os.kill(messages[0]["helper"], signal.SIGKILL)


# -- time-outs -------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("do", ["hang", "hang_in_c"])
def test_a_child_that_hangs_is_killed_and_reaped(do: str) -> None:
    ticks = []
    with Child("acting", {"do": do}, env=ENV) as child:
        messages = child.messages(timeout=PATIENCE_S, tick=lambda: ticks.append(child.pid))
        assert next(messages) == {"ready": True}
        # From here on it is over as soon as the next interval is.
        assert list(child.messages(timeout=0)) == []
        end = child.finish()
    assert (end.timed_out, end.signal_name) == (True, "SIGKILL")
    assert set(ticks) <= {child.pid}
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


@posix
def test_the_parent_gets_its_turn_while_a_child_is_silent() -> None:
    class Enough(Exception):
        pass

    def tick() -> None:
        seen.append(child.pid)
        if len(seen) == 3:
            raise Enough

    seen: list[int] = []
    with pytest.raises(Enough), Child("acting", {"do": "hang"}, env=ENV) as child:
        list(child.messages(timeout=PATIENCE_S, interval=0.001, tick=tick))
    # An error on the parent's side ends the child at once, without a grace, and reaps it.
    assert child._process.returncode == -signal.SIGKILL
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


def test_a_child_that_never_stops_talking_is_stopped() -> None:
    messages, end = run("chatter", timeout=1)
    assert end.timed_out
    assert all(message == {"again": True} for message in messages)


@posix
def test_a_child_stuck_before_it_reads_its_job_is_timed_out() -> None:
    messages, end = run("", module="never_reads", timeout=1, filler="x" * (1 << 20))
    assert (messages, end.timed_out, end.signal_name) == ([], True, "SIGKILL")


@posix
def test_a_parent_that_stops_listening_ends_the_child() -> None:
    with Child("acting", {"do": "hang"}, env=ENV) as child:
        assert next(child.messages(timeout=PATIENCE_S)) == {"ready": True}
        end = child.finish()
    assert not end.timed_out
    assert end.code == 1


# -- the end of the parent -------------------------------------------------------------------


@contextmanager
def parent(behaviour: str, on_interrupt: str = "stop") -> Iterator[tuple[Any, int, int]]:
    """Start a parent in a process group of its own; yield it, its child's pid and pidfd."""
    with subprocess.Popen(
        [sys.executable, "-m", "parent", behaviour, on_interrupt],
        env={**os.environ, **ENV},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as popen:
        assert popen.stdout
        pid, *message = popen.stdout.readline().split()
        assert message == ["ready"]
        watch = os.pidfd_open(int(pid))
        try:
            yield popen, int(pid), watch
        finally:
            popen.kill()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(watch, signal.SIGKILL)
            os.close(watch)


def has_ended(watch: int) -> bool:
    """Return whether the process behind ``watch`` is gone, waiting for it within bounds."""
    return bool(select.select([watch], [], [], PATIENCE_S)[0])


@pidfd
@pytest.mark.parametrize("behaviour", ["hang", "hang_in_c", "hang_without_kernel_help"])
def test_no_child_survives_a_killed_parent(behaviour: str) -> None:
    with parent(behaviour) as (popen, _, watch):
        assert not select.select([watch], [], [], 0)[0]
        os.kill(popen.pid, signal.SIGKILL)
        assert popen.wait() == -signal.SIGKILL
        assert has_ended(watch)


@pidfd
def test_ctrl_c_reaches_the_parent_alone() -> None:
    with parent("wait_for_usr1", "carry-on") as (popen, pid, _):
        os.killpg(popen.pid, signal.SIGINT)
        assert popen.stdout.readline() == "interrupted\n"
        os.kill(pid, signal.SIGUSR1)
        assert popen.stdout.readline().split() == [str(pid), "alive"]
        assert popen.stdout.readline().split() == ["exit", "0"]


@pidfd
def test_ctrl_c_in_the_parent_ends_the_child() -> None:
    with parent("hang") as (popen, _, watch):
        os.killpg(popen.pid, signal.SIGINT)
        assert has_ended(watch)
        assert popen.wait() != 0


# -- the environment -------------------------------------------------------------------------


def test_an_aborting_engine_starts_no_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "yes")
    environment = child_environment({"ADDED": "too"})
    assert environment["GGML_NO_BACKTRACE"] == "1"
    assert (environment["KEPT"], environment["ADDED"]) == ("yes", "too")


def test_an_unknown_signal_has_a_name_too() -> None:
    assert Exit(-200, False, ()).signal_name == "signal 200"
