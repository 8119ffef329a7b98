"""Least squares of measured against expected bytes, with what the data cannot tell left out.

``measured = intercept + slope * expected``. A right formula has a slope of 1; the intercept is the
fixed cost of a context (graph, allocator, driver). That cost depends on the cache type and the
slots (a quantised cache keeps rotation matrices, the graph is built for the slots), so points that
differ in these share the slope but not the intercept, wherever there are points enough for that. A
constant that the points cannot determine is None, and named in ``refused`` with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median
from typing import Any

from localkv.analysis.samples import ALLOCATOR_STEP, PAGE, Sample

CONFIDENCE = 0.95
#: Up to this many points each is held out once; beyond, ``FOLDS`` shuffled folds are.
LEAVE_ONE_OUT = 20
FOLDS = 10
#: A residual this many robust standard deviations from the others is called an outlier.
OUTLIER_DEVIATIONS = 5.0
#: ... and at least so many steps of the allocator: several small allocations that land in the heap
#: in one context and in pages of their own in the next were seen to differ by three.
OUTLIER_STEPS = 4
#: The median of the distances of a normal scatter, times this, is its standard deviation.
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Interval:
    """A constant with its 95 % interval; ``low`` and ``high`` are None when undetermined."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Residual:
    """What the line leaves over at one point, in bytes, and whether it stands apart."""

    key: str
    label: str
    expected: int
    measured: int
    bytes: int
    outlier: bool


@dataclass(frozen=True)
class Fit:
    """A fitted line; see the module.

    ``robust_slope`` is Theil and Sen's, which outliers cannot drag. ``held_out_error`` is the mean
    and ``held_out_worst`` the largest error relative to the measured value, each point predicted
    by a line that had not seen it.
    """

    points: int
    slope: Interval | None = None
    intercept_bytes: Interval | None = None
    r2: float | None = None
    robust_slope: float | None = None
    max_residual_bytes: int | None = None
    held_out_error: float | None = None
    held_out_worst: float | None = None
    residuals: tuple[Residual, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def outliers(self) -> tuple[Residual, ...]:
        """Return the residuals that stand apart from the others."""
        return tuple(r for r in self.residuals if r.outlier)

    def to_dict(self) -> dict[str, Any]:
        """Return the fit as flat JSON values; bytes as integers."""
        slope, intercept = self.slope, self.intercept_bytes
        return {
            "points": self.points,
            "slope": slope.value if slope else None,
            "slope_low": slope.low if slope else None,
            "slope_high": slope.high if slope else None,
            "intercept_bytes": _whole(intercept.value if intercept else None),
            "intercept_low": _whole(intercept.low if intercept else None),
            "intercept_high": _whole(intercept.high if intercept else None),
            "r2": self.r2,
            "robust_slope": self.robust_slope,
            "max_residual_bytes": self.max_residual_bytes,
            "held_out_error": self.held_out_error,
            "held_out_worst": self.held_out_worst,
            "outliers": [r.key for r in self.outliers],
            "refused": list(self.refused),
        }


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def fit_line(samples: Sequence[Sample], seed: int = 0) -> Fit:
    """Return the least-squares line through ``samples`` (bytes against bytes).

    The residual spread that the intervals rest on is floored at one page, since memory cannot be
    told apart below it. No sample is ever dropped: outliers are flagged, and a robust slope stands
    beside the fitted one. ``seed`` shuffles the folds of the held-out test.
    """
    x = [float(s.expected) for s in samples]
    y = [float(s.measured) for s in samples]
    distinct = len(set(x))
    if distinct < 2:
        reason = f"needs at least two distinct predicted sizes, {distinct or 'none'} measured"
        names = ("slope", "intercept", "R2", "held-out error")
        return Fit(len(x), refused=tuple(f"{name}: {reason}" for name in names))
    groups = _groups(samples)
    line = regress(x, y, groups)
    slope, intercept, r2 = line.slope, line.intercept, line.r2
    robust = _theil_sen(x, y, groups)
    residuals = [b - line.at(a, g) for a, b, g in zip(x, y, groups, strict=True)]
    offsets = [b - robust * a for a, b in zip(x, y, strict=True)]
    flags = _outliers(offsets, groups)
    errors = _held_out(x, y, groups, seed)
    return Fit(
        points=len(x),
        slope=slope,
        intercept_bytes=intercept,
        r2=r2,
        robust_slope=robust,
        max_residual_bytes=round(max(abs(r) for r in residuals)),
        held_out_error=mean(errors) if errors else None,
        held_out_worst=max(errors) if errors else None,
        residuals=tuple(
            Residual(s.key, s.label, s.expected, s.measured, round(r), flag)
            for s, r, flag in zip(samples, residuals, flags, strict=True)
        ),
        refused=_refused(len(x), r2, errors),
    )


def _refused(count: int, r2: float | None, errors: list[float]) -> tuple[str, ...]:
    refused = []
    if count < 3:
        refused.append(f"intervals of slope and intercept: need at least three points, {count} are")
    if r2 is None:
        refused.append("R2: every point measured the same")
    if not errors:
        refused.append("held-out error: needs two distinct predicted sizes beside the one held out")
    return tuple(refused)


@dataclass(frozen=True)
class Line:
    """A slope with the intercept of each group; ``intercept`` is their mean over the points."""

    slope: Interval
    intercept: Interval
    r2: float | None
    intercepts: dict[Hashable, float]

    def at(self, x: float, group: Hashable) -> float:
        """Return the line's value at ``x``; a group that the line has not seen takes the mean."""
        return self.intercepts.get(group, self.intercept.value) + self.slope.value * x


def _groups(samples: Sequence[Sample]) -> list[Hashable]:
    """Return the group of each sample: as fine as the number of points allows."""
    by_both: list[Hashable] = [(s.types, s.slots) for s in samples]
    by_types: list[Hashable] = [s.types for s in samples]
    x = [float(s.expected) for s in samples]
    for groups in (by_both, by_types):
        if len(x) - len(set(groups)) >= 2 and any(_centred(x, groups)):
            return groups
    return [None] * len(x)


def _centred(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """Return ``values`` with the mean of their group taken off."""
    members: dict[Hashable, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        members.setdefault(group, []).append(value)
    return [value - mean(members[group]) for value, group in zip(values, groups, strict=True)]


def regress(
    x: Sequence[float], y: Sequence[float], groups: Sequence[Hashable] | None = None
) -> Line:
    """Return the least-squares line of ``y`` on ``x``, one slope and an intercept per group.

    At least one group must have two distinct ``x``. Intervals are Student's t at 95 % on the
    points less the groups less one degrees of freedom, with the residual spread floored at one
    page; None without freedom. R2 is None when ``y`` does not vary. Source: analysis of
    covariance, the within-group estimator.
    """
    import numpy as np
    from scipy import stats

    names = list(groups) if groups is not None else [None] * len(x)
    xs, ys = np.asarray(x), np.asarray(y)
    inner_x, inner_y = np.asarray(_centred(x, names)), np.asarray(_centred(y, names))
    width = float(np.sum(inner_x**2))
    slope = float(np.sum(inner_x * inner_y)) / width
    level = float(ys.mean() - slope * xs.mean())
    rest = inner_y - slope * inner_x
    total = float(np.sum((ys - ys.mean()) ** 2))
    r2 = 1 - float(np.sum(rest**2)) / total if total > 0 else None
    offsets = ys - slope * xs
    intercepts: dict[Hashable, float] = {
        name: float(mean(o for o, n in zip(offsets, names, strict=True) if n == name))
        for name in dict.fromkeys(names)
    }
    free = len(xs) - len(intercepts) - 1
    if free < 1:
        return Line(Interval(slope), Interval(level), r2, intercepts)
    spread = max(float(np.sqrt(np.sum(rest**2) / free)), PAGE)
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, free))
    by_slope = t * spread / width**0.5
    by_level = t * spread * (1 / len(xs) + float(xs.mean()) ** 2 / width) ** 0.5
    return Line(
        Interval(slope, slope - by_slope, slope + by_slope),
        Interval(level, level - by_level, level + by_level),
        r2,
        intercepts,
    )


def _theil_sen(x: Sequence[float], y: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Return the median slope over all pairs of points of a group (Theil and Sen's estimator)."""
    points = list(zip(x, y, groups, strict=True))
    return median(
        (d - b) / (c - a)
        for (a, b, first), (c, d, second) in combinations(points, 2)
        if first == second and a != c
    )


def _outliers(offsets: Sequence[float], groups: Sequence[Hashable]) -> list[bool]:
    """Return which offsets from the robust line stand apart in their group, by their median.

    Medians, since an outlier would drag its group's mean and make outliers of the others. The
    deviation is floored at a page and the distance at the allocator's step: memory is nearly
    deterministic, and without the floors a single page would be an outlier.
    """
    middle = {
        group: median(o for o, g in zip(offsets, groups, strict=True) if g == group)
        for group in set(groups)
    }
    distances = [abs(o - middle[g]) for o, g in zip(offsets, groups, strict=True)]
    sigma = max(MAD_TO_SIGMA * median(distances), PAGE)
    limit = max(OUTLIER_DEVIATIONS * sigma, OUTLIER_STEPS * ALLOCATOR_STEP)
    return [distance > limit for distance in distances]


def _held_out(
    x: Sequence[float], y: Sequence[float], groups: Sequence[Hashable], seed: int
) -> list[float]:
    """Return per point the relative error of a line fitted without it."""
    count = len(x)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    folds = count if count <= LEAVE_ONE_OUT else FOLDS
    errors = []
    for fold in range(folds):
        held = set(order[fold::folds])
        kept = [i for i in range(count) if i not in held]
        kept_x, kept_groups = [x[i] for i in kept], [groups[i] for i in kept]
        if not any(_centred(kept_x, kept_groups)):
            return []
        line = regress(kept_x, [y[i] for i in kept], kept_groups)
        errors += [abs(y[i] - line.at(x[i], groups[i])) / abs(y[i]) for i in held if y[i]]
    return errors
