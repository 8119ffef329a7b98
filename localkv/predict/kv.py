"""The bytes of each cache and of the recurrent state under the settings of one run.

Source: the constructors llama_kv_cache, llama_kv_cache_iswa, llama_kv_cache_dsv4 (src/
llama-kv-cache*.cpp) and llama_memory_recurrent (src/llama-memory-recurrent.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from localkv.model import CacheSpec, ModelShape
from localkv.model.shape import row_bytes
from localkv.predict.config import EffectiveContext, RunConfig, pad
from localkv.predict.estimate import CacheEstimate

_F32 = 4


class SizedCache:
    """One cache with its cells known; ``sizes`` are the bytes of K and of V in a block by width."""

    def __init__(
        self,
        spec: CacheSpec,
        cells: int,
        streams: int,
        sizes: Mapping[tuple[int, int], tuple[int, int]],
    ) -> None:
        self.spec = spec
        self.cells = cells
        self.streams = streams
        self._sizes = sizes
        each = [sizes[k_width, v_width] for _, k_width, v_width in spec.layers]
        self.k_bytes = sum([k for k, _ in each])
        self.v_bytes = sum([v for _, v in each])

    def by_block(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the bytes of each block, in the order of the model."""
        for block, k_width, v_width in self.spec.layers:
            yield block, sum(self._sizes[k_width, v_width])

    def estimate(self) -> CacheEstimate:
        """Return the cache as the engine prints it."""
        return CacheEstimate(
            kind=self.spec.kind,
            cells=self.cells,
            streams=self.streams,
            layers=len(self.spec.layers),
            k_bytes=self.k_bytes,
            v_bytes=self.v_bytes,
        )


def sized_caches(
    specs: tuple[CacheSpec, ...], window: int, config: RunConfig, context: EffectiveContext
) -> tuple[SizedCache, ...]:
    """Return the caches ``specs`` of a model whose sliding window is ``window`` tokens."""
    return tuple(_sized(spec, window, config, context) for spec in specs)


def _sized(
    spec: CacheSpec, window: int, config: RunConfig, context: EffectiveContext
) -> SizedCache:
    cells = cells_per_stream(spec, window, config, context)
    streams = config.n_seq_max if spec.per_slot else context.n_stream
    rows = cells * streams * (1 + config.n_rs_seq if spec.cells == "fixed" else 1)
    type_k, type_v = ("f32", "f32") if spec.f32 else (config.cache_type_k, config.cache_type_v)
    padded = spec.v_padded if v_is_transposed(config) else 0
    sizes = {
        (k_width, v_width): (
            row_bytes(type_k, k_width) * rows,
            row_bytes(type_v, max(v_width, padded)) * rows,
        )
        for k_width, v_width in {layer[1:] for layer in spec.layers}
    }
    return SizedCache(spec, cells, streams, sizes)


def v_is_transposed(config: RunConfig) -> bool:
    """Return whether V is kept transposed, and then padded to the widest V of all layers.

    ``v_trans`` of llama_kv_cache is decided before ``auto`` is resolved, so only "off" counts.
    """
    return config.flash_attn == "off"


def cells_per_stream(
    spec: CacheSpec, window: int, config: RunConfig, context: EffectiveContext
) -> int:
    """Return the cells of one stream of ``spec``.

    Sliding windows: llama_kv_cache_iswa; one row per ``number`` tokens: dsv4_comp_size.
    """
    if spec.cells == "window" and not config.swa_full:
        slots = config.n_seq_max if config.kv_unified and not spec.per_slot else 1
        wanted = (spec.number or window) * slots + context.n_ubatch
        return pad(min(context.n_ctx_seq, wanted))
    if spec.cells == "ratio":
        return pad(max(1, -(-context.n_ctx_seq // spec.number)))
    if spec.cells == "fixed":
        return spec.number
    return context.n_ctx_seq


class StateBytes:
    """The recurrent state of one block, in bytes; ``p_bytes`` of a per-layer embedding."""

    def __init__(self, block: int, r_bytes: int, s_bytes: int, p_bytes: int) -> None:
        self.block = block
        self.r_bytes = r_bytes
        self.s_bytes = s_bytes
        self.p_bytes = p_bytes
        self.bytes = r_bytes + s_bytes + p_bytes


def recurrent_state(shape: ModelShape, config: RunConfig) -> Iterator[StateBytes]:
    """Yield the state of each block that keeps one: f32, a row per slot and rollback snapshot."""
    rows = max(1, config.n_seq_max) * (1 + config.n_rs_seq) * _F32
    for layer in shape.layers:
        if layer.state_width:
            yield StateBytes(
                layer.index, layer.r_width * rows, layer.s_width * rows, layer.p_width * rows
            )


def output_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Return the output buffer: a row of logits per slot, and what else was asked for.

    Source: llama_context::output_reserve in src/llama-context.cpp, called with n_seq_max rows
    when the context is made; it grows when a batch asks for more rows than that. Encoder-decoder
    models (t5) always keep embeddings too; samplers that run in the back end add logits,
    probabilities and candidates.
    """
    rows = config.n_seq_max
    width = shape.n_vocab
    if config.embeddings or shape.architecture == "t5":
        width += shape.n_embd_out or shape.n_embd
    if config.backend_sampling:
        width += 2 * shape.n_vocab + 1 + shape.n_vocab
    return width * rows * _F32
