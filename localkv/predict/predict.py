"""predict: the memory that a model needs under the settings of one run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from localkv.errors import UsageError
from localkv.model import ModelShape, read_model
from localkv.predict.checks import check, effective_config
from localkv.predict.compute import estimate_compute
from localkv.predict.compute_layout import Identity
from localkv.predict.config import EffectiveContext, RunConfig, effective_context, validate
from localkv.predict.devices import HOST, Placement, device_estimates, place
from localkv.predict.estimate import (
    CacheEstimate,
    ComputeEstimate,
    DeviceEstimate,
    Estimate,
    Term,
)
from localkv.predict.kv import (
    StateBytes,
    output_bytes,
    recurrent_state,
    sized_caches,
)
from localkv.predict.notes import bounds_note, context_notes, model_notes, tied_note
from localkv.units import plural

_SETTINGS = frozenset(RunConfig._fields)


def predict(
    model: ModelShape | str | os.PathLike[str],
    config: RunConfig | None = None,
    *,
    engine: bool = False,
    **settings: Any,
) -> Estimate:
    """Return what ``model`` needs under ``config``, with single ``settings`` put over it.

    ``model`` is a shape, or a path that :func:`localkv.read_model` takes. ``settings`` are the
    fields of :class:`RunConfig`: n_ctx (tokens over all slots, 0 for the training context),
    n_seq_max, kv_unified, swa_full, flash_attn, cache_type_k, cache_type_v, n_batch, n_ubatch,
    n_gpu_layers, n_devices, split_mode, main_gpu, tensor_split, no_kv_offload, device_free, ...
    No engine is started unless ``engine`` is True.

    Raises:
        UsageError: a setting that does not exist, or a combination that the engine refuses.
        ModelError: the model cannot be read.
        EngineError: the engine was asked for and is not there or failed.
    """
    shape = model if isinstance(model, ModelShape) else read_model(os.fspath(model))
    asked = (config or RunConfig()).with_(**checked_settings(settings))
    if engine:
        return _ask_engine(shape, asked)
    return estimate(shape, asked)


def estimate(shape: ModelShape, asked: RunConfig) -> Estimate:
    """Return what ``shape`` needs under ``asked``: the formula, nothing else.

    Raises:
        UsageError: a combination that the engine refuses.
    """
    found = _needs(Identity(shape), asked)
    state, compute, output = found.state, found.compute, found.output
    caches = tuple(cache.estimate() for cache in found.caches)
    bounds = _bounds(shape, found.config, found.context)
    weights = sum(device.weights for device in found.devices)
    return Estimate(
        model=_describe(shape),
        config=_settings(asked, shape, found.context),
        caches=caches,
        r_bytes=sum(block.r_bytes for block in state),
        s_bytes=sum(block.s_bytes for block in state),
        p_bytes=sum(block.p_bytes for block in state),
        weights_bytes=weights,
        output_bytes=output,
        compute=compute,
        devices=found.devices,
        terms=(*weight_terms(shape, weights), *_terms(caches, state, output, compute)),
        notes=_notes(shape, asked, found.context, found.placement, bounds),
        known=shape.rule == "exact",
        kv_bounds=bounds,
    )


def device_needs(shape: ModelShape, asked: RunConfig) -> tuple[DeviceEstimate, ...]:
    """Return what each device holds: the figures of :func:`estimate`, for searches, without words.

    Raises:
        UsageError: a combination that the engine refuses.
    """
    return _needs(Identity(shape), asked).devices


@lru_cache(maxsize=32)
def _needs(key: Identity, asked: RunConfig) -> _Needs:
    """Return what ``asked`` comes to: a search and the answer it leads to ask for the same."""
    return _Needs(key.shape, asked)


class _Needs:
    """What the settings of a run come to, in bytes."""

    def __init__(self, shape: ModelShape, asked: RunConfig) -> None:
        self.config = config = effective_config(shape, validate(asked))
        check(shape, config)
        self.context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
        self.placement = place(shape, config)
        self.caches = sized_caches(shape.caches, shape.window, config, self.context)
        self.state = tuple(recurrent_state(shape, config))
        self.compute = estimate_compute(shape, config, self.placement)
        self.output = output_bytes(shape, config)
        self.devices = device_estimates(
            shape, config, self.placement, self.caches, self.state, self.compute, self.output
        )


def _notes(
    shape: ModelShape,
    asked: RunConfig,
    context: EffectiveContext,
    placement: Placement,
    bounds: tuple[int, int] | None,
) -> tuple[str, ...]:
    notes = [*context_notes(shape, asked, context), *model_notes(shape, asked)]
    if shape.tied_bytes and placement.output != HOST:
        notes.append(tied_note(shape, placement.output))
    if bounds:
        notes.append(bounds_note(bounds))
    return tuple(notes)


def checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with lists as tuples.

    Raises:
        UsageError: one of them is not a field of :class:`RunConfig`.
    """
    unknown = sorted(settings.keys() - _SETTINGS)
    if unknown:
        raise UsageError(
            f"{unknown[0]} is not a setting of a run", f"use {', '.join(sorted(_SETTINGS))}"
        )
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def _ask_engine(shape: ModelShape, config: RunConfig) -> Estimate:
    # The adapter stands behind this package, so it is found by name and only when asked for.
    from importlib import import_module

    plan = import_module("localkv.engines.plan")
    result: Estimate = plan.planned(shape, config)
    return result


def _bounds(
    shape: ModelShape, config: RunConfig, context: EffectiveContext
) -> tuple[int, int] | None:
    if shape.bounds is None:
        return None
    low, high = (
        sum(
            cache.k_bytes + cache.v_bytes
            for cache in sized_caches(specs, shape.window, config, context)
        )
        for specs in shape.bounds
    )
    return low, high


def _describe(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "architecture": shape.architecture,
        "path": shape.path,
        "file_bytes": shape.file_bytes,
        "n_layer": shape.n_layer,
        "n_ctx_train": shape.n_ctx_train,
        "rule": shape.rule,
    }


def _settings(config: RunConfig, shape: ModelShape, context: EffectiveContext) -> dict[str, Any]:
    """Return the settings as asked for, with the sizes that the engine makes of them."""
    return {
        **config.to_dict(),
        "n_ctx": context.n_ctx,
        "n_ctx_requested": config.n_ctx or shape.n_ctx_train,
        "n_ctx_per_slot": context.n_ctx_seq,
        "n_batch": context.n_batch,
        "n_ubatch": context.n_ubatch,
    }


def weight_terms(shape: ModelShape, held: int) -> tuple[Term, ...]:
    """Return the weights as one addend for what is loaded and one for what is held again."""
    left = sum(layer.weight_bytes for layer in shape.layers if not layer.loaded)
    loaded = shape.weights_bytes - left
    words = "the sizes of all tensors"
    if left:
        words += " but those of NextN/MTP blocks, which stay in the file"
    terms = [Term("weights", loaded, "file", words)]
    if held > loaded:
        terms.append(
            Term(
                "weights held again",
                held - loaded,
                "file",
                "tied embeddings, rope tables and repacked matrices, once more where they are used",
            )
        )
    return tuple(terms)


def _terms(
    caches: tuple[CacheEstimate, ...],
    state: tuple[StateBytes, ...],
    output: int,
    compute: ComputeEstimate,
) -> tuple[Term, ...]:
    terms = [
        Term(
            f"kv {cache.kind}",
            cache.bytes,
            "formula",
            f"{plural(cache.layers, 'layer')} x {cache.cells} cells x "
            f"{plural(cache.streams, 'stream')} x a row of K and of V",
        )
        for cache in caches
    ]
    if state:
        terms.append(
            Term(
                "recurrent",
                sum(block.bytes for block in state),
                "formula",
                f"{plural(len(state), 'layer')} x slots x state in f32",
            )
        )
    terms.append(Term("output", output, "formula", "slots x vocabulary x 4 bytes"))
    terms.append(Term("compute", compute.bytes, compute.source, "the graph's largest tensors"))
    return tuple(terms)
