"""What a model's header says about its memory, gathered for one page."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from localkv.model.shape import LayerSpec, ModelShape
from localkv.predict.checks import check
from localkv.predict.config import RunConfig, effective_context
from localkv.predict.kv import recurrent_state, sized_caches

SCHEMA = 1
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
SLOTS = (1, 2, 4, 8)


def inspect_model(
    shape: ModelShape, cache_type_k: str = "f16", cache_type_v: str = "f16"
) -> dict[str, Any]:
    """Return the facts of ``shape`` as plain JSON values; sizes in bytes.

    ``kv_per_token`` holds the textbook figure, that of the first token and that of one more token
    once every sliding window is full; ``kv_table`` KV and recurrent state by context per slot and
    slots, as llama-server keeps them; ``gqa`` what sharing KV heads saves against one per head.

    Raises:
        UsageError: a cache type that the engine does not take for this model.
    """
    return {
        "schema": SCHEMA,
        "name": shape.name,
        "architecture": shape.architecture,
        "rule": shape.rule,
        "path": shape.path,
        "file_bytes": shape.file_bytes,
        "weights_bytes": shape.weights_bytes,
        "n_params": shape.n_params,
        "quantisation": [
            {"type": name, "tensors": count, "bytes": size}
            for name, count, size in shape.quantisation
        ],
        "n_layer": shape.n_layer,
        "n_ctx_train": shape.n_ctx_train,
        "n_embd": shape.n_embd,
        "n_vocab": shape.n_vocab,
        "window": shape.window,
        "layers": [_group(list(same)) for _, same in groupby(shape.layers, key=_likeness)],
        "cache_type_k": cache_type_k,
        "cache_type_v": cache_type_v,
        "kv_per_token": _per_token(shape, cache_type_k, cache_type_v),
        "gqa": _gqa(shape, cache_type_k, cache_type_v),
        "kv_table": _table(shape, cache_type_k, cache_type_v),
        "assumed": list(shape.assumed),
        "notes": list(shape.notes),
    }


def _likeness(layer: LayerSpec) -> tuple[Any, ...]:
    shared = layer.shared_with is not None
    return (layer.kind, layer.n_head, layer.n_head_kv, layer.k_head, layer.v_head, shared)


def _group(layers: list[LayerSpec]) -> dict[str, Any]:
    first = layers[0]
    return {
        "first": first.index,
        "count": len(layers),
        "kind": first.kind,
        "n_head": first.n_head,
        "n_head_kv": first.n_head_kv,
        "head_dim_k": first.k_head,
        "head_dim_v": first.v_head,
        "window": first.window,
        "shared": first.shared_with is not None,
        "state_bytes_per_slot": 4 * sum(layer.state_width for layer in layers),
    }


def _per_token(shape: ModelShape, k: str, v: str) -> dict[str, int] | None:
    if shape.rule == "none":
        return None
    return {
        "textbook": shape.kv_bytes_per_token(k, v),
        "first": shape.first_token_bytes(k, v),
        "marginal": shape.marginal_token_bytes(k, v),
    }


def _gqa(shape: ModelShape, k: str, v: str) -> dict[str, Any] | None:
    """Compare the KV heads with full multi-head attention, over the layers that have heads."""
    attending = [layer for layer in shape.layers if layer.n_head_kv and layer.n_head]
    if not attending or shape.rule == "none" or shape.mla:
        return None
    heads = sum(layer.n_head for layer in attending)
    kv_heads = sum(layer.n_head_kv for layer in attending)
    own = shape.kv_bytes_per_token(k, v)
    return {
        "ratio": heads / kv_heads,
        "bytes_per_token": own,
        "multi_head_bytes_per_token": round(own * heads / kv_heads),
    }


def _table(shape: ModelShape, k: str, v: str) -> list[dict[str, Any]]:
    if shape.rule == "none":
        return []
    contexts = [size for size in CONTEXTS if size <= shape.n_ctx_train] or [shape.n_ctx_train]
    rows = []
    for ctx_per_slot in contexts:
        for slots in SLOTS:
            config = RunConfig(
                n_ctx=ctx_per_slot * slots, n_seq_max=slots, cache_type_k=k, cache_type_v=v
            )
            size = _cache_bytes(shape, config)
            rows.append(
                {
                    "ctx_per_slot": ctx_per_slot,
                    "slots": slots,
                    "bytes": size,
                    "of_weights": size / shape.weights_bytes if shape.weights_bytes else None,
                }
            )
    return rows


def _cache_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Return KV and recurrent state alone: the rest of an estimate would take longer to load."""
    check(shape, config)
    context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
    caches = sized_caches(shape.caches, shape.window, config, context)
    kv = sum(block.k_bytes + block.v_bytes for cache in caches for block in cache.blocks)
    return kv + sum(state.bytes for state in recurrent_state(shape, config))
