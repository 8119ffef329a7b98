"""What a report is made of, and the small texts that its sections share."""

from __future__ import annotations

from dataclasses import dataclass, field

from localkv.analysis import points
from localkv.analysis.result import Analysis
from localkv.records import PointRecord, RunInfo
from localkv.report.escape import escape_markdown
from localkv.units import format_bytes


@dataclass(frozen=True)
class Page:
    """A run, its records (one per point and repeat), what they say, and the pictures there are.

    ``pictures`` maps a picture's name (fit, memory, stacked, speed, cache) to its file beside the
    report; a picture that is not there leaves no trace in the text.
    """

    run: RunInfo
    records: tuple[PointRecord, ...]
    analysis: Analysis
    pictures: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the model's name, ready for Markdown."""
        return escape_markdown(self.run.model.get("name") or "the model")

    @property
    def points(self) -> list[PointRecord]:
        """Return one record per point, sorted."""
        return points.one_per_point(self.records)

    def record(self, key: str | None) -> PointRecord | None:
        """Return the record of the point ``key``."""
        return next((r for r in self.points if r.key == key), None)


def size(count: int | None) -> str:
    """Return bytes as IEC text, ``unknown`` for None."""
    return "unknown" if count is None else format_bytes(count)


def percent(share: float | None, digits: int = 2) -> str:
    """Return a share as a percentage, ``unknown`` for None."""
    return "unknown" if share is None else f"{round(share, digits + 2) + 0.0:.{digits}%}"


def signed(share: float, digits: int = 1) -> str:
    """Return a share as a percentage with its sign, none for one that rounds to nothing."""
    rounded = round(share, digits + 2)
    return f"{rounded:+.{digits}%}" if rounded else percent(0.0, digits)


def r2_text(r2: float | None) -> str:
    """Return R² with six decimals, none of which makes it look perfect when it is not."""
    if r2 is None:
        return "not determined"
    return "> 0.999999" if 0.9999995 <= r2 < 1 else f"{r2:.6f}"


def tokens(count: int | None) -> str:
    """Return a number of tokens with thousands apart, ``unknown`` for None."""
    return "unknown" if count is None else f"{count:,}"


def picture(page: Page, name: str, alt: str) -> list[str]:
    """Return the lines that show a picture, none where it was not drawn."""
    file = page.pictures.get(name)
    return [f"![{escape_markdown(alt)}]({file})", ""] if file else []


def label(record: PointRecord) -> str:
    """Return the point in words, ready for Markdown."""
    return escape_markdown(points.label(record))
