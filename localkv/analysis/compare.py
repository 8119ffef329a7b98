"""Two sweeps side by side: the same points matched, and which of their figures really differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from localkv.analysis import figures, points
from localkv.analysis.facts import FactChange, environment_changes, model_changes
from localkv.analysis.figures import KINDS, MEASURED, SPEED, Figure
from localkv.analysis.fit import Interval, fit_line
from localkv.analysis.peak import compare_peaks
from localkv.analysis.samples import ALLOCATOR_STEP, growth_samples
from localkv.records import PointRecord, RunInfo

SCHEMA = 1

#: A difference below this share is none, unless the caller says otherwise.
MIN_EFFECT = 0.01
#: ... and below this many bytes whatever the share: the edge of the C library's heap, and with it
#: the same context in the same build, was seen to move by one step of 132 KiB either way.
MIN_BYTES = 2 * ALLOCATOR_STEP
#: Speed on a machine that does other things as well moves by this much from run to run.
MIN_SPEED_EFFECT = 0.10

EQUAL, WITHIN, SMALL = "equal", "indistinguishable", "below the minimum effect"
GREW, SHRANK, UNKNOWN, UNJUDGED = "grew", "shrank", "unknown", "one run each, not judged"

#: The settings that make a point, for runs whose keys were written differently.
_SETTINGS = (
    *("n_ctx", "n_seq_max", "cache_type_k", "cache_type_v", "flash_attn", "kv_unified"),
    *("swa_full", "n_batch", "n_ubatch", "n_gpu_layers", "n_outputs_max"),
)


@dataclass(frozen=True)
class Run:
    """One side of the comparison: what it is called, what it was, and what it measured."""

    name: str
    info: RunInfo
    records: tuple[PointRecord, ...]


@dataclass(frozen=True)
class Change:
    """One figure of one point in both runs, and what may be said of the difference."""

    figure: str
    source: str
    unit: str
    before: Figure
    after: Figure
    verdict: str

    @property
    def difference(self) -> float | None:
        """Return after less before, None where one of them is unknown."""
        if self.before.value is None or self.after.value is None:
            return None
        return self.after.value - self.before.value

    @property
    def share(self) -> float | None:
        """Return the difference as a share of before, None where that is unknown or 0."""
        if self.difference is None or not self.before.value:
            return None
        return self.difference / self.before.value

    @property
    def is_memory(self) -> bool:
        """Return whether the figure is memory, measured or predicted."""
        return self.source != SPEED

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain JSON values."""
        return {**asdict(self), "difference": self.difference, "share": self.share}


@dataclass(frozen=True)
class PointComparison:
    """A point that both runs have: its key in each, its outcomes, and every figure."""

    label: str
    key_before: str
    key_after: str
    outcome_before: str
    outcome_after: str
    reason: str | None
    changes: tuple[Change, ...]

    @property
    def measured(self) -> bool:
        """Return whether both runs measured the point."""
        return self.outcome_before == "ok" == self.outcome_after

    @property
    def lost(self) -> bool:
        """Return whether the point was measured before and is not any more."""
        return self.outcome_before == "ok" != self.outcome_after

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison of the point as plain JSON values."""
        return {**asdict(self), "changes": [change.to_dict() for change in self.changes]}


@dataclass(frozen=True)
class Summary:
    """One figure over all points: how many have each verdict, the median and the largest change."""

    figure: str
    source: str
    unit: str
    counts: dict[str, int]
    median_share: float | None
    largest: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """Everything that two runs say about each other."""

    before: Run
    after: Run
    min_effect: float
    model: tuple[FactChange, ...]
    environment: tuple[FactChange, ...]
    points: tuple[PointComparison, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    slope: tuple[Interval | None, Interval | None]

    @property
    def matched(self) -> int:
        """Return how many points both runs measured."""
        return sum(point.measured for point in self.points)

    @property
    def lost(self) -> tuple[PointComparison, ...]:
        """Return the points that were measured before and are not any more."""
        return tuple(point for point in self.points if point.lost)

    @property
    def grew(self) -> bool:
        """Return whether any memory, measured or predicted, grew beyond the minimum effect."""
        return any(c.is_memory and c.verdict == GREW for p in self.points for c in p.changes)

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """Return one summary for each figure that any point has."""
        held: dict[str, list[Change]] = {}
        for point in self.points:
            for change in point.changes:
                held.setdefault(change.figure, []).append(change)
        return tuple(_summary(changes) for changes in held.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``localkv compare --json`` prints."""
        slopes = [asdict(each) if each else None for each in self.slope]
        return {
            "schema": SCHEMA,
            "before": _run_dict(self.before),
            "after": _run_dict(self.after),
            "min_effect": {"share": self.min_effect, "bytes": MIN_BYTES},
            "grew": self.grew,
            "matched": self.matched,
            "lost": [point.key_after for point in self.lost],
            "model": [change.to_dict() for change in self.model],
            "environment": [change.to_dict() for change in self.environment],
            "slope": {"before": slopes[0], "after": slopes[1]},
            "figures": [summary.to_dict() for summary in self.summaries],
            "points": [point.to_dict() for point in self.points],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }


def _run_dict(run: Run) -> dict[str, Any]:
    return {
        "run": run.name,
        "created": run.info.created,
        "localkv": run.info.localkv,
        "points": len(points.by_key(run.records)),
        "records": len(run.records),
    }


def compare_runs(before: Run, after: Run, *, min_effect: float = MIN_EFFECT) -> Comparison:
    """Return how ``after`` differs from ``before``.

    A figure counts as changed when the spreads of its two values do not overlap, and the
    difference is at least ``min_effect`` (a share of the value before) and ``MIN_BYTES``.
    """
    old, new = (points.by_key(points.unique(run.records)[0]) for run in (before, after))
    pairs = _match(old, new)
    scatters = _Scatter.of(before), _Scatter.of(after)
    compared = [_point(old[a], new[b], scatters, min_effect) for a, b in pairs.items()]
    return Comparison(
        before=before,
        after=after,
        min_effect=min_effect,
        model=model_changes(before.info, after.info),
        environment=environment_changes(before.info, after.info),
        points=tuple(compared),
        only_before=_labels(old[key] for key in old if key not in pairs),
        only_after=_labels(new[key] for key in new if key not in pairs.values()),
        slope=(scatters[0].slope, scatters[1].slope),
    )


def _labels(groups: Iterable[list[PointRecord]]) -> tuple[str, ...]:
    records = points.one_per_point(record for group in groups for record in group)
    return tuple(points.label(record) for record in records)


def _match(old: dict[str, list[PointRecord]], new: dict[str, list[PointRecord]]) -> dict[str, str]:
    """Return key before -> key after: equal keys, then equal settings under another key."""
    pairs = {key: key for key in old if key in new}
    by_settings = {_settings(new[key][0]): key for key in new if key not in pairs}
    for key in old:
        if key not in pairs and (found := by_settings.pop(_settings(old[key][0]), None)):
            pairs[key] = found
    ordered = points.one_per_point(record for key in pairs for record in old[key])
    return {record.key: pairs[record.key] for record in ordered}


def _settings(record: PointRecord) -> tuple[Any, ...]:
    return tuple(repr(record.config.get(name)) for name in _SETTINGS)


@dataclass(frozen=True)
class _Scatter:
    """How far single runs of one sweep lie from what its other points say, in bytes."""

    growth: int
    peak: int
    slope: Interval | None

    @classmethod
    def of(cls, run: Run) -> _Scatter:
        fit = fit_line(growth_samples(run.records).samples, run.info.seed)
        peaks = compare_peaks(run.records).samples
        return cls(
            figures.scatter([r.bytes for r in fit.residuals]),
            figures.scatter([s.measured - s.expected for s in peaks]),
            fit.slope,
        )

    def of_kind(self, kind: figures.Kind) -> int:
        if kind.source != MEASURED:
            return 0
        return self.growth if kind.name == "context growth" else self.peak


def _point(
    old: list[PointRecord],
    new: list[PointRecord],
    scatters: tuple[_Scatter, _Scatter],
    min_effect: float,
) -> PointComparison:
    runs = tuple([record for record in group if record.outcome == "ok"] for group in (old, new))
    changes = []
    for kind in KINDS:
        sides = (old, new) if kind.source != MEASURED else runs
        a, b = (
            figures.figure(kind, side, scatter.of_kind(kind))
            for side, scatter in zip(sides, scatters, strict=True)
        )
        if a.value is not None or b.value is not None:
            verdict = _verdict(a, b, min_effect, MIN_BYTES)
            changes.append(Change(kind.name, kind.source, kind.unit, a, b, verdict))
    changes += _speed_changes(runs[0], runs[1], min_effect)
    return PointComparison(
        label=points.label(old[0]),
        key_before=old[0].key,
        key_after=new[0].key,
        outcome_before="ok" if runs[0] else old[0].outcome,
        outcome_after="ok" if runs[1] else new[0].outcome,
        reason=next((r.reason for group in (new, old) for r in group if r.reason), None),
        changes=tuple(changes),
    )


def _speed_changes(
    old: list[PointRecord], new: list[PointRecord], min_effect: float
) -> Iterator[Change]:
    before, after = dict(figures.speeds(old)), dict(figures.speeds(new))
    missing = Figure(None, why="not measured")
    for name in dict.fromkeys((*before, *after)):
        a, b = before.get(name, missing), after.get(name, missing)
        verdict = _verdict(a, b, max(min_effect, MIN_SPEED_EFFECT), 0)
        # One run says nothing about how much the next would differ.
        if verdict in (GREW, SHRANK, WITHIN) and 1 in (a.repeats, b.repeats):
            verdict = UNJUDGED
        yield Change(name, SPEED, "tokens/s", a, b, verdict)


def _verdict(a: Figure, b: Figure, min_effect: float, min_bytes: int) -> str:
    if a.value is None or b.value is None:
        return UNKNOWN
    if a.value == b.value:
        return EQUAL
    # Where there is a value, there is a range.
    if (a.low or 0) <= (b.high or 0) and (b.low or 0) <= (a.high or 0):
        return WITHIN
    difference = abs(b.value - a.value)
    if difference < max(min_effect * abs(a.value), min_bytes):
        return SMALL
    return GREW if b.value > a.value else SHRANK


def _summary(changes: Sequence[Change]) -> Summary:
    counts: dict[str, int] = {}
    for change in changes:
        counts[change.verdict] = counts.get(change.verdict, 0) + 1
    shares = [change.share for change in changes if change.share is not None]
    differences = [change.difference for change in changes if change.difference is not None]
    first = changes[0]
    return Summary(
        figure=first.figure,
        source=first.source,
        unit=first.unit,
        counts=counts,
        median_share=median(shares) if shares else None,
        largest=max(differences, key=abs) if differences else None,
    )
