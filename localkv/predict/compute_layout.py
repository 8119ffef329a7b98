"""A model's graph laid out in one buffer: which blocks, which recipe, which inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

from localkv.model import ModelShape
from localkv.model.shape import LayerSpec
from localkv.predict.compute_alloc import Allocator, Block, compiled
from localkv.predict.compute_families import family
from localkv.predict.compute_recipes import (
    DENSE,
    STATE,
    attend,
    block,
    compressed,
    experts,
    latent,
    outputs_last,
    sparse,
)
from localkv.predict.compute_sizes import Setting, Sizes, fillers, inputs
from localkv.predict.compute_widths import Numbers, elements, streams

_F32 = 4
#: Width of gemma3n's embedding per block, which no key gives (n_embd_altup in gemma3n.cpp).
_PER_LAYER = 256
#: Blocks whose residual sum stays in the stream's own memory.
_KEPT = ("mamba", "delta", "delta repeated", "wkv", "wkv7")


class Part:
    """What one buffer holds of the graph.

    ``blocks`` by number; ``source``: the graph's inputs and the embeddings are here, otherwise
    copies come in, ``copies`` of each (4 with pipeline parallelism, and then for good); ``output``:
    the logits are made here; ``joins``: so is the last sum of a stream that the host computed.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        source: bool = True,
        output: bool = True,
        copies: int = 1,
        joins: bool = False,
    ) -> None:
        self.blocks = blocks
        self.source = source
        self.output = output
        self.copies = copies
        self.joins = joins


class Model:
    """What of a model decides its graph, worked out once.

    ``sorts`` numbers the blocks' sorts, block by block; ``widths`` are those of each sort.
    """

    def __init__(self, shape: ModelShape) -> None:
        """Begin with the structure of ``shape``'s architecture; no block is looked at yet."""
        self.shape = shape
        self.kind = family(shape.architecture)
        self.number = Numbers(shape)
        self.trunk = shape.trunk
        self.sorts: list[int] = []
        self.widths: list[dict[str, int]] = []


class Identity:
    """A shape compared by identity: hashing its blocks takes longer than laying them out."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def __hash__(self) -> int:
        return id(self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.shape is self.shape


def described(shape: ModelShape) -> Model:
    """Return what decides the graph of ``shape``."""
    return _described(Identity(shape))


@lru_cache(maxsize=8)
def _described(key: Identity) -> Model:
    model = Model(key.shape)
    known: dict[tuple[object, ...], int] = {}
    for layer in model.trunk:
        widths = elements(model.shape, layer, model.number)
        traits = (
            layer.kind,
            layer.indexer_width,
            _has_experts(layer, model),
            layer.r_width,
            layer.s_width,
            *widths.values(),
        )
        if traits not in known:
            known[traits] = len(known)
            model.widths.append(widths)
        model.sorts.append(known[traits])
    return model


def lay(model: Model, run: Setting, part: Part) -> int:
    """Return the bytes of a buffer that holds ``part`` of the graph of ``model`` under ``run``."""
    shape, kind = model.shape, model.kind
    memory = Allocator()
    held = _take_inputs(memory, model, run, part)
    embeddings = shape.n_embd * run.rows * _F32
    per_layer = _per_layer_bytes(model, run) if part.source else 0
    looked_up = _look_up(memory, per_layer)
    if kind.choice:
        for index, size in fillers(shape, run, kind).items():
            held[f"block {index}"].append(memory.take(size))
    stream = memory.take(embeddings * _streams(model))
    for index, closing in _walked(model, part.blocks):
        layer = model.trunk[index]
        last = index == len(model.trunk) - 1
        full = Sizes(layer, model.widths[model.sorts[index]], run, run.rows, shape.mla)
        tail = Sizes(layer, full.elements, run, run.outputs, shape.mla) if last else full
        done = held.pop(f"block {index}", [])
        if closing:
            done = done + held.pop(layer.kind, [])
        if last:
            done = done + held.pop("any", [])
        program = compiled(_recipe(model, index, run), last=last)
        stream = program.run(memory, full, tail, stream, done, held["outputs"] if last else ())
        if index == 0 and per_layer:
            _project(memory, per_layer, looked_up)
    if part.joins:
        _receive(memory, model, run)
    if part.output:
        held.pop("outputs", None)
        for taken in (taken for blocks in held.values() for taken in blocks):
            memory.free(taken)
        for _ in range(kind.logits):
            memory.take(shape.n_vocab * run.outputs * _F32)
    return memory.peak


def _take_inputs(
    memory: Allocator, model: Model, run: Setting, part: Part
) -> dict[str, list[Block]]:
    """Take the inputs, or copies of those that the part's blocks read; by who reads them last."""
    held: dict[str, list[Block]] = defaultdict(list)
    embeddings = model.shape.n_embd * run.rows * _F32
    kinds = {model.trunk[index].kind for index in part.blocks}
    memory.take(embeddings * (part.copies if part.source else part.copies - 1))
    for reader, size in inputs(model.shape, run, model.kind):
        if part.source or reader in kinds:
            taken = memory.take(size * part.copies)
            if part.copies == 1:
                held[reader].append(taken)
    return held


def _receive(memory: Allocator, model: Model, run: Setting) -> None:
    """Lay out the last sum of the stream where only the output is on a device.

    Sums have no weights that would keep them on the host; those over experts come along, unless
    shared experts or a norm follow.
    """
    widths = model.widths[model.sorts[-1]]
    mixed = _has_experts(model.trunk[-1], model) and not model.kind.shared
    for taken in [memory.take(widths[name] * run.rows * _F32) for name in ("E", "EU")[: 1 + mixed]]:
        memory.free(taken)


def _per_layer_bytes(model: Model, run: Setting) -> int:
    if not model.kind.per_layer:
        return 0
    width = model.number("embedding_length_per_layer_input", _PER_LAYER)
    return width * model.shape.n_layer * run.rows * _F32


def _look_up(memory: Allocator, size: int) -> Block:
    """Lay out the embeddings per block: rows of a table, then scaled."""
    rows = memory.take(size)
    scaled = memory.take(size)
    memory.free(rows)
    return scaled


def _project(memory: Allocator, size: int, looked_up: Block) -> None:
    """Lay out the embeddings per block once more: projected, normed, added, turned and kept."""
    projected = memory.take(size)
    normed = memory.take(size)
    memory.free(projected)
    memory.free(looked_up)
    memory.take(size)
    memory.free(normed)


def _walked(model: Model, blocks: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield the blocks to lay out, and whether each is the last here of its kind.

    A block after one of a sort it has followed before is left out: it finds the same buffer.
    """
    ends = set({model.trunk[index].kind: index for index in blocks}.values())
    seen: set[tuple[int, int]] = set()
    before = -1
    for index in blocks:
        sort = model.sorts[index]
        pair = before, sort
        before = sort
        closing = index in ends
        if closing or pair not in seen:
            seen.add(pair)
            yield index, closing


def _has_experts(layer: LayerSpec, model: Model) -> bool:
    number, where = model.number, model.kind.experts
    if not where or not number("expert_count"):
        return False
    if where == "alternate":
        return layer.index % number("moe_every_n_layers", 1) == 1
    step = number("interleave_moe_layer_step", 1) if where == "every" else 1
    lead = number("leading_dense_block_count") if where == "after lead" else 0
    return layer.index >= lead and (layer.index + 1) % step == 0


def _recipe(model: Model, index: int, run: Setting) -> str:
    layer, kind = model.trunk[index], model.kind
    layout = kind.layout
    if layout == "if parallel":
        layout = "parallel" if model.number("use_parallel_residual") else "pre"
    return _joined(
        _attention(model, layer, run),
        _feed_forward(model, layer),
        layout,
        layer.kind == "recurrent" and kind.state in _KEPT,
        kind.outputs == "after",
    )


@lru_cache(maxsize=256)
def _joined(attention: str, feed_forward: str, layout: str, kept: bool, after: bool) -> str:
    recipe = block(attention, feed_forward, layout, kept=kept)
    return outputs_last(recipe) if after else recipe


def _feed_forward(model: Model, layer: LayerSpec) -> str:
    kind = model.kind
    if _has_experts(layer, model):
        return experts(gated=kind.gated, shared=kind.shared, merged=kind.merged, biased=kind.biased)
    width = model.number("feed_forward_length", model.shape.n_ff, layer.index)
    return DENSE[kind.dense] if width and kind.dense else ""


def _attention(model: Model, layer: LayerSpec, run: Setting) -> str:
    kind, mode = model.kind, run.mode
    indexed = bool(kind.choice and layer.indexer_width)
    if layer.kind == "recurrent":
        return STATE[kind.state]
    if kind.choice == "compressed":
        return compressed(mode, indexed)
    if model.shape.mla:
        choice = kind.choice if layer.kind == "full" else ""
        rotated = layer.indexer_width == layer.k_head
        return latent(mode, choice=choice, indexed=indexed, rotated=rotated)
    windows = bool(model.shape.window) or not mode.cached
    projections = kind.projections or ("qkv" if windows else "qvk")
    if indexed and (run.by_blocks or kind.choice != "blocks"):
        return sparse(mode, projections, kind.choice)
    plain = attend(projections, mode, bias=kind.bias)
    return f"{STATE[kind.state]}; b E: o; {plain}; -: b" if kind.beside else plain


def _streams(model: Model) -> int:
    return streams(model.number) if model.kind.layout in ("streams", "altup") else 1
