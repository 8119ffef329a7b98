"""A model's cache as notebooks and pages, before it is drawn: what each page holds, and for whom.

Every layer with a cache is a notebook; a page holds some tokens. Full layers fill theirs to the
end; sliding layers have a short one and begin again at its first page when it is full; a recurrent
layer has a single page that it rewrites. A paged server hands out small blocks as they are needed
instead of one long notebook per slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localkv.analysis.points import dig, dig_int

#: Tokens in a block of a paged cache: vLLM's default.
BLOCK = 16
#: Parts of a slot that stand for requests where nobody said how long theirs are.
_EXAMPLE = (0.75, 0.1, 0.5, 0.25, 0.9, 0.05)

#: Kind of cache -> (what its layers are called, what the notebook does).
KINDS = {
    "full": ("full attention", "keeps every token"),
    "sliding": ("sliding window", "keeps the last tokens only"),
    "indexer": ("indexer", "short keys to find tokens by"),
    "compressed": ("compressed", "several tokens in one entry"),
    "state": ("state", "one page, rewritten"),
    "recurrent": ("recurrent", "one page, rewritten"),
}
_ONE_PAGE = ("state", "recurrent")


@dataclass(frozen=True)
class Strip:
    """One notebook: whose each page is (None: nobody's yet) and which are only there by rounding.

    ``slot`` is None where all slots share the notebook. ``tokens`` are those kept of those that
    the request has (``asked``); ``wraps`` says that older ones were written over.
    """

    slot: int | None
    owners: tuple[int | None, ...]
    padding: int
    tokens: int
    wraps: bool = False


@dataclass(frozen=True)
class Row:
    """A group of layers with the same kind of cache: ``layers`` notebooks of ``cells`` per strip.

    ``streams`` notebooks stand side by side, of which ``strips`` are the first few. ``window`` in
    tokens, 0 for none; ``bytes`` of all of them.
    """

    kind: str
    layers: int
    cells: int
    streams: int
    bytes: int
    window: int
    strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Paged:
    """The same requests in blocks of ``BLOCK`` tokens: ``owners`` of the pages, one after another.

    Bytes: ``reserved`` by contiguous slots, ``held`` by the tokens that are there, ``paged`` by
    blocks.
    """

    owners: tuple[int, ...]
    reserved: int
    held: int
    paged: int


@dataclass(frozen=True)
class Picture:
    """Everything that a drawing shows. ``requests`` are tokens per slot, ``example`` if
    invented, ``cut`` if some were longer than a slot.

    ``n_ctx`` and ``per_slot`` are tokens after rounding; ``per_page`` tokens on one page.
    """

    slots: int
    n_ctx: int
    per_slot: int
    unified: bool
    per_page: int
    kinds: tuple[str, ...]
    requests: tuple[int, ...]
    example: bool
    cut: bool
    rows: tuple[Row, ...]
    paged: Paged | None

    @property
    def bytes(self) -> int:
        """Return the bytes of all notebooks."""
        return sum(row.bytes for row in self.rows)


def picture(
    estimate: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]] = (),
    requests: Sequence[int] | None = None,
    *,
    max_slots: int,
    max_pages: int,
) -> Picture:
    """Return the picture of ``estimate`` (``Estimate.to_dict()``) with these ``requests`` in it.

    ``layers`` give kind and window in order. ``requests`` are tokens, one per slot, cut to what a
    slot holds; None makes some up. At most ``max_slots`` notebooks of a row are kept; the longest
    has at most ``max_pages`` pages, each of a power of two of tokens.
    """
    slots = dig_int(estimate, "config", "n_seq_max") or 1
    n_ctx = dig_int(estimate, "config", "n_ctx") or 1
    per_slot = dig_int(estimate, "config", "n_ctx_per_slot") or n_ctx
    unified = bool(dig(estimate, "config", "kv_unified"))
    asked = dig_int(estimate, "config", "n_ctx_requested") or n_ctx
    lengths = _lengths(requests, slots, n_ctx // slots if unified else per_slot)
    caches = _caches(estimate, layers, slots)
    per_page = _tokens_per_page(max((cache.cells for cache in caches), default=1), max_pages)
    rows = tuple(
        _row(cache, lengths, _room(cache, asked, slots, unified), per_page, max_slots)
        for cache in caches
    )
    return Picture(
        slots=slots,
        n_ctx=n_ctx,
        per_slot=per_slot,
        unified=unified and slots > 1,
        per_page=per_page,
        kinds=tuple(str(dig(layer, "kind") or "unknown") for layer in layers),
        requests=lengths,
        example=requests is None,
        cut=any(asked > kept for asked, kept in zip(requests or (), lengths, strict=False)),
        rows=rows,
        paged=_paged(caches, lengths, per_page),
    )


@dataclass(frozen=True)
class _Cache:
    """One cache of the estimate; ``share`` are its cells per token (1 but for compressed ones)."""

    kind: str
    layers: int
    cells: int
    streams: int
    bytes: int
    window: int
    share: float

    def kept(self, tokens: int) -> int:
        """Return the cells that hold something of a request of ``tokens``."""
        if self.kind in _ONE_PAGE:
            return 1 if tokens else 0
        inside = min(tokens, self.window) if self.window else tokens
        return min(math.ceil(inside * self.share), self.cells)

    @property
    def cell_bytes(self) -> float:
        """Return the bytes of one cell over all layers."""
        return self.bytes / (self.cells * self.streams)


def _caches(
    estimate: Mapping[str, Any], layers: Sequence[Mapping[str, Any]], slots: int
) -> list[_Cache]:
    windows = [dig_int(layer, "window") or 0 for layer in layers]
    # Kept at full size, sliding layers forget nothing.
    window = 0 if dig(estimate, "config", "swa_full") else max(windows, default=0)
    per_stream = max(dig_int(estimate, "config", "n_ctx_per_slot") or 1, 1)
    found = []
    for cache in dig(estimate, "kv", "caches") or ():
        kind = str(dig(cache, "kind") or "unknown")
        cells = dig_int(cache, "cells") or 0
        size = (dig_int(cache, "k_bytes") or 0) + (dig_int(cache, "v_bytes") or 0)
        share = min(cells / per_stream, 1.0) if kind == "compressed" else 1.0
        if size and cells:
            streams = dig_int(cache, "streams") or 1
            inside = window if kind == "sliding" else 0
            found.append(
                _Cache(kind, dig_int(cache, "layers") or 0, cells, streams, size, inside, share)
            )
    state = dig_int(estimate, "recurrent", "bytes")
    if state:
        count = sum(dig(layer, "kind") == "recurrent" for layer in layers)
        found.append(_Cache("recurrent", count, 1, slots, state, 0, 1.0))
    return found


def _lengths(requests: Sequence[int] | None, slots: int, room: int) -> tuple[int, ...]:
    if requests is None:
        return tuple(int(room * _EXAMPLE[slot % len(_EXAMPLE)]) for slot in range(slots))
    given = [*requests[:slots], *[0] * (slots - len(requests))]
    return tuple(min(max(length, 0), room) for length in given)


def _tokens_per_page(longest: int, max_pages: int) -> int:
    per_page = 1
    while longest > per_page * max_pages:
        per_page *= 2
    return per_page


def _room(cache: _Cache, asked: int, slots: int, unified: bool) -> int:
    """Return the cells of a notebook that were asked for; the others are there by rounding."""
    if cache.kind != "full":
        return cache.cells
    return min(asked if unified else asked // slots, cache.cells)


def _row(
    cache: _Cache,
    lengths: tuple[int, ...],
    room: int,
    per_page: int,
    max_slots: int,
) -> Row:
    count = 1 if cache.kind in _ONE_PAGE else -(-cache.cells // per_page)
    rounding = count - min(-(-room // per_page), count)
    shared = cache.streams == 1 and len(lengths) > 1
    groups = [tuple(enumerate(lengths))] if shared else [((s, n),) for s, n in enumerate(lengths)]
    strips = []
    for group in groups[: min(cache.streams, max_slots)]:
        owners: list[int | None] = []
        for slot, tokens in group:
            owners += [slot] * -(-cache.kept(tokens) // per_page)
        owners = owners[:count]
        strips.append(
            Strip(
                slot=None if shared else group[0][0],
                owners=(*owners, *[None] * (count - len(owners))),
                padding=min(rounding, count - len(owners)),
                tokens=sum(cache.kept(tokens) for _, tokens in group),
                wraps=any(cache.window and tokens > cache.window for _, tokens in group),
            )
        )
    return Row(
        cache.kind,
        cache.layers,
        cache.cells,
        cache.streams,
        cache.bytes,
        cache.window,
        tuple(strips),
    )


def _paged(caches: Sequence[_Cache], lengths: tuple[int, ...], per_page: int) -> Paged | None:
    """Return what blocks would take: each request rounded up to whole blocks, nothing reserved.

    The block is vLLM's default; that it makes the pages of unlike layers equal in size is left
    out (``predict.paged`` plans that).
    """
    if not any(cache.kind == "full" for cache in caches):
        return None
    held = sum(c.cell_bytes * c.kept(tokens) for c in caches for tokens in lengths)
    blocks = sum(
        c.cell_bytes * (k if c.kind in _ONE_PAGE else -(-k // BLOCK) * BLOCK)
        for c in caches
        for tokens in lengths
        if (k := c.kept(tokens))
    )
    owners = [s for s, tokens in enumerate(lengths) for _ in range(-(-tokens // per_page))]
    return Paged(tuple(owners), sum(c.bytes for c in caches), round(held), round(blocks))
