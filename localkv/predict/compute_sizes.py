"""The bytes of the tensors that the recipes name, under the settings of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from localkv.gguf.types import row_bytes
from localkv.model import ModelShape
from localkv.model.shape import LayerSpec
from localkv.predict.compute_families import Family
from localkv.predict.compute_recipes import Mode
from localkv.predict.compute_widths import Numbers
from localkv.predict.config import EffectiveContext, RunConfig
from localkv.predict.kv import cells_per_stream, v_is_transposed

_F32, _F16 = 4, 2
_POOL = 4  # tokens per block of the indexers of qwen4exp and glm5-next
_V_ROTATION = 64  # build_input_v_rot of llama_kv_cache


class Setting:
    """One run as the graph sees it: the worst case of llama_context::sched_reserve.

    ``rows`` of tokens, of which ``outputs`` give logits, in ``sequences``; ``cells`` per stream by
    kind of cache; ``mask`` and ``top_k`` bytes and tokens; ``by_blocks``: minimax-m3's sparse
    attention runs; ``copied``: K and V come from another device.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: RunConfig,
        context: EffectiveContext,
        kind: Family,
        number: Numbers,
        *,
        copied: bool = False,
    ) -> None:
        tokens = min(context.n_ctx, context.n_ubatch)
        flash = config.flash_attn != "off" and shape.flash_attn
        self.rows = -(-tokens // config.n_seq_max) * config.n_seq_max
        asked = min(tokens, config.n_outputs_max or context.n_batch)
        self.outputs = self.rows if kind.outputs == "all" else asked
        self.sequences = config.n_seq_max
        self.streams = context.n_stream
        self.cells = _cells(shape, config, context) if kind.cached else {}
        self.mask = _F16 if flash else _F32
        self.top_k = number("attention.indexer.top_k", 1 << 31)
        self.transposed = v_is_transposed(config)
        self.type_k, self.type_v = config.cache_type_k, config.cache_type_v
        self.by_blocks = flash and (config.n_seq_max == 1 or not config.kv_unified)
        self.copied = copied
        heads = next(((x.k_head, x.v_head) for x in shape.layers if x.k_head), (0, 0))
        rotates = bool(self.cells) and not shape.mla
        self.mode = Mode(
            flash,
            rotate_k=rotates and _rotated(self.type_k, heads[0]),
            rotate_v=rotates and _rotated(self.type_v, heads[1]),
            cast=copied or not self.cells or "f32" in (self.type_k, self.type_v),
            turn=(not flash or kind.bias) and not (self.cells and self.transposed),
            cached=bool(self.cells),
        )


def _cells(shape: ModelShape, config: RunConfig, context: EffectiveContext) -> dict[str, int]:
    """Return the cells of each kind of cache, in the order in which blocks come to read them."""
    order = [layer.kind for layer in shape.layers]
    cells: dict[str, int] = {}
    for cache in sorted(shape.caches, key=lambda c: order.index(c.kind) if c.kind in order else 1):
        if cache.layers and cache.cells != "fixed":
            size = cells_per_stream(cache, shape.window, config, context)
            cells.setdefault(cache.kind, size)
    return cells


def _rotated(cache_type: str, head: int) -> bool:
    """Return whether rows are rotated before they are kept: attn_rot_k of llama_kv_cache."""
    return cache_type not in ("f16", "bf16", "f32") and head % 64 == 0


def inputs(shape: ModelShape, run: Setting, kind: Family) -> Iterator[tuple[str, int]]:
    """Yield the graph's inputs in bytes, each with what reads it last.

    That is a kind of block, "any" block, or "outputs", where their rows are picked.
    """
    rows = run.rows
    yield "any", rows * _F32 * kind.positions
    if not run.cells and any(layer.n_head and not layer.state_width for layer in shape.layers):
        yield "none", rows * rows * run.mask
        if shape.window:
            yield "none", rows * rows * run.mask
    for name, cells in run.cells.items():
        if name == "indexer" and kind.choice == "blocks":
            if run.by_blocks:
                yield "any", rows * 8
                yield "full", cells * rows * _F32
            continue
        if run.mode.rotate_k:
            yield name, _rotation(shape) ** 2 * _F32
        if run.mode.rotate_v:
            yield name, _V_ROTATION**2 * _F32
        yield name, rows * 8
        widest = max((c.v_padded for c in shape.caches if c.kind == name), default=0)
        if widest:
            yield name, rows * 8 * (widest if run.transposed else 1)
        yield name, cells * rows * run.mask
        if kind.bias:
            yield name, cells * rows * _F32
    yield "outputs", run.outputs * _F32


def _rotation(shape: ModelShape) -> int:
    """Return the size of the matrix that rotates K: build_input_k_rot of llama_kv_cache."""
    size = 64
    head = max(layer.k_head for layer in shape.layers)
    while head % (2 * size) == 0:
        size *= 2
    return size


def fillers(shape: ModelShape, run: Setting, kind: Family) -> dict[int, int]:
    """Return the bytes of the zeros that each block unmasks chosen tokens with, by block.

    They are leaves of the graph, so that all of them lie there from the start.
    """
    if kind.choice == "pools":
        return {-1: _pools(run) * run.rows * _F32}
    size = min(run.top_k, run.cells.get("full", 0)) * run.rows * _F32
    if kind.choice == "compressed":
        size = min(run.top_k, run.cells.get("indexer", 0)) * run.rows * run.mask
    every = kind.choice == "tokens"
    if kind.choice not in ("tokens", "pooled", "compressed"):
        return {}
    return {
        layer.index: size
        for layer in shape.layers
        if layer.indexer_width or (every and layer.kind == "full")
    }


def _pools(run: Setting) -> int:
    """Return the tokens in the pools that glm5-next chooses, at most."""
    pools = run.sequences * (run.cells.get("full", 0) // _POOL + 64)
    return _POOL * min(pools, run.top_k // _POOL) + _POOL - 1


class Sizes:
    """The bytes of the widths of one block, for ``rows`` tokens of ``run``."""

    def __init__(
        self, layer: LayerSpec, elements: Mapping[str, int], run: Setting, rows: int, mla: bool
    ) -> None:
        self.layer = layer
        self.elements = elements
        self.run = run
        self.rows = rows
        self.mla = mla

    def __getitem__(self, width: str) -> int:
        """Return the bytes of ``width``."""
        count = self.elements.get(width)
        return count * self.rows * _F32 if count is not None else _SPECIAL[width](self)

    def cells(self, kind: str = "") -> int:
        """Return the cells per stream that the block reads, or those of a ``kind`` of cache."""
        own = self.run.cells.get(kind or self.layer.kind, 0 if kind else self.run.rows)
        chosen = not kind and self.layer.indexer_width and "compressed" in self.run.cells
        return own + (self.run.cells["compressed"] if chosen else 0)

    def all_cells(self) -> int:
        """Return the cells of all streams that the block reads."""
        return self.cells() * (self.run.streams if self.run.cells else 1)

    def scores(self, kind: str = "full", size: int = _F32) -> int:
        """Return the bytes of one number per token and cell."""
        return self.cells(kind) * self.rows * size

    def state(self, width: int) -> int:
        """Return the bytes of a state of ``width`` elements for each sequence."""
        return width * self.run.sequences * _F32


def _copy(sizes: Sizes, cache_type: str, width: str) -> int:
    """Return the bytes of K or V where a copy is computed with: as it is, or as f16."""
    row = sizes.elements[width]
    cells = sizes.all_cells()
    if sizes.run.copied:
        return row_bytes(cache_type, row) * cells
    return row * cells * _F16 if cache_type == "f32" or not sizes.run.cells else 0


def _turned(sizes: Sizes) -> int:
    """Return the bytes of V transposed, in its cache's type."""
    row = sizes.elements["KL" if sizes.mla else "V"]
    own = sizes.run.type_k if sizes.mla else sizes.run.type_v
    return row_bytes(own if sizes.run.cells else "f32", row) * sizes.all_cells()


def _pairs(sizes: Sizes) -> int:
    """Return the bytes of one number per pair of tokens of a sequence and head."""
    tokens = sizes.rows // sizes.run.sequences
    return tokens * tokens * sizes.layer.n_head * sizes.run.sequences * _F32


#: Widths that depend on more than tokens times elements.
_SPECIAL: dict[str, Callable[[Sizes], int]] = {
    "KQ": lambda s: s.layer.n_head * s.cells() * s.rows * _F32,
    "KF": lambda s: _copy(s, s.run.type_k, "K"),
    "VF": lambda s: _copy(s, s.run.type_v, "V"),
    "VT": _turned,
    # state: convolution, state space; what a convolution or a scan makes holds the state too
    "RS": lambda s: s.state(s.layer.r_width),
    "SW": lambda s: s.state(s.layer.s_width),
    "CX": lambda s: s["CV"] + s["RS"],
    "CI": lambda s: s["I"] + s["RS"] // 3,
    "SS": lambda s: s["I"] + s["SW"],
    "LL": _pairs,
    # sparse attention: scores, chosen tokens, masks
    "IS": lambda s: s.scores(),
    "TK": lambda s: min(s.run.top_k, s.cells("full")) * s.rows * _F32,
    "FM": lambda s: s.scores(size=s.run.mask),
    "IP": lambda s: s.cells("full") * s.elements["IK"] * s.run.streams * _F32,
    "IC": lambda s: s["IP"] // _POOL,
    "BS": lambda s: s.elements["IH"] * s.scores() // _POOL,
    "PW": lambda s: _pools(s.run) * s.rows * _F32,
    "PM": lambda s: s["PW"] // 2 + s["FM"],
    "MR": lambda s: s.layer.n_head_kv * s.scores() // s.run.streams,
    "MM": lambda s: s.layer.n_head_kv * s.scores(size=s.run.mask),
    "LS": lambda s: s.scores("indexer"),
    "LM": lambda s: s.scores("indexer", s.run.mask),
}
