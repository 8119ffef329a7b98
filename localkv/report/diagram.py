"""The picture of a model's cache as notebooks and pages, as SVG (see ``notebooks``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from localkv.analysis import points
from localkv.report.escape import plain
from localkv.report.notebooks import BLOCK, KINDS, Paged, Picture, Row, Strip, picture
from localkv.report.page import Page
from localkv.report.style import CARD, COLOURS, EDGE, INK, MUTED
from localkv.report.svg import Svg, text_lines
from localkv.units import format_bytes, plural

_WIDTH = 830
_LEFT, _STRIP, _STRIP_END, _RIGHT = 28, 238, 672, 802
_MAX_PAGES, _MAX_SLOTS = 32, 6
_PAGE_WIDTH = (_STRIP_END - _STRIP) / _MAX_PAGES
_PAGE_HEIGHT, _PAGE_GAP = 20, 7
#: Notebooks up to this long leave room for words behind them.
_MAX_PAGES_WITH_WORDS = 20
_USED, _RESERVED = 0.9, 0.28
_STORY = (
    "A token is a piece of a word. For each token every layer notes a key and a value, so that the "
    "model",
    "need not read the whole conversation again for every next word. A slot is one conversation;",
    "the notebooks of all its layers are its KV cache, and they fill at the same time.",
    "All pages are taken from memory at the start, whether they will be written or not.",
)


def draw_cache(page: Page, path: Path) -> Path | None:
    """Write the diagram of the longest context that ran, or that was planned if none did."""
    known = [
        r for r in page.points if points.predicted(r, "kv") or points.predicted(r, "recurrent")
    ]
    if not known:
        return None
    ran = [r for r in known if r.outcome == "ok"] or known
    record = max(ran, key=lambda r: (points.n_ctx(r) or 0, points.slots(r), r.key))
    layers = page.run.model.get("layers")
    path.write_text(
        cache_diagram(
            record.prediction,
            layers if isinstance(layers, list | tuple) else (),
            name=str(page.run.model.get("name") or "the model"),
        ),
        encoding="utf-8",
    )
    return path


def cache_diagram(
    estimate: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]] = (),
    *,
    requests: Sequence[int] | None = None,
    name: str = "the model",
) -> str:
    """Return the SVG for ``estimate`` (``Estimate.to_dict()``).

    ``layers`` (``kind`` and ``window`` in order) draw the model's spine; ``requests`` are tokens,
    one per slot, None for made-up ones, which the picture says. All text is escaped.
    """
    shown = picture(estimate, layers, requests, max_slots=_MAX_SLOTS, max_pages=_MAX_PAGES)
    canvas = Svg(_WIDTH)
    y = _spine(canvas, shown.kinds, _title(canvas, shown, name))
    for row in shown.rows:
        y = _notebooks(canvas, row, y)
    if shown.paged:
        y = _pool(canvas, shown.paged, y)
    y = _legend(canvas, shown, y)
    return canvas.render(y + 6, f"The cache of {name} as notebooks and pages")


def _title(canvas: Svg, shown: Picture, name: str) -> int:
    canvas.text(_LEFT, 40, plain(f"The cache of {name}", 58), size=18, weight="bold")
    parts = [f"context {shown.n_ctx:,} tokens"]
    if shown.slots > 1:
        parts.append(f"{shown.slots} slots" + (", one shared cache" if shown.unified else ""))
        parts += [] if shown.unified else [f"{shown.per_slot:,} tokens each"]
    parts.append(f"{format_bytes(shown.bytes)} in all")
    canvas.text(_LEFT, 62, " · ".join(parts), fill=MUTED)
    return 84


def _spine(canvas: Svg, kinds: Sequence[str], y: int) -> int:
    """Draw the layers in order, one tick each, when they are not all of a kind."""
    if len(set(kinds)) < 2:
        return y
    width = (_RIGHT - _STRIP) / len(kinds)
    canvas.text(_LEFT, y + 14, f"{len(kinds)} layers in order")
    for index, kind in enumerate(kinds):
        fill, edge = _tick(kind)
        gap = 2 if width > 5 else 0
        canvas.rect(_STRIP + index * width, y, width - gap, 18, fill=fill, stroke=edge, radius=2)
    x = float(_STRIP)
    for kind in dict.fromkeys(kinds):
        fill, edge = _tick(kind)
        words = f"{kinds.count(kind)} {KINDS.get(kind, (kind, ''))[0]}"
        canvas.rect(x, y + 29, 11, 11, fill=fill, stroke=edge, radius=2)
        canvas.text(x + 17, y + 39, words, size=12.5, fill=MUTED)
        x += 40 + 7.2 * len(words)
    return y + 58


def _tick(kind: str) -> tuple[str, str]:
    return {
        "full": (INK, INK),
        "sliding": ("#A9B4C0", "#A9B4C0"),
        "recurrent": (CARD, INK),
    }.get(kind, (CARD, EDGE))


def _notebooks(canvas: Svg, row: Row, y: int) -> int:
    """Draw one kind's notebooks, one strip per slot, and return where the next row begins."""
    canvas.line(_LEFT, y, _RIGHT, y, EDGE)
    title, does = KINDS.get(row.kind, (row.kind, ""))
    words = [f"{row.layers} x {title}" if row.layers else title, does]
    if row.window:
        words[1] = f"keeps the last {row.window:,}"
    if row.kind != "recurrent":
        words.append(f"{row.cells:,} tokens per notebook")
    text_lines(canvas, _LEFT, y + 26, words)
    top = y + 14
    for strip in row.strips:
        _strip(canvas, top, strip, stacked=row.layers > 1)
        top += _PAGE_HEIGHT + _PAGE_GAP
    hidden = row.streams - len(row.strips)
    if hidden > 0:
        canvas.text(_STRIP, top + 12, f"and {hidden} more", size=12.5, fill=MUTED)
        top += 20
    canvas.text(_RIGHT, y + 28, format_bytes(row.bytes), weight="bold", anchor="end")
    if row.layers:
        each = f"{format_bytes(row.bytes // row.layers)} a layer"
        canvas.text(_RIGHT, y + 46, each, size=12.5, fill=MUTED, anchor="end")
    return max(top + 10, y + 46 + 18 * (len(words) - 1))


def _colour(slot: int | None) -> str:
    return MUTED if slot is None else COLOURS[slot % len(COLOURS)]


def _strip(canvas: Svg, y: float, strip: Strip, *, stacked: bool) -> None:
    """Draw one notebook: its pages side by side, the other layers' notebooks behind it."""
    count = len(strip.owners)
    length, colour = count * _PAGE_WIDTH, _colour(strip.slot)
    for shift in (4, 2, 0) if stacked else (0,):
        canvas.rect(
            _STRIP + shift,
            y - shift,
            length,
            _PAGE_HEIGHT,
            fill=CARD,
            stroke=colour,
            opacity=0.45 if shift else 1.0,
        )
    for index, owner in enumerate(strip.owners):
        x = _STRIP + index * _PAGE_WIDTH
        if index >= count - strip.padding:
            canvas.line(x + 3, y + _PAGE_HEIGHT - 4, x + _PAGE_WIDTH - 3, y + 4, MUTED)
        else:
            _page(canvas, x, y, colour if owner is None else _colour(owner), owner is not None)
    if strip.wraps:
        told = "↺ old pages are written over" if count <= _MAX_PAGES_WITH_WORDS else "↺"
        canvas.text(_STRIP + length + 8, y + 15, told, size=12, fill=MUTED)


def _page(canvas: Svg, x: float, y: float, colour: str, used: bool) -> None:
    canvas.rect(
        x + 2,
        y + 2.5,
        max(_PAGE_WIDTH - 3, 1),
        _PAGE_HEIGHT - 5,
        fill=colour,
        opacity=_USED if used else _RESERVED,
        radius=1.5,
    )


def _pool(canvas: Svg, paged: Paged, y: int) -> int:
    """Draw the same requests as a paged server keeps them, and compare the bytes."""
    canvas.line(_LEFT, y, _RIGHT, y, EDGE)
    words = ["Paged, as in vLLM", f"blocks of {BLOCK} tokens,", "taken when needed"]
    text_lines(canvas, _LEFT, y + 26, words)
    top = y + 14
    shown = paged.owners[: _MAX_PAGES * _MAX_SLOTS]
    for start in range(0, len(shown), _MAX_PAGES):
        for index, owner in enumerate(shown[start : start + _MAX_PAGES]):
            _page(canvas, _STRIP + index * _PAGE_WIDTH, top, _colour(owner), True)
        top += _PAGE_HEIGHT + _PAGE_GAP
    if len(shown) < len(paged.owners):
        canvas.text(_STRIP, top + 12, "and so on", size=12.5, fill=MUTED)
        top += 20
    canvas.text(_RIGHT, y + 28, format_bytes(paged.paged), weight="bold", anchor="end")
    share = paged.held / paged.reserved
    told = f"the notebooks above reserve {format_bytes(paged.reserved)} and fill {share:.0%}"
    canvas.text(_STRIP, top + 12, told, size=12.5, fill=MUTED)
    return max(top + 28, y + 82)


def _legend(canvas: Svg, shown: Picture, y: int) -> int:
    canvas.line(_LEFT, y, _RIGHT, y, EDGE)
    x, y = float(_LEFT), y + 28
    for slot in range(min(shown.slots, _MAX_SLOTS) if shown.slots > 1 else 0):
        canvas.rect(x, y - 11, 13, 13, fill=_colour(slot), opacity=_USED, radius=2)
        canvas.text(x + 19, y, f"slot {slot + 1}", size=12.5)
        x += 74
    if shown.unified:
        y += 24
        words = f"all {shown.slots} slots write into the same notebooks"
        canvas.text(_LEFT, y, words, size=12.5)
    y += 26 if shown.slots > 1 else 0
    page = plural(shown.per_page, "token")
    states = f"A page is {page} of every layer: full ones are used, pale ones reserved"
    if any(strip.padding for row in shown.rows for strip in row.strips):
        states += ", struck ones there by rounding"
    canvas.text(_LEFT, y, f"{states}.", size=12.5)
    if shown.example:
        words = "How far they are filled is an example: no requests were counted."
        canvas.text(_LEFT, y + 20, words, size=12.5)
        y += 20
    text_lines(canvas, _LEFT, y + 26, _STORY, first_fill=MUTED, first_weight="normal")
    return y + 26 + 18 * len(_STORY)
