"""What a point of a sweep becomes in Ollama: its settings, and what cannot be asked of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localkv.errors import UsageError
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig
from localkv.predict.defaults import ollama_before_030, run_config
from localkv.predict.estimate import Estimate
from localkv.predict.flags import OLLAMA_TYPES
from localkv.predict.ollama_plan import Gpu, ollama_plan, ps_bytes
from localkv.sweep.plan import DEFAULT_CONTEXTS, Point, SweepPlan, grid

#: From this version on Ollama runs llama-server; before it holds the engine itself.
_RUNS_LLAMA_SERVER = (0, 30)
_VERSION = re.compile(r"(\d+)\.(\d+)")
_LEFT_TO_OLLAMA = "leave it away: Ollama decides that by itself"


@dataclass(frozen=True)
class Serve:
    """The settings of a running ``ollama serve``; ``why`` says why they are but assumed."""

    num_parallel: int
    cache_type: str
    flash_attn: str
    max_loaded: int
    why: str = ""


def serve_settings(variables: Mapping[str, str], n_gpus: int) -> Serve:
    """Return the settings of an ``ollama serve`` that was started with ``variables``.

    Source: envconfig/config.go; three models per GPU, or three.
    """
    flash = variables.get("OLLAMA_FLASH_ATTENTION", "").strip().lower()
    return Serve(
        num_parallel=_count(variables, "OLLAMA_NUM_PARALLEL") or 1,
        cache_type=variables.get("OLLAMA_KV_CACHE_TYPE", "").strip().lower() or "f16",
        flash_attn={"": "auto", "1": "on", "true": "on"}.get(flash, "off"),
        max_loaded=_count(variables, "OLLAMA_MAX_LOADED_MODELS") or 3 * max(1, n_gpus),
        why="" if variables else "its environment cannot be read, so Ollama's defaults are assumed",
    )


def _count(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


def has_engine_inside(version: str, program: str | None) -> bool:
    """Return whether this Ollama is of the line before 0.30.

    A build without a version (0.0.0) is told by what lies beside ``program``.
    """
    found = _VERSION.match(version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    if number != (0, 0):
        return number < _RUNS_LLAMA_SERVER
    if not program or not os.path.isabs(program):
        return False
    folder = os.path.dirname(os.path.realpath(program))
    beside = (
        os.path.join(folder, *way) for way in (("..", "lib", "ollama"), (), ("lib", "ollama"))
    )
    return not any(os.path.exists(os.path.join(place, "llama-server")) for place in beside)


def refuse_foreign(plan: SweepPlan) -> None:
    """Refuse what ``plan`` asks for and Ollama cannot be told.

    Raises:
        UsageError: naming the first such option.
    """
    if any(plan.kv_unified):
        raise UsageError(
            "--kv-unified: Ollama gives every request a cache of its own", _LEFT_TO_OLLAMA
        )
    if any(plan.swa_full):
        raise UsageError("--swa-full: Ollama has no such setting", _LEFT_TO_OLLAMA)
    if plan.batch_size and plan.ubatch_size and plan.batch_size != plan.ubatch_size:
        raise UsageError("Ollama's num_batch is both -b and -ub", "give one of the two")
    if plan.n_outputs_max is not None:
        raise UsageError("n_outputs_max: Ollama has no such setting", _LEFT_TO_OLLAMA)
    for k, v in plan.cache_types():
        if k != v or k not in OLLAMA_TYPES:
            raise UsageError(
                f"a cache of {k if k == v else f'{k}/{v}'}: Ollama has one type for K and V, of "
                f"{', '.join(OLLAMA_TYPES)}",
                "use --cache-type with one of these",
            )


def ollama_points(
    plan: SweepPlan, shape: ModelShape, gpus: Sequence[Gpu], *, engine_inside: bool
) -> list[Point]:
    """Return the points of ``plan`` as Ollama runs them; contexts are num_ctx, per request.

    Raises:
        UsageError: something that Ollama cannot be told, or that the engine does not take.
    """
    refuse_foreign(plan)
    contexts = plan.ctx_size or plan.ctx_per_slot
    if plan.ctx_size and plan.ctx_per_slot:
        raise UsageError(
            "both a context and a context per slot were given", "num_ctx is per request: give one"
        )
    trained = shape.n_ctx_train
    contexts = contexts or tuple(n for n in DEFAULT_CONTEXTS if n <= trained) or (trained,)
    per_request = tuple(dict.fromkeys(size or trained for size in contexts))
    # num_batch is both batches.
    asked = replace(
        plan,
        ctx_size=(),
        ctx_per_slot=per_request,
        batch_size=(),
        ubatch_size=plan.ubatch_size or plan.batch_size,
    )

    def settle(config: RunConfig) -> RunConfig:
        return _settled(config, shape, gpus, plan, engine_inside=engine_inside)

    return grid(asked, trained, settle=settle)


def _settled(
    config: RunConfig,
    shape: ModelShape,
    gpus: Sequence[Gpu],
    plan: SweepPlan,
    *,
    engine_inside: bool,
) -> RunConfig:
    flash = config.flash_attn
    if config.cache_type_k != "f16" and flash == "auto":
        flash = "on"
    told: dict[str, Any] = {
        "cache_type_k": config.cache_type_k,
        "cache_type_v": config.cache_type_v,
        "flash_attn": flash,
    }
    num_ctx = config.n_ctx // config.n_seq_max
    asked = config.n_ubatch if plan.batch_size or plan.ubatch_size else 0
    believed = ollama_plan(shape, num_ctx=num_ctx, parallel=config.n_seq_max, gpus=gpus, **told)
    settled = run_config("ollama", shape, n_ctx=num_ctx, n_seq_max=believed.parallel, **told).with_(
        mmap=believed.mmap
    )
    if engine_inside:
        settled = ollama_before_030(shape, settled, **({"num_batch": asked} if asked else {}))
    else:
        batch = asked or believed.n_batch
        settled = settled.with_(n_batch=batch, n_ubatch=batch)
    if not gpus:
        return settled
    layers = config.n_gpu_layers if plan.gpu_layers else believed.gpu_layers or 0
    return settled.with_(
        n_gpu_layers=layers,
        n_devices=len(gpus),
        device_free=tuple(gpu.free for gpu in gpus),
    )


def options_of(config: RunConfig, plan: SweepPlan) -> dict[str, int]:
    """Return the options of a request that make Ollama run ``config``.

    What was not asked for is left to it.
    """
    options = {"num_ctx": config.n_ctx // config.n_seq_max}
    if plan.batch_size or plan.ubatch_size:
        options["num_batch"] = config.n_ubatch
    if plan.gpu_layers and config.n_gpu_layers >= 0:
        options["num_gpu"] = config.n_gpu_layers
    if plan.threads:
        options["num_thread"] = plan.threads
    return options


def refused_by(serve: Serve, config: RunConfig) -> str | None:
    """Return why the running ``serve`` cannot be measured with ``config``, None when it can."""
    for name, has, wanted in (
        ("OLLAMA_NUM_PARALLEL", serve.num_parallel, config.n_seq_max),
        ("OLLAMA_KV_CACHE_TYPE", serve.cache_type, config.cache_type_k),
    ):
        if has != wanted:
            sure = f" ({serve.why})" if serve.why else ""
            return (
                f"the running Ollama has {name}={has}, not {wanted}{sure}; localkv restarts no "
                "server that it did not start: --server-bin starts one of its own"
            )
    return None


def foretold_size(
    shape: ModelShape, estimate: Estimate, config: RunConfig, *, engine_inside: bool
) -> tuple[int | None, str]:
    """Return the size that /api/ps will show, or why it cannot be said.

    Before 0.30 it counts weights and cache alone.
    """
    if engine_inside and not config.n_gpu_layers:
        return shape.weights_bytes + estimate.kv_bytes, ""
    return ps_bytes(shape, estimate, config.n_gpu_layers or None)
