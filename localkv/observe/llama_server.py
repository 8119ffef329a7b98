"""llama-server, read from ``/slots``, ``/metrics`` and ``/props``, any of which may be off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localkv.observe.metrics import Metrics
from localkv.snapshots import Slot, Snapshot

SERVER = "llama-server"
PREFIX = "llamacpp:"
_COUNTERS = {
    "prompt_tokens": ("llamacpp:prompt_tokens_total",),
    "cached_prompt_tokens": ("llamacpp:prompt_tokens_cached_total",),
    "generated_tokens": ("llamacpp:tokens_predicted_total",),
    "prompt_seconds": ("llamacpp:prompt_seconds_total",),
    "generated_seconds": ("llamacpp:tokens_predicted_seconds_total",),
}
_NO_SLOTS = "the server gives no /slots (start it with --slots)"
_NO_METRICS = "the server gives no /metrics (start it with --metrics)"


def snapshot(
    metrics: Metrics | None,
    slots: Sequence[Any] | None,
    props: Mapping[str, Any] | None,
    *,
    unified: bool | None = None,
) -> Snapshot:
    """Return what llama-server says; None for an endpoint that is off.

    ``unified`` is known from the server's log or command line alone: no field says it. Every slot
    reports the whole of a unified cache, so that capacity is one slot's context and not the sum.
    A slot's tokens stay in its cache after the request; during a prefill they are the batch's
    target.
    """
    metrics, props = metrics or Metrics(()), props or {}
    found = tuple(slot for entry in slots or () if (slot := _slot(entry)))
    unknown = {}
    if slots is None:
        unknown["used_tokens"] = unknown["capacity_tokens"] = _NO_SLOTS
    elif unified is None and len(found) > 1:
        unknown["capacity_tokens"] = (
            "split or unified cache: neither the log nor the command line was seen"
        )
    usage = metrics.mean("llamacpp:kv_cache_usage_ratio")  # servers before the middle of 2025
    busy = sum(slot.busy for slot in found) if slots is not None else None
    if not metrics:
        unknown["waiting"] = _NO_METRICS
    running = metrics.count("llamacpp:requests_processing")
    return Snapshot(
        server=SERVER,
        model=str(props.get("model_alias") or props.get("model_path") or ""),
        used_tokens=sum(slot.tokens for slot in found) if slots is not None else None,
        capacity_tokens=capacity(found, unified),
        usage=usage,
        running=busy if running is None else running,
        waiting=metrics.count("llamacpp:requests_deferred"),
        speed_prompt=metrics.mean("llamacpp:prompt_tokens_seconds"),
        speed_generated=metrics.mean("llamacpp:predicted_tokens_seconds"),
        counters=metrics.counters(_COUNTERS),
        slots=found,
        facts=_facts(props, unified),
        unknown=unknown,
        warnings=metrics.warnings,
    )


def capacity(slots: Sequence[Slot], unified: bool | None) -> int | None:
    """Return the tokens that all slots together can hold, None where that cannot be told."""
    if not slots or (unified is None and len(slots) > 1):
        return None
    return slots[0].n_ctx if unified else sum(slot.n_ctx for slot in slots)


def _slot(entry: Any) -> Slot | None:
    if not isinstance(entry, Mapping):
        return None
    return Slot(
        id=_whole(entry.get("id")) or 0,
        n_ctx=_whole(entry.get("n_ctx")) or 0,
        busy=bool(entry.get("is_processing")),
        # Missing until the slot's first task; despite its name it counts what was generated too.
        tokens=_whole(entry.get("n_prompt_tokens")) or 0,
        cached=_whole(entry.get("n_prompt_tokens_cache")),
    )


def _facts(props: Mapping[str, Any], unified: bool | None) -> dict[str, Any]:
    settings = props.get("default_generation_settings")
    per_slot = settings.get("n_ctx") if isinstance(settings, Mapping) else None
    facts = {
        "total_slots": _whole(props.get("total_slots")),
        "n_ctx_per_slot": _whole(per_slot),
        "build": str(props["build_info"]) if props.get("build_info") else None,
        "model_path": str(props["model_path"]) if props.get("model_path") else None,
        "sleeping": props.get("is_sleeping"),
        "kv_unified": unified,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _whole(value: Any) -> int | None:
    """Return ``value`` where it is a whole number of zero or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value
