"""The settings of a run in the words of each program: flags, arguments, variables.

Sources: common/arg.cpp of llama.cpp; llama_cpp/llama.py (class ``Llama``) and
llama_cpp/llama_cpp.py (``llama_context_params``) of llama-cpp-python; envconfig/config.go,
llm/llama_server.go and api/types.go (Runner) of Ollama 0.33; vllm/engine/arg_utils.py of vLLM.
"""

from __future__ import annotations

from typing import Any

from localkv.gguf.types import CACHE_TYPES, GGML_TYPES_BY_NAME
from localkv.predict.config import RunConfig
from localkv.predict.defaults import ollama_batch
from localkv.tuples import NamedTuple
from localkv.units import MIB

#: The one word that names each program, in the order in which commands are shown.
PROGRAMS = ("llama-server", "llama-cpp-python", "ollama", "vllm")

#: What llama-server uses when nothing is said (common/common.h); those flags are left away.
_SERVER_VALUES: dict[str, tuple[str, object]] = {
    "n_batch": ("-b", 2048),
    "n_ubatch": ("-ub", 512),
    "cache_type_k": ("-ctk", "f16"),
    "cache_type_v": ("-ctv", "f16"),
    "flash_attn": ("-fa", "auto"),
    "split_mode": ("-sm", "layer"),
    "main_gpu": ("-mg", 0),
}
#: Switches of llama-server: the value of the setting that needs the flag.
_SERVER_SWITCHES: dict[str, tuple[str, bool]] = {
    "kv_unified": ("--kv-unified", True),
    "swa_full": ("--swa-full", True),
    "no_kv_offload": ("--no-kv-offload", True),
    "op_offload": ("--no-op-offload", False),
    "repack": ("--no-repack", False),
}
#: The cache types that Ollama documents; it uses one for K and V.
OLLAMA_TYPES = ("f16", "q8_0", "q4_0")
_FLASH = {"auto": -1, "off": 0, "on": 1}
_SPLIT = {"none": 0, "layer": 1}


class Limits(NamedTuple):
    """What llama-server may keep in host memory beside its buffers; None: as it does by itself.

    ``cache_ram`` are bytes for the prompt cache (0: none, -1: no limit), ``ctx_checkpoints`` are
    counted per slot.
    """

    cache_ram: int | None = None
    ctx_checkpoints: int | None = None


NO_LIMITS = Limits()


def llama_server_flags(
    config: RunConfig, n_ctx: int, limits: Limits = NO_LIMITS
) -> dict[str, tuple[str, ...]]:
    """Return the words of llama-server's command line by setting; ``n_ctx`` over all slots.

    What the server does by itself is left away, but for context and slots.
    """
    words: dict[str, tuple[str, ...]] = {
        "n_ctx": ("-c", str(n_ctx)),
        "n_seq_max": ("-np", str(config.n_seq_max)),
    }
    for name, (flag, default) in _SERVER_VALUES.items():
        value = getattr(config, name)
        if value != default:
            words[name] = (flag, str(value))
    for name, (flag, needed) in _SERVER_SWITCHES.items():
        if bool(getattr(config, name)) is needed:
            words[name] = (flag,)
    if config.n_gpu_layers:
        # -1 would be read as auto.
        layers = "all" if config.n_gpu_layers < 0 else str(config.n_gpu_layers)
        words["n_gpu_layers"] = ("-ngl", layers)
    if config.tensor_split is not None:
        words["tensor_split"] = ("-ts", ",".join(f"{share:g}" for share in config.tensor_split))
    if config.n_cpu_moe:
        words["n_cpu_moe"] = (
            ("--cpu-moe",) if config.n_cpu_moe < 0 else ("--n-cpu-moe", str(config.n_cpu_moe))
        )
    if limits.cache_ram is not None:
        mib = limits.cache_ram if limits.cache_ram < 0 else -(-limits.cache_ram // MIB)
        words["cache_ram"] = ("--cache-ram", str(mib))
    if limits.ctx_checkpoints is not None:
        words["ctx_checkpoints"] = ("--ctx-checkpoints", str(limits.ctx_checkpoints))
    return words


def llama_arguments(config: RunConfig, n_ctx: int) -> dict[str, object]:
    """Return the keyword arguments of llama-cpp-python's class ``Llama``, which has one slot."""
    arguments: dict[str, object] = {
        "n_ctx": n_ctx,
        "n_batch": config.n_batch,
        "n_ubatch": config.n_ubatch,
        # The class turns flash attention off unless told otherwise, and knows no "auto".
        "flash_attn": config.flash_attn != "off",
        "swa_full": config.swa_full,
    }
    if config.n_gpu_layers:
        arguments["n_gpu_layers"] = config.n_gpu_layers
    if config.split_mode != "layer":
        arguments |= {"split_mode": _SPLIT[config.split_mode], "main_gpu": config.main_gpu}
    if config.tensor_split is not None:
        arguments["tensor_split"] = list(config.tensor_split)
    if config.no_kv_offload:
        arguments["offload_kqv"] = False
    if not config.op_offload:
        arguments["op_offload"] = False
    return arguments | _types(config)


def low_level_fields(config: RunConfig, n_ctx: int) -> tuple[dict[str, object], dict[str, object]]:
    """Return what to set in llama_model_params and in llama_context_params.

    Fields whose default in the C API is not that of RunConfig are always there.
    """
    model: dict[str, object] = {"n_gpu_layers": config.n_gpu_layers}
    if config.split_mode != "layer":
        model |= {"split_mode": _SPLIT[config.split_mode], "main_gpu": config.main_gpu}
    if not config.repack:
        model["use_extra_bufts"] = False
    context: dict[str, object] = {
        "n_ctx": n_ctx,
        "n_seq_max": config.n_seq_max,
        "n_batch": config.n_batch,
        "n_ubatch": config.n_ubatch,
        "flash_attn_type": _FLASH.get(config.flash_attn, -1),
        "kv_unified": config.kv_unified,
        "swa_full": config.swa_full,
    }
    if config.n_outputs_max:
        context["n_outputs_max"] = config.n_outputs_max
    if config.no_kv_offload:
        context["offload_kqv"] = False
    return model, context | _types(config)


def _types(config: RunConfig) -> dict[str, object]:
    return {
        field: GGML_TYPES_BY_NAME[name].id
        for field, name in (("type_k", config.cache_type_k), ("type_v", config.cache_type_v))
        if name != "f16" and name in CACHE_TYPES
    }


def ollama_variables(config: RunConfig, limits: Limits = NO_LIMITS) -> dict[str, str]:
    """Return the environment of ``ollama serve``; it hands LLAMA_ARG_* on to its llama-server."""
    variables = {"OLLAMA_NUM_PARALLEL": str(config.n_seq_max)}
    k = config.cache_type_k
    if k != "f16" and k == config.cache_type_v and k in OLLAMA_TYPES:
        variables["OLLAMA_KV_CACHE_TYPE"] = k
        variables["OLLAMA_FLASH_ATTENTION"] = "1"
    elif config.flash_attn != "auto":
        variables["OLLAMA_FLASH_ATTENTION"] = str(int(config.flash_attn == "on"))
    if limits.cache_ram is not None:
        mib = limits.cache_ram if limits.cache_ram < 0 else -(-limits.cache_ram // MIB)
        variables["LLAMA_ARG_CACHE_RAM"] = str(mib)
    if limits.ctx_checkpoints is not None:
        variables["LLAMA_ARG_CTX_CHECKPOINTS"] = str(limits.ctx_checkpoints)
    return variables


def ollama_parameters(config: RunConfig, n_ctx_seq: int) -> dict[str, str]:
    """Return the PARAMETER lines of a Modelfile; ``n_ctx_seq`` are the tokens of one slot."""
    parameters = {"num_ctx": str(n_ctx_seq)}
    if config.n_ubatch != ollama_batch(n_ctx_seq * config.n_seq_max):
        # It is both the logical and the physical batch there.
        parameters["num_batch"] = str(config.n_ubatch)
    if config.n_gpu_layers:
        # -1 is left to Ollama, which then offloads what fits.
        parameters["num_gpu"] = str(999 if config.n_gpu_layers < 0 else config.n_gpu_layers)
    if config.split_mode == "none":
        parameters["main_gpu"] = str(config.main_gpu)
    return parameters


#: The settings of a run that each program can be told; the others it decides by itself.
_TOLD = {
    "llama-server": frozenset(
        {"n_ctx", "n_seq_max", "n_gpu_layers", "tensor_split", "n_cpu_moe", *_SERVER_VALUES}
        | {*_SERVER_SWITCHES, *Limits._fields}
    ),
    "llama-cpp-python": frozenset(
        {"n_ctx", "n_seq_max", "n_batch", "n_ubatch", "flash_attn", "kv_unified", "swa_full"}
        | {"n_gpu_layers", "split_mode", "main_gpu", "no_kv_offload", "tensor_split", "op_offload"}
        | {"cache_type_k", "cache_type_v"}
    ),
    "ollama": frozenset(
        {"n_ctx", "n_seq_max", "n_batch", "n_ubatch", "flash_attn", "n_gpu_layers", "split_mode"}
        | {"main_gpu", "cache_type_k", "cache_type_v", *Limits._fields}
    ),
    "vllm": frozenset({"n_ctx", "n_seq_max"}),
}


class Spoken(NamedTuple):
    """The settings of a run with its contexts as the engine rounds them."""

    config: RunConfig
    n_ctx: int
    n_ctx_seq: int
    limits: Limits = NO_LIMITS

    def told(self) -> dict[str, Any]:
        """Return every setting that some program can be told, by name."""
        return {**self.config._asdict(), "n_ctx": self.n_ctx, **self.limits._asdict()}


def change_in_words(program: str, before: Spoken, after: Spoken) -> str | None:
    """Return what to tell ``program`` to get from ``before`` to ``after``; None where it cannot be.

    A flag that has to go is named with "without" before it.
    """
    old, new = before.told(), after.told()
    # The rows of logits follow the slots in every program.
    changed = {name for name in old if old[name] != new[name]} - {"n_outputs_max"}
    if not changed or not changed <= _TOLD[program]:
        return None
    return _WORDS[program](before, after)


def _server_words(before: Spoken, after: Spoken) -> str | None:
    old = llama_server_flags(before.config, before.n_ctx, before.limits)
    new = llama_server_flags(after.config, after.n_ctx, after.limits)
    said = [" ".join(words) for name, words in new.items() if old.get(name) != words]
    return " ".join([*said, *(f"without {old[name][0]}" for name in old if name not in new)])


def _python_words(before: Spoken, after: Spoken) -> str | None:
    if before.config.n_seq_max == after.config.n_seq_max == 1:
        if before.config.kv_unified != after.config.kv_unified:
            return None
        old, new = (llama_arguments(s.config, s.n_ctx_seq) for s in (before, after))
        return _assignments(old, new, "", "=", ", ")
    (old_model, old), (new_model, new) = (
        low_level_fields(s.config, s.n_ctx) for s in (before, after)
    )
    said = [
        _assignments(old_model, new_model, "model_params.", " = ", "; "),
        _assignments(old, new, "context_params.", " = ", "; "),
    ]
    return "; ".join(part for part in said if part)


def _assignments(
    old: dict[str, object], new: dict[str, object], prefix: str, equals: str, comma: str
) -> str:
    said = [f"{prefix}{k}{equals}{v!r}" for k, v in new.items() if k not in old or old[k] != v]
    return comma.join([*said, *(f"without {prefix}{name}" for name in old if name not in new)])


def _ollama_words(before: Spoken, after: Spoken) -> str | None:
    if after.config.cache_type_k != after.config.cache_type_v:
        return None
    old = ollama_variables(before.config, before.limits)
    new = ollama_variables(after.config, after.limits)
    old_lines = ollama_parameters(before.config, before.n_ctx_seq)
    new_lines = ollama_parameters(after.config, after.n_ctx_seq)
    said = [f"{name}={value}" for name, value in new.items() if old.get(name) != value]
    said += [
        f"PARAMETER {name} {value}"
        for name, value in new_lines.items()
        if old_lines.get(name) != value
    ]
    gone = [name for name in old if name not in new]
    # num_batch goes by itself where Ollama would batch as much without it.
    gone += [name for name in old_lines if name not in new_lines and name != "num_batch"]
    return " ".join([*said, *(f"without {name}" for name in gone)])


def _vllm_words(before: Spoken, after: Spoken) -> str | None:
    said = []
    if before.n_ctx_seq != after.n_ctx_seq:
        said.append(f"--max-model-len {after.n_ctx_seq}")
    if before.config.n_seq_max != after.config.n_seq_max:
        said.append(f"--max-num-seqs {after.config.n_seq_max}")
    return " ".join(said) or None


_WORDS = {
    "llama-server": _server_words,
    "llama-cpp-python": _python_words,
    "ollama": _ollama_words,
    "vllm": _vllm_words,
}
