"""KV heads and head widths of every attention layer of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from localkv.gguf.text import shown
from localkv.model.hf_fields import ALIASES, Fields
from localkv.units import plural


@dataclass(frozen=True)
class Heads:
    """One layer's heads: query heads, KV heads, elements of one K head and of one V head."""

    n_head: int
    n_head_kv: int
    k_head: int
    v_head: int


def attention_heads(f: Fields, heads: str, kinds: list[str]) -> list[Heads]:
    """Return the heads of each layer; ``heads`` is a key of ``HEADS``, layers as in ``kinds``.

    Raises:
        ModelError: the configuration does not say how many heads there are, or how wide.
    """
    return _overridden(f, HEADS[heads](f, kinds))


def latent_heads(f: Fields, kinds: list[str]) -> list[Heads]:
    """Return MLA's heads: one K of the latent and the rotary part, no V."""
    width = f.number("kv_lora_rank", 512) + f.number("qk_rope_head_dim", 64)
    return [Heads(f.need("n_head"), 1, width, 0)] * len(kinds)


def uncompressed_heads(f: Fields) -> tuple[int, int]:
    """Return the elements of K and V of one head that MLA's latent stands for; 0 if not said."""
    nope, rope, v_head = (
        f.optional(name) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return (nope + rope if nope and rope else 0), v_head


def _overridden(f: Fields, heads: list[Heads]) -> list[Heads]:
    """Return ``heads`` with the layers that per_layer_config names changed: transformers 5."""
    changed = list(heads)
    for key, values in f.nested("per_layer_config").items():
        index = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 9 else -1
        if not (isinstance(values, Mapping) and 0 <= index < len(heads)):
            raise f.fail(f"per_layer_config has no layer {shown(str(key), 40)!r}")
        own = Fields(values, "", f.where)
        width = own.optional("head_dim") or heads[index].k_head
        kv = own.optional("num_key_value_heads") or heads[index].n_head_kv
        changed[index] = Heads(heads[index].n_head, kv, width, width)
    return changed


def _plain(f: Fields, kinds: list[str]) -> list[Heads]:
    """GQA: num_key_value_heads, as many as heads without it; head_dim, hidden / heads without it.

    Either may be a list with one entry per layer.
    """
    n_head = _per_layer(f, "n_head", len(kinds))
    n_head_kv = _per_layer(f, "n_head_kv", len(kinds), n_head)
    return [
        Heads(q, kv, width, width)
        for q, kv, width in zip(n_head, n_head_kv, _head_dims(f, n_head), strict=True)
    ]


def _head_dims(f: Fields, n_head: list[int]) -> list[int]:
    head_dim = f.fact("head_dim")
    if head_dim:
        return [head_dim] * len(n_head)
    n_embd = f.need("n_embd")
    return [n_embd // max(1, heads) for heads in n_head]


def _per_layer(f: Fields, fact: str, count: int, default: list[int] | None = None) -> list[int]:
    for name in ALIASES[fact]:
        listed = f.numbers(name)
        if listed is not None:
            if len(listed) != count:
                entries = plural(len(listed), "entry", "entries")
                raise f.fail(f"{name} has {entries} for {plural(count, 'layer')}")
            return listed
    if default is None:
        return [f.need(fact)] * count
    value = f.fact(fact)
    return [value] * count if value else default


def _multi_query(flag: bool, f: Fields, kinds: list[str]) -> list[Heads]:
    """Return plain heads, with a single KV head where ``flag`` says multi-query."""
    plain = _plain(f, kinds)
    return [Heads(h.n_head, 1, h.k_head, h.v_head) for h in plain] if flag else plain


def _multi_head(f: Fields, kinds: list[str]) -> list[Heads]:
    n_head = f.need("n_head")
    width = f.fact("head_dim") or f.need("n_embd") // n_head
    return [Heads(n_head, n_head, width, width)] * len(kinds)


def _falcon(f: Fields, kinds: list[str]) -> list[Heads]:
    """multi_query gives one KV head, unless the new decoder architecture names its own count."""
    new = f.flag("new_decoder_architecture", False)
    return _multi_query(not new and f.flag("multi_query", True), f, kinds)


def _bigcode(f: Fields, kinds: list[str]) -> list[Heads]:
    return _multi_query(f.flag("multi_query", True), f, kinds)


def _dbrx(f: Fields, kinds: list[str]) -> list[Heads]:
    inner = Fields(f.nested("attn_config"), f.model_type, f.where)
    n_head = f.need("n_head")
    n_head_kv = inner.number("kv_n_heads", 1)
    width = f.need("n_embd") // n_head
    f.assumed.extend(inner.assumed)
    return [Heads(n_head, n_head_kv, width, width)] * len(kinds)


def _mpt(f: Fields, kinds: list[str]) -> list[Heads]:
    inner = f.nested("attn_config")
    n_head = f.need("n_head")
    named = inner.get("kv_n_heads")
    n_head_kv = named if isinstance(named, int) and named > 0 else n_head
    if inner.get("attn_type") == "multiquery_attention":
        n_head_kv = 1
    width = f.need("n_embd") // n_head
    return [Heads(n_head, n_head_kv, width, width)] * len(kinds)


def _gemma4(f: Fields, kinds: list[str]) -> list[Heads]:
    """Full layers have heads of their own width, and where K serves as V their own count.

    Newer files carry the same as per_layer_config.
    """
    sliding = _plain(f, kinds)
    if f.has("per_layer_config"):
        return sliding
    wide = f.number("global_head_dim", 512)
    named = f.optional("num_global_key_value_heads")
    own = named if named and f.flag("attention_k_eq_v", False) else None
    return [
        Heads(h.n_head, own or h.n_head_kv, wide, wide) if kind == "full" else h
        for h, kind in zip(sliding, kinds, strict=True)
    ]


def _zamba(f: Fields, kinds: list[str]) -> list[Heads]:
    """The shared block reads the hidden state beside the embeddings: twice as wide."""
    n_head = f.need("n_head")
    n_head_kv = f.fact("n_head_kv") or n_head
    width = f.optional("attention_head_dim") or 2 * f.need("n_embd") // n_head
    return [Heads(n_head, n_head_kv, width, width)] * len(kinds)


def _expanded_mla(f: Fields, kinds: list[str]) -> list[Heads]:
    """minicpm3: the latent is expanded before it is cached; vLLM pads V to the width of K."""
    width = f.number("qk_nope_head_dim", 64) + f.number("qk_rope_head_dim", 32)
    n_head = f.need("n_head")
    return [Heads(n_head, n_head, width, width)] * len(kinds)


HEADS: dict[str, Callable[[Fields, list[str]], list[Heads]]] = {
    "plain": _plain,
    "multi-head": _multi_head,
    "falcon": _falcon,
    "bigcode": _bigcode,
    "dbrx": _dbrx,
    "mpt": _mpt,
    "gemma4": _gemma4,
    "zamba": _zamba,
    "expanded mla": _expanded_mla,
}
