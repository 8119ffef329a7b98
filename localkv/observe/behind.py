"""The model behind a server: what localkv itself makes of its cache, to set beside what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_ASKED = (
    "n_batch",
    "n_ubatch",
    "cache_type_k",
    "cache_type_v",
    "flash_attn",
    "swa_full",
    "n_gpu_layers",
)


def predicted(
    snapshot: Snapshot,
    holders: Sequence[Mapping[str, Any]] = (),
    model: ModelShape | str | None = None,
) -> dict[str, Any]:
    """Return what follows from the model's header for the server of ``snapshot``.

    ``holders`` are the settings of the processes that hold its models
    (:meth:`localkv.observe.process.ServerProcess.holders`): one, or for Ollama one per model;
    ``model`` is the model, or its name, where the server's own path cannot be read here. Keys:
    ``model``, ``capacity_tokens``, ``kv_bytes``, ``bytes_per_token`` (one more token, every window
    full), ``context_bytes`` (KV, state, output), ``config``. Where nothing can be said, ``why``
    says so.
    """
    if snapshot.server == "ollama" and not snapshot.loaded:
        return {"why": "no model is loaded"}
    try:
        return _together([_one(snapshot, told, model) for told in holders or [{}]])
    except LocalkvError as error:
        return {"why": str(error)}


def _one(
    snapshot: Snapshot, told: Mapping[str, Any], model: ModelShape | str | None
) -> dict[str, Any]:
    named = model or _path(snapshot, told)
    if named is None:
        return {"why": "the model's file is not known or not readable here: name it with --model"}
    shape = named if isinstance(named, ModelShape) else read_model(named)
    if snapshot.server == "vllm":
        return _paged(shape, snapshot, told)
    if snapshot.server == "llama-server":
        run = server_config(shape, snapshot, told)
        found = _contiguous(shape, run)
        usable = run.n_seq_max * (shape.n_ctx_train or found["capacity_tokens"])
        return {**found, "capacity_tokens": min(found["capacity_tokens"], usable)}
    if snapshot.server == "ollama":
        config = _runner_config(shape, snapshot, told)
        if config is None:
            return {"why": "several models are loaded: Ollama does not say which process is which"}
        return _contiguous(shape, config)
    return {"model": shape.name, "bytes_per_token": shape.marginal_token_bytes()}


def server_config(shape: ModelShape, snapshot: Snapshot, told: Mapping[str, Any]) -> RunConfig:
    """Return the settings that a llama-server runs with, from its answers and its process.

    It cuts a slot to the training context and keeps the cache that was asked for
    (server_context::n_ctx_slot in tools/server): its answers then tell of a part of it.
    """
    facts = snapshot.facts
    slots = facts.get("total_slots") or len(snapshot.slots) or 1
    per_slot = facts.get("n_ctx_per_slot") or (snapshot.slots[0].n_ctx if snapshot.slots else 0)
    unified = bool(facts.get("kv_unified", is_unified(told)))
    total = per_slot if unified else per_slot * slots
    if per_slot == shape.n_ctx_train:
        total = max(total, told.get("n_ctx") or 0)
    return run_config(
        "llama-server", shape, **_asked(told), n_ctx=total, n_seq_max=slots, kv_unified=unified
    )


def _runner_config(
    shape: ModelShape, snapshot: Snapshot, told: Mapping[str, Any]
) -> RunConfig | None:
    """Return the settings of Ollama's runner; None where its context cannot be told."""
    if not told.get("runner"):
        asked = {"n_ctx": told.get("n_ctx"), "n_seq_max": told.get("n_seq_max")}
        return run_config(
            "llama-server", shape, **_asked(told), **asked, kv_unified=is_unified(told)
        )
    if len(snapshot.loaded) != 1:
        return None
    context = snapshot.loaded[0].context_length
    parallel = told.get("n_seq_max")
    return run_config("ollama", shape, **_asked(told), n_ctx=context, n_seq_max=parallel)


def _asked(told: Mapping[str, Any]) -> dict[str, Any]:
    asked = {name: told[name] for name in _ASKED if name in told}
    if told.get("kv_offload") is False:
        asked["no_kv_offload"] = True
    return asked


def _path(snapshot: Snapshot, told: Mapping[str, Any]) -> str | None:
    for path in (snapshot.facts.get("model_path"), told.get("model")):
        if path and Path(str(path)).exists():
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


def _paged(shape: ModelShape, snapshot: Snapshot, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan for as many blocks as the server has."""
    blocks, size = snapshot.facts.get("num_blocks"), snapshot.facts.get("block_size")
    if not blocks or not size:
        return {"why": "the server does not say how many blocks it has"}
    kind = snapshot.facts.get("kv_dtype") or "auto"
    longest = told.get("max_model_len") or shape.n_ctx_train or 1
    dtype = str(told.get("dtype", "auto"))
    one = paged_plan(shape, 1 << 40, longest, size, kind, dtype)
    plan = paged_plan(shape, blocks * one.block_bytes, longest, size, kind, dtype)
    return {
        "model": shape.name,
        "capacity_tokens": plan.tokens,
        "kv_bytes": blocks * one.block_bytes,
        "bytes_per_token": plan.bytes_per_token,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
    }


def _together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum over several models; what one of them does not know, nobody does."""
    if len(parts) == 1:
        return parts[0]
    if silent := next((part for part in parts if "why" in part), None):
        return silent
    summed = {
        name: sum(part[name] for part in parts)
        for name in ("capacity_tokens", "kv_bytes", "context_bytes", "total_bytes")
        if all(part.get(name) is not None for part in parts)
    }
    return {"model": ", ".join(part["model"] for part in parts), **summed}


class Predictor:
    """:func:`predicted`, computed again when the server's model or capacity is another one.

    What could not be said of Ollama is tried again: the model may still have been loading.
    """

    def __init__(self, process: Any, model: ModelShape | str | None = None) -> None:
        """Predict for the server of ``process``; ``model`` as for :func:`predicted`."""
        self._process = process
        self._model = model
        self._known: tuple[object, dict[str, Any]] | None = None

    def __call__(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what follows for ``snapshot``."""
        loaded = tuple((each.name, each.context_length) for each in snapshot.loaded)
        key = (self._process.pid, snapshot.model, snapshot.capacity_tokens, loaded)
        again = snapshot.server == "ollama" and self._known and "why" in self._known[1]
        if self._known is None or self._known[0] != key or again:
            self._known = key, predicted(snapshot, self._process.holders(), self._model)
        return self._known[1]
