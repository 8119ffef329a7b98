from __future__ import annotations

import signal
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localkv.engines.channel import Exit
from localkv.records import OUTCOMES, Reading
from localkv.sweep.measure import Sampler, judge

STAGES = ("start", "load", "context", "decode", "fill", "exit")
GOOD = Exit(0, False, ())
#: Which memory a stage is about; the engine's own word, where there is one, is better.
MEANT = {"load": "weights", "context": "context", "decode": "compute", "fill": "compute"}


def died(code: int, *said: str) -> Exit:
    return Exit(code, False, said)


def verdict(
    end: Exit, *, done: bool = False, failure: dict[str, Any] | None = None, stage: str = "context"
) -> tuple[str, str | None, str | None]:
    return judge(done, failure, stage, end, 60.0)


def reason_of(found: tuple[str, str | None, str | None]) -> str:
    assert found[1]
    assert "\n" not in found[1]
    return found[1]


def test_a_child_that_is_done_and_left_well_is_ok() -> None:
    assert verdict(GOOD, done=True) == ("ok", None, None)


@pytest.mark.parametrize("stage", STAGES)
def test_a_child_that_left_well_but_was_not_done_is_not_ok(stage: str) -> None:
    outcome, reason, where = verdict(GOOD, stage=stage)
    assert (outcome, where) == ("crashed", MEANT.get(stage, stage))
    assert reason
    assert stage in reason


@pytest.mark.parametrize(("oom", "outcome"), [(True, "oom"), (False, "failed")])
@pytest.mark.parametrize("stage", ["weights", "kv", "compute", "output", "context", "decode"])
def test_what_the_engine_said_is_kept_with_the_part_that_it_was_about(
    oom: bool, outcome: str, stage: str
) -> None:
    failure = {"kind": "failure", "reason": "its own words", "stage": stage, "oom": oom}
    assert verdict(GOOD, failure=failure) == (outcome, "its own words", stage)
    # Its words are worth more than a death while it was cleaning up after them.
    assert verdict(died(-signal.SIGSEGV), failure=failure) == (outcome, "its own words", stage)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGFPE", "SIGTERM"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_crash_names_the_signal_the_stage_and_the_last_words(name: str, stage: str) -> None:
    end = died(-signal.Signals[name], "noise", "ggml.c:12: GGML_ASSERT(x) failed")
    found = verdict(end, stage=stage)
    assert (found[0], found[2]) == ("crashed", MEANT.get(stage, stage))
    assert name in reason_of(found)
    assert stage in reason_of(found)
    assert reason_of(found).endswith("GGML_ASSERT(x) failed")


def test_a_crash_after_the_last_message_is_a_crash() -> None:
    outcome, reason, where = verdict(died(-signal.SIGSEGV), done=True, stage="exit")
    assert (outcome, where) == ("crashed", "exit")
    assert reason
    assert "SIGSEGV" in reason


def test_an_exit_code_is_named() -> None:
    found = verdict(died(3, "ModuleNotFoundError: No module named 'x'"))
    assert found[0] == "crashed"
    assert "exit code 3" in reason_of(found)
    assert "No module named" in reason_of(found)


def test_a_child_killed_from_outside_was_probably_out_of_memory() -> None:
    found = verdict(died(-signal.SIGKILL, "some line"), stage="decode")
    assert (found[0], found[2]) == ("crashed", "compute")
    assert "SIGKILL" in reason_of(found)
    assert "memory" in reason_of(found)


@pytest.mark.parametrize(
    ("said", "stage", "where"),
    [
        (("MemoryError",), "context", "context"),
        (("terminate called", "  what():  std::bad_alloc"), "load", "weights"),
        (("  what():  std::bad_alloc",), "decode", "compute"),
        (("x: failed to allocate buffer for kv cache", "bye"), "context", "kv"),
        (("x: failed to allocate compute pp buffers", "bye"), "context", "compute"),
        (("x: unable to allocate CUDA0 buffer", "bye"), "load", "weights"),
    ],
)
def test_an_engine_that_dies_of_a_failed_allocation_is_out_of_memory(
    said: tuple[str, ...], stage: str, where: str
) -> None:
    found = verdict(died(-signal.SIGABRT, *said), stage=stage)
    assert (found[0], found[2]) == ("oom", where)
    assert stage in reason_of(found)


@pytest.mark.parametrize("stage", STAGES)
def test_a_time_out_names_the_limit_and_the_stage(stage: str) -> None:
    end = Exit(-signal.SIGKILL, True, ("a last word",))
    failure = {"reason": "words", "stage": "kv", "oom": True}
    for said, done in product((None, failure), (False, True)):
        found = verdict(end, failure=said, done=done, stage=stage)
        assert (found[0], found[2]) == ("timeout", MEANT.get(stage, stage))
        assert "60 s" in reason_of(found)
        assert stage in reason_of(found)


@given(
    st.booleans(),
    st.none()
    | st.fixed_dictionaries({"reason": st.text(), "stage": st.text(), "oom": st.booleans()}),
    st.text(),
    st.builds(Exit, st.integers(-64, 255), st.booleans(), st.lists(st.text()).map(tuple)),
)
def test_every_end_has_an_outcome_and_only_ok_has_no_reason(
    done: bool, failure: dict[str, Any] | None, stage: str, end: Exit
) -> None:
    outcome, reason, _ = judge(done, failure, stage, end, 1.0)
    assert outcome in OUTCOMES
    assert (outcome == "ok") == (reason is None)
    assert (outcome == "ok") <= (done and end.code == 0)


# -- the highest readings --------------------------------------------------------------------

READINGS = st.dictionaries(
    st.sampled_from(["uss", "rss"]), st.builds(Reading, st.none() | st.integers(0, 1000))
)


@given(st.lists(READINGS, min_size=1))
@example([{"uss": Reading(None)}, {"uss": Reading(0)}])
def test_the_peak_is_the_highest_known_reading_of_each_kind(seen: list[dict[str, Reading]]) -> None:
    sampler = Sampler(gpu=None)
    for readings in seen:
        sampler.see(readings)
    for key in ("uss", "rss"):
        values = [readings[key].value for readings in seen if key in readings]
        known = [value for value in values if value is not None]
        assert (key in sampler.peak) == bool(values)
        if values:
            assert sampler.peak[key].value == (max(known) if known else None)
