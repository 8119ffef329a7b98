"""Constants of part of the points: per cache type, per slot count, per token, per slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from localkv.analysis.fit import Fit, Interval, fit_line, regress
from localkv.analysis.samples import Sample

#: A group of fewer points gets no fit of its own.
MIN_POINTS = 3


@dataclass(frozen=True)
class GroupFit:
    """The fit of the points that share ``name``: a cache type or a slot count."""

    name: str
    fit: Fit


@dataclass(frozen=True)
class BytesPerToken:
    """What one more token of context costs, in bytes, for one pair of cache types.

    ``formula`` is K and V by the formula, ``table`` the engine's bookkeeping, ``measured`` the
    slope of the measured growth. Only contexts of equal slot count are compared with each other.
    """

    types: str
    points: int
    measured: float
    formula: float
    table: float


@dataclass(frozen=True)
class Groups:
    """Everything that is known of parts of the points, and what could not be determined."""

    by_types: tuple[GroupFit, ...] = ()
    by_slots: tuple[GroupFit, ...] = ()
    per_token: tuple[BytesPerToken, ...] = ()
    per_slot_bytes: Interval | None = None
    refused: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the groups as plain JSON values."""
        slot = self.per_slot_bytes
        return {
            "by_cache_type": {g.name: g.fit.to_dict() for g in self.by_types},
            "by_slots": {g.name: g.fit.to_dict() for g in self.by_slots},
            "bytes_per_token": [
                {
                    "cache_type": p.types,
                    "points": p.points,
                    "measured": p.measured,
                    "formula": p.formula,
                    "table": p.table,
                }
                for p in self.per_token
            ],
            "per_slot_bytes": slot.value if slot else None,
            "per_slot_low": slot.low if slot else None,
            "per_slot_high": slot.high if slot else None,
            "refused": list(self.refused),
        }


def fit_groups(samples: Sequence[Sample], seed: int = 0) -> Groups:
    """Return the fits per cache type and slot count, bytes per token and the cost of a slot."""
    refused: list[str] = []
    by_types = _fits(samples, lambda s: s.types, "cache type", seed, refused)
    by_slots = _fits(samples, lambda s: str(s.slots), "slot count", seed, refused)
    return Groups(
        by_types=by_types,
        by_slots=by_slots,
        per_token=_per_token(samples, refused),
        per_slot_bytes=_per_slot(samples, refused),
        refused=tuple(refused),
    )


def _fits(
    samples: Sequence[Sample],
    name: Callable[[Sample], str],
    what: str,
    seed: int,
    refused: list[str],
) -> tuple[GroupFit, ...]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(name(sample), []).append(sample)
    fits = []
    for group, members in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        distinct = len({m.expected for m in members})
        if distinct < MIN_POINTS:
            refused.append(
                f"fit of {what} {group}: needs {MIN_POINTS} distinct sizes, has {distinct}"
            )
        else:
            fits.append(GroupFit(group, fit_line(members, seed)))
    return tuple(fits)


def _per_token(samples: Sequence[Sample], refused: list[str]) -> tuple[BytesPerToken, ...]:
    rows = []
    for types in sorted({s.types for s in samples}):
        members = [s for s in samples if s.types == types]
        measured = _within_slots(members, lambda s: s.measured)
        if measured is None:
            refused.append(
                f"bytes per token of {types}: needs two contexts with the same slot count"
            )
            continue
        formula = _within_slots(members, lambda s: s.formula_bytes)
        table = _within_slots(members, lambda s: s.table_bytes)
        rows.append(BytesPerToken(types, len(members), measured, formula or 0.0, table or 0.0))
    return tuple(rows)


def _within_slots(samples: Sequence[Sample], value: Callable[[Sample], int]) -> float | None:
    """Return the slope of ``value`` on n_ctx, each slot count compared with itself only.

    The usual within-group estimator: both sides are taken relative to their group's mean, so that
    what a slot costs by itself does not count as a cost of its tokens.
    """
    above = below = 0.0
    for count in {s.slots for s in samples}:
        group = [s for s in samples if s.slots == count]
        mean_x = sum(s.n_ctx for s in group) / len(group)
        mean_y = sum(value(s) for s in group) / len(group)
        above += sum((s.n_ctx - mean_x) * (value(s) - mean_y) for s in group)
        below += sum((s.n_ctx - mean_x) ** 2 for s in group)
    return above / below if below else None


def _per_slot(samples: Sequence[Sample], refused: list[str]) -> Interval | None:
    """Return what a slot costs beyond the prediction: slope of the difference on the slots."""
    counts = {s.slots for s in samples}
    if len(counts) < 2:
        refused.append(
            "per-slot cost: not determined, every point has the same number of slots"
            if counts
            else "per-slot cost: not determined, no point was measured"
        )
        return None
    return regress(
        [float(s.slots) for s in samples], [float(s.measured - s.expected) for s in samples]
    ).slope
