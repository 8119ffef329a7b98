"""RunConfig: the settings of one engine context, under the engine's own names.

The three programs that people run start from different defaults; ``DEFAULTS`` holds each set
(llama.cpp: common/common.h and tools/server; llama-cpp-python: llama_cpp/llama.py; Ollama: its
runner's command line).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localkv.errors import UsageError
from localkv.tuples import NamedTuple

FLASH_ATTN = ("auto", "on", "off")
SPLIT_MODES = ("layer", "none")
MAX_SEQ = 256  # LLAMA_MAX_SEQ, src/llama-cparams.h
CTX_PAD = 256  # GGML_PAD(n_ctx, 256), src/llama-context.cpp


class RunConfig(NamedTuple):
    """The settings of one context.

    ``n_ctx`` is the total over all slots, as ``-c`` of llama.cpp (0: the training context);
    ``n_seq_max`` the slots; ``n_outputs_max`` the rows of logits that one batch may ask for
    (0: ``n_batch``, as the C API has it; llama-server sets it to the number of slots).
    ``n_gpu_layers`` counts from the output layer down, -1 for all. ``device_free`` are bytes free
    per device, which steer the default split. ``repack`` False is llama.cpp's ``--no-repack``.
    ``n_rs_seq`` are snapshots of recurrent state kept for speculative decoding; ``embeddings`` and
    ``backend_sampling`` make room for embeddings and for samplers in the back end.
    ``cpu_features`` (avx2, avx512, neon, dotprod, i8mm, ...) decide which weights a CPU repacks;
    none are assumed. ``mmap`` False: weights are read into memory instead of mapped.
    ``n_cpu_moe``: the experts of so many blocks, from the first on, stay on the host (-1: all).
    """

    n_ctx: int = 0
    n_seq_max: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    kv_unified: bool = False
    swa_full: bool = False
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    n_outputs_max: int = 0
    n_gpu_layers: int = 0
    n_devices: int = 1
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] | None = None
    no_kv_offload: bool = False
    op_offload: bool = True
    repack: bool = True
    device_free: tuple[int, ...] | None = None
    n_rs_seq: int = 0
    embeddings: bool = False
    backend_sampling: bool = False
    mmap: bool = True
    cpu_features: tuple[str, ...] = ()
    n_cpu_moe: int = 0

    def with_(self, **changes: Any) -> RunConfig:
        """Return a copy with the named fields changed."""
        return self._replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, field by field."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._asdict().items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunConfig:
        """Return the settings written by :meth:`to_dict`; names it does not know are ignored."""
        return cls(**plain_fields(cls, data))


def plain_fields(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``data`` says of the fields of the record ``cls``; JSON's lists as tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in data.items()
        if name in cls.__annotations__
    }


def validate(config: RunConfig) -> RunConfig:
    """Return ``config`` unchanged when every value is one that the engine takes.

    Raises:
        UsageError: a value is out of the engine's range, with the engine's rule.
    """
    _require(config.n_ctx >= 0, "n_ctx must not be negative", "0 means the training context")
    for name in ("n_ctx", "n_batch", "n_ubatch"):
        # The engine's fields are uint32_t: a larger value would wrap around without a word.
        _require(
            getattr(config, name) < 1 << 32, f"{name} must be below 2**32", "give a smaller value"
        )
    _require(
        1 <= config.n_seq_max <= MAX_SEQ,
        f"{config.n_seq_max} slots: the engine takes 1 to {MAX_SEQ}",
        "n_seq_max must be <= 256",
    )
    _require(config.n_batch >= 1, "n_batch must be at least 1", "the engine's default is 2048")
    _require(config.n_ubatch >= 1, "n_ubatch must be at least 1", "the engine's default is 512")
    _require(config.n_rs_seq >= 0, "n_rs_seq must not be negative", "0 keeps no snapshots")
    _require(config.n_outputs_max >= 0, "n_outputs_max must not be negative", "0 means n_batch")
    _require(
        config.flash_attn in FLASH_ATTN,
        f"flash_attn {config.flash_attn!r} is not a setting",
        "use auto, on or off",
    )
    _require(
        config.split_mode in SPLIT_MODES,
        f"split_mode {config.split_mode!r} is not supported",
        "use layer or none",
    )
    return config


def _require(condition: bool, message: str, hint: str) -> None:
    if not condition:
        raise UsageError(message, hint)


class EffectiveContext(NamedTuple):
    """What the engine makes of the requested context: sizes in tokens (cells)."""

    n_ctx: int
    n_ctx_seq: int
    n_stream: int
    n_batch: int
    n_ubatch: int


def pad(value: int, to: int = CTX_PAD) -> int:
    """Return ``value`` rounded up to a multiple of ``to``."""
    return -(-value // to) * to


def effective_context(
    config: RunConfig, n_ctx_train: int, *, causal: bool = True
) -> EffectiveContext:
    """Return the context that the engine creates for ``config``.

    Source: llama_context::llama_context in src/llama-context.cpp. ``n_batch`` is cut to ``n_ctx``
    before padding (causal models); ``n_ctx`` is padded to 256; without a unified cache each slot
    gets ``pad256(n_ctx / n_seq_max)`` cells, which can add up to more than was asked for.
    """
    asked = config.n_ctx or n_ctx_train
    n_batch = min(asked, config.n_batch) if causal else config.n_batch
    n_ubatch = min(n_batch, config.n_ubatch)
    n_ctx = pad(asked)
    if config.kv_unified:
        return EffectiveContext(n_ctx, n_ctx, 1, n_batch, n_ubatch)
    n_ctx_seq = pad(n_ctx // config.n_seq_max)
    return EffectiveContext(
        n_ctx_seq * config.n_seq_max, n_ctx_seq, config.n_seq_max, n_batch, n_ubatch
    )
