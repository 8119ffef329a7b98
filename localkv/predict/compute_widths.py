"""The widths that the recipes name: elements per token of one block, from the model alone."""

from __future__ import annotations

from localkv.model import ModelShape
from localkv.model.shape import LayerSpec


class Numbers:
    """A model's own integer keys, one value each."""

    def __init__(self, shape: ModelShape) -> None:
        """Read the keys of ``shape``."""
        self._values = shape.numbers

    def __call__(self, key: str, default: int = 0, block: int = -1) -> int:
        """Return the number under ``key``, that of ``block`` in a list (without one, the most).

        A single number that is not above 0 counts as missing; no number is ever below 0.
        """
        value = self._values.get(key, default)
        if isinstance(value, tuple):
            one = value[block] if 0 <= block < len(value) else max(value, default=default)
            return max(one, 0)
        return value if value > 0 else default


def streams(number: Numbers) -> int:
    """Return how many residual streams a model with several of them has."""
    return number("hyper_connection.count") or 4  # n_altup in gemma3n.cpp, which reads no key


def elements(shape: ModelShape, layer: LayerSpec, number: Numbers) -> dict[str, int]:
    """Return the elements per token of each width that depends on the model alone."""
    n_embd, heads = shape.n_embd, layer.n_head
    return {
        "E": n_embd,
        "E3": 3 * n_embd,
        "E6": 6 * n_embd,
        "HC": streams(number) * n_embd,
        **_attention(shape, layer, number),
        **_feed_forward(shape, layer, number),
        **_state(layer, heads, n_embd, number),
    }


def _attention(shape: ModelShape, layer: LayerSpec, number: Numbers) -> dict[str, int]:
    heads, kv_heads = layer.n_head, layer.n_head_kv
    k_head, v_head = layer.k_head, layer.v_head
    key = number("attention.key_length_mla", k_head) if shape.mla else k_head
    value = number("attention.value_length_mla", v_head) if shape.mla else v_head
    latent = number("attention.kv_lora_rank", v_head)
    rope = number("rope.dimension_count")
    index_heads = number("attention.indexer.head_count")
    index_key = number("attention.indexer.key_length")
    return {
        "Q": heads * key,
        "QQ": 2 * heads * k_head,
        "K": kv_heads * k_head,
        "V": kv_heads * v_head,
        "QKV": heads * k_head + kv_heads * (k_head + v_head),
        "O": heads * value,
        # MLA: Q's low rank, Q against the latent, its roped part, both; the same of K
        "QL": number("attention.q_lora_rank"),
        "QA": heads * latent,
        "QR": heads * rope,
        "QC": heads * (latent + rope),
        "KC": latent + rope,
        "KL": latent,
        "KR": rope,
        # the indexer's key, weights per head and queries
        "IK": index_key,
        "IH": index_heads,
        "IQ": index_heads * index_key,
    }


def _feed_forward(shape: ModelShape, layer: LayerSpec, number: Numbers) -> dict[str, int]:
    block = layer.index
    used = number("expert_used_count")
    n_ff = number("feed_forward_length", shape.n_ff, block)
    expert = number("expert_feed_forward_length", n_ff, block)
    shared = number(
        "expert_shared_feed_forward_length", expert * number("expert_shared_count", 1), block
    )
    return {
        "F": n_ff,
        "FF": 2 * n_ff,
        "X": shape.n_expert,
        "U": used,
        "GU": expert * used,
        "GG": 2 * expert * used,
        "EU": shape.n_embd * used,
        "S": shared,
    }


def _state(layer: LayerSpec, heads: int, n_embd: int, number: Numbers) -> dict[str, int]:
    inner = number("ssm.inner_size", heads * number("kda.head_dim")) or n_embd
    kernel = max(number("ssm.conv_kernel", number("shortconv.l_cache")), 2)
    window = layer.r_width // (kernel - 1)  # channels of the convolution
    steps = number("ssm.time_step_rank", heads)
    return {
        "I": inner,
        "G": number("ssm.group_count", 1) * number("ssm.state_size"),
        "CV": window,
        "ZM": 2 * inner,
        "ZX": inner + window + steps,
        "XP": steps + 2 * number("ssm.state_size"),
        "DT": steps,
    }
