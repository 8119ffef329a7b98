"""Recurrent state of a layer, in elements per sequence: (convolution, state-space or linear).

Source: transformers' modeling files, which vLLM's MambaStateShapeCalculator
(model_executor/layers/mamba/mamba_utils.py) follows. The defaults are those of the configuration
classes in transformers 5.19.
"""

from __future__ import annotations

from collections.abc import Callable

from localkv.model.hf_fields import Fields

State = tuple[int, int]


def _mamba(f: Fields) -> State:
    """Mamba 1 as its own model: (kernel - 1) x inner, inner x state."""
    inner = f.optional("intermediate_size") or f.number("expand", 2) * f.need("n_embd")
    return (f.number("conv_kernel", 4) - 1) * inner, inner * f.number("state_size", 16)


def _jamba(f: Fields) -> State:
    inner = f.number("mamba_expand", 2) * f.need("n_embd")
    return (f.number("mamba_d_conv", 4) - 1) * inner, inner * f.number("mamba_d_state", 16)


def _ssd(inner: int, groups: int, heads: int, head_dim: int, state: int, kernel: int) -> State:
    """Mamba 2: x, B and C run through the convolution; one state matrix per head."""
    return (kernel - 1) * (inner + 2 * groups * state), heads * head_dim * state


def _mamba2(f: Fields) -> State:
    inner = f.number("expand", 2) * f.need("n_embd")
    return _ssd(
        inner,
        f.number("n_groups", 8),
        f.number("num_heads", 128),
        f.number("head_dim", 64),
        f.number("state_size", 128),
        f.number("conv_kernel", 4),
    )


def _bamba(f: Fields) -> State:
    """bamba, granitemoehybrid and falcon_h1; the last may name its inner width."""
    heads = f.number("mamba_n_heads", 128)
    inner = f.optional("mamba_d_ssm") or f.number("mamba_expand", 2) * f.need("n_embd")
    head_dim = f.config.get("mamba_d_head")
    return _ssd(
        inner,
        f.number("mamba_n_groups", 1),
        heads,
        f.number("mamba_d_head") if isinstance(head_dim, int) else inner // max(1, heads),
        f.number("mamba_d_state", 256),
        f.number("mamba_d_conv", 4),
    )


def _nemotron_h(f: Fields) -> State:
    heads, head_dim = f.number("mamba_num_heads", 128), f.number("mamba_head_dim", 64)
    return _ssd(
        heads * head_dim,
        f.number("n_groups", 8),
        heads,
        head_dim,
        f.number("ssm_state_size", 128),
        f.number("conv_kernel", 4),
    )


def _zamba2(f: Fields) -> State:
    inner = f.number("mamba_expand", 2) * f.need("n_embd")
    heads = f.number("n_mamba_heads", 8)
    return _ssd(
        inner,
        f.number("mamba_ngroups", 1),
        heads,
        f.optional("mamba_headdim") or inner // max(1, heads),
        f.number("mamba_d_state", 64),
        f.number("mamba_d_conv", 4),
    )


def _zamba(f: Fields) -> State:
    inner = f.number("mamba_expand", 2) * f.need("n_embd")
    return (f.number("mamba_d_conv", 4) - 1) * inner, inner * f.number("mamba_d_state", 16)


def _gated_delta(f: Fields) -> State:
    """Qwen3-Next and its kin: q, k and v run through the convolution; a k x v matrix per head."""
    k_dim, v_dim = f.number("linear_key_head_dim", 128), f.number("linear_value_head_dim", 128)
    k_heads, v_heads = f.number("linear_num_key_heads", 16), f.number("linear_num_value_heads", 32)
    conv = 2 * k_dim * k_heads + v_dim * v_heads
    return (f.number("linear_conv_kernel_dim", 4) - 1) * conv, v_heads * v_dim * k_dim


def _short_conv(f: Fields) -> State:
    """LFM2: a short convolution and nothing else."""
    return (f.number("conv_L_cache", 3) - 1) * f.need("n_embd"), 0


def _lightning(f: Fields) -> State:
    """MiniMax: linear attention, a head_dim x head_dim matrix per query head."""
    heads = f.need("n_head")
    head_dim = f.fact("head_dim") or f.need("n_embd") // heads
    return 0, heads * head_dim * head_dim


def _kimi_delta(f: Fields) -> State:
    """Kimi Linear: q, k and v convolved apart, a square matrix per head."""
    linear = f.nested("linear_attn_config")
    inner = Fields(linear, f.model_type, f.where) if linear else f
    heads = inner.number("num_heads" if linear else "linear_num_heads", 32)
    head_dim = inner.number("head_dim" if linear else "linear_head_dim", 128)
    kernel = inner.number("short_conv_kernel_size" if linear else "linear_conv_kernel_dim", 4)
    return (kernel - 1) * 3 * heads * head_dim, heads * head_dim * head_dim


def _griffin(f: Fields) -> State:
    """RecurrentGemma: a gated linear recurrence over lru_width channels."""
    width = f.optional("lru_width") or f.need("n_embd")
    return (f.number("conv1d_width", 4) - 1) * width, width


STATES: dict[str, Callable[[Fields], State]] = {
    "mamba": _mamba,
    "jamba": _jamba,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "nemotron_h": _nemotron_h,
    "zamba": _zamba,
    "zamba2": _zamba2,
    "gated_delta": _gated_delta,
    "short_conv": _short_conv,
    "lightning": _lightning,
    "kimi_delta": _kimi_delta,
    "griffin": _griffin,
}
