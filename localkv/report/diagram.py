"""The picture of a model's cache as notebooks and pages, as SVG.

Every layer with a cache is a notebook; a page holds a number of tokens. Full layers fill theirs to
the end, sliding layers keep the last pages only, a recurrent layer has a single page that it
rewrites. Colours tell the slots apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localkv.analysis import points
from localkv.report.escape import plain
from localkv.report.page import Page
from localkv.report.style import CARD, COLOURS, EDGE, INK, MUTED
from localkv.report.svg import Svg, text_lines
from localkv.units import format_bytes

_WIDTH = 830
_LEFT, _STRIP, _STRIP_END, _RIGHT = 28, 238, 672, 802
_PAGE_HEIGHT, _PAGE_GAP = 20, 7
_MAX_PAGES = 32
_MAX_SLOTS = 6
#: Kind of cache -> (what its layers are called, what the notebook does).
_KINDS = {
    "full": ("full attention", "keeps every token"),
    "sliding": ("sliding window", "keeps the last tokens only"),
    "indexer": ("indexer", "short keys to find tokens by"),
    "compressed": ("compressed", "several tokens per page"),
    "state": ("state", "one page, rewritten"),
    "recurrent": ("recurrent", "one page, rewritten each time"),
}


@dataclass(frozen=True)
class _Row:
    """One kind of layer: how many notebooks of how many cells, for how many slots."""

    kind: str
    layers: int
    cells: int
    streams: int
    bytes: int


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
    used: int | None = None,
    name: str = "the model",
) -> str:
    """Return the SVG for ``estimate`` (``Estimate.to_dict()``).

    ``layers`` (``kind`` in order) draws the model's spine; ``used`` are the tokens in each slot,
    None when unknown: then everything is drawn as reserved. All text is escaped.
    """
    rows = _rows(estimate, layers)
    slots = points.dig_int(estimate, "config", "n_seq_max") or 1
    pages = _tokens_per_page(rows)
    canvas = Svg(_WIDTH)
    y = _title(canvas, estimate, name, slots)
    y = _spine(canvas, layers, y)
    for row in rows:
        y = _notebooks(canvas, row, y, slots=slots, per_page=pages, used=used)
    y = _legend(canvas, y, slots=slots, per_page=pages, used=used, rows=rows)
    return canvas.render(y + 6, f"The cache of {name} as notebooks and pages")


def _rows(estimate: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> list[_Row]:
    rows = [
        _Row(
            kind=str(cache.get("kind") or "unknown"),
            layers=points.dig_int(cache, "layers") or 0,
            cells=points.dig_int(cache, "cells") or 0,
            streams=points.dig_int(cache, "streams") or 1,
            bytes=(points.dig_int(cache, "k_bytes") or 0) + (points.dig_int(cache, "v_bytes") or 0),
        )
        for cache in points.dig(estimate, "kv", "caches") or ()
        if isinstance(cache, Mapping)
    ]
    state = points.dig_int(estimate, "recurrent", "bytes")
    if state:
        count = sum(points.dig(layer, "kind") == "recurrent" for layer in layers)
        slots = points.dig_int(estimate, "config", "n_seq_max") or 1
        rows.append(_Row("recurrent", count, 1, slots, state))
    return [row for row in rows if row.bytes]


def _tokens_per_page(rows: Sequence[_Row]) -> int:
    longest = max((row.cells for row in rows), default=1)
    per_page = 1
    while longest > per_page * _MAX_PAGES:
        per_page *= 2
    return per_page


def _title(canvas: Svg, estimate: Mapping[str, Any], name: str, slots: int) -> int:
    total = points.dig_int(estimate, "config", "n_ctx")
    shared = bool(points.dig(estimate, "config", "kv_unified"))
    canvas.text(_LEFT, 40, plain(f"The cache of {name}", 58), size=18, weight="bold")
    each = points.dig_int(estimate, "config", "n_ctx_per_slot")
    parts = [f"context {total:,} tokens" if total else ""]
    if slots > 1:
        parts.append(f"{slots} slots" + (", one shared cache" if shared else ""))
        parts.append("" if shared or not each else f"{each:,} tokens each")
    held = (points.dig_int(estimate, "kv", "bytes") or 0) + (
        points.dig_int(estimate, "recurrent", "bytes") or 0
    )
    parts.append(f"{format_bytes(held)} in all")
    canvas.text(_LEFT, 62, " · ".join(part for part in parts if part), fill=MUTED)
    return 84


def _spine(canvas: Svg, layers: Sequence[Mapping[str, Any]], y: int) -> int:
    """Draw the layers in order, one tick each, when they are not all of a kind."""
    kinds = [str(points.dig(layer, "kind") or "unknown") for layer in layers]
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
        words = f"{kinds.count(kind)} {_KINDS.get(kind, (kind, ''))[0]}"
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


def _notebooks(
    canvas: Svg, row: _Row, y: int, *, slots: int, per_page: int, used: int | None
) -> int:
    """Draw one kind's notebooks, one strip per slot, and return where the next row begins."""
    shown = min(row.streams, _MAX_SLOTS)
    count = max(1, -(-row.cells // per_page))
    canvas.line(_LEFT, y, _RIGHT, y, EDGE)
    title, does = _KINDS.get(row.kind, (row.kind, ""))
    words = [f"{row.layers} x {title}" if row.layers else title, does]
    if row.kind != "recurrent":
        words.append(f"{row.cells:,} tokens per notebook")
    text_lines(canvas, _LEFT, y + 26, words)
    top = y + 14
    for slot in range(shown):
        shared = row.streams == 1 and slots > 1
        colour = MUTED if shared else COLOURS[slot % len(COLOURS)]
        filled = None if used is None else -(-min(used, row.cells) // per_page)
        _strip(canvas, top, count, colour, filled, stacked=row.layers > 1)
        top += _PAGE_HEIGHT + _PAGE_GAP
    if row.streams > shown:
        canvas.text(_STRIP, top + 12, f"and {row.streams - shown} more", size=12.5, fill=MUTED)
        top += 20
    canvas.text(_RIGHT, y + 28, format_bytes(row.bytes), weight="bold", anchor="end")
    if row.layers:
        each = f"{format_bytes(row.bytes // row.layers)} a layer"
        canvas.text(_RIGHT, y + 46, each, size=12.5, fill=MUTED, anchor="end")
    return max(top + 10, y + 46 + 18 * (len(words) - 1))


def _strip(
    canvas: Svg, y: float, count: int, colour: str, filled: int | None, *, stacked: bool
) -> None:
    """Draw one slot's notebook: its pages side by side, the other layers' notebooks behind it."""
    width = (_STRIP_END - _STRIP) / _MAX_PAGES
    length = count * width
    if stacked:
        for shift in (4, 2):
            canvas.rect(
                _STRIP + shift,
                y - shift,
                length,
                _PAGE_HEIGHT,
                fill=CARD,
                stroke=colour,
                opacity=0.45,
            )
    canvas.rect(_STRIP, y, length, _PAGE_HEIGHT, fill=CARD, stroke=colour)
    for index in range(count):
        solid = filled is not None and index < filled
        canvas.rect(
            _STRIP + index * width + 2,
            y + 2.5,
            max(width - 3, 1),
            _PAGE_HEIGHT - 5,
            fill=colour,
            opacity=0.9 if solid else 0.28,
            radius=1.5,
        )


def _legend(
    canvas: Svg, y: int, *, slots: int, per_page: int, used: int | None, rows: Sequence[_Row]
) -> int:
    canvas.line(_LEFT, y, _RIGHT, y, EDGE)
    x, y = float(_LEFT), y + 28
    split = any(row.streams > 1 for row in rows)
    for slot in range(min(slots, _MAX_SLOTS) if split and slots > 1 else 0):
        canvas.rect(x, y - 11, 13, 13, fill=COLOURS[slot % len(COLOURS)], opacity=0.6, radius=2)
        canvas.text(x + 19, y, f"slot {slot + 1}", size=12.5)
        x += 74
    if not split and slots > 1:
        canvas.text(x, y, f"all {slots} slots write into the same notebooks", size=12.5)
    y += 26 if slots > 1 else 0
    page = "1 token" if per_page == 1 else f"{per_page:,} tokens"
    states = "" if used is None else "; pale pages are reserved, full ones hold tokens"
    canvas.text(_LEFT, y, f"A page is {page} of every layer{states}.", size=12.5)
    story = [
        "A token is a piece of a word. For each token every layer notes a key and a value, so that "
        "the model",
        "need not read the whole conversation again for every next word. A slot is one "
        "conversation.",
        "All pages are reserved at the start, whether they will be written or not.",
    ]
    text_lines(canvas, _LEFT, y + 26, story, first_fill=MUTED, first_weight="normal")
    return y + 26 + 18 * len(story)
