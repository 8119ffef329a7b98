"""The exact size of one sequence's saved state, as llama.cpp writes it out.

llama-server saves a slot's state to host memory in two ways: the whole of it when another prompt
takes the slot (an entry of its prompt cache), and the part of it that cannot be rolled back while
a prompt is read (a context checkpoint).

Sources, all under src/ of llama.cpp: llama_context::state_seq_get_size (llama-context.cpp);
state_write of llama_kv_cache, llama_kv_cache_iswa, _dsa, _dsa_iswa, _msa and _dsv4
(llama-kv-cache*.cpp), of llama_memory_recurrent and of llama_memory_hybrid, _iswa and _idx
(llama-memory-*.cpp). Headers and counts are uint32_t unless said otherwise.
"""

from __future__ import annotations

from localkv.gguf.types import row_bytes
from localkv.model.shape import LayerSpec, ModelShape
from localkv.model.specs import CacheSpec
from localkv.predict.config import EffectiveContext, RunConfig
from localkv.predict.kv import cells_per_stream

_U32 = 4
_F32 = 4
_SEQUENCE = 2 * _U32  # magic, sequence
_CELL = 3 * _U32  # position, number of sequences, the sequence
_CELL_EXT = 3 * _U32  # x, y, token
_ROW_HEADER = 3 * _U32  # type and the row's bytes as uint64_t; transposed V: type, element, width
_DSV4_HEADER = 3 * _U32  # magic, version, mode
_DSV4_TENSOR = _U32 + 3 * 8  # type; row width, rows and the row's bytes as uint64_t

#: llama_model_rope_type says M-RoPE, so that cells hold two more positions (has_cell_ext).
_MROPE = frozenset(
    {
        "paddleocr",
        "qwen2vl",
        "qwen35",
        "qwen35moe",
        "qwen3tts",
        "qwen3vl",
        "qwen3vlmoe",
        "qwen4exp",
    }
)
#: The same where the header gives rope sections (llama_hparams::use_mrope).
_MROPE_BY_SECTIONS = frozenset({"bailingmoe3", "glm4", "glm4moe", "hunyuan_vl"})
#: Windows that begin anew every so many tokens instead of moving along: LLAMA_SWA_TYPE_CHUNKED.
_CHUNKED = frozenset({"llama4"})


def sequence_state_bytes(
    shape: ModelShape,
    config: RunConfig,
    context: EffectiveContext,
    n_tokens: int,
    *,
    partial: bool = False,
) -> int:
    """Return the bytes of the state of one sequence that has ``n_tokens`` tokens, 1 or more.

    ``partial`` is LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: recurrent state and sliding windows without
    what the full layers hold; a model that has neither writes everything all the same. ``config``
    holds the cache types as the engine takes them. Flash attention makes no difference: V is
    written without its padding, transposed or not.
    """
    states = [layer for layer in shape.trunk if layer.state_width]
    rest = partial and bool(states or any(cache.kind == "sliding" for cache in shape.caches))
    size = _SEQUENCE
    if _is_dsv4(shape):
        size += _DSV4_HEADER
    for cache in shape.caches:
        if cache.cells == "fixed":
            size += _compressor_state(cache)
        elif rest and cache.kind != "sliding":
            continue
        elif cache.cells == "ratio":
            rows = min(n_tokens // cache.number, cells_per_stream(cache, 0, config, context))
            size += _compressed_cache(cache, config, rows)
        else:
            size += _attention_cache(shape, cache, config, context, n_tokens)
    return size + (_recurrent_state(states) if states else 0)


def window_tokens(shape: ModelShape, n_tokens: int) -> int:
    """Return how many of ``n_tokens`` tokens a sliding layer still sees, and so saves.

    Source: llama_hparams::is_masked_swa, asked for the last token.
    """
    if shape.architecture in _CHUNKED:
        return (n_tokens - 1) % shape.window + 1
    return min(n_tokens, shape.window)


def _is_dsv4(shape: ModelShape) -> bool:
    return any(cache.cells in ("ratio", "fixed") for cache in shape.caches)


def _attention_cache(
    shape: ModelShape,
    cache: CacheSpec,
    config: RunConfig,
    context: EffectiveContext,
    n_tokens: int,
) -> int:
    """llama_kv_cache::state_write: every stream says how many cells it has, one has some."""
    streams = config.n_seq_max if cache.per_slot else context.n_stream
    cells = window_tokens(shape, n_tokens) if cache.kind == "sliding" else n_tokens
    rows = sum(
        row_bytes(config.cache_type_k, layer.k_width)
        + row_bytes(config.cache_type_v, layer.v_width)
        for layer in cache.layers
    )
    headers = _ROW_HEADER * len(cache.layers) * (2 if cache.v_padded else 1)
    per_cell = _CELL + (_CELL_EXT if _has_cell_ext(shape) else 0) + rows
    # The number of streams, each stream's count, and "V is transposed", the number of layers.
    return _U32 + _U32 * streams + 2 * _U32 + headers + cells * per_cell


def _has_cell_ext(shape: ModelShape) -> bool:
    if shape.architecture in _MROPE:
        return True
    sections = shape.numbers.get("rope.dimension_sections", ())
    return (
        shape.architecture in _MROPE_BY_SECTIONS
        and isinstance(sections, tuple)
        and len(sections) > 1
        and sections[0] > 0
        and sections[1] > 0
    )


def _recurrent_state(layers: list[LayerSpec]) -> int:
    """llama_memory_recurrent::state_write: one cell, R and its history by layer, then S."""
    # The number of cells; position and number of sequences; "S is transposed", layers.
    size = _U32 + 2 * _U32 + 2 * _U32
    for layer in layers:
        size += 2 * _ROW_HEADER + _F32 * layer.state_width
        if layer.p_width:
            size += 8  # the row's bytes as uint64_t
    return size


def _compressed_cache(cache: CacheSpec, config: RunConfig, rows: int) -> int:
    """dsv4_state_write_k_cache: version, rows, streams, layers; each layer with its number."""
    return 4 * _U32 + sum(
        _U32 + _DSV4_TENSOR + rows * row_bytes(config.cache_type_k, layer.k_width)
        for layer in cache.layers
    )


def _compressor_state(cache: CacheSpec) -> int:
    """llama_dsv4_comp_state::state_write: six counts, then KV and scores of each layer in f32."""
    return 6 * _U32 + sum(
        _U32 + 2 * _DSV4_TENSOR + cache.number * _F32 * (layer.k_width + layer.v_width)
        for layer in cache.layers
    )
