"""What one layer keeps in one block of vLLM's paged cache.

Source: vLLM 0.32, v1/kv_cache_interface.py (the specs' page sizes and max_memory_usage_bytes),
each attention layer's get_kv_cache_spec, platforms/interface.py (_align_hybrid_block_size) and
platforms/cpu.py (what a CPU decides before it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localkv.errors import UsageError
from localkv.model.shape import LayerSpec, ModelShape

_DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "int8": 1,
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
}
#: Our own short names for the same.
_SHORT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
#: An f32 scale for each side of a head that per-token-head types keep beside the numbers.
_SCALE_BYTES = 4

#: vLLM counts the token itself on top of the window: model_executor/models/commandr.py.
_WINDOW_PLUS_ONE = frozenset({"cohere2", "cohere2_moe", "modernbert-decoder"})
#: Attention within chunks frees whole chunks: ChunkedLocalAttentionSpec.
_CHUNKED = frozenset({"llama4", "llama4_text"})
#: Mamba 2 keeps one more state per request, for a prefill's checkpoint: MambaMixer2. Names of
#: transformers and of GGUF files.
_CHECKPOINTED = frozenset(
    (
        "bamba",
        "falcon-h1",
        "falcon_h1",
        "granitehybrid",
        "granitemoehybrid",
        "mamba2",
        "nemotron_h",
        "nemotron_h_moe",
        "zamba2",
    )
)


@dataclass(frozen=True)
class Serving:
    """What a vLLM platform and its defaults decide before the cache is planned.

    ``kernel_block``: the attention kernel's block sizes are multiples of it. ``mla_block_size``:
    the block size forced for MLA, None to keep the one asked for. ``mla_kernel_block``: that of
    the MLA kernel. ``ssm_dtype``: the type of a state-space state, auto for the model's.
    ``prefix_caching``: a second block of state per request. ``max_batched_tokens``: tokens in
    flight in one step, which sliding windows keep on top of the window.
    """

    kernel_block: int = 32
    mla_block_size: int | None = 16
    mla_kernel_block: int = 16
    ssm_dtype: str = "float32"
    prefix_caching: bool = True
    max_batched_tokens: int = 4096


#: The CPU build, used from Python (4096 batched tokens), with AVX512-BF16 and without AMX.
CPU = Serving()


@dataclass(frozen=True)
class Page:
    """One layer's page: ``bytes`` for ``block_size`` tokens, or for one recurrent state.

    ``kind`` is full, mla, sliding, chunked or recurrent. Layers with equal pages can share a
    group. ``padded`` is the page's size where it was made larger than its content.
    """

    kind: str
    block_size: int
    heads: int
    k_head: int
    v_head: int
    token_bytes: int
    state_bytes: int = 0
    window: int = 0
    padded: int = 0
    state_blocks: int = 1

    @property
    def bytes(self) -> int:
        """Return the bytes of the page."""
        return self.padded or self.state_bytes or self.token_bytes * self.block_size

    @property
    def shown_kind(self) -> str:
        """Return the kind as the plan names it."""
        return "sliding" if self.kind == "chunked" else self.kind

    def with_bytes(self, wanted: int) -> Page | None:
        """Return the page made ``wanted`` bytes large, None when it cannot be.

        A page that divides the larger one holds more tokens; others are padded, which the latent
        rows of MLA do not allow. Source: unify_kv_cache_spec_page_size.
        """
        if self.bytes == wanted:
            return self
        if self.kind == "recurrent":
            return replace(self, padded=wanted)
        if wanted % self.bytes == 0:
            return replace(self, block_size=self.block_size * (wanted // self.bytes))
        return None if self.kind == "mla" else replace(self, padded=wanted)

    def blocks_per_request(self, max_model_len: int, batched: int) -> int:
        """Return the most blocks that one request of ``max_model_len`` tokens holds.

        A window keeps its last tokens and a step's batch, plus one block because it need not
        start at a block's edge. Source: max_admission_blocks_per_request.
        """
        if self.kind == "recurrent":
            return self.state_blocks
        tokens = max_model_len
        if self.kind == "sliding":
            tokens = min(self.window - 1 + batched, max_model_len)
        elif self.kind == "chunked":
            tokens = min(self.window + batched, max_model_len)
        return -(-tokens // self.block_size) + (self.kind == "sliding")


def is_element_type(dtype: str) -> bool:
    """Return whether ``dtype`` is a type whose elements stand alone, unlike q8_0 and its kin."""
    return _SHORT.get(dtype, dtype) in _DTYPE_BYTES


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``, named as in vLLM or as f16, bf16, f32.

    Raises:
        UsageError: no such type.
    """
    size = _DTYPE_BYTES.get(_SHORT.get(dtype, dtype))
    if size is None:
        raise UsageError(f"{dtype!r} is not a cache type", f"use auto, {', '.join(_DTYPE_BYTES)}")
    return size


def layer_token_bytes(layer: LayerSpec, dtype: str) -> int:
    """Return what one token takes in one attention layer, in bytes.

    fp8 and int8 are one byte per element: their scales are one number per tensor, kept with the
    weights. The per-token-head types keep an f32 scale per head for K and one for V in the page
    (two beside the latent of MLA). Source: customize_spec of vLLM's triton_attn.py and of its
    mla_attention.py.
    """
    size = (layer.k_width + layer.v_width) * element_bytes(dtype)
    if layer.k_width and dtype.endswith("_per_token_head"):
        size += max(1, layer.n_head_kv) * 2 * _SCALE_BYTES
    return size


def layer_pages(
    shape: ModelShape,
    block_size: int,
    max_model_len: int,
    kv_dtype: str,
    model_dtype: str,
    serving: Serving,
) -> list[Page]:
    """Return one page per attention layer and per recurrent state, in the order of the model.

    ``kv_dtype`` auto is ``model_dtype``; states never follow ``kv_dtype``.

    Raises:
        UsageError: a type that is not known.
    """
    if shape.mla and serving.mla_block_size:
        block_size = serving.mla_block_size
    dtype = model_dtype if kv_dtype == "auto" else kv_dtype
    attention = _attention_pages(shape, block_size, dtype, serving)
    states = {
        layer.index: _state_bytes(layer, model_dtype, serving)
        for layer in shape.layers
        if layer.state_width
    }
    if not states:
        return list(attention.values())
    # Without attention layers there is no prefix to cache, and one block holds a whole request.
    if not attention:
        return [_state_page(size, max_model_len, 0, 1) for size in states.values()]
    widest = max(page.token_bytes for page in attention.values())
    block_size = _hybrid_block_size(shape, block_size, max(states.values()), widest, serving)
    span, blocks = max_model_len, 1
    if serving.prefix_caching:
        span, blocks = block_size, 2 + (shape.architecture in _CHECKPOINTED)
    return _in_order(
        shape,
        _attention_pages(shape, block_size, dtype, serving),
        {i: _state_page(size, span, block_size * widest, blocks) for i, size in states.items()},
    )


def _attention_pages(
    shape: ModelShape, block_size: int, dtype: str, serving: Serving
) -> dict[int, Page]:
    """Return layer -> page of the layers that hold keys."""
    return {
        layer.index: _attention_page(shape, layer, block_size, dtype, serving)
        for layer in shape.layers
        if layer.k_width
    }


def _state_page(state_bytes: int, block_size: int, padded: int, blocks: int) -> Page:
    return Page(
        "recurrent",
        block_size,
        heads=0,
        k_head=0,
        v_head=0,
        token_bytes=0,
        state_bytes=state_bytes,
        padded=padded,
        state_blocks=blocks,
    )


def _in_order(
    shape: ModelShape, attention: dict[int, Page], recurrent: dict[int, Page]
) -> list[Page]:
    """Return the pages in the order in which vLLM builds the layers.

    Models that run attention beside a state build the attention first.
    """
    if attention.keys() & recurrent.keys():
        return [*attention.values(), *recurrent.values()]
    return [
        pages[layer.index]
        for layer in shape.layers
        for pages in (attention, recurrent)
        if layer.index in pages
    ]


def _attention_page(
    shape: ModelShape, layer: LayerSpec, block_size: int, dtype: str, serving: Serving
) -> Page:
    heads = max(1, layer.n_head_kv)
    kind, window = ("full" if layer.v_width else "mla"), 0
    if layer.window:
        kind = "chunked" if shape.architecture in _CHUNKED else "sliding"
        window = layer.window + (shape.architecture in _WINDOW_PLUS_ONE)
    if kind == "sliding":
        # Windows take the kernel's own block, whatever was asked: _largest_kernel_block_within.
        kernel = serving.kernel_block
        block_size = max(kernel, block_size // kernel * kernel)
    return Page(
        kind,
        block_size,
        heads,
        layer.k_width // heads,
        layer.v_width // heads,
        layer_token_bytes(layer, dtype),
        window=window,
    )


def _state_bytes(layer: LayerSpec, model_dtype: str, serving: Serving) -> int:
    """Return the bytes of a layer's state: convolution in the model's type, the rest apart."""
    conv = element_bytes(model_dtype)
    ssm = conv if serving.ssm_dtype == "auto" else element_bytes(serving.ssm_dtype)
    return (layer.r_width + layer.p_width) * conv + layer.s_width * ssm


def _hybrid_block_size(
    shape: ModelShape, block_size: int, state_bytes: int, token_bytes: int, serving: Serving
) -> int:
    """Return the block size at which an attention page is at least as large as the state.

    Source: Platform._align_hybrid_block_size: a multiple of what the kernels take and of the
    block size that was asked for, 128 tokens at the least where MLA is among the layers.
    """
    kernel = serving.mla_kernel_block if shape.mla else serving.kernel_block
    step = max(kernel, block_size, 128 if shape.mla else 0)
    needed = step * -(-state_bytes // (step * token_bytes))
    return max(block_size, kernel * -(-needed // kernel))
