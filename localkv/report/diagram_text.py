"""The picture of a model's cache as notebooks and pages, as text (see ``notebooks``).

Signs carry all of it, so that it reads without colour: a slot's own digit for a used page, a dot
for a reserved one, a stroke for one that is there by rounding.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from localkv.report.escape import escape_terminal
from localkv.report.notebooks import BLOCK, KINDS, Paged, Picture, Row, Strip, picture
from localkv.units import format_bytes, plural

_MAX_PAGES, _MAX_SLOTS = 24, 9
_RESERVED, _PADDING = ".", "/"
_LETTERS = {"full": "F", "sliding": "s", "recurrent": "R", "none": "-"}
_STORY = (
    "A token is a piece of a word. For each token every layer notes a key and a value, so that the "
    "model need not read the whole conversation again for every next word. A slot is one "
    "conversation; each of its layers has a notebook, and together they are its KV cache. All "
    "pages are taken from memory at the start, whether they will be written or not."
)

#: The colour of each slot's digit inside a notebook, for a terminal that has some.
STYLES = {
    rf"{slot + 1}(?=[0-9./]*\])": colour
    for slot, colour in enumerate(("blue", "red", "green", "magenta", "cyan", "yellow") * 2)
    if slot < 9
}


def diagram_lines(
    estimate: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]] = (),
    requests: Sequence[int] | None = None,
    *,
    name: str = "the model",
    width: int = 80,
) -> list[str]:
    """Return the lines of the picture of ``estimate`` (``Estimate.to_dict()``).

    ``layers`` and ``requests`` as for :func:`~localkv.report.notebooks.picture`; no line is longer
    than ``width``, 60 at least.
    """
    width = max(width, 60)
    shown = picture(estimate, layers, requests, max_slots=_MAX_SLOTS, max_pages=_MAX_PAGES)
    lines = [f"The cache of {escape_terminal(name, 46)}", _size(shown)]
    if len(set(shown.kinds)) > 1:
        lines += ["", *_spine(shown.kinds, width)]
    for row in shown.rows:
        lines += ["", *_row(row, shown, width)]
    if shown.paged:
        lines += ["", *_pool(shown.paged, width)]
    return [*lines, "", *_legend(shown, width)]


def _size(shown: Picture) -> str:
    if shown.slots == 1:
        context = f"{shown.n_ctx:,} tokens"
    elif shown.unified:
        context = f"{shown.n_ctx:,} tokens that {shown.slots} slots share"
    else:
        context = f"{shown.slots} slots of {shown.per_slot:,} tokens"
    return f"{context}, {format_bytes(shown.bytes)}"


def _spine(kinds: Sequence[str], width: int) -> list[str]:
    letters = "".join(_LETTERS.get(kind, "?") for kind in kinds)
    words = ", ".join(
        f"{_LETTERS.get(kind, '?')} {KINDS.get(kind, (kind, ''))[0]}"
        for kind in dict.fromkeys(kinds)
    )
    return [*textwrap.wrap(f"{len(kinds)} layers in order: {letters}", width), f"  ({words})"]


def _row(row: Row, shown: Picture, width: int) -> list[str]:
    title, does = KINDS.get(row.kind, (escape_terminal(row.kind, 20), ""))
    if row.window:
        does = f"keeps the last {row.window:,}"
    layers = plural(row.layers, "layer") if row.layers else ""
    head = f"{layers} {title}".strip()
    lines = [f"{head}: {does}".ljust(width - 12) + f"{format_bytes(row.bytes):>12}"]
    for strip in row.strips:
        label = "all slots" if strip.slot is None and shown.slots > 1 else ""
        if strip.slot is not None and shown.slots > 1:
            label = f"slot {strip.slot + 1}"
        lines.append(f"  {label:<9} {_pages(strip)} {_told(strip, row)}")
    hidden = row.streams - len(row.strips)
    return [*lines, f"  and {hidden} more like these"] if hidden > 0 else lines


def _pages(strip: Strip) -> str:
    count = len(strip.owners)
    signs = []
    for index, owner in enumerate(strip.owners):
        if index >= count - strip.padding:
            signs.append(_PADDING)
        elif owner is None:
            signs.append(_RESERVED)
        else:
            signs.append(_sign(owner))
    return "[" + "".join(signs) + "]" + " " * (_MAX_PAGES - count)


def _sign(slot: int) -> str:
    return str((slot + 1) % 10)


def _told(strip: Strip, row: Row) -> str:
    if row.kind in ("recurrent", "state"):
        return "rewritten" if strip.tokens else ""
    if strip.wraps:
        return f"{strip.tokens:,}, begins again"
    return f"{strip.tokens:,} of {row.cells:,}"


def _pool(paged: Paged, width: int) -> list[str]:
    head = f"The same paged, as in vLLM (blocks of {BLOCK})"
    lines = [head.ljust(width - 12) + f"{format_bytes(paged.paged):>12}"]
    shown = paged.owners[: _MAX_PAGES * _MAX_SLOTS]
    for start in range(0, len(shown), _MAX_PAGES):
        signs = "".join(_sign(s) for s in shown[start : start + _MAX_PAGES])
        lines.append(f"  {'':<9} [{signs}]")
    if len(shown) < len(paged.owners):
        lines.append("  and so on")
    told = (
        f"The notebooks above reserve {format_bytes(paged.reserved)} and fill "
        f"{paged.held / paged.reserved:.0%}; blocks are taken when they are needed."
    )
    return [*lines, *textwrap.wrap(told, width)]


def _legend(shown: Picture, width: int) -> list[str]:
    page = plural(shown.per_page, "token")
    used = "A digit: used by that slot" if shown.slots > 1 else "1: used"
    signs = f"One sign is a page of {page}, in every layer. {used}; {_RESERVED} reserved"
    if any(strip.padding for row in shown.rows for strip in row.strips):
        signs += f"; {_PADDING} there by rounding"
    lines = textwrap.wrap(f"{signs}.", width)
    if shown.example:
        told = "How far they are filled is an example; --requests 900,200 sets it."
        lines += textwrap.wrap(told, width)
    if shown.cut:
        lines += textwrap.wrap("Requests longer than a slot are cut to it.", width)
    return [*lines, *textwrap.wrap(_STORY, width)]
