"""A model block by block, for people and reports: derived from its caches and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping

from localkv.model.hparams import Hparams
from localkv.model.metadata import RefusedError
from localkv.model.rules import Rule
from localkv.model.shape import LayerSpec
from localkv.model.specs import CacheSpec


def build_layers(
    hp: Hparams,
    rule: Rule,
    caches: tuple[CacheSpec, ...],
    weights: Mapping[int, int],
    experts: Mapping[int, int],
) -> tuple[LayerSpec, ...]:
    """Return one spec per block; ``weights`` are the bytes of its tensors, ``experts`` of some.

    Raises:
        RefusedError: blocks that share a cache name one that is not there.
    """
    kinds, indexers = _by_block(caches)
    layers = []
    for block in range(hp.n_layer_all):
        stateful = _keeps_state(hp, rule, block)
        kind, k_width, v_width = kinds.get(block, ("recurrent" if stateful else "none", 0, 0))
        shared = _shared_with(hp, block)
        if shared is not None:
            kind = "sliding" if hp.sliding[block] else "full"
        layers.append(
            LayerSpec(
                index=block,
                kind=kind,
                n_head=hp.n_head[block],
                n_head_kv=hp.n_head_kv[block],
                k_width=k_width,
                v_width=v_width,
                window=hp.window if kind == "sliding" else 0,
                r_width=hp.r_width if stateful else 0,
                s_width=hp.s_width if stateful else 0,
                p_width=hp.p_width if stateful and block in hp.p_blocks else 0,
                indexer_width=indexers.get(block, 0),
                shared_with=shared,
                weight_bytes=weights.get(block, 0),
                expert_bytes=experts.get(block, 0),
                k_head=hp.k_head_of(block),
                v_head=hp.v_head_of(block),
                loaded=rule.nextn_loaded or block < hp.n_layer or hp.router,
            )
        )
    return tuple(layers)


def _by_block(
    caches: tuple[CacheSpec, ...],
) -> tuple[dict[int, tuple[str, int, int]], dict[int, int]]:
    """Return each block's kind with its K and V widths, and the width of its indexer's K."""
    kinds: dict[int, tuple[str, int, int]] = {}
    indexers: dict[int, int] = {}
    for cache in caches:
        for layer in cache.layers:
            if cache.kind in ("full", "sliding"):
                kinds[layer.block] = (cache.kind, layer.k_width, layer.v_width)
            elif cache.kind == "indexer":
                indexers[layer.block] = layer.k_width
    return kinds, indexers


def _keeps_state(hp: Hparams, rule: Rule, block: int) -> bool:
    """Return whether llama_memory_recurrent makes rows for ``block``."""
    return rule.recurrent is not None and block < hp.n_layer and hp.recurrent[block]


def _shared_with(hp: Hparams, block: int) -> int | None:
    """Return the block whose cache ``block`` reads: ``reuse`` in llama_model::create_memory."""
    if hp.has_kv(block):
        return None
    target = hp.kv_from_start - (2 if hp.sliding[block] else 1)
    if hp.sliding[target] != hp.sliding[block]:
        raise RefusedError(f"block {block} shares the cache of block {target}, which is not alike")
    return target
