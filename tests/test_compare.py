"""Two sweeps side by side: what is matched, what counts as a difference, what is said first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from analysis_helpers import CONTEXT_FIXED, KIB, MIB, PAGE, grid, kv_bytes, record, run_info
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.analysis.compare import (
    EQUAL,
    GREW,
    MIN_BYTES,
    SHRANK,
    SMALL,
    UNJUDGED,
    UNKNOWN,
    WITHIN,
    Change,
    Comparison,
    Run,
    compare_runs,
)
from localkv.records import PointRecord, Reading, Speed
from localkv.report.compare import render_comparison, verdict


def run(name: str, records: Sequence[PointRecord], **info: Any) -> Run:
    return Run(name, run_info(len(records), **info), tuple(records))


def compared(
    before: Sequence[PointRecord], after: Sequence[PointRecord], **settings: Any
) -> Comparison:
    return compare_runs(run("a", before), run("b", after), **settings)


def change(found: Comparison, figure: str, point: int = 0) -> Change:
    return next(c for c in found.points[point].changes if c.figure == figure)


def with_speed(entry: PointRecord, prefill: float, decode: float) -> PointRecord:
    return replace(entry, speed=(Speed(512, 1, prefill, decode),))


# -- no difference ---------------------------------------------------------------------------


def test_a_run_does_not_differ_from_itself() -> None:
    records = grid()
    found = compared(records, records)
    verdicts = {c.verdict for p in found.points for c in p.changes}
    assert verdicts == {EQUAL}
    assert (found.grew, found.matched, len(found.points)) == (False, len(records), len(records))
    assert found.model == found.environment == found.only_before == found.only_after == ()


def test_pages_of_noise_are_indistinguishable() -> None:
    shifted = grid(noise=iter([PAGE, -PAGE] * 6).__next__)
    found = compared(grid(), shifted)
    verdicts = {c.verdict for p in found.points for c in p.changes if c.source == "measured"}
    assert verdicts <= {EQUAL, WITHIN}
    assert WITHIN in verdicts
    assert not found.grew


# -- the minimum effect ----------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
def test_a_difference_beyond_the_effect_is_growth_or_shrinking(sign: int) -> None:
    extra = sign * MIB
    found = compared([record(8192)], [record(8192, extra=extra)])
    growth = change(found, "context growth")
    assert growth.difference == extra
    assert growth.verdict == (GREW if sign > 0 else SHRANK)
    assert found.grew == (sign > 0)


def test_below_the_floor_in_bytes_nothing_differs_however_large_the_share() -> None:
    growth = change(
        compared([record(256)], [record(256, extra=MIN_BYTES - PAGE)]), "context growth"
    )
    assert growth.share is not None
    assert growth.share > 0.05
    assert growth.verdict == SMALL
    growth = change(compared([record(256)], [record(256, extra=MIN_BYTES)]), "context growth")
    assert growth.verdict == GREW


def test_below_the_share_nothing_differs_however_many_bytes() -> None:
    extra = 64 * MIB // 100
    whole = change(compared([record(65536)], [record(65536, extra=extra)]), "context growth")
    assert extra > MIN_BYTES
    assert whole.verdict == SMALL
    stricter = compared([record(65536)], [record(65536, extra=extra)], min_effect=0.001)
    assert change(stricter, "context growth").verdict == GREW


@settings(max_examples=60)
@given(
    st.integers(-(1 << 24), 1 << 24),
    st.integers(8, 128),
    st.sampled_from([0.0, 0.005, 0.01, 0.1, 1.0]),
)
def test_growth_is_exactly_what_passes_both_thresholds(extra: int, k: int, share: float) -> None:
    one = record(k * 1024)
    found = change(compared([one], [record(k * 1024, extra=extra)], min_effect=share), "peak RSS")
    before = found.before.value
    assert before is not None
    beyond = abs(extra) >= MIN_BYTES and abs(extra) >= share * before
    expected = (GREW if extra > 0 else SHRANK) if beyond else (EQUAL, WITHIN, SMALL)
    assert found.verdict in expected


# -- spreads ---------------------------------------------------------------------------------


def repeated(*extras: int) -> list[PointRecord]:
    return [record(1024, repeat=number, extra=extra) for number, extra in enumerate(extras)]


def test_repeats_whose_ranges_overlap_cannot_be_told_apart() -> None:
    before, after = repeated(0, MIB, 4 * MIB), repeated(3 * MIB, 6 * MIB, 8 * MIB)
    assert change(compared(before, after), "context growth").verdict == WITHIN
    apart = repeated(5 * MIB, 6 * MIB, 8 * MIB)
    grown = change(compared(before, apart), "context growth")
    assert (grown.verdict, grown.difference) == (GREW, 5 * MIB)
    assert (grown.before.repeats, grown.after.repeats) == (3, 3)


def test_a_single_run_scatters_as_the_points_of_its_sweep_do() -> None:
    noise = [0, 900 * KIB, -900 * KIB, 900 * KIB, -900 * KIB, 0, 800 * KIB, -800 * KIB]
    scattered = [record(1024 * (n + 1), extra=extra) for n, extra in enumerate(noise)]
    straight = [record(1024 * (n + 1)) for n in range(len(noise))]
    moved = [record(1024 * (n + 1), extra=MIB) for n in range(len(noise))]
    assert change(compared(straight, moved), "context growth").verdict == GREW
    assert change(compared(scattered, moved), "context growth").verdict == WITHIN


def test_different_numbers_of_repeats_are_compared_by_their_medians() -> None:
    found = change(compared(repeated(0), repeated(2 * MIB, 2 * MIB, 40 * MIB)), "context growth")
    assert (found.before.repeats, found.after.repeats) == (1, 3)
    assert found.difference == 2 * MIB


# -- predictions and speed -------------------------------------------------------------------


def test_predicted_kv_is_compared_to_the_byte() -> None:
    changed = record(4096)
    changed.prediction["kv"]["bytes"] += MIB
    kv = change(compared([record(4096)], [changed]), "KV cache")
    assert (kv.before.value, kv.difference, kv.verdict) == (kv_bytes(4096, "f16"), MIB, GREW)
    assert compared([record(4096)], [changed]).grew


def test_speed_of_one_run_each_is_shown_and_not_judged() -> None:
    before, after = with_speed(record(1024), 100, 20), with_speed(record(1024), 50, 19)
    prefill = change(compared([before], [after]), "prefill at depth 512")
    assert (prefill.share, prefill.verdict) == (-0.5, UNJUDGED)


def test_speed_is_judged_by_its_repeats_and_is_no_memory() -> None:
    before = [with_speed(r, 100 + n, 20) for n, r in enumerate(repeated(0, 0, 0))]
    after = [with_speed(r, 200 + n, 20.5 + n) for n, r in enumerate(repeated(0, 0, 0))]
    found = compared(before, after)
    assert change(found, "prefill at depth 512").verdict == GREW
    assert change(found, "decode at depth 512").verdict == SMALL
    assert not found.grew
    page = render_comparison(found)
    assert "faster" in page
    assert verdict(found).startswith("No memory figure differs")


def test_a_figure_that_one_side_lacks_is_unknown_never_zero() -> None:
    blind = record(1024)
    blind.peak.clear()
    blind.peak["peak_rss"] = Reading(None, why="the kernel does not tell")
    found = change(compared([record(1024)], [blind]), "peak RSS")
    assert (found.verdict, found.after.value, found.difference) == (UNKNOWN, None, None)
    assert found.after.why == "the kernel does not tell"
    names = {c.figure for c in compared([blind], [blind]).points[0].changes}
    assert "peak RSS" not in names  # neither knows it
    assert "peak VRAM" not in names


# -- points ----------------------------------------------------------------------------------


def test_points_of_one_side_are_listed_by_name() -> None:
    found = compared([record(1024), record(2048)], [record(2048), record(4096, 2)])
    assert [p.label for p in found.points] == ["n_ctx 2048, 1 slot, f16"]
    assert found.only_before == ("n_ctx 1024, 1 slot, f16",)
    assert found.only_after == ("n_ctx 4096, 2 slots, f16",)
    page = render_comparison(found)
    assert page.index("Only in before") < page.index("n\\_ctx 1024") < page.index("Only in after")


def test_points_match_by_their_settings_when_their_keys_were_written_differently() -> None:
    renamed = [replace(r, key=f"point {n}") for n, r in enumerate(grid())]
    found = compared(grid(), renamed)
    assert found.matched == len(renamed)
    assert {p.label for p in found.points} == {p.label for p in compared(grid(), grid()).points}
    assert all(c.verdict == EQUAL for p in found.points for c in p.changes)
    other = [replace(r, config={**r.config, "n_ubatch": 256}) for r in renamed]
    assert compared(grid(), other).points == ()


@pytest.mark.parametrize("outcome", ["oom", "skipped", "crashed", "failed", "timeout"])
def test_a_point_that_failed_on_one_side_is_named_with_its_reason(outcome: str) -> None:
    lost = record(2048, outcome=outcome, reason="no room for | the cache")
    found = compared([record(1024), record(2048)], [record(1024), lost])
    assert [p.label for p in found.lost] == ["n_ctx 2048, 1 slot, f16"]
    assert found.matched == 1
    page = render_comparison(found)
    assert f"| ok | {outcome} | no room for \\| the cache |" in page
    assert "1 measured before could not be measured again" in page
    assert compared([lost], [record(2048)]).lost == ()


def test_a_point_with_one_good_repeat_is_measured() -> None:
    records = [record(1024, outcome="crashed", reason="r"), record(1024, repeat=1)]
    found = compared(records, [record(1024)])
    assert found.matched == 1
    assert change(found, "context growth").before.repeats == 1


def test_nothing_in_common_is_said() -> None:
    assert "no point in common" in verdict(compared([record(1024)], [record(2048)]))
    failed = record(1024, outcome="oom")
    assert "no point was measured in both" in verdict(compared([failed], [failed]))
    assert "no point in common" in verdict(compared([], []))
    render_comparison(compared([], []))


# -- what is around the figures --------------------------------------------------------------


def around(**after: Any) -> Comparison:
    return compare_runs(run("a", grid()), run("b", grid(), **after))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"environment": {"engine": {"version": "0.4.0"}}}, "engine version"),
        ({"environment": {"engine": {"commit": "abc"}}}, "engine commit"),
        ({"environment": {"engine": {"system_info": "CPU : AVX2 = 1 |"}}}, "engine features"),
        ({"environment": {"engine": {"gpu_offload": True}}}, "engine with GPU support"),
        ({"environment": {"engine": {"heap": ["GOGC=off"]}}}, "engine heap"),
        ({"environment": {"n_threads": 8}}, "threads"),
        ({"environment": {"python": "3.13.0"}}, "python"),
        ({"environment": {"host": {"cpu_model": "Another"}}}, "processor"),
        ({"environment": {"packages": {"psutil": "1"}}}, "psutil"),
    ],
)
def test_an_environment_that_differs_is_named(changed: dict[str, Any], name: str) -> None:
    told = next(c for c in around(**changed).environment if c.name == name)
    assert told.before != told.after


def test_the_order_of_features_and_the_load_of_the_machine_are_no_differences() -> None:
    def at(info: str, load: float) -> Run:
        engine = {"system_info": info}
        return run("x", grid(), environment={"engine": engine, "host": {"load": [load]}})

    found = compare_runs(at("CPU : A = 1 | B = 1 |", 0.1), at("CPU : B = 1 | A = 1 |", 9.0))
    assert found.environment == ()


def test_a_model_that_differs_is_said_before_any_figure() -> None:
    found = around(model={"file_bytes": 7 * MIB, "name": "Other | *Model*"})
    assert {c.name for c in found.model} == {"file size", "name"}
    page = render_comparison(found)
    assert "Other \\| \\*Model\\*" in page
    assert page.index("## The model differs") < page.index("## Figures over all points")


def test_a_fact_that_one_side_did_not_record_is_no_row_of_the_table() -> None:
    page = render_comparison(around(environment={"n_threads": 8}))
    assert "only one of the two recorded it: threads" in page
    assert "not recorded" not in page


# -- what comes out --------------------------------------------------------------------------


def test_the_page_names_what_changed_in_bytes_and_percent() -> None:
    found = compared([record(1024), record(8192)], [record(1024), record(8192, extra=MIB)])
    page = render_comparison(found)
    assert verdict(found) == "Memory grew at 1 of 2 points measured in both runs."
    row = next(
        line for line in page.splitlines() if "| context growth |" in line and "8192" in line
    )
    assert "+1.00 MiB" in row
    grown = change(found, "context growth", 1)
    assert grown.before.value is not None
    assert grown.before.value > CONTEXT_FIXED
    assert f"+{MIB / grown.before.value:.1%}" in row


def test_the_json_is_plain_and_holds_every_figure() -> None:
    found = compared(grid(), [replace(r, key="k" + r.key) for r in grid()][:-1])
    told = json.loads(json.dumps(found.to_dict()))
    assert told["schema"] == 1
    assert told["grew"] is False
    assert told["matched"] == len(told["points"]) == 11
    assert len(told["only_before"]) == 1
    first = told["points"][0]["changes"][0]
    assert first["difference"] == first["after"]["value"] - first["before"]["value"]
    assert {figure["figure"] for figure in told["figures"]} >= {"context growth", "KV cache"}
