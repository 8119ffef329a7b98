"""What a person should know about an estimate, in sentences."""

from __future__ import annotations

from localkv.model import ModelShape
from localkv.predict.config import EffectiveContext, RunConfig
from localkv.units import format_bytes


def context_notes(shape: ModelShape, config: RunConfig, context: EffectiveContext) -> list[str]:
    """Return what rounding and the training context did to the context that was asked for."""
    notes = []
    asked = config.n_ctx or shape.n_ctx_train
    if context.n_ctx != asked:
        slots = f" over {config.n_seq_max} slots" if config.n_seq_max > 1 else ""
        each = f", {context.n_ctx_seq} each" if context.n_stream > 1 else ""
        notes.append(f"{asked}{slots} gives {context.n_ctx}{each}: the engine rounds up to 256")
    if shape.n_ctx_train and context.n_ctx_seq > shape.n_ctx_train:
        notes.append(
            f"{context.n_ctx_seq} tokens per slot are more than the {shape.n_ctx_train} that the "
            "model was trained for: expect poor answers beyond that"
        )
    if context.n_ubatch < config.n_ubatch:
        notes.append(
            f"n_ubatch {config.n_ubatch} is cut to {context.n_ubatch}, the size of the context"
        )
    return notes


def model_notes(shape: ModelShape, config: RunConfig) -> list[str]:
    """Return what is special about the model under these settings."""
    notes = [*shape.notes, *(f"assumed: {fact}" for fact in shape.assumed)]
    if not shape.flash_attn and config.flash_attn != "off":
        notes.append(f"the engine turns flash attention off for {shape.architecture}")
    if config.n_cpu_moe and any(layer.expert_bytes for layer in shape.layers):
        notes.append(
            "experts on the host: the compute buffers are still counted as if they were with their "
            "blocks"
        )
    if shape.rule == "exact" and not any(layer.kind != "none" for layer in shape.layers):
        notes.append(f"{shape.architecture} keeps no cache: every token is computed anew")
    if shape.n_layer_nextn and shape.rule == "exact":
        notes.append(
            f"further tokens are predicted by {shape.n_layer_nextn} of {shape.n_layer} blocks "
            "(NextN/MTP)"
        )
    shared = sum(layer.shared_with is not None for layer in shape.layers)
    if shared:
        notes.append(f"{shared} of {shape.n_layer} blocks share the cache of another block")
    return notes


def tied_note(shape: ModelShape, output: str) -> str:
    """Return what tied embeddings cost where the output layer is on another device."""
    return (
        f"the token embeddings are the output matrix too: {format_bytes(shape.tied_bytes)} held "
        f"on the host and again on {output}"
    )


def bounds_note(bounds: tuple[int, int]) -> str:
    """Return the range of a cache whose pattern is unknown, as a sentence."""
    low, high = bounds
    return (
        f"the cache is between {format_bytes(low)} (every block slides) and "
        f"{format_bytes(high)} (every block is full)"
    )
