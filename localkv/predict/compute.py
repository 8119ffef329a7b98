"""The compute buffers without an engine: the graph's largest tensors, laid out as ggml does.

The engine sizes its buffers by laying out the graph of the worst batch
(llama_context::sched_reserve in src/llama-context.cpp). So does this, over a sketch of that graph:
``compute_families`` says how an architecture's blocks are put together, ``compute_recipes`` what
each part allocates, ``compute_sizes`` how large that is, ``compute_alloc`` where it goes.
"""

from __future__ import annotations

from localkv.model import ModelShape
from localkv.predict.compute_layout import Model, Part, described, lay
from localkv.predict.compute_sizes import Setting
from localkv.predict.config import EffectiveContext, RunConfig, effective_context
from localkv.predict.devices import HOST, Placement
from localkv.predict.estimate import ComputeEstimate

#: Copies of the inputs with pipeline parallelism: GGML_SCHED_MAX_COPIES.
_PIPELINE_COPIES = 4
#: Where the header or the architecture's rule is missing: little is known but the embeddings.
_UNKNOWN_BAND = (0.5, 4.0)


def estimate_compute(
    shape: ModelShape, config: RunConfig, placement: Placement | None = None
) -> ComputeEstimate:
    """Return the compute buffers in bytes, with the band that their sum lies in.

    ``placement`` spreads the blocks over devices; without one all of them are on the host.
    """
    model = described(shape)
    context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
    run = Setting(shape, config, context, model.kind, model.number)
    if placement is None or len(placement.names) == 1:
        parts = {HOST: lay(model, run, Part(range(len(model.trunk))))}
    else:
        parts = _on_devices(model, run, config, context, placement)
    size = sum(parts.values())
    known = shape.rule == "exact" and shape.numbers
    low, high = (model.kind.low, model.kind.high) if known else _UNKNOWN_BAND
    return ComputeEstimate(
        bytes=size,
        source="formula",
        low=int(size * low),
        high=int(size * high),
        devices=tuple(parts.items()),
    )


def _on_devices(
    model: Model,
    run: Setting,
    config: RunConfig,
    context: EffectiveContext,
    placement: Placement,
) -> dict[str, int]:
    """Return the bytes of each buffer: the host's inputs, what is computed where, and copies."""
    blocks = placement.blocks[: len(model.trunk)]
    copies = _PIPELINE_COPIES if _pipelined(config, placement) else 1
    away = run
    if config.no_kv_offload:
        away = Setting(model.shape, config, context, model.kind, model.number, copied=True)
    sizes = {}
    for name in placement.names:
        here = [index for index, device in enumerate(blocks) if device == name]
        output = placement.output == name
        if name == HOST:
            sizes[name] = lay(model, run, Part(here, True, output, copies))
        elif here or output:
            joins = not here and HOST in blocks[-1:]
            sizes[name] = lay(model, away, Part(here, False, output, copies, joins))
    return sizes


def _pipelined(config: RunConfig, placement: Placement) -> bool:
    """Return whether several batches run at once: pipeline_parallel in src/llama-context.cpp."""
    return (
        config.n_devices > 1
        and config.split_mode == "layer"
        and not config.no_kv_offload
        and HOST not in (*placement.blocks, placement.output)
    )
