"""The defaults of the three programs that people run; the same options mean different contexts.

llama-server divides ``-c`` among its slots; Ollama multiplies ``num_ctx`` by its parallel
requests; llama-cpp-python's ``Llama`` has one slot, keeps sliding layers at full size and turns
flash attention off.

Sources: common/common.h, common/arg.cpp and tools/server/server.cpp of llama.cpp (slots left to
the program: four, one cache for all of them); llama_cpp/llama.py of llama-cpp-python (``Llama``'s
arguments); Ollama's scheduler and runner, version 0.33.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localkv.errors import UsageError
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig

#: Slots of llama-server when it is left to choose; it then shares one cache among them.
SERVER_AUTO_SLOTS = 4
#: Tokens per request of Ollama on a machine with less than 23 GiB of VRAM.
OLLAMA_NUM_CTX = 4096
#: Up to this total context Ollama batches so many tokens; beyond the last, 2048.
_OLLAMA_BATCH = ((4096, 512), (32768, 1024))
#: Architectures to which Ollama gives one slot, whatever OLLAMA_NUM_PARALLEL says.
OLLAMA_SINGLE = frozenset(
    {
        "mllama",
        "qwen3vl",
        "qwen3vlmoe",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "nemotron_h_omni",
    }
)


def run_config(program: str, shape: ModelShape, **asked: Any) -> RunConfig:
    """Return the settings that ``program`` runs ``shape`` with, given what was ``asked`` for.

    ``asked`` are fields of :class:`RunConfig`; those that are None were not asked for. Under
    "ollama", ``n_ctx`` is num_ctx: tokens per request, not in all.

    Raises:
        UsageError: there is no such program.
    """
    fill = PROGRAMS.get(program)
    if fill is None:
        raise UsageError(f"{program!r} has no defaults here", f"use {', '.join(PROGRAMS)}")
    return fill(shape, {name: value for name, value in asked.items() if value is not None})


def _llama_server(shape: ModelShape, asked: dict[str, Any]) -> RunConfig:
    slots = asked.get("n_seq_max", SERVER_AUTO_SLOTS)
    chosen = {
        "n_seq_max": slots,
        "kv_unified": "n_seq_max" not in asked,
        "n_outputs_max": slots,
    }
    return RunConfig(**{**chosen, **asked})


def _llama_cpp_python(shape: ModelShape, asked: dict[str, Any]) -> RunConfig:
    chosen = {
        "n_ctx": 512,
        "n_batch": 512,
        "n_ubatch": 512,
        "swa_full": True,
        "flash_attn": "off",
    }
    return RunConfig(**{**chosen, **asked})


def ollama_batch(total: int) -> int:
    """Return the tokens that Ollama batches when ``total`` tokens are shared by all requests."""
    return next((size for limit, size in _OLLAMA_BATCH if total <= limit), 2048)


def _ollama(shape: ModelShape, asked: dict[str, Any]) -> RunConfig:
    slots = 1 if shape.architecture in OLLAMA_SINGLE else asked.get("n_seq_max", 1)
    per_request = min(asked.get("n_ctx") or OLLAMA_NUM_CTX, shape.n_ctx_train or OLLAMA_NUM_CTX)
    total = per_request * slots
    batch = ollama_batch(total)
    chosen = {"n_batch": batch, "n_ubatch": batch, "n_outputs_max": slots}
    return RunConfig(**{**chosen, **asked, "n_ctx": total, "n_seq_max": slots})


def ollama_before_030(shape: ModelShape, config: RunConfig, num_batch: int = 512) -> RunConfig:
    """Return ``config`` for ``shape`` as Ollama before 0.30 runs it, with llama.cpp inside.

    A batch does not grow with the context and is for each slot, every token of one may ask for
    logits, and sliding layers are kept at full size: the C API's defaults. Source:
    NewContextParams in llama/llama.go and llm/server.go of Ollama 0.17.
    """
    return config.with_(
        n_batch=num_batch * config.n_seq_max,
        n_ubatch=num_batch,
        n_outputs_max=0,
        swa_full=any(layer.window for layer in shape.layers),
    )


PROGRAMS: dict[str, Callable[[ModelShape, dict[str, Any]], RunConfig]] = {
    "llama-server": _llama_server,
    "llama-cpp-python": _llama_cpp_python,
    "ollama": _ollama,
}
