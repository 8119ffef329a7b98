"""Writes SVG by hand: rectangles, lines and text on a light card, everything escaped."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.report.escape import escape_xml
from localkv.report.style import CARD, EDGE, INK, MUTED

_FONT = "'DejaVu Sans', Verdana, -apple-system, 'Segoe UI', sans-serif"


class Svg:
    """A picture ``width`` pixels wide; elements are kept in the order in which they are added."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        stroke: str = "none",
        opacity: float = 1.0,
        radius: float = 3.0,
    ) -> None:
        """Add a rectangle; ``opacity`` dims it as a whole."""
        dim = f' opacity="{opacity:g}"' if opacity < 1 else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'rx="{radius:g}" fill="{fill}" stroke="{stroke}"{dim}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str) -> None:
        """Add a line."""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 14,
        fill: str = INK,
        weight: str = "normal",
        anchor: str = "start",
    ) -> None:
        """Add a line of text; ``words`` may be anything, it is escaped."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" '
            f'font-weight="{weight}" text-anchor="{anchor}">{escape_xml(words)}</text>'
        )

    def render(self, height: float, title: str) -> str:
        """Return the document, ``height`` pixels high, on a card of its own."""
        size = f'width="{self._width}" height="{height:.0f}"'
        card = (
            f'<rect x="0.5" y="0.5" width="{self._width - 1}" height="{height - 1:.0f}" rx="9" '
            f'fill="{CARD}" stroke="{EDGE}"/>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
                f'viewBox="0 0 {self._width} {height:.0f}" role="img" font-family="{_FONT}">',
                f"<title>{escape_xml(title)}</title>",
                card,
                *self._parts,
                "</svg>\n",
            ]
        )


def text_lines(
    canvas: Svg,
    x: float,
    y: float,
    lines: Sequence[str],
    *,
    first_fill: str = INK,
    first_weight: str = "bold",
) -> None:
    """Add lines below each other, the first as a heading unless told otherwise."""
    for index, line in enumerate(lines):
        canvas.text(
            x,
            y + 18 * index,
            line,
            size=14 if index == 0 and first_weight == "bold" else 12.5,
            fill=first_fill if index == 0 else MUTED,
            weight=first_weight if index == 0 else "normal",
        )
