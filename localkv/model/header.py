"""From the header of a model file to its ModelShape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from os.path import isfile, join
from typing import Any

from localkv.errors import ModelError
from localkv.model.architectures import ENGINE, RULES
from localkv.model.caches import build_caches
from localkv.model.consistency import contradictions
from localkv.model.hparams import effective_rule, load_hparams
from localkv.model.layers import build_layers
from localkv.model.metadata import MAX_LAYERS, Metadata, RefusedError
from localkv.model.rules import Rule
from localkv.model.shape import LayerSpec, ModelShape
from localkv.model.specs import CacheLayer, CacheSpec, Tensor
from localkv.model.weights import WeightPlan, plan_weights

#: Sentences for what a model needs beside it, by ``Rule.companion``.
_COMPANIONS = {
    "always": "it drafts for another model and shares that model's cache: the engine will not run "
    "it alone",
    "embeddings": "it drafts for another model and borrows that model's embeddings: the engine "
    "will not run it alone",
}
#: Files that are no models, by general.type.
_FILE_KINDS = {
    "mmproj": "the vision or audio projector (mmproj) of a model",
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
    "vocab": "a vocabulary without a model",
}


def read_model(path: str) -> ModelShape:
    """Return the shape of the model that ``path`` names.

    A .gguf file, any shard of a set, its URL (the header alone is fetched), ``ollama:NAME`` or
    ``hf:ORG/NAME`` from the caches of this machine, a built-in name, a Hugging Face config.json or
    its folder.

    Raises:
        ModelError: the model cannot be found or read, or is not a language model.
    """
    path = _downloaded_config(path) or path
    if path.endswith(".json") or isfile(join(path, "config.json")):
        from localkv.model.hf_config import read_hf_model

        return read_hf_model(path)
    from localkv.gguf import open_model

    model = open_model(path)
    shape = shape_from_header(
        model.metadata, model.tensors, path=model.path, file_bytes=model.file_bytes
    )
    missing = (model.missing,) if model.missing else ()
    return shape._replace(paths=model.files.paths, notes=(*shape.notes, *missing))


def _downloaded_config(argument: str) -> str | None:
    """Return the folder that ``hf:ORG/NAME`` stands for when it holds no GGUF file."""
    if not argument.startswith("hf:"):
        return None
    from localkv.gguf.hub_cache import find_config
    from localkv.gguf.places import places

    return find_config(argument.removeprefix("hf:"), places())


def shape_from_header(
    metadata: Mapping[str, Any],
    tensors: Iterable[Tensor],
    *,
    path: str = "",
    file_bytes: int = 0,
) -> ModelShape:
    """Return the shape of the model with this header. Pure: reads nothing else.

    Raises:
        ModelError: the header names no architecture, or belongs to a companion of a model.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{path or 'the header'}: general.architecture is missing", "not a model")
    _refuse_companion(metadata, path)
    infos = tuple(tensors)
    meta = Metadata(metadata, architecture)
    rule = RULES.get(architecture)
    plan = plan_weights(
        infos, lfm2=bool(rule and rule.norm_of_output), ties=rule is None or rule.ties
    )
    shape = _weights(_facts(metadata, meta, infos, path, file_bytes), plan, infos)
    if rule is None:
        return _unknown(shape, meta, plan)
    try:
        return _known(shape, meta, effective_rule(meta, rule), plan, infos)
    except RefusedError as refusal:
        return _unknown(shape, meta, plan)._replace(
            refused=str(refusal),
            notes=(f"the engine gives up on this file: {refusal}",),
        )


def _facts(
    metadata: Mapping[str, Any],
    meta: Metadata,
    infos: tuple[Tensor, ...],
    path: str,
    file_bytes: int,
) -> ModelShape:
    """Return what a header says whether or not there is a rule for its architecture."""
    architecture = str(metadata["general.architecture"])
    return ModelShape(
        name=str(metadata.get("general.name") or _stem(path) or architecture),
        architecture=architecture,
        path=path,
        file_bytes=file_bytes,
        rule="none",
        n_ctx_train=_quiet(meta, "context_length"),
        n_embd=_quiet(meta, "embedding_length"),
        n_vocab=_vocabulary(metadata, meta, infos),
        layers=(),
        n_ff=max(_quiet_list(meta, "feed_forward_length"), default=0),
        n_expert=_quiet(meta, "expert_count"),
        mla_heads=(
            _quiet(meta, "attention.key_length_mla"),
            _quiet(meta, "attention.value_length_mla"),
        ),
        numbers=meta.numbers(),
    )


def _known(
    shape: ModelShape, meta: Metadata, rule: Rule, plan: WeightPlan, infos: tuple[Tensor, ...]
) -> ModelShape:
    names = {tensor.name for tensor in infos}
    hp = load_hparams(meta, rule, names)
    caches = build_caches(hp, rule.memory)
    layers = build_layers(hp, rule, caches, plan.blocks, plan.experts)
    notes = [*contradictions(hp, rule, infos)]
    refused = ""
    if rule.companion == "always" or (
        rule.companion == "embeddings" and not {"token_embd.weight", "output.weight"} <= names
    ):
        refused = _COMPANIONS[rule.companion]
        notes.append(refused)
    if meta.has("attention.sliding_window") and rule.sliding is None and rule.memory == "kv":
        notes.append("a sliding window is declared, but the engine does not use it here")
    return shape._replace(
        rule="exact",
        n_ctx_train=hp.n_ctx_train,
        n_embd=hp.n_embd,
        n_embd_out=hp.n_embd_out,
        layers=layers,
        causal=hp.causal,
        n_layer_nextn=hp.n_layer_all - hp.n_layer,
        window=hp.window,
        mla=hp.mla or rule.memory == "dsv4",
        flash_attn=rule.flash_attn,
        caches=caches,
        assumed=tuple(meta.assumed),
        notes=tuple(notes),
        refused=refused,
    )


def _unknown(shape: ModelShape, meta: Metadata, plan: WeightPlan) -> ModelShape:
    """Return a shape that claims nothing, with bounds where a window is declared."""
    note = (
        f"localkv has no rule for the architecture {shape.architecture} (rules follow {ENGINE}): "
        "only the engine's dry run can tell its cache"
    )
    # Bounded: the header of a damaged file may claim any number.
    count = min(max(_quiet(meta, "block_count"), max(plan.blocks, default=-1) + 1), MAX_LAYERS)
    layers = tuple(
        LayerSpec(
            index=block,
            kind="none",
            weight_bytes=plan.blocks.get(block, 0),
            expert_bytes=plan.experts.get(block, 0),
        )
        for block in range(count)
    )
    return shape._replace(layers=layers, notes=(note,), bounds=_bounds(meta))


def _bounds(
    meta: Metadata,
) -> tuple[tuple[CacheSpec, ...], tuple[CacheSpec, ...]] | None:
    """Return the caches with every block sliding and with every block full, None unless both."""
    window = _quiet(meta, "attention.sliding_window")
    if window < 1:
        return None
    try:
        hp = load_hparams(meta, Rule(""), ())
    except RefusedError:
        return None
    layers = tuple(
        CacheLayer(block, hp.k_width(block), hp.v_width(block)) for block in range(hp.n_layer)
    )
    padded = hp.v_width_max()
    sliding = CacheSpec("sliding", layers, cells="window", number=window, v_padded=padded)
    return (sliding,), (CacheSpec("full", layers, v_padded=padded),)


def companion_kind(metadata: Mapping[str, Any]) -> str:
    """Return what a file is that goes with a model instead of being one, "" for a model."""
    kind = metadata.get("general.type")
    if metadata.get("general.architecture") != "clip" and kind not in _FILE_KINDS:
        return ""
    return _FILE_KINDS.get(str(kind), _FILE_KINDS["mmproj"])


def _refuse_companion(metadata: Mapping[str, Any], path: str) -> None:
    if what := companion_kind(metadata):
        raise ModelError(
            f"{path or 'the file'} is {what}, not a model",
            "give the model it belongs to",
        )


def _vocabulary(metadata: Mapping[str, Any], meta: Metadata, infos: tuple[Tensor, ...]) -> int:
    """Return llama_vocab::n_tokens: the tokens listed, or what a file without a list declares."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if metadata.get("tokenizer.ggml.model") in ("no_vocab", "none"):
        return _quiet(meta, "vocab_size")
    if tokens is not None and hasattr(tokens, "length"):
        return int(tokens.length)
    if isinstance(tokens, (list, tuple)):
        return len(tokens)
    embedding = next((t for t in infos if t.name == "token_embd.weight"), None)
    return embedding.shape[-1] if embedding and embedding.shape else 0


def _weights(shape: ModelShape, plan: WeightPlan, infos: tuple[Tensor, ...]) -> ModelShape:
    """Return ``shape`` with the sizes of its tensors, by place and by type."""
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for tensor in infos:
        kinds[tensor.type][0] += 1
        kinds[tensor.type][1] += tensor.nbytes
    return shape._replace(
        input_bytes=plan.input,
        output_bytes=plan.output,
        every_device_bytes=plan.every_device,
        tied_bytes=plan.tied,
        tied_embeddings=plan.tied > 0,
        matrices=plan.matrices,
        weights_bytes=sum(tensor.nbytes for tensor in infos),
        n_params=sum(prod(tensor.shape) for tensor in infos),
        n_params_expert=sum(prod(t.shape) for t in infos if "_exps." in t.name),
        quantisation=tuple(
            (name, count, size)
            for name, (count, size) in sorted(kinds.items(), key=lambda item: -item[1][1])
        ),
    )


def _quiet(meta: Metadata, key: str) -> int:
    """Return the number under ``key``, 0 where there is none to show."""
    try:
        return meta.number(key, 0)
    except RefusedError:
        return 0


def _quiet_list(meta: Metadata, key: str) -> list[int]:
    try:
        return meta.listed(key) or [_quiet(meta, key)]
    except RefusedError:
        return []


def _stem(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gguf")
