"""ModelShape: the facts about a model that decide how much memory it needs, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

from localkv.gguf.types import row_bytes as row_bytes
from localkv.model.specs import CacheSpec
from localkv.model.weights import MatrixGroup
from localkv.tuples import NamedTuple

#: What a layer keeps for the tokens it has seen.
LAYER_KINDS = ("full", "sliding", "recurrent", "none")


class LayerSpec(NamedTuple):
    """One block of the model.

    Widths are elements per token: ``k_width = n_head_kv * k_head`` (0: no K), ``v_width``
    likewise (0 for MLA, which keeps no V); ``k_head`` and ``v_head`` are one head's elements.
    ``window`` is the sliding window in tokens, 0 for none. ``r_width`` and ``s_width`` are f32
    elements per sequence of convolution and state-space state, ``p_width`` those of a per-layer
    embedding's convolution; a layer of a parallel hybrid has both widths and state.
    ``indexer_width`` is the K width of a sparse-attention indexer. ``shared_with`` is the layer
    whose cache this one reads instead of holding its own. ``weight_bytes`` sums the tensors that
    the engine places with this block, ``expert_bytes`` those of them that belong to experts;
    ``loaded`` is False where it leaves them in the file.
    """

    index: int  # type: ignore[assignment]  # of the block; tuple.index is not needed
    kind: str
    n_head: int = 0
    n_head_kv: int = 0
    k_width: int = 0
    v_width: int = 0
    window: int = 0
    r_width: int = 0
    s_width: int = 0
    indexer_width: int = 0
    shared_with: int | None = None
    weight_bytes: int = 0
    k_head: int = 0
    v_head: int = 0
    p_width: int = 0
    loaded: bool = True
    expert_bytes: int = 0

    @property
    def state_width(self) -> int:
        """Return the f32 elements of recurrent state per sequence."""
        return self.r_width + self.s_width + self.p_width


class ModelShape(NamedTuple):
    """A model's facts, read from a file header; sizes in bytes.

    ``rule`` is "exact" when the architecture's row of rules was applied and "none" when there is
    no row, in which case ``layers`` is empty of claims and only the engine can answer.
    ``assumed`` names every fact that the header lacked and the engine's default filled in.
    Weights: ``input_bytes`` stay on the host, ``output_bytes`` go with layer n + 1,
    ``every_device_bytes`` are held by each device with blocks, ``tied_bytes`` are the token
    embeddings where they are the output too; ``weights_bytes`` is the whole file's.
    ``n_layer_nextn`` of the layers, at the end, are NextN/MTP blocks; ``n_embd_out`` is the width
    of the embeddings; ``window`` the sliding window; ``mla`` says that K alone is cached;
    ``flash_attn`` is False where the engine turns flash attention off. ``caches`` are the caches
    the engine makes; for rule "none", ``bounds`` may hold the least and the most they can be.
    ``refused`` is the engine's reason not to load the model, or not to run it alone. ``dtype`` is
    the cache type that the weights' own type stands for (f16, bf16, f32), where it is said.
    ``n_params_expert`` of the ``n_params`` belong to experts, of which a token meets a few only;
    ``mla_heads`` are the elements of K and V of one head that MLA compresses (0: not known).
    ``numbers`` are the architecture's own keys that hold integers, without their prefix, as the
    header gives them: what the compute graph's widths are read from.
    """

    name: str
    architecture: str
    path: str
    file_bytes: int
    rule: str
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    layers: tuple[LayerSpec, ...]
    n_ff: int = 0
    n_expert: int = 0
    causal: bool = True
    input_bytes: int = 0
    output_bytes: int = 0
    weights_bytes: int = 0
    n_params: int = 0
    quantisation: tuple[tuple[str, int, int], ...] = ()  # (ggml type, tensors, bytes)
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    n_layer_nextn: int = 0
    n_embd_out: int = 0
    window: int = 0
    mla: bool = False
    flash_attn: bool = True
    tied_embeddings: bool = False
    every_device_bytes: int = 0
    tied_bytes: int = 0
    matrices: tuple[MatrixGroup, ...] = ()
    caches: tuple[CacheSpec, ...] = ()
    bounds: tuple[tuple[CacheSpec, ...], tuple[CacheSpec, ...]] | None = None
    refused: str = ""
    dtype: str = ""
    n_params_expert: int = 0
    mla_heads: tuple[int, int] = (0, 0)
    numbers: Mapping[str, int | tuple[int, ...]] = {}

    def __hash__(self) -> int:
        # ``numbers`` has no hash, and what matters of it is in the other fields.
        return hash(self[:-1])

    @property
    def n_layer(self) -> int:
        """Return the number of blocks."""
        return len(self.layers)

    @property
    def trunk(self) -> tuple[LayerSpec, ...]:
        """Return the blocks without the NextN/MTP blocks at the end."""
        return self.layers[: self.n_layer - self.n_layer_nextn]

    def kv_bytes_per_token(self, cache_type_k: str = "f16", cache_type_v: str = "f16") -> int:
        """Return the textbook figure: bytes of K and V that one token adds, every layer full.

        2 x layers x KV heads x head_dim x bytes per element, from the header alone: what most
        calculators give, blind to windows, shared caches, MLA and recurrent layers.

        Raises:
            UsageError: no such cache type, or its block size does not divide a row.
        """
        return sum(
            row_bytes(cache_type_k, layer.n_head_kv * layer.k_head)
            + row_bytes(cache_type_v, layer.n_head_kv * layer.v_head)
            for layer in self.trunk
        )

    def first_token_bytes(self, cache_type_k: str = "f16", cache_type_v: str = "f16") -> int:
        """Return the bytes that one token takes in all caches while every window has room."""
        return self._per_token(cache_type_k, cache_type_v, ("context", "window", "ratio"))

    def marginal_token_bytes(self, cache_type_k: str = "f16", cache_type_v: str = "f16") -> int:
        """Return the bytes that one more token adds once every sliding window is full."""
        return self._per_token(cache_type_k, cache_type_v, ("context", "ratio"))

    def _per_token(self, cache_type_k: str, cache_type_v: str, cells: tuple[str, ...]) -> int:
        total = 0
        for cache in self.caches:
            if cache.cells not in cells:
                continue
            row = sum(
                row_bytes(cache_type_k, layer.k_width) + row_bytes(cache_type_v, layer.v_width)
                for layer in cache.layers
            )
            total += row // cache.number if cache.cells == "ratio" else row
        return total
