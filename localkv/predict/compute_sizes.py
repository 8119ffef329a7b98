"""The bytes of the tensors that the recipes name, for one block and so many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from localkv.gguf.types import row_bytes
from localkv.model import ModelShape
from localkv.model.shape import LayerSpec
from localkv.predict.compute_families import Family
from localkv.predict.compute_recipes import Mode
from localkv.predict.config import EffectiveContext, RunConfig
from localkv.predict.kv import cells_per_stream, v_is_transposed

_F32 = 4
_POOLED = 4  # tokens per block of qwen4exp's indexer
_V_ROTATION = 64  # build_input_v_rot of llama_kv_cache


class Numbers:
    """A model's own integer keys, one value each."""

    def __init__(self, shape: ModelShape) -> None:
        """Read the keys of ``shape``."""
        self._values = shape.numbers

    def __call__(self, key: str, default: int = 0, block: int = -1) -> int:
        """Return the number under ``key``, that of ``block`` in a list; 0 counts as missing."""
        value = self._values.get(key, default)
        if isinstance(value, tuple):
            return value[block] if 0 <= block < len(value) else max(value, default=default)
        return value or default


@dataclass(frozen=True)
class Setting:
    """One run as the graph sees it: rows of tokens and of outputs, cells of K per kind of cache."""

    rows: int
    outputs: int
    mode: Mode
    cells: Mapping[str, int]
    streams: int
    sequences: int
    transposed: bool
    blocks: bool
    type_k: str
    type_v: str


def setting(
    shape: ModelShape, config: RunConfig, context: EffectiveContext, kind: Family
) -> Setting:
    """Return the worst case that llama_context::sched_reserve sizes the buffers for."""
    tokens = min(context.n_ctx, context.n_ubatch)
    rows = -(-tokens // config.n_seq_max) * config.n_seq_max
    outputs = min(tokens, config.n_outputs_max or context.n_batch)
    if kind.outputs == "all":
        outputs = rows
    cells: dict[str, int] = {}
    # inputs lie in the order in which blocks come to read them
    order = [layer.kind for layer in shape.layers]
    caches = shape.caches if kind.cached else ()
    for cache in sorted(caches, key=lambda c: order.index(c.kind) if c.kind in order else 1):
        if cache.layers and cache.kind not in cells and cache.cells != "fixed":
            cells[cache.kind] = cells_per_stream(cache, shape.window, config, context)
    flash = config.flash_attn != "off" and shape.flash_attn
    first = next((layer for layer in shape.layers if layer.k_head), None)
    rotate = first is not None and bool(cells) and not shape.mla
    transposed = v_is_transposed(config)
    return Setting(
        rows=rows,
        outputs=outputs,
        mode=Mode(
            flash,
            rotate_k=rotate and _rotated(config.cache_type_k, first.k_head),
            rotate_v=rotate and _rotated(config.cache_type_v, first.v_head),
            cast=not cells or "f32" in (config.cache_type_k, config.cache_type_v),
            turn=(not flash or kind.bias) and (not cells or not transposed),
            cached=bool(cells),
        ),
        cells=cells,
        streams=context.n_stream,
        sequences=config.n_seq_max,
        transposed=transposed,
        blocks=flash and (config.n_seq_max == 1 or not config.kv_unified),
        type_k=config.cache_type_k,
        type_v=config.cache_type_v,
    )


def _rotated(cache_type: str, head: int) -> bool:
    """Return whether rows are rotated before they are kept: attn_rot_k of llama_kv_cache."""
    return cache_type not in ("f16", "bf16", "f32") and head % 64 == 0


def inputs(
    shape: ModelShape, run: Setting, positions: int, choice: str
) -> Iterator[tuple[str, int]]:
    """Yield the graph's inputs in bytes, each with the kind of block that reads it last."""
    rows = run.rows
    yield "", rows * _F32 * positions
    yield "", run.outputs * _F32
    mask = 2 if run.mode.flash else _F32
    if not run.cells and any(layer.n_head and not layer.state_width for layer in shape.layers):
        yield "none", rows * rows * mask
        if shape.window:
            yield "none", rows * rows * mask
    for kind, cells in run.cells.items():
        if kind == "indexer" and choice == "blocks":
            if run.blocks:
                yield "", rows * 8
                yield "full", cells * rows * _F32
            continue
        widest = max((c.v_padded for c in shape.caches if c.kind == kind), default=0)
        if run.mode.rotate_k:
            yield kind, _rotation(shape) ** 2 * _F32
        if run.mode.rotate_v:
            yield kind, _V_ROTATION**2 * _F32
        yield kind, rows * 8
        if widest:
            yield kind, rows * 8 * (widest if run.transposed else 1)
        yield kind, cells * rows * mask


def fillers(shape: ModelShape, run: Setting, number: Numbers, choice: str) -> dict[int, int]:
    """Return the bytes of the zeros that each block with an indexer unmasks with, by block.

    They are leaves of the graph, so that all of them lie there from the start.
    """
    if choice in ("", "blocks"):
        return {}
    if choice == "pools":
        return {-1: _pool_bytes(number, run, run.rows)}
    cells = run.cells.get("full", 0)
    size = chosen_tokens(number, cells) * run.rows * _F32
    if choice == "compressed":
        cells = run.cells.get("indexer", 0)
        size = chosen_tokens(number, cells) * run.rows * (2 if run.mode.flash else _F32)
    every = choice == "tokens"
    return {
        layer.index: size
        for layer in shape.layers
        if layer.indexer_width or (every and layer.kind == "full")
    }


def _pool_bytes(number: Numbers, run: Setting, rows: int) -> int:
    """Return the bytes of the tokens in the pools that glm5-next chooses."""
    pools = run.sequences * (run.cells.get("full", 0) // _POOLED + 64)
    chosen = min(pools, (number("attention.indexer.top_k") or _POOLED * pools) // _POOLED)
    return (_POOLED * chosen + _POOLED - 1) * rows * _F32


def _rotation(shape: ModelShape) -> int:
    """Return the size of the matrix that rotates K: build_input_k_rot of llama_kv_cache."""
    size = 64
    head = max(layer.k_head for layer in shape.layers)
    while head % (2 * size) == 0:
        size *= 2
    return size


def sizes(
    shape: ModelShape, layer: LayerSpec, number: Numbers, run: Setting, rows: int
) -> dict[str, int]:
    """Return the bytes of everything a recipe may name in ``layer``, for ``rows`` tokens."""
    block = layer.index
    heads = layer.n_head
    k_head, v_head = layer.k_head, layer.v_head
    kv_heads = layer.n_head_kv
    n_embd = shape.n_embd
    used = number("expert_used_count")
    n_ff = number("feed_forward_length", shape.n_ff, block)
    expert_ff = number("expert_feed_forward_length", 0, block) or n_ff
    shared_ff = number("expert_shared_feed_forward_length", 0, block) or (
        expert_ff * max(1, number("expert_shared_count"))
    )
    k_mla = number("attention.key_length_mla") or k_head
    v_mla = number("attention.value_length_mla") or v_head
    latent = number("attention.kv_lora_rank") or v_head
    rope = number("rope.dimension_count")
    seen = run.cells.get(layer.kind, run.rows)
    if "compressed" in run.cells and layer.indexer_width:
        seen += run.cells["compressed"]
    elements = {
        "E": n_embd,
        "Q": heads * (k_mla if shape.mla else k_head),
        "K": kv_heads * k_head,
        "V": kv_heads * v_head,
        "QKV": heads * k_head + kv_heads * (k_head + v_head),
        "O": heads * (v_mla if shape.mla else v_head),
        "F": n_ff,
        "FF": 2 * n_ff,
        "X": shape.n_expert,
        "U": used,
        "GU": expert_ff * used,
        "GG": 2 * expert_ff * used,
        "EU": n_embd * used,
        "S": shared_ff,
        "QL": number("attention.q_lora_rank"),
        "QA": heads * latent,
        "QR": heads * rope,
        "QC": heads * (latent + rope),
        "KC": latent + rope,
        "KL": latent,
        "KR": rope,
        "KQ": heads * seen,
    }
    inner = number("ssm.inner_size") or heads * number("kda.head_dim") or n_embd
    kernel = max(number("ssm.conv_kernel") or number("shortconv.l_cache"), 2)
    conv = layer.r_width // (kernel - 1)
    decays = number("ssm.time_step_rank") or heads
    index_key = number("attention.indexer.key_length")
    index_heads = number("attention.indexer.head_count")
    elements |= {
        "QQ": 2 * heads * k_head,
        "I": inner,
        "CV": conv,
        "ZM": 2 * inner,
        "ZX": inner + conv + decays,
        "XP": decays + 2 * number("ssm.state_size"),
        "DT": decays,
        "HC": streams(number) * n_embd,
        "IK": index_key,
        "IH": index_heads,
        "IQ": index_heads * index_key,
        "E3": 3 * n_embd,
        "E6": 6 * n_embd,
    }
    bytes_per_width = {name: count * rows * _F32 for name, count in elements.items()}
    cells = run.cells.get(layer.kind, run.rows) * (run.streams if run.cells else 1)
    half = 2
    bytes_per_width["KF"] = cells * elements["K"] * half if run.type_k == "f32" or not run.cells else 0
    bytes_per_width["VF"] = cells * elements["V"] * half if run.type_v == "f32" or not run.cells else 0
    v_row = latent if shape.mla else elements["V"]
    v_type = (run.type_k if shape.mla else run.type_v) if run.cells else "f32"
    bytes_per_width["VT"] = row_bytes(v_type, v_row) * cells
    held = {"RS": layer.r_width, "SW": layer.s_width}
    bytes_per_width |= {name: count * run.sequences * _F32 for name, count in held.items()}
    bytes_per_width["CX"] = bytes_per_width["CV"] + bytes_per_width["RS"]
    bytes_per_width["CI"] = bytes_per_width["I"] + bytes_per_width["RS"] // 3
    bytes_per_width["SS"] = bytes_per_width["I"] + bytes_per_width["SW"]
    tokens = rows // run.sequences
    bytes_per_width["LL"] = tokens * tokens * heads * run.sequences * _F32
    bytes_per_width |= _chosen(number, run, rows, kv_heads, index_heads, index_key)
    return bytes_per_width


def _chosen(
    number: Numbers, run: Setting, rows: int, kv_heads: int, heads: int, key: int
) -> dict[str, int]:
    """Return the bytes of what an indexer makes to choose tokens."""
    cells = run.cells.get("full", 0)
    compressed = run.cells.get("indexer", 0)
    mask = 2 if run.mode.flash else _F32
    return {
        "IS": cells * rows * _F32,
        "TK": chosen_tokens(number, cells) * rows * _F32,
        "FM": cells * rows * mask,
        "IP": cells * key * run.streams * _F32,
        "BS": -(-cells // _POOLED) * heads * rows * _F32,
        "IC": cells // _POOLED * key * run.streams * _F32,
        "PW": _pool_bytes(number, run, rows),
        "PM": _pool_bytes(number, run, rows) // 2 + cells * rows * mask,
        "MR": cells * kv_heads * rows * _F32 // run.streams,
        "MM": cells * kv_heads * rows * mask,
        "LS": compressed * rows * _F32,
        "LM": compressed * rows * mask,
    }


def streams(number: Numbers) -> int:
    """Return how many residual streams a model with several of them has."""
    return number("hyper_connection.count") or 4  # gemma3n.cpp reads no key: n_altup


def chosen_tokens(number: Numbers, cells: int) -> int:
    """Return how many tokens an indexer lets through at most."""
    return min(number("attention.indexer.top_k") or cells, cells)
