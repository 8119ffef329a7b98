"""What a model's header says about its memory, gathered for one page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from localkv.errors import UsageError
from localkv.model.shape import LayerSpec, ModelShape
from localkv.predict.checks import check, effective_config
from localkv.predict.config import MAX_SEQ, RunConfig, validate
from localkv.predict.layer_pattern import layer_signs, pattern
from localkv.predict.slot_caches import SlotCaches
from localkv.units import plural

SCHEMA = 1
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
SLOTS = (1, 2, 4, 8)
_MOST_CELLS = 4096
#: How a note about missing weights begins: see model.hf_config.
_NO_WEIGHTS = "weights unknown: "


def inspect_model(
    shape: ModelShape,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    *,
    contexts: Sequence[int] | None = None,
    slots: Sequence[int] = SLOTS,
) -> dict[str, Any]:
    """Return the facts of ``shape`` as plain JSON values; sizes in bytes.

    ``kv_per_token`` holds the textbook figure, that of the first token and that of one more token
    once every sliding window is full. ``kv_table`` has KV and recurrent state by context per slot
    (``contexts``; up to the training context by default) and slots, as llama-server keeps them;
    ``exceeds_weights`` the smallest contexts of that table at which the caches are larger than the
    weights. ``gqa``, ``mla`` and ``sliding`` say what each saves over the largest of the contexts,
    in one slot. What is None has its reason in ``unknown``, or does not apply to the model.

    Raises:
        UsageError: a cache type that the engine does not take for this model, or a table that is
            too large.
    """
    wanted = RunConfig(n_ctx=1, cache_type_k=cache_type_k, cache_type_v=cache_type_v)
    config = effective_config(shape, wanted)
    known = shape.rule != "none"
    if known:
        check(shape, config)
    kept = _cache(shape)
    asked = tuple(contexts or default_contexts(shape.n_ctx_train))
    if kept == "state" and not contexts:
        asked = asked[-1:]  # the same at any context
    held = SlotCaches(shape, config) if known else None
    table = _table(held, asked, slots) if held and kept != "none" else []
    return {
        "schema": SCHEMA,
        **_model(shape),
        **_layers(shape),
        "cache": kept,
        "cache_type_k": config.cache_type_k,
        "cache_type_v": config.cache_type_v,
        "kv_per_token": _per_token(shape, config) if held else None,
        "state_bytes_per_slot": held.state_bytes if held else None,
        "gqa": held.gqa(max(asked)) if held else None,
        "mla": held.mla(max(asked)) if held else None,
        "sliding": held.sliding(max(asked)) if held else None,
        "kv_table": table,
        "exceeds_weights": _crossing(table),
        "unknown": _unknown(shape),
        "assumed": list(shape.assumed),
        "notes": [*_rounding(table), *_beyond(shape, table), *shape.notes],
    }


def _model(shape: ModelShape) -> dict[str, Any]:
    """Return what the model is called, and what its tensors take."""
    return {
        "name": shape.name,
        "architecture": shape.architecture,
        "rule": shape.rule,
        "refused": shape.refused or None,
        "path": shape.path,
        "paths": list(shape.paths),
        "file_bytes": shape.file_bytes,
        "weights_bytes": shape.weights_bytes or None,
        "n_params": shape.n_params or None,
        "n_params_active": _active(shape),
        "n_expert": shape.n_expert,
        "quantisation": [
            {"type": name, "tensors": count, "bytes": size}
            for name, count, size in shape.quantisation
        ],
        "dtype": shape.dtype or None,
        "n_ctx_train": shape.n_ctx_train or None,
        "n_embd": shape.n_embd,
        "n_vocab": shape.n_vocab,
    }


def _layers(shape: ModelShape) -> dict[str, Any]:
    """Return the layers: groups of the like, one sign each, and the signs folded."""
    signs = layer_signs(shape.layers) if shape.rule != "none" else None
    return {
        "n_layer": shape.n_layer,
        "n_layer_nextn": shape.n_layer_nextn,
        "window": shape.window,
        "uses_mla": shape.mla,
        "layers": [_group(list(same)) for _, same in groupby(shape.layers, key=_likeness)],
        "layer_signs": signs,
        "layer_pattern": None if signs is None else pattern(signs),
    }


def default_contexts(n_ctx_train: int) -> tuple[int, ...]:
    """Return the contexts of a table: powers of two below the training context, and that one."""
    if not n_ctx_train:
        return CONTEXTS
    return (*(size for size in CONTEXTS if size < n_ctx_train), n_ctx_train)


def _unknown(shape: ModelShape) -> dict[str, str]:
    """Return the reason for each fact that is not known, by its name."""
    found = {}
    bare = "a config.json says nothing of single tensors"
    if not shape.weights_bytes:
        said = [n.removeprefix(_NO_WEIGHTS) for n in shape.notes if n.startswith(_NO_WEIGHTS)]
        found["weights_bytes"] = said[0] if said else "the file lists no tensors"
    if not shape.n_params:
        listed = not shape.path.endswith(".json")
        found["n_params"] = "the file lists no tensors" if listed else bare
    if _active(shape) is None:
        found["n_params_active"] = found.get("n_params") or (
            "the file does not tell the experts' tensors apart, or how many a token uses"
        )
    if not shape.n_ctx_train:
        found["n_ctx_train"] = "the file does not say"
    if shape.rule == "none":
        found["kv_per_token"] = (
            f"the engine gives up on this file: {shape.refused}"
            if shape.refused
            else "localkv has no rule for this architecture"
        )
    if shape.mla and not all(shape.mla_heads):
        found["mla"] = "the file does not say how wide K and V of one head would be"
    return found


def _active(shape: ModelShape) -> int | None:
    """Return the parameters that one token meets: of the experts only those that are used."""
    if not shape.n_expert:
        return shape.n_params or None
    used = shape.numbers.get("expert_used_count")
    if not shape.n_params_expert or not isinstance(used, int) or not 0 < used <= shape.n_expert:
        return None
    return shape.n_params - shape.n_params_expert * (shape.n_expert - used) // shape.n_expert


def _likeness(layer: LayerSpec) -> tuple[Any, ...]:
    shared = layer.shared_with is not None
    return (
        layer.kind,
        layer.n_head,
        layer.n_head_kv,
        layer.k_head,
        layer.v_head,
        layer.window,
        shared,
        layer.state_width,
    )


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


def _cache(shape: ModelShape) -> str:
    """Return what the model keeps from token to token: kv, state, kv and state, none, unknown."""
    if shape.rule == "none":
        return "unknown"
    kept = []
    if any(layer.k_width or layer.v_width for cache in shape.caches for layer in cache.layers):
        kept.append("kv")
    if any(layer.state_width for layer in shape.layers):
        kept.append("state")
    return " and ".join(kept) or "none"


def _per_token(shape: ModelShape, config: RunConfig) -> dict[str, int]:
    k, v = config.cache_type_k, config.cache_type_v
    return {
        "textbook": shape.kv_bytes_per_token(k, v),
        "first": shape.first_token_bytes(k, v),
        "marginal": shape.marginal_token_bytes(k, v),
    }


def _table(held: SlotCaches, contexts: Sequence[int], slots: Sequence[int]) -> list[dict[str, Any]]:
    if len(contexts) * len(slots) > _MOST_CELLS:
        raise UsageError(
            f"a table of {plural(len(contexts), 'context')} by {plural(len(slots), 'slot count')}",
            f"ask for at most {_MOST_CELLS} cells",
        )
    if min(contexts) < 1:
        raise UsageError(f"a context of {min(contexts)} tokens", "give at least 1")
    if not 1 <= min(slots) <= max(slots) <= MAX_SEQ:
        raise UsageError(
            f"slots from {min(slots)} to {max(slots)}", f"the engine takes 1 to {MAX_SEQ}"
        )
    weights = held.shape.weights_bytes
    rows = []
    for ctx_per_slot in contexts:
        for count in slots:
            config, context = held.run(ctx_per_slot, count)
            validate(config)
            size = held.held(ctx_per_slot, count)
            rows.append(
                {
                    "ctx_per_slot": ctx_per_slot,
                    "n_ctx_per_slot": context.n_ctx_seq,
                    "slots": count,
                    "bytes": size,
                    "of_weights": size / weights if weights else None,
                }
            )
    return rows


def _crossing(table: Sequence[dict[str, Any]]) -> list[dict[str, int]]:
    """Return, for each number of slots, the smallest context whose caches exceed the weights."""
    found: dict[int, int] = {}
    for row in table:
        if (row["of_weights"] or 0) > 1:
            best = found.get(row["slots"], row["ctx_per_slot"])
            found[row["slots"]] = min(best, row["ctx_per_slot"])
    return [{"slots": slots, "ctx_per_slot": found[slots]} for slots in sorted(found)]


def _rounding(table: Sequence[dict[str, Any]]) -> list[str]:
    changed = {
        row["ctx_per_slot"]: row["n_ctx_per_slot"]
        for row in table
        if row["ctx_per_slot"] != row["n_ctx_per_slot"]
    }
    if not changed:
        return []
    said = ", ".join(f"{asked:,} become {made:,}" for asked, made in list(changed.items())[:4])
    return [f"the engine rounds the tokens of a slot up to a multiple of 256: {said}"]


def _beyond(shape: ModelShape, table: Sequence[dict[str, Any]]) -> list[str]:
    longest = max((row["ctx_per_slot"] for row in table), default=0)
    if not 0 < shape.n_ctx_train < longest:
        return []
    return [
        f"{longest:,} tokens are more than the training context of {shape.n_ctx_train:,}: the "
        "memory is right, the answers may not be"
    ]
