"""The compute buffer without an engine: the graph's largest tensors, laid out as ggml does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from localkv.model import ModelShape
from localkv.model.shape import LayerSpec
from localkv.predict.compute_alloc import Allocator, Block
from localkv.predict.compute_alloc import compiled as compiled_recipe
from localkv.predict.compute_families import Family, family
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
from localkv.predict.compute_sizes import Numbers, Setting, fillers, inputs, setting, sizes, streams
from localkv.predict.config import RunConfig, effective_context
from localkv.predict.estimate import ComputeEstimate

_F32 = 4
#: How often the same kinds of neighbouring blocks are laid out: a steady state shows at once.
_REPEATS = 2
#: Width of gemma3n's embedding per block, which no key gives (n_embd_altup in gemma3n.cpp).
_PER_LAYER = 256


def estimate_compute(shape: ModelShape, config: RunConfig) -> ComputeEstimate:
    """Return the compute buffer in bytes, with the band that it lies in.

    The worst batch is laid out block by block as ggml's allocator does it; blocks that repeat are
    laid out as often as it takes to come round.
    """
    context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
    kind = family(shape.architecture)
    size = _layout(shape, setting(shape, config, context, kind), kind)
    return ComputeEstimate(
        bytes=size, source="formula", low=int(size * kind.low), high=int(size * kind.high)
    )


def _layout(shape: ModelShape, run: Setting, kind: Family) -> int:
    memory = Allocator()
    number = Numbers(shape)
    embeddings = shape.n_embd * run.rows * _F32
    memory.take(embeddings)
    held: dict[str, list[Block]] = defaultdict(list)
    for reader, size in inputs(shape, run, kind.positions, kind.choice):
        held[reader].append(memory.take(size))
    per_layer = number("embedding_length_per_layer_input", _PER_LAYER) * shape.n_layer
    per_layer *= run.rows * _F32 if kind.per_layer else 0
    rows = memory.take(per_layer)
    looked_up = memory.take(per_layer)
    memory.free(rows)
    for index, size in fillers(shape, run, number, kind.choice).items():
        held[f"block {index}"].append(memory.take(size))
    stream = memory.take(embeddings * _streams(number, kind))
    for layer, last, closing in _walked(shape, number, kind):
        recipe = _recipe(shape, layer, number, run, kind)
        full = sizes(shape, layer, number, run, run.rows)
        tail = sizes(shape, layer, number, run, run.outputs) if last else full
        done = held.pop(f"block {layer.index}", [])
        if closing:
            done += held.pop(layer.kind, [])
        stream = compiled_recipe(recipe, last=last).run(memory, full, tail, stream, done)
        if layer.index == 0 and kind.per_layer:
            _embed_layers(memory, per_layer, looked_up)
    for blocks in held.values():
        for taken in blocks:
            memory.free(taken)
    for _ in range(kind.logits):
        memory.take(shape.n_vocab * run.outputs * _F32)
    return memory.peak


def _embed_layers(memory: Allocator, size: int, looked_up: Block) -> None:
    """Lay out the embeddings per block once more: projected, normed, added, turned and kept."""
    projected = memory.take(size)
    normed = memory.take(size)
    memory.free(projected)
    memory.free(looked_up)
    memory.take(size)
    memory.free(normed)


def _walked(
    shape: ModelShape, number: Numbers, kind: Family
) -> Iterator[tuple[LayerSpec, bool, bool]]:
    """Yield the blocks to lay out, whether each is the last, and the last of its kind."""
    trunk = shape.layers[: len(shape.layers) - shape.n_layer_nextn]
    ends = {layer.kind: layer.index for layer in trunk}
    seen: dict[object, int] = {}
    before: object = None
    for layer in trunk:
        sort = (
            layer.indexer_width, layer.kind, layer.n_head, layer.k_width, layer.v_width, _mixes(layer, number, kind))
        pair = (before, sort)
        before = sort
        seen[pair] = seen.get(pair, 0) + 1
        closing = ends[layer.kind] == layer.index
        if closing or seen[pair] <= _REPEATS:
            yield layer, layer is trunk[-1], closing


def _mixes(layer: LayerSpec, number: Numbers, kind: Family) -> bool:
    """Return whether ``layer`` has experts."""
    if not kind.experts or not number("expert_count"):
        return False
    if kind.experts == "alternate":
        return layer.index % max(number("moe_every_n_layers", 1), 1) == 1
    step = number("interleave_moe_layer_step", 1) if kind.experts == "every" else 1
    lead = number("leading_dense_block_count") if kind.experts == "after lead" else 0
    return layer.index >= lead and (layer.index + 1) % max(step, 1) == 0


def _recipe(
    shape: ModelShape, layer: LayerSpec, number: Numbers, run: Setting, kind: Family
) -> str:
    if _mixes(layer, number, kind):
        feed_forward = experts(
            gated=kind.gated, shared=kind.shared, merged=kind.merged, biased=kind.biased)
    elif number("feed_forward_length", shape.n_ff, layer.index) and kind.dense:
        feed_forward = DENSE[kind.dense]
    else:
        feed_forward = ""
    layout = kind.layout
    if layout == "if parallel":
        layout = "parallel" if number("use_parallel_residual") else "pre"
    kept = layer.kind == "recurrent" and kind.state in ("mamba", "delta", "wkv", "wkv7")
    recipe = block(_attention(shape, layer, run, kind), feed_forward, layout, kept=kept)
    return outputs_last(recipe) if kind.outputs == "after" else recipe


def _attention(shape: ModelShape, layer: LayerSpec, run: Setting, kind: Family) -> str:
    mode = run.mode
    indexed = bool(kind.choice and layer.indexer_width)
    if layer.kind == "recurrent":
        return STATE[kind.state]
    if kind.choice == "compressed":
        return compressed(mode, indexed)
    if shape.mla:
        return latent(
            mode,
            choice=kind.choice if layer.kind == "full" else "",
            indexed=indexed,
            rotated=layer.indexer_width == layer.k_head,
        )
    projections = kind.projections or ("qkv" if shape.window or not mode.cached else "qvk")
    if indexed and (run.blocks or kind.choice != "blocks"):
        return sparse(mode, projections, kind.choice)
    plain = attend(projections, mode, bias=kind.bias)
    return f"{STATE[kind.state]}; b E: o; {plain}; -: b" if kind.beside else plain


def _streams(number: Numbers, kind: Family) -> int:
    return streams(number) if kind.layout in ("streams", "altup") else 1
