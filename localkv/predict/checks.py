"""The combinations that the engine refuses, found before it is asked, in the engine's words.

Source: llama_init_from_model and llama_context::llama_context in src/llama-context.cpp.
"""

from __future__ import annotations

from localkv.errors import UsageError
from localkv.gguf.types import GgmlType, cache_type
from localkv.model import LayerSpec, ModelShape
from localkv.predict.config import RunConfig


def effective_config(shape: ModelShape, config: RunConfig) -> RunConfig:
    """Return ``config`` as the engine takes it for ``shape``.

    Flash attention is off where the engine forces it off (Grok); cache types are written in the
    engine's own way.

    Raises:
        UsageError: the engine keeps no cache in such a type.
    """
    return config.with_(
        flash_attn=config.flash_attn if shape.flash_attn else "off",
        cache_type_k=cache_type(config.cache_type_k).name,
        cache_type_v=cache_type(config.cache_type_v).name,
    )


def check(shape: ModelShape, config: RunConfig) -> None:
    """Return when the engine takes ``config`` for ``shape``.

    Raises:
        UsageError: it does not; the message holds the engine's rule.
    """
    type_k, type_v = cache_type(config.cache_type_k), cache_type(config.cache_type_v)
    if config.n_ctx == 0 and shape.n_ctx_train == 0 and shape.rule == "exact":
        raise UsageError(
            "n_ctx and model->hparams.n_ctx_train cannot both be zero", "give a context size"
        )
    if shape.mla and type_k.name != type_v.name:
        raise UsageError(
            f"model does not support different K ({type_k.name}) and V ({type_v.name}) cache types",
            f"give {type_k.name} for both",
        )
    if config.flash_attn == "off" and type_v.block > 1:
        raise UsageError(
            "quantized V cache requires flash_attn to be enabled",
            f"turn flash attention on, or keep V in f16 instead of {type_v.name}"
            if shape.flash_attn
            else f"{shape.architecture} runs without flash attention: keep V in f16",
        )
    if config.flash_attn != "off":
        _check_heads("K", type_k, shape.trunk)
        _check_heads("V", type_v, shape.trunk)
    _check_rows(shape, type_k, type_v)


def _check_heads(letter: str, kind: GgmlType, layers: tuple[LayerSpec, ...]) -> None:
    for layer in layers:
        head = layer.k_head if letter == "K" else layer.v_head
        if head % kind.block:
            raise UsageError(
                f"{letter} cache type {kind.name} with block size {kind.block} does not divide "
                f"n_embd_head_{letter.lower()}={head}",
                "use f16",
            )


def _check_rows(shape: ModelShape, type_k: GgmlType, type_v: GgmlType) -> None:
    """Refuse rows that are no whole number of blocks, which no check of the engine covers."""
    if type_k.block == type_v.block == 1:
        return
    for cache in shape.caches:
        if cache.f32:
            continue
        for letter, kind, widths in (
            ("K", type_k, {layer.k_width for layer in cache.layers}),
            ("V", type_v, {layer.v_width for layer in cache.layers}),
        ):
            for width in sorted(widths):
                if width % kind.block:
                    raise UsageError(
                        f"{letter} cache type {kind.name} with block size {kind.block} does not "
                        f"divide the {width} elements of a row of the {cache.kind} cache",
                        "use f16",
                    )
