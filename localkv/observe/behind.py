"""The model behind a server: what localkv itself makes of its cache, to set beside what it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localkv.errors import LocalkvError
from localkv.model import ModelShape, read_model
from localkv.observe.command_line import is_unified
from localkv.predict.config import RunConfig
from localkv.predict.defaults import run_config
from localkv.predict.paged import paged_plan
from localkv.predict.predict import estimate
from localkv.snapshots import Snapshot


def predicted(
    snapshot: Snapshot, settings: Mapping[str, Any] | None = None, model: str | None = None
) -> dict[str, Any]:
    """Return what follows from the model's header for the server of ``snapshot``.

    ``settings`` are those of its process, for Ollama of its runner
    (:func:`localkv.observe.command_line.server_settings`);
    ``model`` names the model where the server's own path cannot be read here. Keys: ``model``,
    ``capacity_tokens``, ``kv_bytes``, ``bytes_per_token`` (one more token, every window full),
    ``context_bytes`` (KV, state, output), ``config``. Where nothing can be said, ``why`` says so.
    """
    named = model or _path(snapshot, settings)
    if named is None:
        return {"why": "the server does not say which model file it has: name it with --model"}
    try:
        shape = read_model(named)
        if snapshot.server == "vllm":
            return _paged(shape, snapshot)
        if snapshot.server in ("llama-server", "ollama") and snapshot.slots:
            return _contiguous(shape, server_config(shape, snapshot, settings or {}))
    except LocalkvError as error:
        return {"why": str(error)}
    return {"model": shape.name, "bytes_per_token": shape.marginal_token_bytes()}


def server_config(shape: ModelShape, snapshot: Snapshot, settings: Mapping[str, Any]) -> RunConfig:
    """Return the settings that a llama-server runs with, from its answers and its process."""
    facts = snapshot.facts
    slots = facts.get("total_slots") or len(snapshot.slots) or 1
    per_slot = facts.get("n_ctx_per_slot") or (snapshot.slots[0].n_ctx if snapshot.slots else 0)
    unified = bool(facts.get("kv_unified", is_unified(settings)))
    asked = {
        name: settings[name]
        for name in (
            "n_batch",
            "n_ubatch",
            "cache_type_k",
            "cache_type_v",
            "flash_attn",
            "swa_full",
            "n_gpu_layers",
        )
        if name in settings
    }
    if settings.get("kv_offload") is False:
        asked["no_kv_offload"] = True
    total = per_slot if unified else per_slot * slots
    return run_config(
        "llama-server", shape, **asked, n_ctx=total, n_seq_max=slots, kv_unified=unified
    )


def _path(snapshot: Snapshot, settings: Mapping[str, Any] | None) -> str | None:
    for path in (snapshot.facts.get("model_path"), (settings or {}).get("model")):
        if path and Path(str(path)).is_file():
            return str(path)
    return None


def _contiguous(shape: ModelShape, config: RunConfig) -> dict[str, Any]:
    found = estimate(shape, config)
    return {
        "model": shape.name,
        "capacity_tokens": found.config["n_ctx"],
        "kv_bytes": found.kv_bytes if found.known else None,
        "bytes_per_token": shape.marginal_token_bytes(config.cache_type_k, config.cache_type_v),
        "context_bytes": found.context_bytes if found.known else None,
        "total_bytes": found.total_bytes if found.known else None,
        "config": found.config,
    }


def _paged(shape: ModelShape, snapshot: Snapshot) -> dict[str, Any]:
    """Return the plan for as many blocks as the server has."""
    blocks, size = snapshot.facts.get("num_blocks"), snapshot.facts.get("block_size")
    if not blocks or not size:
        return {"why": "the server does not say how many blocks it has"}
    kind = snapshot.facts.get("kv_dtype") or "auto"
    longest = shape.n_ctx_train or 1
    one = paged_plan(shape, 1 << 40, longest, size, kind, "auto")
    plan = paged_plan(shape, blocks * one.block_bytes, longest, size, kind, "auto")
    return {
        "model": shape.name,
        "capacity_tokens": plan.tokens,
        "kv_bytes": blocks * one.block_bytes,
        "bytes_per_token": plan.bytes_per_token,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
    }
