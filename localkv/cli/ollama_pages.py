"""What ``localkv predict`` knows of Ollama: its settings, and its own opinion of a model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from localkv.errors import LocalkvError
from localkv.report.escape import escape_terminal as safe
from localkv.units import format_bytes, plural

if TYPE_CHECKING:
    from localkv.model.shape import ModelShape
    from localkv.predict.config import RunConfig
    from localkv.predict.ollama_plan import Gpu, OllamaPlan

_PREFIX = "ollama:"
#: The line of Ollama that the rules describe, and how long a running one may take to say its own.
_LINE = (0, 33)
_ASK_S = 1.0


class OllamaSettings:
    """What Ollama is told, None for a ``num_ctx`` that nobody names, and where that came from."""

    def __init__(
        self, gpus: tuple[Gpu, ...], num_ctx: int | None, parallel: int, notes: tuple[str, ...]
    ) -> None:
        self.gpus = gpus
        self.num_ctx = num_ctx
        self.parallel = parallel
        self.notes = notes

    def plan(self, shape: ModelShape, config: RunConfig) -> OllamaPlan:
        """Return what Ollama will do with ``shape`` under the settings of ``config``."""
        from localkv.predict.ollama_plan import ollama_plan

        return ollama_plan(
            shape,
            num_ctx=self.num_ctx,
            parallel=self.parallel,
            gpus=self.gpus,
            cache_type_k=config.cache_type_k,
            cache_type_v=config.cache_type_v,
            flash_attn=config.flash_attn,
        )


def fill_in(model: str, options: dict[str, Any]) -> OllamaSettings | None:
    """Fill ``options`` with what Ollama would take for ``model``; None when it is not asked for.

    A model named ``ollama:NAME`` means Ollama's defaults unless others were asked for. In the
    order in which Ollama takes them: the options, the model's own parameters, this environment.
    """
    source = click.get_current_context().get_parameter_source("defaults")
    if model.startswith(_PREFIX) and source is click.core.ParameterSource.DEFAULT:
        options["defaults"] = "ollama"
    if options["defaults"] != "ollama":
        return None
    notes = [
        *_from_model(model, options),
        *_from_environment(os.environ, options),
    ]
    if model.startswith(_PREFIX):
        notes += _older_line()
    gpus = _gpus(options["device_free"], options["devices"])
    num_ctx = options["ctx_size"] or options["ctx_per_slot"]
    settings = OllamaSettings(gpus, num_ctx, options["parallel"] or 1, tuple(notes))
    if settings.num_ctx is None and gpus:
        from localkv.predict.ollama_plan import num_ctx_by_vram

        options["ctx_size"] = num_ctx_by_vram(sum(gpu.total for gpu in gpus))
    return settings


def _from_model(model: str, options: dict[str, Any]) -> list[str]:
    """Fill in num_ctx and num_batch of the model's Modelfile; return what was taken from there."""
    if not model.startswith(_PREFIX):
        return []
    from localkv.gguf.ollama_store import find_ollama
    from localkv.gguf.places import places

    found = find_ollama(model.removeprefix(_PREFIX), places().ollama)
    notes = []
    num_ctx, num_batch = found.parameter("num_ctx"), found.parameter("num_batch")
    if num_ctx and num_ctx > 0 and not (options["ctx_size"] or options["ctx_per_slot"]):
        options["ctx_size"] = num_ctx
        notes.append(f"num_ctx {num_ctx} is the model's own parameter")
    if num_batch and num_batch > 0 and not (options["batch_size"] or options["ubatch_size"]):
        options["batch_size"] = options["ubatch_size"] = num_batch
        notes.append(f"num_batch {num_batch} is the model's own parameter")
    return notes


def _from_environment(variables: Mapping[str, str], options: dict[str, Any]) -> list[str]:
    """Fill in the settings of ``ollama serve`` that this environment holds; return them."""
    used = []
    length, parallel = (
        _count(variables, name) for name in ("OLLAMA_CONTEXT_LENGTH", "OLLAMA_NUM_PARALLEL")
    )
    if length and not (options["ctx_size"] or options["ctx_per_slot"]):
        options["ctx_size"] = length
        used.append(f"OLLAMA_CONTEXT_LENGTH={length}")
    if parallel and options["parallel"] is None:
        options["parallel"] = parallel
        used.append(f"OLLAMA_NUM_PARALLEL={parallel}")
    kind = variables.get("OLLAMA_KV_CACHE_TYPE", "").strip().lower()
    if kind and options["cache_type_k"] is None and options["cache_type_v"] is None:
        options["cache_type_k"] = options["cache_type_v"] = kind
        used.append(f"OLLAMA_KV_CACHE_TYPE={kind}")
    flash = variables.get("OLLAMA_FLASH_ATTENTION", "").strip().lower()
    if flash and options["flash_attn"] is None:
        options["flash_attn"] = "on" if flash in ("1", "true") else "off"
        used.append(f"OLLAMA_FLASH_ATTENTION={flash}")
    return [f"{', '.join(used)}: from this environment"] if used else []


def _older_line() -> list[str]:
    """Return a note when the Ollama that runs, or else the one on PATH, is older than the rules."""
    version, where = _installed()
    found = re.match(r"(\d{1,6})\.(\d{1,6})\.", version)
    number = (int(found[1]), int(found[2])) if found else _LINE
    if number == (0, 0) or number >= _LINE:  # a build without a version says 0.0.0
        return []
    return [
        f"Ollama {version} {where}: what is said here holds for its {_line()} line, and an older "
        "one may run the model otherwise; localkv sweep --backend ollama measures it"
    ]


def _line() -> str:
    return ".".join(map(str, _LINE))


def _installed() -> tuple[str, str]:
    """Return the version of the Ollama that answers, or of the one on PATH; "" for neither."""
    import shutil

    from localkv.engines.ollama_host import ollama_url

    url = ollama_url(os.environ.get("OLLAMA_HOST"))
    if _listens(url):
        from localkv.engines import ollama

        with suppress(LocalkvError, ImportError):
            return ollama.attached(url, timeout=_ASK_S).version, f"answers at {url}"
    if program := shutil.which("ollama"):
        from localkv.engines.ollama_program import program_version

        return program_version(program, timeout=_ASK_S), "is on PATH"
    return "", ""


def _listens(url: str) -> bool:
    """Return whether anybody listens at ``url``: to know it costs less than to load HTTP."""
    import socket
    from urllib.parse import urlsplit

    from localkv.engines.ollama_host import PORT

    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port or PORT), timeout=_ASK_S).close()
    except (OSError, ValueError, UnicodeError):
        return False
    return True


def _count(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _gpus(given: str | None, count: int | None) -> tuple[Gpu, ...]:
    """Return the GPUs that were given with their free memory, or those of this machine."""
    from localkv.predict.ollama_plan import Gpu

    if count == 0:
        return ()
    if given is not None:
        from localkv.cli.devices import free_memory

        return tuple(Gpu(size, size) for size in free_memory(given, probe=False) or ())
    from localkv.probes.gpu import gpu_summary

    devices = gpu_summary().devices
    return tuple(Gpu(device.total or 0, device.free or 0) for device in devices)


def plan_lines(plan: OllamaPlan, settings: OllamaSettings) -> list[str]:
    """Return Ollama's belief beside the truth, and what follows from it."""
    belief, true = plan.belief, plan.true
    held = format_bytes(true.total_bytes) if true.known else "unknown"
    kv = format_bytes(true.kv_bytes + true.recurrent_bytes) if true.known else "unknown"
    shown = format_bytes(plan.ps_bytes) if plan.ps_bytes is not None else f"unknown: {plan.ps_why}"
    batch = f" + {format_bytes(belief.surcharge)} for batches" if belief.surcharge else ""
    lines = [
        "",
        f"what Ollama will think (its {_line()} line):",
        f"{'it expects':<18} {format_bytes(belief.total):>12}  file "
        f"{format_bytes(belief.weights)} + KV {format_bytes(belief.kv)}{batch}",
        f"{'it will be':<18} {held:>12}  weights {format_bytes(true.weights_bytes)}, KV {kv}",
        f"{'ollama ps shows':<18} {shown:>12}",
    ]
    if plan.gpu_layers is not None:
        gpus = plural(plan.gpus_used, "GPU")
        lines.append(f"{'placed':<18} {plan.gpu_layers} of {plan.n_layers} layers on {gpus}")
    return lines + [f"note: {safe(note, 400)}" for note in (*settings.notes, *plan.notes)]


def plan_dict(plan: OllamaPlan, settings: OllamaSettings) -> dict[str, Any]:
    """Return the same as plain JSON values."""
    return {**plan.to_dict(), "settings": list(settings.notes)}
