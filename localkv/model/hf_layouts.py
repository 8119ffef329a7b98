"""Which layer does what: the kinds of all layers of a configuration, in order.

``layer_types`` (or ``layers_block_type``) is the configuration's own word and comes first. Where
an older config.json lacks it, the model type's class computes it from a few fields; ``LAYOUTS``
names each such computation. Source: ``__post_init__`` of transformers 5.19's
``configuration_<model_type>.py``, and the modeling file where the class has no list.

Kinds: full, sliding, chunked (attention within chunks of the context), recurrent, both (attention
beside a recurrent state), none.
"""

from __future__ import annotations

from collections.abc import Callable

from localkv.gguf.text import shown
from localkv.model.hf_fields import Fields
from localkv.units import plural

_WORDS = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "global_attention": "full",
    "indexed_attention": "full",
    "sliding_attention": "sliding",
    "sliding_window": "sliding",
    "sliding_window_attention": "sliding",
    "local": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "conv": "recurrent",
    "recurrent": "recurrent",
    "hybrid": "both",
    "moe": "none",
    "mlp": "none",
}

#: hybrid_override_pattern of nemotron_h: one letter per layer.
_LETTERS = {"M": "recurrent", "*": "full", "-": "none", "E": "none"}


def layer_kinds(f: Fields, layout: str) -> list[str]:
    """Return the kind of every layer; ``layout`` is a key of ``LAYOUTS``.

    Raises:
        ModelError: a list does not fit the number of layers, or holds an unknown word.
    """
    for name in ("layer_types", "layers_block_type"):
        if isinstance(f.config.get(name), list):
            return _listed(f, name)
    return LAYOUTS[layout](f)


def _listed(f: Fields, name: str) -> list[str]:
    listed = f.config[name]
    words = f.words(name, f.layers() if f.fact("n_layer") else f.bounded(len(listed))) or []
    unknown = next((word for word in words if word not in _WORDS), None)
    if unknown is not None:
        raise f.fail(f"{name} has a layer of kind {shown(unknown, 40)!r}, which is not known")
    return [_WORDS[word] for word in words]


def _full(f: Fields) -> list[str]:
    return ["full"] * f.layers()


def _sliding(f: Fields) -> list[str]:
    """Every layer has the window, if there is one: mistral, mixtral, phi3, starcoder2."""
    return ["sliding"] * f.layers()


def _every(
    default: int, pattern_name: str = "sliding_window_pattern"
) -> Callable[[Fields], list[str]]:
    """Return a layout where every n-th layer is full and the others slide."""

    def layout(f: Fields) -> list[str]:
        every = f.optional(pattern_name) or f.optional("_" + pattern_name) or default
        return ["full" if (i + 1) % every == 0 else "sliding" for i in range(f.layers())]

    return layout


def _gemma4(f: Fields) -> list[str]:
    """As gemma3, and the last layer is full whatever the pattern says."""
    return [*_every(6)(f)[:-1], "full"]


def _first_of(every: int) -> Callable[[Fields], list[str]]:
    """Return a layout where the first of every ``every`` layers is full: cwm."""
    return lambda f: ["sliding" if i % every else "full" for i in range(f.layers())]


def _late_window(f: Fields) -> list[str]:
    """qwen2 and its kin: only where use_sliding_window says so, and from a layer on."""
    if not f.flag("use_sliding_window", False):
        return _full(f)
    first = f.number("max_window_layers", 28)
    return ["sliding" if i >= first else "full" for i in range(f.layers())]


def _llama4(f: Fields) -> list[str]:
    """Layers with rotary positions attend within chunks, the others to everything."""
    count = f.layers()
    listed = f.numbers("no_rope_layers")
    every = f.optional("no_rope_layer_interval") or 4
    rope = listed or [int((i + 1) % every != 0) for i in range(count)]
    if len(rope) != count:
        entries = plural(len(rope), "entry", "entries")
        raise f.fail(f"no_rope_layers has {entries} for {plural(count, 'layer')}")
    return ["chunked" if value else "full" for value in rope]


def _interval(f: Fields) -> list[str]:
    """qwen3_next and its kin: every full_attention_interval-th layer is full, others linear."""
    every = max(1, f.number("full_attention_interval", 4))
    return ["recurrent" if (i + 1) % every else "full" for i in range(f.layers())]


def _jamba(f: Fields) -> list[str]:
    period = max(1, f.number("attn_layer_period", 8))
    offset = f.number("attn_layer_offset", 4)
    return ["full" if i % period == offset else "recurrent" for i in range(f.layers())]


def _zamba(f: Fields) -> list[str]:
    """zamba: one mamba layer in each period runs beside the shared attention block."""
    period = max(1, f.number("attn_layer_period", 6))
    offset = f.number("attn_layer_offset", 4)
    kinds = ["both" if i % period == offset else "recurrent" for i in range(f.layers())]
    return ["recurrent", "recurrent", "both", *kinds[3:]][: len(kinds)]


def _zamba2(f: Fields) -> list[str]:
    return _indexed(f, "hybrid_layer_ids", "both")


def _bamba(f: Fields) -> list[str]:
    return _indexed(f, "attn_layer_indices", "full")


def _lfm2(f: Fields) -> list[str]:
    """Without a list of the attention layers the class takes every layer for one."""
    return _indexed(f, "full_attn_idxs", "full") if f.has("full_attn_idxs") else _full(f)


def _indexed(f: Fields, name: str, kind: str) -> list[str]:
    """Return recurrent layers, but ``kind`` where the list ``name`` has the index."""
    listed = set(f.numbers(name) or ())
    return [kind if i in listed else "recurrent" for i in range(f.layers())]


def _kimi(f: Fields) -> list[str]:
    """linear_attn_config counts its layers from 1."""
    linear = f.nested("linear_attn_config").get("kda_layers")
    if not isinstance(linear, list):
        return _interval(f)
    return ["recurrent" if i + 1 in linear else "full" for i in range(f.layers())]


def _nemotron_h(f: Fields) -> list[str]:
    pattern = f.config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= set(_LETTERS):
        raise f.fail("hybrid_override_pattern is missing or has letters other than M * - E")
    return [_LETTERS[letter] for letter in pattern[: f.bounded(len(pattern))]]


def _minimax(f: Fields) -> list[str]:
    """attn_type_list has 1 for softmax attention; without it every second layer is linear."""
    listed = f.numbers("attn_type_list")
    count = f.layers()
    if listed is None:
        return ["recurrent" if i % 2 else "full" for i in range(count)]
    if len(listed) != count:
        entries = plural(len(listed), "entry", "entries")
        raise f.fail(f"attn_type_list has {entries} for {plural(count, 'layer')}")
    return ["full" if value == 1 else "recurrent" for value in listed]


def _griffin(f: Fields) -> list[str]:
    """The pattern block_types, repeated; attention is local."""
    pattern = f.config.get("block_types")
    if not isinstance(pattern, list) or not pattern:
        pattern = ["recurrent", "recurrent", "attention"]
    kinds = ["sliding" if word == "attention" else "recurrent" for word in pattern]
    return [kinds[i % len(kinds)] for i in range(f.layers())]


def _recurrent(f: Fields) -> list[str]:
    return ["recurrent"] * f.layers()


def _both(f: Fields) -> list[str]:
    return ["both"] * f.layers()


def _twice(f: Fields) -> list[str]:
    """longcat_flash: two attention blocks in each of num_layers layers."""
    halves = f.optional("num_layers")
    return ["full"] * (2 * f.bounded(halves) if halves else f.layers())


def _none(f: Fields) -> list[str]:
    return ["none"] * f.layers()


LAYOUTS: dict[str, Callable[[Fields], list[str]]] = {
    "full": _full,
    "sliding": _sliding,
    "every 2": _every(2),
    "every 3": _every(3, "global_attn_every_n_layers"),
    "every 4": _every(4),
    "every 4 global": _every(4, "global_attn_every_n_layers"),
    "every 5": _every(5),
    "every 6": _every(6),
    "gemma4": _gemma4,
    "first of 4": _first_of(4),
    "late window": _late_window,
    "llama4": _llama4,
    "interval": _interval,
    "jamba": _jamba,
    "zamba": _zamba,
    "zamba2": _zamba2,
    "bamba": _bamba,
    "lfm2": _lfm2,
    "kimi": _kimi,
    "nemotron_h": _nemotron_h,
    "minimax": _minimax,
    "griffin": _griffin,
    "recurrent": _recurrent,
    "both": _both,
    "twice": _twice,
    "none": _none,
}
