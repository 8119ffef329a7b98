"""From a Hugging Face config.json to the same ModelShape that a GGUF header gives.

The language model's fields may be nested (``text_config``), go by old names (``n_head``) or be
left to the configuration class's defaults, which are then listed in ``assumed``. What each layer
caches comes from the model type's row in :mod:`localkv.model.hf_rules`; a type without a row is
answered from its fields with the rule "generic" and a note, never in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from localkv.errors import ModelError
from localkv.gguf.text import shown
from localkv.model.hf_attention import Heads, attention_heads, latent_heads, uncompressed_heads
from localkv.model.hf_defaults import TEXT_TYPES
from localkv.model.hf_fields import Fields
from localkv.model.hf_layouts import layer_kinds
from localkv.model.hf_rules import ENCODERS, RULES, HfRule
from localkv.model.hf_states import STATES
from localkv.model.hf_weights import read_weights
from localkv.model.shape import LayerSpec, ModelShape
from localkv.model.specs import CacheLayer, CacheSpec

#: Where multimodal configurations keep their language model.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "text_model_config")
#: Encoder-decoder models name the decoder's facts apart.
_DECODER = {
    "decoder_layers": "num_hidden_layers",
    "num_decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
}
_DTYPES = {"float16": "f16", "half": "f16", "bfloat16": "bf16", "float32": "f32", "float": "f32"}
_CONFIG_MOST = 16 << 20
_MOST_NESTING = 4


def read_hf_model(path: str) -> ModelShape:
    """Return the shape of the model in a folder with a config.json, or of that file itself.

    Weights come from ``model.safetensors.index.json`` or from the headers of the safetensors
    files beside it; where there are none they stay unknown (0, with a note that says why).

    Raises:
        ModelError: there is no config.json, it is not readable as one, or it is not enough.
    """
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    folder = os.path.dirname(os.path.abspath(file))
    shape = shape_from_hf_config(_load(file), name=os.path.basename(folder), path=file)
    weights = read_weights(folder)
    notes = shape.notes + ((f"weights unknown: {weights.why}",) if weights.why else ())
    return shape._replace(
        weights_bytes=weights.tensor_bytes,
        # An index says what all tensors take together, not which layer they belong to.
        input_bytes=weights.tensor_bytes,
        file_bytes=weights.file_bytes,
        paths=(file, *weights.paths),
        notes=notes,
    )


def shape_from_hf_config(
    config: Mapping[str, Any], *, name: str = "", path: str = ""
) -> ModelShape:
    """Return the shape of the language model that ``config`` describes. Pure: reads nothing.

    Widths are elements per token, states elements per sequence. ``rule`` is "exact" for a model
    type with a row of its own and "generic" for others.

    Raises:
        ModelError: the fields do not say what a layer caches.
    """
    where = shown(path or name or "config")
    text, model_type = _language_model(config, where)
    f = Fields(_decoder(text), model_type, where)
    if model_type in ENCODERS:
        return _encoder(f, config, name, path)
    rule = RULES.get(model_type)
    notes = [] if rule else [_unknown_type(model_type)]
    used = rule or _generic(f)
    layers = _layers(f, used)
    notes += _remarks(f, used, layers, known=rule is not None)
    return _shape(f, config, layers, notes, name, path, "exact" if rule else "generic", used.mla)


def _shape(
    f: Fields,
    config: Mapping[str, Any],
    layers: tuple[LayerSpec, ...],
    notes: list[str],
    name: str,
    path: str,
    rule: str,
    mla: bool,
) -> ModelShape:
    n_embd = f.fact("n_embd") or 0
    return ModelShape(
        name=name or str(config.get("_name_or_path") or f.model_type),
        architecture=f.model_type,
        path=path,
        file_bytes=0,
        rule=rule,
        n_ctx_train=f.fact("n_ctx") or 0,
        n_embd=n_embd,
        n_embd_out=n_embd,
        n_vocab=f.fact("n_vocab") or 0,
        layers=layers,
        causal=any(layer.kind != "none" for layer in layers),
        window=max((layer.window for layer in layers), default=0),
        mla=mla,
        mla_heads=uncompressed_heads(f) if mla else (0, 0),
        tied_embeddings=f.flag("tie_word_embeddings", False),
        caches=_caches(layers),
        dtype=_dtype(f.config, config),
        assumed=tuple(f.assumed),
        notes=tuple(notes),
    )


def _load(file: str) -> Mapping[str, Any]:
    try:
        if os.path.getsize(file) > _CONFIG_MOST:
            raise ModelError(f"{shown(file)}: more than 16 MiB", "this is no config.json")
        with open(file, "rb") as stream:
            value = json.loads(stream.read(_CONFIG_MOST))
    except OSError as error:
        raise ModelError(
            f"{shown(file)}: {error.strerror or error}", "give a folder with a config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{shown(file)}: not JSON ({shown(str(error), 60)})", "download the file again"
        ) from error
    if not isinstance(value, Mapping):
        raise ModelError(f"{shown(file)}: not a JSON object", "download the file again")
    return value


def _language_model(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """Return the fields of the language model and its model type, through any nesting."""
    model_type = config.get("model_type")
    for _ in range(_MOST_NESTING):
        inner = next((config[n] for n in _NESTED if isinstance(config.get(n), Mapping)), None)
        if inner is None:
            break
        outer, config = config, inner
        named = config.get("model_type")
        model_type = named or TEXT_TYPES.get(str(model_type), model_type)
        if "torch_dtype" not in config and "dtype" not in config:
            config = {**config, "dtype": outer.get("dtype", outer.get("torch_dtype"))}
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{where}: model_type is missing", "give a model's config.json")
    # Qwen2-VL and others once kept the language model's fields beside the vision tower's.
    return config, TEXT_TYPES.get(model_type, model_type)


def _decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with the decoder's own counts under the plain names."""
    if not config.get("is_encoder_decoder"):
        return config
    named = {to: config[name] for name, to in _DECODER.items() if name in config}
    return {**config, **named}


def _generic(f: Fields) -> HfRule:
    """Return the rule for a model type without a row, from the fields that it has."""
    mla = f.has("kv_lora_rank") and f.has("qk_rope_head_dim")
    return HfRule(mla=mla)


def _layers(f: Fields, rule: HfRule) -> tuple[LayerSpec, ...]:
    kinds = layer_kinds(f, rule.layout)
    attends = any(kind not in ("recurrent", "none") for kind in kinds)
    heads: list[Heads] = [Heads(0, 0, 0, 0)] * len(kinds)
    if attends:
        heads = latent_heads(f, kinds) if rule.mla else attention_heads(f, rule.heads, kinds)
    state = (0, 0)
    if "recurrent" in kinds or "both" in kinds:
        if not rule.state:
            raise f.fail("recurrent layers in a model type whose state is not known")
        state = STATES[rule.state](f)
    shared = _shared_layers(f, kinds)
    windows = _windows(f, kinds)
    return tuple(
        _layer(f, index, kinds[index], heads[index], state, windows[index], shared.get(index))
        for index in range(len(kinds))
    )


def _layer(
    f: Fields,
    index: int,
    kind: str,
    heads: Heads,
    state: tuple[int, int],
    window: int,
    shared: int | None,
) -> LayerSpec:
    attends = kind not in ("recurrent", "none")
    holds = attends and shared is None
    stateful = kind in ("recurrent", "both")
    shown_kind = "sliding" if window else "full" if attends else kind
    return LayerSpec(
        index=index,
        kind=shown_kind,
        n_head=heads.n_head if attends else 0,
        n_head_kv=heads.n_head_kv if attends else 0,
        k_width=heads.n_head_kv * heads.k_head if holds else 0,
        v_width=heads.n_head_kv * heads.v_head if holds else 0,
        window=window,
        r_width=state[0] if stateful else 0,
        s_width=state[1] if stateful else 0,
        indexer_width=(f.optional("index_head_dim") or 0) if holds else 0,
        shared_with=shared,
        k_head=heads.k_head if attends else 0,
        v_head=heads.v_head if attends else 0,
    )


def _windows(f: Fields, kinds: list[str]) -> list[int]:
    """Return each layer's window or chunk in tokens; 0 means that it keeps the whole context."""
    window = (f.fact("window") or 0) if "sliding" in kinds else 0
    chunk = f.number("attention_chunk_size", 8192) if "chunked" in kinds else 0
    return [{"sliding": window, "chunked": chunk}.get(kind, 0) for kind in kinds]


def _shared_layers(f: Fields, kinds: list[str]) -> dict[int, int]:
    """Return layer -> layer whose cache it reads: the last ones of gemma3n and gemma4.

    Each reads the last layer of its own kind that holds a cache (num_kv_shared_layers).
    """
    count = f.optional("num_kv_shared_layers") or 0
    first = len(kinds) - count
    if not 0 < first < len(kinds):
        return {}
    owners = {kind: index for index, kind in enumerate(kinds[:first])}
    return {i: owners[kinds[i]] for i in range(first, len(kinds)) if kinds[i] in owners}


def _caches(layers: tuple[LayerSpec, ...]) -> tuple[CacheSpec, ...]:
    """Return the caches that the layers make up: full ones, and those of each window."""
    found: dict[tuple[str, int], list[CacheLayer]] = {}
    for layer in layers:
        if layer.k_width:
            block = CacheLayer(layer.index, layer.k_width, layer.v_width)
            found.setdefault((layer.kind, layer.window), []).append(block)
    return tuple(
        CacheSpec(
            kind,
            tuple(blocks),
            cells="window" if kind == "sliding" else "context",
            number=window,
            v_padded=max(block.v_width for block in blocks),
        )
        for (kind, window), blocks in found.items()
    )


def _encoder(f: Fields, config: Mapping[str, Any], name: str, path: str) -> ModelShape:
    layers = tuple(LayerSpec(index=i, kind="none") for i in range(f.layers()))
    note = f"{f.model_type} is an encoder: it keeps no KV cache"
    return _shape(f, config, layers, [note], name, path, "exact", False)


def _remarks(f: Fields, rule: HfRule, layers: tuple[LayerSpec, ...], *, known: bool) -> list[str]:
    """Return what a reader of the figures should know, one sentence each."""
    notes = []
    if f.flag("is_encoder_decoder", False):
        notes.append("encoder-decoder: the decoder's own cache; cross-attention is not counted")
    if any(layer.indexer_width for layer in layers):
        notes.append("sparse attention: the indexer's keys are counted apart from the KV cache")
    if not known and rule.layout == "full" and f.fact("window") and not f.has("layer_types"):
        notes.append("a sliding window is declared but not for which layers: counted as full")
    return notes


def _unknown_type(model_type: str) -> str:
    return (
        f"model_type {shown(model_type, 60)!r} has no rule here: read as plain attention by its "
        "fields, so compare with the server's own log"
    )


def _dtype(*configs: Mapping[str, Any]) -> str:
    """Return the type of the weights as a cache type: f16, bf16, f32, or empty if not said."""
    for config in configs:
        for name in ("dtype", "torch_dtype"):
            value = config.get(name)
            if isinstance(value, str):
                return _DTYPES.get(value.removeprefix("torch."), "")
    return ""
