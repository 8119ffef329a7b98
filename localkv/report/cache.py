"""The sections about the cache: its size over context and slots, and what GQA saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localkv.analysis import points
from localkv.records import PointRecord
from localkv.report.escape import escape_markdown
from localkv.report.levers import levers
from localkv.report.page import Page, label, picture, size, tokens
from localkv.report.table import table
from localkv.units import plural


def cache_sections(page: Page) -> list[str]:
    """Return the lines about the cache's size, its picture, GQA, and what to change."""
    if not any(points.predicted(r, "kv") for r in page.points):
        return []
    return [
        "## The KV cache",
        "",
        "The cache keeps a key and a value per token, layer and KV head, so that earlier text "
        "need not be read again for every new token. It is reserved in full when the context is "
        "created, before the first token.",
        "",
        *picture(page, "cache", "The cache as notebooks: layers, cells and slots"),
        *_kv_table(page),
        *picture(page, "memory", "Memory against context per slot, one line per slot count"),
        *_gqa(page),
        *levers(page),
    ]


def _kv_table(page: Page) -> list[str]:
    """Return one table per cache type: contexts down, slots across, marked against the weights."""
    lines: list[str] = []
    for types in dict.fromkeys(points.types_text(r) for r in page.points):
        group = [r for r in page.points if points.types_text(r) == types]
        lines += [f"### KV cache in {escape_markdown(types)}", "", *_grid(group), ""]
    over = any(_share(r) > 1 for r in page.points)
    lines.append(
        "Predicted by formula, in brackets as a multiple of the weights"
        + (
            f" ({size(_weights(page.points))}); **bold**: larger than the weights."
            if over
            else f" ({size(_weights(page.points))})."
        )
    )
    return [*lines, ""]


def _grid(group: list[PointRecord]) -> list[str]:
    # A sweep over contexts per slot has its columns by those; one over totals by totals.
    by_slot = len({points.n_ctx_seq(r) for r in group}) < len(
        {points.n_ctx_asked(r) for r in group}
    )
    what = points.n_ctx_seq if by_slot else points.n_ctx_asked
    contexts = sorted({c for r in group if (c := what(r) or points.n_ctx(r))})
    slots = sorted({points.slots(r) for r in group})
    cells = {(what(r) or points.n_ctx(r), points.slots(r)): r for r in group}
    head = "tokens per slot" if by_slot else "n_ctx (all slots)"
    columns = [[_cell(cells.get((c, n)), c, by_slot) for c in contexts] for n in slots]
    headers = [head, *(plural(n, "slot") for n in slots)]
    if len(columns) > 1 and all(column == columns[0] for column in columns):
        headers, columns = [head, f"{slots[0]} to {slots[-1]} slots"], columns[:1]
    rows = [[tokens(c), *(column[index] for column in columns)] for index, c in enumerate(contexts)]
    return table(headers, rows, right=range(len(headers)))


def _cell(record: PointRecord | None, context: int, by_slot: bool) -> str:
    if record is None or (kv := points.predicted(record, "kv")) is None:
        return ""
    share = _share(record)
    text = f"{size(kv)} ({share:.2f}x)" if share else size(kv)
    text = f"**{text}**" if share > 1 else text
    total = points.n_ctx(record)
    return text if by_slot or total == context or not total else f"{text}, n_ctx {tokens(total)}"


def _weights(group: list[PointRecord]) -> int | None:
    return next((w for r in group if (w := points.predicted(r, "weights"))), None)


def _share(record: PointRecord) -> float:
    weights = points.predicted(record, "weights")
    return (points.predicted(record, "kv") or 0) / weights if weights else 0.0


def _gqa(page: Page) -> list[str]:
    layers = page.run.model.get("layers")
    biggest = max(page.points, key=lambda r: points.predicted(r, "kv") or 0)
    kv = points.predicted(biggest, "kv")
    if not isinstance(layers, list | tuple) or not kv:
        return []
    kinds = [layer for layer in layers if isinstance(layer, Mapping) and _width(layer)]
    mla = [x for x in kinds if not points.dig_int(x, "v_width")]
    heads = {(points.dig_int(x, "n_head"), points.dig_int(x, "n_head_kv")) for x in kinds}
    if not kinds or mla or any(not h or not k for h, k in heads):
        return []
    full = _without_gqa(biggest, kinds)
    if full <= kv:
        return [
            "### Attention heads",
            "",
            "Every attention head has a KV head of its own (no GQA): the cache has its full size.",
            "",
        ]
    shown = ", ".join(
        f"{plural(k, 'KV head')} for {plural(h, 'attention head')}"
        for h, k in sorted(heads, key=str)
        if h and k
    )
    return [
        "### What grouped-query attention saves",
        "",
        f"{shown}: at {label(biggest)} the cache takes {size(kv)} instead of "
        f"{size(full)} with a KV head for every attention head, {size(full - kv)} less "
        f"({full / kv:.1f} times smaller).",
        "",
    ]


def _width(layer: Mapping[str, Any]) -> int:
    return (points.dig_int(layer, "k_width") or 0) + (points.dig_int(layer, "v_width") or 0)


def _without_gqa(record: PointRecord, layers: list[Mapping[str, Any]]) -> int:
    """Return the bytes of the cache if every attention head had its own KV head."""
    total = 0
    for cache in points.caches(record):
        kind = cache.get("kind")
        group = [x for x in layers if x.get("kind") == kind] or layers
        now = sum(_width(x) for x in group)
        then = sum(_width(x) * x["n_head"] // x["n_head_kv"] for x in group)
        held = (points.dig_int(cache, "k_bytes") or 0) + (points.dig_int(cache, "v_bytes") or 0)
        total += held * then // now
    return total
