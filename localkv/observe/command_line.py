"""The settings of a server, read from the command line and environment of its process.

Sources: common/arg.cpp of llama.cpp; envconfig/config.go and runner/runner.go of Ollama 0.17;
vLLM's and SGLang's arguments. A flag counts more than its environment variable; of a flag given
twice the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TRUE, _FALSE = ("1", "on", "true", "enabled"), ("0", "off", "false", "disabled")


def _mib(text: str) -> int:
    return int(text) if int(text) < 0 else int(text) << 20


def _layers(text: str) -> int:
    # "auto" fits what it can to the free memory: not known from the command line.
    return -1 if text == "all" else int(text)


#: Setting -> (its flags, its environment variable, how its text becomes a value).
_VALUES: dict[str, tuple[tuple[str, ...], str, Callable[[str], Any]]] = {
    "model": (("-m", "--model"), "LLAMA_ARG_MODEL", str),
    "port": (("--port",), "LLAMA_ARG_PORT", int),
    "n_ctx": (("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE", int),
    "n_seq_max": (("-np", "--parallel"), "LLAMA_ARG_N_PARALLEL", int),
    "n_batch": (("-b", "--batch-size"), "LLAMA_ARG_BATCH", int),
    "n_ubatch": (("-ub", "--ubatch-size"), "LLAMA_ARG_UBATCH", int),
    "cache_type_k": (("-ctk", "--cache-type-k"), "LLAMA_ARG_CACHE_TYPE_K", str),
    "cache_type_v": (("-ctv", "--cache-type-v"), "LLAMA_ARG_CACHE_TYPE_V", str),
    "flash_attn": (("-fa", "--flash-attn"), "LLAMA_ARG_FLASH_ATTN", str),
    "n_gpu_layers": (("-ngl", "--gpu-layers", "--n-gpu-layers"), "LLAMA_ARG_N_GPU_LAYERS", _layers),
    "cache_ram": (("-cram", "--cache-ram"), "LLAMA_ARG_CACHE_RAM", _mib),
    "ctx_checkpoints": (
        ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
        "LLAMA_ARG_CTX_CHECKPOINTS",
        int,
    ),
    "checkpoint_min_step": (
        ("-cms", "--checkpoint-min-step"),
        "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
        int,
    ),
    "sleep_idle": (("--sleep-idle-seconds",), "", int),
    "slot_save_path": (("--slot-save-path",), "", str),
    "log_file": (("--log-file",), "LLAMA_ARG_LOG_FILE", str),
    "load_mode": (("-lm", "--load-mode"), "LLAMA_ARG_LOAD_MODE", str),
}
#: Switch -> (flags that set it, flags that unset it, its environment variable).
_SWITCHES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "kv_unified": (
        ("-kvu", "--kv-unified"),
        ("-no-kvu", "--no-kv-unified"),
        "LLAMA_ARG_KV_UNIFIED",
    ),
    "swa_full": (("--swa-full",), (), "LLAMA_ARG_SWA_FULL"),
    "mmap": (("--mmap",), ("--no-mmap",), "LLAMA_ARG_MMAP"),
    "cache_idle_slots": (
        ("--cache-idle-slots",),
        ("--no-cache-idle-slots",),
        "LLAMA_ARG_CACHE_IDLE_SLOTS",
    ),
    "kv_offload": (("-kvo", "--kv-offload"), ("-nkvo", "--no-kv-offload"), "LLAMA_ARG_KV_OFFLOAD"),
}


def server_settings(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what a llama-server that was started so was told; None when it is another program.

    Keys are the fields of ``RunConfig`` and ``model``, ``port``, ``cache_ram`` (bytes),
    ``ctx_checkpoints``, ``checkpoint_min_step``, ``sleep_idle`` (seconds), ``slot_save_path``,
    ``log_file``, ``load_mode``, ``cache_idle_slots`` and ``kv_offload``; what it was not told is
    left out. Values that it would refuse are, too.
    """
    if not any("llama-server" in word for word in words[:2]):
        return None
    found: dict[str, Any] = {}
    for name, (flags, variable, convert) in _VALUES.items():
        text = _after(words, flags) or variables.get(variable)
        try:
            if text is not None:
                found[name] = convert(text)
        except ValueError:
            continue
    for name, (on, off, variable) in _SWITCHES.items():
        said = next((word in on for word in reversed(words) if word in on or word in off), None)
        told = variables.get(variable, "").lower()
        if said is None and told in (*_TRUE, *_FALSE):
            said = told in _TRUE
        if said is not None:
            found[name] = said
    if found.get("n_seq_max", 0) < 1:
        # Left to choose, it takes four slots that share one cache.
        found.pop("n_seq_max", None)
    return found


def holder_settings(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what the program that holds a model was told, whichever of the known ones it is.

    Keys as for :func:`server_settings`, and ``dtype``, ``max_model_len``; ``runner`` is True for
    the process of an Ollama before 0.30, whose context is told to it later. None: another program,
    or one that says nothing of a model.
    """
    if (found := server_settings(words, variables)) is not None:
        return found
    model = _after(words, ("--model", "--model-path")) or _after(words, ("serve",))
    if model is None or model.startswith("-"):
        return None
    if "runner" in words[1:2]:
        told = {"n_seq_max": variables.get("OLLAMA_NUM_PARALLEL", "")}
        parallel = {name: int(text) for name, text in told.items() if text.isdecimal()}
        kind = variables.get("OLLAMA_KV_CACHE_TYPE") or "f16"
        return {
            "model": model,
            "runner": True,
            "cache_type_k": kind,
            "cache_type_v": kind,
            **parallel,
        }
    length = _after(words, ("--max-model-len", "--context-length")) or ""
    known = {"model": model, "dtype": _after(words, ("--dtype",)) or "auto"}
    return {**known, "max_model_len": int(length)} if length.isdecimal() else dict(known)


def is_unified(settings: Mapping[str, Any] | None) -> bool | None:
    """Return whether a server with these settings shares one cache among its slots.

    None when nothing is known of it. Source: tools/server/server.cpp.
    """
    if settings is None:
        return None
    return bool(settings.get("kv_unified", "n_seq_max" not in settings))


def is_sleeper(settings: Mapping[str, Any] | None) -> bool | None:
    """Return whether a server with these settings unloads its model when idle; None: not known."""
    return None if settings is None else settings.get("sleep_idle", -1) > 0


def _after(words: Sequence[str], flags: Sequence[str]) -> str | None:
    """Return what follows the last of ``flags``."""
    for index in range(len(words) - 2, -1, -1):
        if words[index] in flags:
            return words[index + 1]
    return None
