"""Writes a report: ``report.md`` and its pictures, from the records of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localkv.analysis import points
from localkv.analysis.answers import Predict
from localkv.analysis.frame import frame
from localkv.analysis.result import Analysis, analyse
from localkv.records import PointRecord, RunInfo
from localkv.report.diagram import draw_cache
from localkv.report.markdown import render_report
from localkv.report.page import Page
from localkv.report.plots import draw_fit, draw_memory, draw_speed, draw_stacked
from localkv.report.terminal import summary_lines

REPORT_FILE = "report.md"
TABLE_FILE = "results.csv"
SCHEMA = 1

#: Name of each picture -> what draws it; the file is the name with .svg.
PICTURES: dict[str, Callable[[Page, Path], Path | None]] = {
    "cache": draw_cache,
    "memory": draw_memory,
    "fit": draw_fit,
    "stacked": draw_stacked,
    "speed": draw_speed,
}
_FIT_KEYS = (
    "slope",
    "slope_low",
    "slope_high",
    "intercept_bytes",
    "r2",
    "max_residual_bytes",
    "held_out_error",
)


@dataclass(frozen=True)
class Written:
    """A report on disk: its path, what it says, and the lines that end a sweep."""

    run: Path
    report: Path
    analysis: Analysis
    summary: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``localkv sweep --json`` prints (schema 1)."""
        fit = self.analysis.fit.to_dict()
        return {
            "schema": SCHEMA,
            "run": str(self.run),
            "report": str(self.report),
            "points": dict(self.analysis.counts),
            "fit": {key: fit[key] for key in _FIT_KEYS},
            "peak_error": self.analysis.peak.worst,
        }


def write_report(
    directory: Path,
    run: RunInfo,
    records: Sequence[PointRecord],
    *,
    predict: Predict | None = None,
    notes: Sequence[str] = (),
) -> Written:
    """Write ``report.md``, its SVG files and ``results.csv`` into ``directory``.

    ``predict(n_ctx, slots)`` gives the bytes of any context, for the largest that fits; ``notes``
    are sentences about the results that the records do not show. Files of an earlier report are
    replaced, and a picture that this run has no data for is removed.
    """
    analysis = analyse(run, records, predict)
    analysis = replace(analysis, notes=(*analysis.notes, *notes))
    kept, _ = points.unique(records)
    page = Page(run, tuple(kept), analysis)
    drawn = {}
    for name, draw in PICTURES.items():
        path = directory / f"{name}.svg"
        path.unlink(missing_ok=True)
        if draw(page, path) is not None:
            drawn[name] = path.name
    page = Page(run, page.records, analysis, drawn)
    # Halves of surrogate pairs, as a file name may bring along, have no UTF-8 of their own.
    frame(kept).to_csv(
        directory / TABLE_FILE, index=False, lineterminator="\n", errors="backslashreplace"
    )
    report = directory / REPORT_FILE
    fresh = report.with_suffix(".md.new")
    fresh.write_text(render_report(page), encoding="utf-8", newline="\n")
    os.replace(fresh, report)
    return Written(directory, report, analysis, tuple(summary_lines(page, str(report))))
