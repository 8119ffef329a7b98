"""What a load came to, from steps made by hand: percentiles, giving up, predictions, a prefix."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_helpers import look, request, step

from localkv.analysis.exhausted import exhaustion, queued
from localkv.analysis.loaded import (
    exhaustion_point,
    percentiles,
    predicted_requests,
    summarise_load,
    summarise_step,
)
from localkv.snapshots import LoadLimits, LoadStep, RecordingInfo, Slot

FULL = request(error="http://x answered 500: Context size has been exceeded.", status=500)
LONG = request(error="http://x answered 400: exceeds the available context size", status=400)


@given(st.lists(st.floats(0, 1e6), min_size=2))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for point, value in percentiles(values).items():
        assert value == pytest.approx(cuts[int(point[1:]) - 1])


def test_percentiles_of_one_value_are_that_value_and_of_none_nothing() -> None:
    assert percentiles([2.5]) == {"p50": 2.5, "p90": 2.5, "p99": 2.5}
    assert percentiles([]) == {}


def kind(found: LoadStep, server: str) -> str:
    given_up = exhaustion(found, server)
    assert given_up is None or given_up.evidence
    return given_up.kind if given_up else ""


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        (FULL, "cache full"),
        (LONG, "too long"),
        (request(error="http://x answered 503: server busy", status=503), "refused"),
        (request(error="http://x answered 500: out of luck", status=500), ""),
        (request(error="http://x answered 400: no such parameter", status=400), ""),
    ],
)
def test_a_refusal_says_how_the_server_gave_up(failed: Any, expected: str) -> None:
    assert kind(step([request(), failed]), "llama-server") == expected


def test_the_gravest_kind_is_told() -> None:
    assert kind(step([FULL, LONG], [look(0, waiting=3)]), "llama-server") == "cache full"


def test_a_preemption_counter_that_rose_is_evidence() -> None:
    looks = [look(t, counters={"preemptions": n}) for t, n in ((0, 5), (1, 5), (2, 22))]
    found = exhaustion(step([request()], looks), "vllm")
    assert found is not None
    assert found.kind == "preempted"
    assert "17" in found.evidence[0]
    assert [preempted for _, _, _, preempted, _ in found.over_time] == [5, 5, 22]


def test_a_preemption_counter_that_stays_is_none() -> None:
    looks = [look(t, counters={"preemptions": 5}) for t in range(3)]
    assert kind(step([request()], looks), "vllm") == ""


def test_requests_that_go_back_to_waiting_show_it_before_the_counter() -> None:
    back = [look(0, running=4, waiting=6), look(1, running=1, waiting=9)]
    assert kind(step([request()], back), "vllm") == "preempted"
    came = [look(0, running=4, waiting=0), look(1, running=3, waiting=6)]
    assert kind(step([request()], came), "vllm") == ""
    ended = [look(0, running=4, waiting=6), look(1, running=1, waiting=6)]
    assert kind(step([request()], ended), "vllm") == ""


def test_sglang_calls_it_a_retraction() -> None:
    looks = [look(0, "sglang", facts={"retracted_now": n}) for n in (0, 2)]
    found = exhaustion(step([request()], looks), "sglang")
    assert found is not None
    assert found.word("sglang") == "retracted"
    assert "at most 2 requests retracted" in found.evidence[0]


def test_llama_server_defers_what_has_no_slot() -> None:
    looks = [look(0, "llama-server", running=4, waiting=1)]
    found = exhaustion(step([request()] * 5, looks), "llama-server")
    assert found is not None
    assert found.word("llama-server") == "deferred"
    assert found.peak_running == 4


def test_a_moment_of_waiting_is_no_queue_for_vllm() -> None:
    looks = [look(0, running=1, waiting=1), look(1, running=2, waiting=0)]
    assert kind(step([request(), request()], looks), "vllm") == ""
    late = request(first_token=1.2, seconds=2.0)
    assert kind(step([request(), late], looks), "vllm") == "queued"


def test_a_queue_shows_in_who_begins_when_another_has_ended() -> None:
    stairs = [request(first_token=0.5 + t, seconds=1.0 + t) for t in range(4)]
    assert queued(step(stairs)) == 3
    # An older Ollama tells nothing of what runs; a newer one's runner does.
    assert kind(step(stairs), "ollama") == "queued"
    assert kind(step(stairs, [look(0, "ollama", running=2)]), "ollama") == "queued"
    assert kind(step(stairs, [look(0, "ollama", running=4)]), "ollama") == ""
    together = [request(first_token=0.5, seconds=1.0) for _ in range(4)]
    assert kind(step(together), "ollama") == ""


def test_ollama_cuts_a_prompt_without_a_word() -> None:
    found = step([request(prompt_tokens=514)], prompt_tokens=1100)
    assert kind(found, "ollama") == "cut"
    assert not summarise_step(found, "ollama").fits
    assert any("1,100" in note and "514" in note for note in summarise_step(found, "ollama").notes)


def test_queueing_counts_on_a_ramp_only_when_nothing_graver_came() -> None:
    waits = step([request()], [look(0, "llama-server", waiting=2)], name="waits")
    full = step([FULL], name="full")
    assert exhaustion_point([], "llama-server") is None
    for ramp, expected in (([waits], "waits"), ([waits, full], "full"), ([full, waits], "full")):
        found = exhaustion_point(ramp, "llama-server")
        assert found is not None
        assert found.step == expected


@pytest.mark.parametrize(
    ("limits", "tokens", "expected"),
    [
        (LoadLimits(slots=4, per_request=2048, capacity=8192, unified=False), 132, 4),
        (LoadLimits(slots=4, per_request=2048, capacity=8192, unified=False), 2049, 0),
        (LoadLimits(slots=4, per_request=1024, capacity=1024, unified=True), 316, 3),
        (LoadLimits(slots=4, per_request=1024, capacity=1024, unified=True), 100, 4),
        # 132 tokens are 5 blocks; 19 of 20 blocks are handed out.
        (LoadLimits(per_request=512, capacity=640, block_size=32), 132, 3),
        (LoadLimits(), 100, None),
    ],
)
def test_how_many_requests_should_run_at_once(
    limits: LoadLimits, tokens: int, expected: int | None
) -> None:
    assert predicted_requests(limits, limits.capacity, tokens) == expected


def test_a_step_sums_up_its_requests_and_looks() -> None:
    looks = [
        look(0, "llama-server", used_tokens=10, running=0),
        look(1, "llama-server", used_tokens=230, running=2, waiting=1, usage=0.5),
        look(2, "llama-server", used_tokens=216, running=0, waiting=0),
    ]
    requests = [request(), request(first_token=1.5, cached_tokens=7), LONG]
    found = summarise_step(step(requests, looks), "llama-server")
    assert (found.answered, found.failed, found.fits) == (2, 1, False)
    assert (found.peak_used, found.used_after, found.peak_usage) == (230, 216, 0.5)
    assert (found.peak_running, found.peak_waiting, found.cached_tokens) == (2, 1, 7)
    assert found.first_token["p50"] == 1.0
    assert found.generated == 24
    assert found.throughput == 12.0
    assert found.notes == ("1 failed: exceeds the available context size",)


def info(**load: Any) -> RecordingInfo:
    return RecordingInfo(kind="load", server="llama-server", load=load)


def pair(*looks: Any, cached: int | None = 1984) -> list[LoadStep]:
    told: dict[str, Any] = {"part": "prefix", "prompt_tokens": 2100, "shared": 2000}
    return [
        step([request(prompt_tokens=2100, first_token=2.0)], **told),
        step([request(prompt_tokens=2100, first_token=0.2, cached_tokens=cached)], looks, **told),
    ]


def test_a_prefix_is_worth_its_discount() -> None:
    found = summarise_load(info(price=3.0, discount=90, shared=2000), pair()).prefix
    assert found is not None
    assert (found.first_token_without, found.first_token_with) == (2.0, 0.2)
    assert (found.cached_tokens, found.source) == (1984, "the answer")
    # 1984 tokens at 3.00 per million, 90 % off, for a thousand prompts.
    assert found.saved_per_1000 == pytest.approx(1984 / 1e6 * 3.0 * 0.9 * 1000)
    assert found.saved_share == pytest.approx(1984 * 0.9 / 2100)
    free = summarise_load(info(discount=90), pair()).prefix
    assert free is not None
    assert free.saved_share is None


def test_cached_tokens_come_from_counters_or_slots_where_no_answer_tells() -> None:
    counted = [look(t, counters={"prefix_hits": n}) for t, n in ((0, 100.0), (1, 2084.0))]
    slots = (Slot(0, 4096, True, 2104, 1990), Slot(1, 4096, True, 90, 88))
    idle = (Slot(0, 4096, False, 2108, 0),)
    for looks, expected in (
        (counted, (1984, "the server's counters")),
        ([look(0, "ollama", slots=slots), look(1, "ollama", slots=idle)], (1990, "the slot")),
        ([look(0, "ollama", slots=idle)], (None, "")),
        ([], (None, "")),
    ):
        found = summarise_load(info(), pair(*looks, cached=None)).prefix
        assert found is not None
        assert (found.cached_tokens, found.source) == expected


def test_a_load_is_set_beside_what_was_predicted() -> None:
    limits = LoadLimits(slots=4, per_request=1024, capacity=1024, unified=True)
    told = RecordingInfo(
        server="llama-server",
        predicted={"capacity_tokens": 1024},
        load={"limits": limits.to_dict()},
    )
    full = step([FULL] * 4, part="context", prompt_tokens=300, n_predict=16)
    found = summarise_load(told, [full], "done")
    assert [each.kind for each in found.exhaustion] == ["cache full"]
    assert found.exhaustion[0].asked_tokens == 4 * 316
    assert (found.exhaustion[0].predicted_requests, found.exhaustion[0].predicted_tokens) == (
        3,
        1024,
    )
    assert found.predicted["source"] == "localkv"


def test_steps_come_back_from_json() -> None:
    whole = step([request(), LONG], [look(0, slots=(Slot(0, 8, True, 1),))])
    assert LoadStep.from_dict(whole.to_dict()) == whole
