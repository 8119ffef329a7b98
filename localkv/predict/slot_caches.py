"""What one slot's caches hold when every slot has its own, and what that saves.

The comparisons of a page about a model: KV heads shared by heads (GQA), a latent instead of K and
V (MLA), sliding windows instead of full layers. Rounding and windows are llama-server's.
"""

from __future__ import annotations

from typing import Any

from localkv.gguf.types import row_bytes
from localkv.model import CacheSpec, ModelShape
from localkv.predict.config import CTX_PAD, EffectiveContext, RunConfig, effective_context
from localkv.predict.kv import cells_per_stream, recurrent_state, sized_caches
from localkv.tuples import NamedTuple


class SlotCache(NamedTuple):
    """One cache: ``rows`` are the bytes of one cell by block."""

    spec: CacheSpec
    rows: dict[int, int]

    @property
    def row(self) -> int:
        """Return the bytes of one cell over all blocks."""
        return sum(self.rows.values())


class SlotCaches:
    """The caches and the recurrent state of ``shape`` under the cache types of ``config``.

    The bytes of a cell are worked out once, so that a whole table costs little.
    """

    def __init__(self, shape: ModelShape, config: RunConfig) -> None:
        self.shape = shape
        self.config = config.with_(n_ctx=CTX_PAD, n_seq_max=1, kv_unified=False)
        self.state_bytes = sum(state.bytes for state in recurrent_state(shape, self.config))
        context = effective_context(self.config, shape.n_ctx_train, causal=shape.causal)
        self.caches = tuple(
            SlotCache(
                cache.spec,
                {block: size // max(cache.cells, 1) for block, size in cache.by_block()},
            )
            for cache in sized_caches(shape.caches, shape.window, self.config, context)
        )

    def run(self, ctx_per_slot: int, slots: int) -> tuple[RunConfig, EffectiveContext]:
        """Return the settings of ``slots`` slots of ``ctx_per_slot`` tokens, asked and made."""
        config = self.config.with_(n_ctx=ctx_per_slot * slots, n_seq_max=slots)
        return config, effective_context(config, self.shape.n_ctx_train, causal=self.shape.causal)

    def held(self, ctx_per_slot: int, slots: int = 1) -> int:
        """Return the bytes of all caches and of the state, for all slots together."""
        cells = self.cells(ctx_per_slot, slots)
        kv = sum(cache.row * count for cache, count in zip(self.caches, cells, strict=True))
        return (kv + self.state_bytes) * slots

    def cells(self, ctx_per_slot: int, slots: int = 1) -> tuple[int, ...]:
        """Return the cells of each cache in one slot."""
        config, context = self.run(ctx_per_slot, slots)
        return tuple(
            cells_per_stream(cache.spec, self.shape.window, config, context)
            for cache in self.caches
        )

    def gqa(self, ctx_per_slot: int) -> dict[str, Any] | None:
        """Return what sharing KV heads saves against one KV head per head; None without KV heads.

        ``ratio`` is heads by KV heads, weighted by what the layers keep. MLA has a comparison of
        its own.
        """
        kept = self._attention()
        if not kept or self.shape.mla:
            return None
        single = [self._one_head_each(cache) for cache, _ in kept]
        per_token = sum(cache.row for cache, _ in kept)
        return {
            "ratio": sum(single) / per_token,
            "bytes_per_token": per_token,
            "multi_head_bytes_per_token": sum(single),
            "ctx_per_slot": ctx_per_slot,
            "bytes": sum(cache.row * cells for cache, cells in self._attention(ctx_per_slot)),
            "multi_head_bytes": sum(
                row * cells
                for row, (_, cells) in zip(single, self._attention(ctx_per_slot), strict=True)
            ),
        }

    def sliding(self, ctx_per_slot: int) -> dict[str, Any] | None:
        """Return what the windows save against every layer full; None where no layer slides."""
        kept = self._attention(ctx_per_slot)
        if not any(cache.spec.cells == "window" for cache, _ in kept):
            return None
        _, context = self.run(ctx_per_slot, 1)
        held = sum(cache.row * cells for cache, cells in kept)
        full = sum(cache.row for cache, _ in kept) * context.n_ctx_seq
        return {
            "ratio": full / held,
            "ctx_per_slot": ctx_per_slot,
            "bytes": held,
            "all_full_bytes": full,
        }

    def mla(self, ctx_per_slot: int) -> dict[str, Any] | None:
        """Return what the latent saves against K and V of every head.

        None without MLA, and where the file does not say how wide such a head would be.
        """
        kept = self._attention(ctx_per_slot)
        k_head, v_head = self.shape.mla_heads
        one_kind = len({cells for _, cells in kept}) == 1
        if not (self.shape.mla and one_kind and k_head > 0 and v_head > 0):
            return None
        heads = sum(self.shape.layers[block].n_head for cache, _ in kept for block in cache.rows)
        cells = kept[0][1]
        latent = sum(cache.row for cache, _ in kept)
        per_head = heads * (
            row_bytes(self.config.cache_type_k, k_head)
            + row_bytes(self.config.cache_type_v, v_head)
        )
        if not per_head:
            return None
        return {
            "ratio": per_head / latent,
            "bytes_per_token": latent,
            "per_head_bytes_per_token": per_head,
            "ctx_per_slot": ctx_per_slot,
            "bytes": latent * cells,
            "per_head_bytes": per_head * cells,
        }

    def _attention(self, ctx_per_slot: int = CTX_PAD) -> list[tuple[SlotCache, int]]:
        """Return the caches of K and V with their cells in one slot; not the small ones beside."""
        return [
            (cache, cells)
            for cache, cells in zip(self.caches, self.cells(ctx_per_slot), strict=True)
            if cache.spec.kind in ("full", "sliding") and cache.row
        ]

    def _one_head_each(self, cache: SlotCache) -> int:
        """Return the bytes of one cell if each head had a KV head of its own."""
        total = 0
        for block, row in cache.rows.items():
            layer = self.shape.layers[block]
            total += row * layer.n_head // layer.n_head_kv if layer.n_head_kv else row
        return total
