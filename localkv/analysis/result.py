"""The analysis of a run: everything that the report says, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localkv.analysis import points
from localkv.analysis.answers import Answers, Predict, find_answers
from localkv.analysis.fit import Fit, fit_line
from localkv.analysis.groups import Groups, fit_groups
from localkv.analysis.peak import Peak, compare_peaks
from localkv.analysis.samples import Samples, growth_samples
from localkv.analysis.warnings import RunWarning, find_warnings
from localkv.records import OUTCOMES, PointRecord, RunInfo

SCHEMA = 1


@dataclass(frozen=True)
class Analysis:
    """What a run says. ``counts`` are points by outcome; ``notes`` tell of records set aside."""

    counts: dict[str, int]
    growth: Samples
    fit: Fit
    groups: Groups
    peak: Peak
    answers: Answers
    warnings: tuple[RunWarning, ...]
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> tuple[str, ...]:
        """Return what the data could not determine, each by name with the reason."""
        return (*self.growth.refused, *self.fit.refused, *self.groups.refused, *self.peak.refused)

    def to_dict(self) -> dict[str, Any]:
        """Return the analysis as plain JSON values; bytes as integers."""
        return {
            "schema": SCHEMA,
            "points": dict(self.counts),
            "fit": self.fit.to_dict(),
            "groups": self.groups.to_dict(),
            "peak": self.peak.to_dict(),
            "peak_error": self.peak.worst,
            "answers": self.answers.to_dict(),
            "warnings": [w.to_dict() for w in self.warnings],
            "refused": list(self.refused),
            "notes": list(self.notes),
        }


def analyse(
    run: RunInfo, records: Sequence[PointRecord], predict: Predict | None = None
) -> Analysis:
    """Return the analysis of the records of one run, in any order, finished or not.

    ``predict(n_ctx, slots)`` gives the bytes of any context on the device that holds the cache;
    without it the largest context that fits is read off the predictions of the run.
    """
    kept, notes = points.unique(records)
    growth = growth_samples(kept)
    fit = fit_line(growth.samples, run.seed)
    peak = compare_peaks(kept)
    answers = find_answers(run, kept, predict)
    return Analysis(
        counts=count_points(kept),
        growth=growth,
        fit=fit,
        groups=fit_groups(growth.samples, run.seed),
        peak=peak,
        answers=answers,
        warnings=find_warnings(run, kept, growth, fit, peak, answers),
        notes=tuple(notes),
    )


def count_points(records: Sequence[PointRecord]) -> dict[str, int]:
    """Return the number of points by outcome; a point of which one repeat is ok counts as ok."""
    counts = dict.fromkeys(OUTCOMES, 0)
    for record in points.one_per_point(records):
        counts[record.outcome] = counts.get(record.outcome, 0) + 1
    return counts
