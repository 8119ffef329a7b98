"""Warnings with remedies, answers, and the whole analysis as data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from analysis_helpers import (
    COMPUTE,
    GIB,
    KIB,
    MIB,
    WEIGHTS,
    grid,
    kv_bytes,
    prediction,
    record,
    run_info,
)

from localkv.analysis import analyse
from localkv.analysis.answers import best_answers
from localkv.records import Phase, PointRecord, Reading


def codes(records: list[PointRecord], **run: object) -> dict[str, str]:
    info = run_info(len(records), **run)  # type: ignore[arg-type]
    return {w.code: w.severity for w in analyse(info, records).warnings}


def test_a_clean_run_warns_of_nothing() -> None:
    assert codes(grid()) == {}


def closed_with(one: PointRecord, anon: int) -> PointRecord:
    return replace(
        one, phases=(*one.phases[:-1], Phase("closed", 2.0, {"rss_anon": Reading(anon)}))
    )


def swapped(one: PointRecord) -> PointRecord:
    return replace(one, phases=(*one.phases, Phase("fill", 2.0, {"swap": Reading(5 * MIB)})))


def engine_says(one: PointRecord, kv: int) -> PointRecord:
    return replace(one, engine={**one.engine, "caches": [{"bytes": kv}]})


def rounded(one: PointRecord) -> PointRecord:
    told = {**one.prediction, "config": {**one.prediction["config"], "n_ctx_requested": 1000}}
    return replace(one, prediction=told)


CASES: dict[str, Callable[[list[PointRecord]], list[PointRecord]]] = {
    "slope": lambda rs: grid(slope=1.05),
    "outlier": lambda rs: [*rs[:-1], record(8192, 4, extra=9 * MIB)],
    "spread": lambda rs: [*rs, record(8192, 4, repeat=1, extra=2 * MIB)],
    "intercept": lambda rs: grid(noise=lambda: 30 * MIB),
    "peak": lambda rs: [replace(rs[0], peak={"rss": Reading(2 * GIB)}), *rs[1:]],
    "not-returned": lambda rs: [closed_with(rs[0], 200 * MIB), *rs[1:]],
    "swapped": lambda rs: [swapped(rs[0]), *rs[1:]],
    "engine-differs-kv": lambda rs: [engine_says(rs[0], kv_bytes(1024, "f16") + MIB), *rs[1:]],
    "rounding": lambda rs: [rounded(rs[0]), *rs[1:]],
    "kv-exceeds-weights": lambda rs: [*rs, record(131072)],
    "skipped": lambda rs: [*rs, record(65536, outcome="skipped", reason="needs 1, 0 available")],
    "oom": lambda rs: [*rs, record(65536, outcome="oom")],
    "crashed": lambda rs: [*rs, record(65536, outcome="crashed")],
    "timeout": lambda rs: [*rs, record(65536, outcome="timeout")],
    "failed": lambda rs: [*rs, record(65536, outcome="failed")],
}


@pytest.mark.parametrize("code", CASES)
def test_each_warning_names_cause_and_remedy(code: str) -> None:
    records = CASES[code](grid())
    found = analyse(run_info(len(records)), records).warnings
    warning = next(w for w in found if w.code == code)
    assert warning.text
    assert warning.cause
    assert warning.remedy


def test_figures_of_the_log_are_compared_up_to_its_last_decimal() -> None:
    kv = kv_bytes(1024, "f16")
    one = grid()
    assert "engine-differs-kv" not in codes([engine_says(one[0], kv + 4 * KIB), *one[1:]])
    assert "engine-differs-kv" in codes([engine_says(one[0], kv + 40 * KIB), *one[1:]])


def test_an_interrupted_run_says_how_to_go_on() -> None:
    found = analyse(run_info(24), grid()).warnings
    assert found[0].code == "interrupted"
    assert "12 of 24" in found[0].text
    assert "--resume" in found[0].remedy


def test_a_busy_machine_and_an_unknown_architecture_are_notes() -> None:
    busy = {"host": {"load": [7.5, 1, 1], "cpus_usable": 2}}
    assert codes(grid(), environment=busy) == {"busy": "note"}
    assert codes(grid(), model={"rule": "none"}) == {"no-rule": "note"}


def test_swa_full_is_priced_against_its_twin() -> None:
    wide, narrow = record(8192, swa_full=True), record(8192)
    big = prediction(16384, 1, "f16")
    wide = replace(wide, key="wide", prediction={**wide.prediction, "kv": big["kv"]})
    found = analyse(run_info(2), [wide, narrow]).warnings
    text = next(w.text for w in found if w.code == "swa-full")
    assert "16.00 MiB" in text
    assert kv_bytes(16384, "f16") - kv_bytes(8192, "f16") == 16 * MIB


def test_answers_tell_what_ran_what_was_refused_and_what_should_fit() -> None:
    records = [
        record(1024),
        record(2048),
        record(4096, outcome="skipped", reason="needs 5 GiB, 2 GiB available"),
    ]
    (answer,) = analyse(run_info(3), records).answers.by_slots
    assert (answer.measured, answer.measured_per_slot) == (2048, 2048)
    assert (answer.refused, answer.refused_reason) == (4096, "needs 5 GiB, 2 GiB available")
    assert (answer.fits, answer.limit) == (16384, "training context")
    assert answer.extrapolated


def test_memory_limits_the_context_to_the_last_multiple_that_fits() -> None:
    per_token = kv_bytes(1, "f16")
    need = WEIGHTS + COMPUTE + 32000 * 4
    room = need + 5000 * per_token
    memory = {"memory": {"available": room, "source": "s"}}
    (answer,) = analyse(
        run_info(2, environment=memory), [record(1024), record(2048)]
    ).answers.by_slots
    assert answer.limit == "memory"
    assert answer.fits == 5000 // 256 * 256


def test_the_callers_prediction_replaces_the_line() -> None:
    asked: list[tuple[int, int]] = []

    def predict(n_ctx: int, slots: int) -> int:
        asked.append((n_ctx, slots))
        return 0 if n_ctx <= 3072 else 99 * GIB

    (answer,) = analyse(run_info(1), [record(1024, 2)], predict).answers.by_slots
    assert answer.fits == 3072
    assert not answer.extrapolated
    assert {slots for _, slots in asked} == {2}


def test_without_known_memory_nothing_is_promised() -> None:
    unknown = {"memory": {"available": None, "source": ""}}
    answers = analyse(run_info(environment=unknown), grid()).answers
    assert answers.available is None
    assert {a.fits for a in answers.by_slots} == {None}


def test_the_finer_cache_type_is_recommended_where_both_ran() -> None:
    answers = analyse(run_info(24), grid(types=("q8_0", "f16"))).answers
    assert [(a.slots, a.types, a.measured) for a in best_answers(answers)] == [
        (1, "f16", 8192),
        (4, "f16", 8192),
    ]


def test_the_analysis_is_plain_json_with_the_keys_of_the_sweep() -> None:
    data = json.loads(json.dumps(analyse(run_info(), grid()).to_dict()))
    assert data["points"] == {
        "ok": 12,
        "skipped": 0,
        "failed": 0,
        "oom": 0,
        "crashed": 0,
        "timeout": 0,
    }
    for key in ("slope", "slope_low", "slope_high", "r2", "held_out_error"):
        assert isinstance(data["fit"][key], float)
    for key in ("intercept_bytes", "max_residual_bytes"):
        assert isinstance(data["fit"][key], int)
    assert data["peak_error"] == data["peak"]["worst"]


def test_an_empty_run_has_an_analysis() -> None:
    data = analyse(run_info(0), []).to_dict()
    assert data["fit"]["slope"] is None
    assert data["peak_error"] is None
    assert data["answers"]["by_slots"] == []


def test_a_point_counts_once_however_often_it_ran() -> None:
    runs = [record(1024, repeat=i) for i in range(3)] + [record(2048, outcome="crashed")]
    assert analyse(run_info(4), runs).counts["ok"] == 1
