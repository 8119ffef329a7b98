"""The measured peak of the process against the predicted total."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from localkv.analysis.samples import Sample, peak_samples
from localkv.records import PointRecord


@dataclass(frozen=True)
class Peak:
    """How far the peak is from the prediction, relative to the measured peak.

    ``worst`` and ``median`` compare it with the predicted bytes that can be resident plus
    ``fixed_bytes``: what every process of the run holds beyond the engine's buffers (vocabulary,
    graph, work space, pages of the libraries), the median of what the points show. ``worst_bare``
    is without that allowance.
    """

    samples: tuple[Sample, ...] = ()
    fixed_bytes: int | None = None
    worst: float | None = None
    median: float | None = None
    worst_bare: float | None = None
    refused: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values."""
        return {
            "points": len(self.samples),
            "source": self.samples[0].source if self.samples else None,
            "fixed_bytes": self.fixed_bytes,
            "worst": self.worst,
            "median": self.median,
            "worst_without_fixed": self.worst_bare,
            "refused": list(self.refused),
        }


def compare_peaks(records: Iterable[PointRecord]) -> Peak:
    """Return the comparison of measured peaks with predicted totals over all ok points."""
    measured = [r for r in records if r.outcome == "ok"]
    bare = peak_samples(measured)
    if not bare.samples:
        why = "peak error: no point has a measured peak and a prediction"
        return Peak(refused=(*bare.refused, why))
    fixed, refused = None, bare.refused
    if len(bare.samples) > 1:
        fixed = round(median(s.measured - s.expected for s in bare.samples))
    else:
        # From one point it would be whatever is missing, and the error always 0.
        refused += ("what the process holds beyond the buffers: needs at least two points",)
    found = peak_samples(measured, fixed or 0)
    errors = [abs(s.error) for s in found.samples]
    return Peak(
        samples=found.samples,
        fixed_bytes=fixed,
        worst=max(errors),
        median=median(errors),
        worst_bare=max(abs(s.error) for s in bare.samples),
        refused=refused,
    )
