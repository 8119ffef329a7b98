"""What counts as growth and as peak, and what is refused with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from analysis_helpers import (
    COMPUTE,
    CONTEXT_FIXED,
    MIB,
    PAGE,
    VOCABULARY,
    grid,
    kv_bytes,
    record,
    table_bytes,
)

from localkv.analysis import points
from localkv.analysis.peak import compare_peaks
from localkv.analysis.samples import (
    cell_table_bytes,
    context_bytes,
    growth,
    growth_samples,
    peak_samples,
)
from localkv.records import Phase, PointRecord, Reading


def with_readings(
    original: PointRecord, change: dict[str, dict[str, Reading]], **changes: object
) -> PointRecord:
    phases = tuple(
        Phase(p.name, p.seconds, change.get(p.name, p.readings)) for p in original.phases
    )
    return replace(original, phases=phases, **changes)  # type: ignore[arg-type]


def test_growth_is_anonymous_memory_from_model_to_context() -> None:
    (sample,) = growth_samples([record(4096, 2)]).samples
    output = 2 * 32000 * 4
    assert sample.formula_bytes == kv_bytes(4096, "f16") + output
    assert sample.table_bytes == table_bytes(4096, 2)
    assert sample.expected == sample.formula_bytes + sample.table_bytes
    assert sample.measured == sample.expected + CONTEXT_FIXED
    assert sample.source == "rss_anon"


def test_cell_table_counts_every_stream_of_every_cache() -> None:
    one = record(4096, 4)
    told = dict(one.prediction)
    told["kv"] = {
        "bytes": 1,
        "caches": [{"cells": 1024, "streams": 4}, {"cells": 512, "streams": 4}],
    }
    assert cell_table_bytes(replace(one, prediction=told)) == 4 * (1536 * 52 + 2 * 256 * 48)


def test_growth_falls_back_to_uss_and_says_so() -> None:
    unknown = Reading(None, why="not on this system")
    changed = with_readings(
        record(1024),
        {
            "model": {"rss_anon": unknown, "uss": Reading(5 * MIB)},
            "context": {"rss_anon": unknown, "uss": Reading(9 * MIB)},
        },
    )
    assert growth(changed) == Reading(4 * MIB, source="uss")


def test_unknown_memory_is_refused_with_its_reason() -> None:
    unknown = Reading(None, why="/proc is not mounted")
    changed = with_readings(
        record(1024), {"model": {"rss_anon": unknown}, "context": {"rss_anon": unknown}}
    )
    found = growth_samples([changed])
    assert found.samples == ()
    assert found.refused == (
        "n_ctx 1024, 1 slot, f16: rss_anon is unknown, because /proc is not mounted",
    )


def gpu_record(vram: Reading) -> PointRecord:
    one = record(2048)
    kv = kv_bytes(2048, "f16")
    told = {
        **one.prediction,
        "devices": [
            {"name": "host", "total": 1},
            {"name": "gpu0", "kv": kv, "compute": COMPUTE, "total": kv + COMPUTE},
        ],
    }
    return with_readings(
        replace(one, prediction=told),
        {
            "model": {"rss_anon": Reading(MIB), "vram_process": Reading(10 * MIB)},
            "context": {"rss_anon": Reading(3 * MIB), "vram_process": vram},
        },
    )


def test_video_memory_counts_and_so_does_the_compute_buffer_there() -> None:
    one = gpu_record(Reading(60 * MIB))
    assert growth(one) == Reading(52 * MIB, source="rss_anon + vram_process")
    assert context_bytes(one) == kv_bytes(2048, "f16") + 32000 * 4 + COMPUTE


def test_a_gpu_that_cannot_be_read_is_not_zero() -> None:
    found = growth_samples([gpu_record(Reading(None, why="WDDM hides it"))])
    assert found.samples == ()
    assert "because WDDM hides it" in found.refused[0]


def test_repeats_give_their_median_and_their_range() -> None:
    runs = [record(1024, repeat=i, extra=extra) for i, extra in enumerate((0, 8 * PAGE, PAGE))]
    (sample,) = growth_samples(runs).samples
    assert sample.repeats == 3
    assert sample.measured == sample.expected + CONTEXT_FIXED + PAGE
    assert sample.spread == 8 * PAGE


def test_equal_repeats_still_have_the_spread_of_a_page() -> None:
    (sample,) = growth_samples([record(1024, repeat=i) for i in range(3)]).samples
    assert sample.spread == PAGE


def test_only_points_that_went_well_are_samples() -> None:
    runs = [record(1024), record(2048, outcome="oom", reason="no"), record(4096, outcome="crashed")]
    assert [s.n_ctx for s in growth_samples(runs).samples] == [1024]


def test_a_record_written_twice_counts_once_the_latest_wins() -> None:
    kept, notes = points.unique([record(1024, extra=0), record(1024, extra=MIB)])
    assert [growth(r).value for r in kept] == [growth(record(1024, extra=MIB)).value]
    assert len(notes) == 1
    assert "recorded twice" in notes[0]


def test_peak_is_explained_by_prediction_and_one_fixed_cost() -> None:
    peak = compare_peaks(grid())
    assert peak.worst is not None
    assert peak.worst_bare is not None
    assert peak.fixed_bytes == pytest.approx(VOCABULARY + CONTEXT_FIXED, abs=MIB)
    assert peak.worst < 0.01 < peak.worst_bare
    assert peak.refused == ()


def test_a_single_point_cannot_tell_the_fixed_cost() -> None:
    peak = compare_peaks([record(1024)])
    assert peak.fixed_bytes is None
    assert peak.worst == peak.worst_bare
    assert "needs at least two points" in peak.refused[0]


def test_untouched_compute_is_left_out_of_the_peak() -> None:
    whole, part = record(8192), replace(record(8192), resident_compute=COMPUTE // 4)
    (a,), (b,) = peak_samples([whole]).samples, peak_samples([part]).samples
    assert a.expected - b.expected == COMPUTE - COMPUTE // 4


def test_no_measured_peak_is_refused_by_name() -> None:
    peak = compare_peaks([replace(record(1024), peak={})])
    assert peak.worst is None
    assert any(reason.startswith("peak error:") for reason in peak.refused)
