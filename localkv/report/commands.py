"""Paste-ready commands that run the settings of a point: llama-server, llama-cpp-python, Ollama."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localkv.analysis import points
from localkv.report.escape import safe_filename

# enum ggml_type in ggml/include/ggml.h
_GGML_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
# What llama-server uses when nothing is said (common/common.h); those flags are left away.
_SERVER = {
    "n_batch": ("-b", 2048),
    "n_ubatch": ("-ub", 512),
    "cache_type_k": ("-ctk", "f16"),
    "cache_type_v": ("-ctv", "f16"),
    "flash_attn": ("-fa", "auto"),
}
_OLLAMA_TYPES = ("f16", "q8_0", "q4_0")
# A Modelfile's line cannot hold these, however it is quoted.
_UNQUOTABLE = re.compile(r'["\n\r]')


@dataclass(frozen=True)
class Command:
    """``lines`` in the language ``language`` for ``program``; ``note`` says what they leave out."""

    program: str
    language: str
    lines: tuple[str, ...]
    note: str = ""


def commands(
    config: Mapping[str, Any], n_ctx: int, n_ctx_seq: int, model: Mapping[str, Any]
) -> list[Command]:
    """Return the commands for ``config`` (``RunConfig.to_dict()``) with ``n_ctx`` tokens in all.

    ``n_ctx_seq`` are the tokens of one slot; ``model`` names the file under ``path``. Everything
    is quoted for a POSIX shell, for Python, or for a Modelfile.
    """
    path = str(model.get("path") or "model.gguf")
    name = safe_filename(model.get("name") or "model").lower()
    return [
        llama_server(config, n_ctx, path),
        llama_cpp_python(config, n_ctx_seq, path),
        ollama(config, n_ctx_seq, path, name),
    ]


def llama_server(config: Mapping[str, Any], n_ctx: int, path: str) -> Command:
    """Return the llama-server command; flags at the server's own default are left away."""
    words = ["-c", str(n_ctx), "-np", str(_slots(config))]
    for name, (flag, default) in _SERVER.items():
        value = config.get(name, default)
        if value != default:
            words += [flag, str(value)]
    if config.get("kv_unified"):
        words.append("--kv-unified")
    if config.get("swa_full"):
        words.append("--swa-full")
    if config.get("n_gpu_layers"):
        words += ["-ngl", str(config["n_gpu_layers"])]
    if config.get("no_kv_offload"):
        words.append("--no-kv-offload")
    return Command(
        "llama-server", "sh", (f"llama-server -m {_shell_path(path)} {shlex.join(words)}",)
    )


def llama_cpp_python(config: Mapping[str, Any], n_ctx_seq: int, path: str) -> Command:
    """Return Python lines for the class ``Llama``; none for several slots, since it has one."""
    if _slots(config) > 1:
        return Command("llama-cpp-python", "python", (), "its class Llama has one slot only")
    k, v = str(config.get("cache_type_k", "f16")), str(config.get("cache_type_v", "f16"))
    arguments: dict[str, object] = {
        "n_ctx": n_ctx_seq,
        "n_batch": config.get("n_batch", 2048),
        "n_ubatch": config.get("n_ubatch", 512),
        # The class turns flash attention off unless told otherwise.
        "flash_attn": config.get("flash_attn", "auto") != "off",
        "swa_full": bool(config.get("swa_full")),
    }
    if config.get("n_gpu_layers"):
        arguments["n_gpu_layers"] = config["n_gpu_layers"]
    for argument, word in (("type_k", k), ("type_v", v)):
        if word != "f16" and word in _GGML_TYPES:
            arguments[argument] = _GGML_TYPES[word]
    inside = "".join(f", {name}={value!a}" for name, value in arguments.items())
    home = path.startswith("~/")
    file = f"os.path.expanduser({path!a})" if home else f"{path!a}"
    lines = ("from llama_cpp import Llama", f"llm = Llama({file}{inside})")
    # Its context keeps room for the logits of a whole batch; no argument of the class changes that.
    note = "its compute buffer is larger than measured here: it keeps logits for a whole batch"
    return Command("llama-cpp-python", "python", ("import os", *lines) if home else lines, note)


def ollama(config: Mapping[str, Any], n_ctx_seq: int, path: str, name: str) -> Command:
    """Return the shell lines that make a model of the file and serve it with these settings."""
    if _UNQUOTABLE.search(path):
        return Command("Ollama", "sh", (), "the file's name cannot stand in a Modelfile: rename it")
    modelfile = (f'FROM "{path}"', f"PARAMETER num_ctx {n_ctx_seq}")
    serve = [f"OLLAMA_NUM_PARALLEL={_slots(config)}"]
    note = ""
    k, v = str(config.get("cache_type_k", "f16")), str(config.get("cache_type_v", "f16"))
    if k != v or k not in _OLLAMA_TYPES:
        note = f"Ollama knows the cache types {', '.join(_OLLAMA_TYPES)} only, the same for K and V"
    elif k != "f16":
        serve += [f"OLLAMA_KV_CACHE_TYPE={k}", "OLLAMA_FLASH_ATTENTION=1"]
    return Command(
        "Ollama",
        "sh",
        (
            # Ollama's num_ctx is per slot; the server allocates num_ctx x parallel.
            f"{shlex.join(serve)} ollama serve &",
            f"printf '%s\\n' {shlex.join(modelfile)} > Modelfile",
            shlex.join(["ollama", "create", name, "-f", "Modelfile"]),
            shlex.join(["ollama", "run", name]),
        ),
        note,
    )


def _shell_path(path: str) -> str:
    """Return ``path`` quoted, with a leading ~/ left for the shell to expand."""
    if path.startswith("~/"):
        return "~/" + shlex.quote(path[2:])
    # A name that begins with a dash would be read as an option.
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _slots(config: Mapping[str, Any]) -> int:
    return points.dig_int(config, "n_seq_max") or 1
