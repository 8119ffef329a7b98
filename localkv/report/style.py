"""The common look of the plots, and how a figure becomes an SVG file.

Pages are light or dark, so each picture brings its own light card. Text stays text. The same
figure gives the same bytes: no date, and identifiers from a fixed salt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from localkv.report.escape import escape_xml
from localkv.units import GIB, KIB, MIB

#: Okabe and Ito's colours, told apart with any colour vision; the yellow is left out on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
KIND_COLOURS = {
    "weights": "#B8C0CA",
    "kv": "#0072B2",
    "recurrent": "#CC79A7",
    "compute": "#E69F00",
    "output": "#009E73",
}
INK, MUTED, GRID, CARD, EDGE = "#1F2328", "#59636E", "#E4E8EC", "#FFFFFF", "#D1D9E0"
#: Inches; at 72 points an inch this is the width of a text column on GitHub.
WIDTH = 11.0
_SALT = "localkv"

# Any: matplotlib's own type lists every parameter there is, and differs by version.
_RC: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": _SALT,
    "font.family": "DejaVu Sans",
    "font.size": 12.5,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 12.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 7,
}


@contextmanager
def drawing(height: float) -> Iterator[Any]:
    """Yield an empty figure of the common width and ``height`` inches, in the common look."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import FancyBboxPatch

    with matplotlib.rc_context(_RC):
        layout = ConstrainedLayoutEngine(w_pad=0.16, h_pad=0.1, rect=(0, 0, 1, 1 - 0.08 / height))
        figure = Figure(figsize=(WIDTH, height), layout=layout)
        figure.patch.set_visible(False)
        card = FancyBboxPatch(
            (0.02, 0.02),
            WIDTH - 0.04,
            height - 0.04,
            boxstyle="round,pad=0,rounding_size=0.12",
            transform=figure.dpi_scale_trans,
            facecolor=CARD,
            edgecolor=EDGE,
            linewidth=1,
            zorder=-10,
        )
        card.set_in_layout(False)
        figure.add_artist(card)
        yield figure


def save(figure: Any, path: Path, title: str) -> Path:
    """Write ``figure`` to ``path`` as SVG and return the path; ``title`` is for screen readers."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": "localkv"})
    svg = text.getvalue()
    # DejaVu Sans is at hand for drawing; Verdana has its widths, where only that is installed.
    svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    start = svg.index("<svg")
    body = svg.index(">", start) + 1
    svg = f'{svg[start : body - 1]} role="img">\n <title>{escape_xml(title)}</title>{svg[body:]}'
    path.write_text(svg, encoding="utf-8")
    return path


def unit_for(values: Sequence[float]) -> tuple[float, str]:
    """Return the divisor and the name of the IEC unit that suits bytes of this size."""
    largest = max((abs(v) for v in values), default=0)
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if largest >= 2 * unit:
            return float(unit), name
    return 1.0, "B"


def tokens_text(count: float) -> str:
    """Return a number of tokens as on an axis: 512, 1k, 1.5k, 128k."""
    return f"{count / 1024:g}k" if count >= 1024 else f"{count:g}"


def context_axis(axes: Any, contexts: Sequence[int]) -> None:
    """Make the x axis one of contexts: powers of two, written 1k, 2k, 4k."""
    low, high = min(contexts), max(contexts)
    axes.set_xscale("log", base=2)
    ticks = [2**e for e in range(6, 25) if low <= 2**e <= high] or sorted(set(contexts))
    axes.set_xticks(ticks, [tokens_text(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlim(low / 2**0.3, high * 2**0.3)


def legend_below(figure: Any, handles: Sequence[Any], columns: int = 6) -> None:
    """Put one legend below all axes, outside the data."""
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=len(handles) if len(handles) <= columns else 4,
        columnspacing=1.6,
        handletextpad=0.6,
    )
