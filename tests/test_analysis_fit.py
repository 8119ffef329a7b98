"""The fit: what it recovers, what it refuses by name, and what it does about outliers."""

from __future__ import annotations

import random

import pytest
from analysis_helpers import CONTEXT_FIXED, MIB, PAGE, grid, kv_bytes, record
from hypothesis import given
from hypothesis import strategies as st

from localkv.analysis.fit import Fit, fit_line, regress
from localkv.analysis.groups import fit_groups
from localkv.analysis.samples import growth_samples
from localkv.records import PointRecord


def fit_of(records: list[PointRecord]) -> Fit:
    return fit_line(growth_samples(records).samples)


@given(
    slope=st.floats(0.5, 2.0),
    intercept=st.integers(-50 * MIB, 50 * MIB),
    sizes=st.lists(st.integers(1, 4096), min_size=3, max_size=30, unique=True),
)
def test_slope_and_intercept_are_recovered(slope: float, intercept: int, sizes: list[int]) -> None:
    x = [float(size * MIB) for size in sizes]
    line = regress(x, [intercept + slope * a for a in x])
    assert line.slope.value == pytest.approx(slope, rel=1e-6)
    assert line.intercept.value == pytest.approx(intercept, abs=1024)
    assert line.r2 == pytest.approx(1.0, abs=1e-6)


@given(
    slope=st.floats(0.5, 2.0),
    fixed=st.lists(st.integers(0, 50 * MIB), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 4096), min_size=2, max_size=8, unique=True),
)
def test_groups_share_the_slope_and_keep_their_own_intercept(
    slope: float, fixed: list[int], sizes: list[int]
) -> None:
    x = [float(size * MIB) for _ in fixed for size in sizes]
    groups = [index for index in range(len(fixed)) for _ in sizes]
    line = regress(x, [fixed[g] + slope * a for a, g in zip(x, groups, strict=True)], groups)
    assert line.slope.value == pytest.approx(slope, rel=1e-6)
    for group, intercept in enumerate(fixed):
        assert line.intercepts[group] == pytest.approx(intercept, abs=4096)


@given(seed=st.integers(0, 10_000))
def test_truth_lies_within_a_few_widths_of_the_interval(seed: int) -> None:
    generator = random.Random(seed)
    fit = fit_of(grid(noise=lambda: round(generator.gauss(0, 16 * PAGE))))
    assert fit.slope is not None
    assert fit.slope.low is not None
    width = fit.slope.value - fit.slope.low
    # Five half-widths of a 95 % interval are eleven standard errors: never by chance.
    assert abs(fit.slope.value - 1.0) < 5 * width


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    generator, hits, runs = random.Random(1), 0, 200
    for _ in range(runs):
        x = [float(MIB * size) for size in (10, 20, 40, 80, 160)]
        slope = regress(x, [a + generator.gauss(0, 20 * PAGE) for a in x]).slope
        assert slope.low is not None
        assert slope.high is not None
        hits += slope.low <= 1.0 <= slope.high
    assert 0.90 <= hits / runs <= 0.99


def test_noise_free_data_still_have_an_interval_of_a_page() -> None:
    fit = fit_of(grid(noise=lambda: 0))
    assert fit.slope is not None
    assert fit.slope.low is not None
    assert fit.slope.high is not None
    assert fit.slope.low < 1.0 < fit.slope.high
    assert fit.max_residual_bytes is not None
    assert fit.max_residual_bytes <= 1


def test_a_clean_grid_gives_slope_one_and_the_fixed_cost() -> None:
    fit = fit_of(grid())
    assert fit.slope is not None
    assert fit.intercept_bytes is not None
    assert fit.held_out_error is not None
    assert fit.slope.value == pytest.approx(1.0, abs=0.002)
    assert fit.intercept_bytes.value == pytest.approx(CONTEXT_FIXED, abs=4 * PAGE)
    assert fit.held_out_error < 0.01
    assert fit.outliers == ()
    assert fit.refused == ()


def test_no_point_and_one_size_refuse_every_constant_by_name() -> None:
    for records, how in (([], "none measured"), ([record(1024, repeat=i) for i in (0, 1)], "1 ")):
        fit = fit_of(records)
        assert fit.slope is None
        assert fit.intercept_bytes is None
        assert [r.split(":")[0] for r in fit.refused] == [
            "slope",
            "intercept",
            "R2",
            "held-out error",
        ]
        assert all("at least two distinct predicted sizes" in r for r in fit.refused)
        assert all(how in r for r in fit.refused)


def test_two_points_give_a_line_without_intervals() -> None:
    fit = fit_of(grid(contexts=(1024, 4096), slots=(1,)))
    assert fit.slope is not None
    assert fit.slope.low is None
    assert fit.held_out_error is None
    assert [r.split(":")[0] for r in fit.refused] == [
        "intervals of slope and intercept",
        "held-out error",
    ]


def test_pages_are_no_outliers() -> None:
    generator = random.Random(3)
    fit = fit_of(grid(noise=lambda: PAGE * generator.choice((0, 0, 0, 4))))
    assert fit.outliers == ()


def test_a_real_outlier_is_flagged_and_stays_in_the_fit() -> None:
    records = grid()
    records[-1] = record(8192, 4, extra=20 * MIB)
    fit = fit_of(records)
    assert [r.key for r in fit.outliers] == [records[-1].key]
    assert fit.points == len(records) == len(fit.residuals)
    assert fit.slope is not None
    assert fit.robust_slope == pytest.approx(1.0, abs=0.01)
    assert abs(fit.slope.value - 1) > 5 * abs((fit.robust_slope or 0) - 1)


def test_held_out_error_sees_what_residuals_hide() -> None:
    records = grid(slots=(1,), noise=lambda: 0)
    records[-1] = record(8192, extra=4 * MIB)
    fit = fit_of(records)
    assert fit.held_out_worst is not None
    assert fit.max_residual_bytes is not None
    largest = max(s.measured for s in growth_samples(records).samples)
    assert fit.held_out_worst > 2 * fit.max_residual_bytes / largest


def test_many_points_are_held_out_in_folds_and_the_seed_decides_which() -> None:
    generator = random.Random(5)
    records = grid(
        contexts=[1024 * i for i in range(1, 13)], noise=lambda: generator.randint(0, 64) * PAGE
    )
    samples = growth_samples(records).samples
    first = fit_line(samples, 1)
    assert first == fit_line(samples, 1)
    assert first.held_out_error != fit_line(samples, 2).held_out_error
    assert first.slope == fit_line(samples, 2).slope


def test_cache_types_and_slot_counts_are_fitted_apart() -> None:
    groups = fit_groups(growth_samples(grid(types=("f16", "q8_0"))).samples)
    assert [g.name for g in groups.by_types] == ["f16", "q8_0"]
    assert [g.name for g in groups.by_slots] == ["1", "2", "4"]
    assert {g.fit.points for g in groups.by_types} == {12}
    for group in (*groups.by_types, *groups.by_slots):
        assert group.fit.slope is not None
        assert group.fit.slope.value == pytest.approx(1.0, abs=0.01)


def test_bytes_per_token_are_the_formulas() -> None:
    groups = fit_groups(growth_samples(grid(types=("f16", "q8_0"))).samples)
    for row in groups.per_token:
        assert row.formula == pytest.approx(kv_bytes(1024, row.types) / 1024)
        assert row.table == pytest.approx(52)
        assert row.measured == pytest.approx(row.formula + row.table, rel=0.01)


def test_what_a_slot_costs_is_found() -> None:
    records = [record(c, n, extra=300_000 * n) for n in (1, 2, 4) for c in (1024, 2048, 4096)]
    slot = fit_groups(growth_samples(records).samples).per_slot_bytes
    assert slot is not None
    assert slot.value == pytest.approx(300_000, rel=0.01)


def test_groups_too_small_and_slots_all_alike_are_refused_by_name() -> None:
    groups = fit_groups(growth_samples(grid(contexts=(1024, 2048), slots=(2,))).samples)
    assert groups.per_slot_bytes is None
    assert groups.refused == (
        "fit of cache type f16: needs 3 distinct sizes, has 2",
        "fit of slot count 2: needs 3 distinct sizes, has 2",
        "per-slot cost: not determined, every point has the same number of slots",
    )
