"""Paste-ready commands that run given settings: llama-server, llama-cpp-python, Ollama, vLLM.

A file's name is untrusted text: it comes out as one word of a POSIX shell, one literal of Python,
one value of a Modelfile, in characters that can be seen.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig, effective_context
from localkv.predict.flags import (
    NO_LIMITS,
    OLLAMA_TYPES,
    Limits,
    llama_arguments,
    llama_server_flags,
    low_level_fields,
    ollama_parameters,
    ollama_variables,
)
from localkv.tuples import NamedTuple

#: A model of Ollama's own store, as localkv's MODEL names it.
_OLLAMA_STORE = "ollama:"
#: Waits until a new ``ollama serve`` answers, ten seconds at most.
_OLLAMA_WAIT = (
    "for i in 1 2 3 4 5 6 7 8 9 10; do ollama list >/dev/null 2>&1 && break; sleep 1; done"
)
#: Files that the lines make where they are pasted; nobody else's are called so.
_MODELFILE, _LINK = "localkv.Modelfile", "localkv-model.gguf"


class Command(NamedTuple):
    """``lines`` in the language ``language`` for ``program``; ``note`` says what they leave out."""

    program: str
    language: str
    lines: tuple[str, ...]
    note: str = ""

    @property
    def key(self) -> str:
        """Return the program as options and JSON name it."""
        return self.program.lower()

    @property
    def text(self) -> str:
        """Return the lines as one text, ready to be pasted; "" where there is no command."""
        return "\n".join(self.lines)


class Paged(NamedTuple):
    """What vLLM is told: tokens of the longest request, requests at a time, its cache and GPUs."""

    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float = 0.9
    kv_dtype: str = "auto"
    block_size: int | None = None
    gpus: int = 1


def model_commands(
    shape: ModelShape,
    config: RunConfig,
    *,
    source: str = "",
    limits: Limits = NO_LIMITS,
    paged: Paged | None = None,
) -> tuple[Command, ...]:
    """Return the commands that run ``shape`` with ``config``, its contexts as the engine rounds.

    ``source`` is the model as the person named it: one of Ollama's store stays there. A model
    known by its config.json is served by vLLM alone, with ``paged``.
    """
    context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
    if shape.path.endswith(".json"):
        told = paged or Paged(context.n_ctx_seq, config.n_seq_max)
        return (vllm(shape.path, told),)
    path = _file_of(shape.path)
    found = commands(
        config,
        context.n_ctx,
        context.n_ctx_seq,
        path=path,
        name=shape.name,
        source=source,
        limits=limits,
    )
    if path == shape.path:
        return found
    # None of the programs takes a URL for a file: llama-server -m ends with an error.
    first = f"download the file first: curl -L -o {shell_path(path)} {shlex.quote(shape.path)}"
    return tuple(c._replace(note="; ".join(filter(None, (first, c.note)))) for c in found)


def _file_of(path: str) -> str:
    """Return ``path``, or of a URL the name that its file has once it is downloaded."""
    if not path.startswith(("http://", "https://")):
        return path
    from urllib.parse import unquote, urlsplit

    return unquote(urlsplit(path).path).rpartition("/")[2] or "model.gguf"


def commands(
    config: RunConfig | Mapping[str, object],
    n_ctx: int,
    n_ctx_seq: int,
    *,
    path: str,
    name: str = "",
    source: str = "",
    limits: Limits = NO_LIMITS,
) -> tuple[Command, ...]:
    """Return the commands for ``config`` (or its ``to_dict()``) with ``n_ctx`` tokens in all.

    ``n_ctx_seq`` are the tokens of one slot; ``path`` is the model's file, ``name`` what it calls
    itself; ``source`` and ``limits`` as in :func:`model_commands`.
    """
    told = config if isinstance(config, RunConfig) else RunConfig.from_dict(config)
    # Ollama has no cache that slots share: each gets its part of one.
    share = n_ctx // told.n_seq_max if told.kv_unified else n_ctx_seq
    return (
        llama_server(told, n_ctx, path, limits),
        llama_cpp_python(told, n_ctx, n_ctx_seq, path),
        ollama(told, share, path, name, source=source, limits=limits),
    )


def llama_server(config: RunConfig, n_ctx: int, path: str, limits: Limits = NO_LIMITS) -> Command:
    """Return the llama-server command; flags at the server's own default are left away."""
    words = [word for flag in llama_server_flags(config, n_ctx, limits).values() for word in flag]
    line = f"llama-server -m {shell_path(path)} {shlex.join(words)}"
    return Command("llama-server", "sh", (line,))


def llama_cpp_python(config: RunConfig, n_ctx: int, n_ctx_seq: int, path: str) -> Command:
    """Return Python lines: the class ``Llama`` for one slot, the low-level calls for several."""
    if config.n_seq_max > 1:
        return _low_level(config, n_ctx, path)
    home = path.startswith("~/")
    file = f"os.path.expanduser({path!a})" if home else ascii(path)
    inside = "".join(
        f", {name}={value!a}" for name, value in llama_arguments(config, n_ctx).items()
    )
    lines = ("from llama_cpp import Llama", f"llm = Llama({file}{inside})")
    # Its context keeps room for the logits of a whole batch; no argument of the class changes that.
    notes = ["its compute buffer is larger: it keeps logits for a whole batch"]
    notes += [f"the class {what}" for what in _beyond_the_class(config)]
    return Command(
        "llama-cpp-python", "python", ("import os", *lines) if home else lines, "; ".join(notes)
    )


def _beyond_the_class(config: RunConfig) -> list[str]:
    """Return which settings the class ``Llama`` has no argument for."""
    said = []
    if not config.repack:
        said.append("cannot leave out repacked copies of weights")
    if config.n_cpu_moe:
        said.append("cannot keep experts on the host")
    if config.flash_attn == "auto":
        said.append('knows no flash attention "auto": it is on here')
    return said


def _low_level(config: RunConfig, n_ctx: int, path: str) -> Command:
    model, context = low_level_fields(config, n_ctx)
    home = path.startswith("~/")
    raw = path.encode("utf-8", "surrogateescape")
    file = f"os.path.expanduser({raw!a})" if home else repr(raw)
    lines = [
        *(["import os"] if home else []),
        "import llama_cpp",
        "llama_cpp.llama_backend_init()",
        "model_params = llama_cpp.llama_model_default_params()",
        *(f"model_params.{name} = {value!a}" for name, value in model.items()),
        f"model = llama_cpp.llama_model_load_from_file({file}, model_params)",
        "context_params = llama_cpp.llama_context_default_params()",
        *(f"context_params.{name} = {value!a}" for name, value in context.items()),
        "context = llama_cpp.llama_init_from_model(model, context_params)",
    ]
    note = "its class Llama has one slot only, so these are its low-level calls: each slot is a "
    note += "seq_id of a llama_batch"
    lost = _beyond_low_level(config)
    return Command("llama-cpp-python", "python", tuple(lines), f"{note}; {lost}" if lost else note)


def _beyond_low_level(config: RunConfig) -> str:
    said = []
    if config.tensor_split is not None:
        said.append("tensor_split is an array of C floats to be set in model_params")
    if config.n_cpu_moe:
        said.append("experts on the host take tensor_buft_overrides in model_params")
    return "; ".join(said)


def ollama(
    config: RunConfig,
    n_ctx_seq: int,
    path: str,
    name: str,
    *,
    source: str = "",
    limits: Limits = NO_LIMITS,
) -> Command:
    """Return the shell lines that make a model of the file and serve it with these settings."""
    link, origin = _ollama_from(path, source)
    # Ollama's num_ctx is per slot; the server allocates num_ctx x parallel.
    parameters = ollama_parameters(config, n_ctx_seq)
    modelfile = [f"FROM {origin}", *(f"PARAMETER {k} {v}" for k, v in parameters.items())]
    variables = [f"{k}={v}" for k, v in ollama_variables(config, limits).items()]
    called = ollama_name(name)
    lines = (
        f"{shlex.join(variables)} ollama serve &",
        _OLLAMA_WAIT,
        *link,
        f"printf '%s\\n' {shlex.join(modelfile)} > {_MODELFILE}",
        shlex.join(["ollama", "create", called, "-f", _MODELFILE]),
        shlex.join(["ollama", "run", called]),
    )
    notes = ["stop an Ollama that is running first", *_beyond_ollama(config)]
    return Command("Ollama", "sh", lines, "; ".join(notes))


def _ollama_from(path: str, source: str) -> tuple[tuple[str, ...], str]:
    """Return lines to run before, and what stands behind FROM in the Modelfile.

    A Modelfile drops characters that do not print, so that such a file needs another name.
    Source: ParseFile and unquote in parser/parser.go of Ollama.
    """
    if source.startswith(_OLLAMA_STORE) and source[len(_OLLAMA_STORE) :].isprintable():
        return (), source[len(_OLLAMA_STORE) :]
    path = f"./{path}" if path.startswith("-") else path
    if path.isprintable() and '"' not in path:
        return (), f'"{path}"'
    return (f"ln -sf {shell_path(path)} {_LINK}",), f"./{_LINK}"


def ollama_name(name: str) -> str:
    """Return ``name`` as Ollama takes it for a model: Name.IsValid in types/model/name.go."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower())[:80].strip("-._") or "model"


def _beyond_ollama(config: RunConfig) -> list[str]:
    """Return what ``ollama serve`` cannot be told."""
    k, v = config.cache_type_k, config.cache_type_v
    said = []
    if k != v or k not in OLLAMA_TYPES:
        said.append(
            f"Ollama knows the cache types {', '.join(OLLAMA_TYPES)} only, the same for K and V"
        )
    if config.kv_unified and config.n_seq_max > 1:
        said.append("Ollama gives each slot a cache of its own, an equal part of this one")
    for told, what in (
        (config.swa_full, "keeps sliding layers at their window"),
        (config.no_kv_offload, "keeps KV with its layers"),
        (config.n_cpu_moe, "keeps experts with their layers"),
        (config.tensor_split is not None, "splits over GPUs by their free memory"),
    ):
        if told:
            said.append(f"Ollama {what}")
    return said


def vllm(path: str, paged: Paged) -> Command:
    """Return the ``vllm serve`` command for the folder (or config.json) at ``path``."""
    folder = path.removesuffix("config.json").rstrip("/") or "."
    words = ["--max-model-len", str(paged.max_model_len), "--max-num-seqs", str(paged.max_num_seqs)]
    words += ["--gpu-memory-utilization", f"{paged.gpu_memory_utilization:g}"]
    if paged.gpus > 1:
        words += ["--tensor-parallel-size", str(paged.gpus)]
    if paged.kv_dtype != "auto":
        words += ["--kv-cache-dtype", paged.kv_dtype]
    if paged.block_size is not None:
        words += ["--block-size", str(paged.block_size)]
    return Command("vLLM", "sh", (f"vllm serve {shell_path(folder)} {shlex.join(words)}",))


def shell_path(path: str) -> str:
    """Return ``path`` as one word of a POSIX shell, with a leading ~/ left to it to expand.

    What cannot be seen (control characters, marks that turn the direction of writing, bytes that
    are no text) is written in octal, so that the command can be read and pasted.
    """
    if path.startswith("~/"):
        return "~/" + shell_path(path[2:])
    # A name that begins with a dash would be read as an option.
    path = f"./{path}" if path.startswith("-") else path
    if path.isprintable() or path.endswith("\n"):  # $() drops line ends
        return shlex.quote(path)
    text = "".join(
        chr(byte)
        if byte < 128 and (chr(byte).isalnum() or chr(byte) in "/._-")
        else f"\\{byte:03o}"
        for byte in path.encode("utf-8", "surrogateescape")
    )
    return f"\"$(printf '{text}')\""
