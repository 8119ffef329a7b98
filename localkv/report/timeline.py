"""Figures over time as SVG: what a live server held and did while it was looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localkv.report.style import COLOURS, GRID, MUTED, drawing, legend_below, save


def draw_timeline(
    path: Path,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    title: str,
    unit: str,
    *,
    ceiling: float | None = None,
    steps: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str | None:
    """Draw ``series`` (seconds, value) into the SVG ``path`` and return its name.

    ``ceiling`` is drawn as the capacity, ``marks`` (seconds, label) as thin lines across. None, and
    no file, where there is no data.
    """
    path.unlink(missing_ok=True)
    known = [(name, points) for name, points in series if points]
    if not known:
        return None
    with drawing(3.4) as figure:
        axes = figure.subplots()
        handles: list[Any] = []
        for index, (name, points) in enumerate(known):
            style = "steps-post" if steps else "default"
            handles += axes.plot(
                [t for t, _ in points],
                [v for _, v in points],
                color=COLOURS[index],
                drawstyle=style,
                label=name,
            )
        if ceiling:
            handles.append(axes.axhline(ceiling, color=MUTED, linestyle="--", label="capacity"))
        for at, label in marks:
            axes.axvline(at, color=GRID, linewidth=1, zorder=0)
            axes.annotate(label, (at, 1), xycoords=("data", "axes fraction"), color=MUTED, size=9)
        axes.set_title(title, pad=18 if marks else None)
        axes.set_xlabel("seconds")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        legend_below(figure, handles)
        save(figure, path, title)
    return path.name
