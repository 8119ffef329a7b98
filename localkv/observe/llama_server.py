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
    "decodes": ("llamacpp:n_decode_total",),
}
_NO_SLOTS = "the server gives no /slots (start it with --slots)"
_NO_METRICS = "the server gives no /metrics (start it with --metrics)"
_ASLEEP = "the server sleeps: its model and cache are unloaded until the next request"
_KEPT_AWAKE = (
    "asking for /slots would keep the server from going to sleep (start it with --metrics)"
)


def snapshot(
    metrics: Metrics | None,
    slots: Sequence[Any] | None,
    props: Mapping[str, Any] | None,
    *,
    unified: bool | None = None,
    sleeps: bool | None = None,
) -> Snapshot:
    """Return what llama-server says; None for an endpoint that is off or was not asked.

    ``unified`` is known from the server's log or command line alone: no field says it. Every slot
    reports the whole of a unified cache, so that capacity is one slot's context and not the sum.
    A slot's tokens stay in its cache after the request; during a prefill they are the batch's
    target. ``sleeps`` says that the server unloads its model when idle.
    """
    metrics, props = metrics or Metrics(()), props or {}
    found = tuple(slot for entry in slots or () if (slot := _slot(entry)))
    facts = _facts(props, unified)
    capacity = _capacity(found, facts, unified)
    unknown = {}
    if slots is None:
        unknown["used_tokens"] = (
            _ASLEEP if is_asleep(props) else _KEPT_AWAKE if sleeps else _NO_SLOTS
        )
    if capacity is None:
        unknown["capacity_tokens"] = (
            "split or unified cache: neither the log nor the command line was seen"
            if found or facts.get("n_ctx_per_slot")
            else _NO_SLOTS
        )
    if not metrics:
        unknown["waiting"] = _NO_METRICS
    running = metrics.count("llamacpp:requests_processing")
    if running is None and slots is not None:
        running = sum(slot.busy for slot in found)
    return Snapshot(
        server=SERVER,
        model=str(props.get("model_alias") or props.get("model_path") or ""),
        used_tokens=sum(slot.tokens for slot in found) if slots is not None else None,
        capacity_tokens=capacity,
        usage=metrics.mean("llamacpp:kv_cache_usage_ratio"),  # until the middle of 2025
        running=running,
        waiting=metrics.count("llamacpp:requests_deferred"),
        speed_prompt=metrics.mean("llamacpp:prompt_tokens_seconds"),
        speed_generated=metrics.mean("llamacpp:predicted_tokens_seconds"),
        counters=metrics.counters(_COUNTERS),
        slots=found,
        facts=facts,
        unknown=unknown,
        warnings=metrics.warnings,
    )


def is_asleep(props: Mapping[str, Any]) -> bool:
    """Return whether the server has unloaded its model until the next request."""
    return props.get("is_sleeping") is True


def work_done(metrics: Metrics | None) -> tuple[float | None, ...] | None:
    """Return what an idle server has done so far: as long as that stays, so do its slots.

    None while it works, or where it does not say.
    """
    if metrics is None or metrics.count("llamacpp:requests_processing") != 0:
        return None
    names = ("n_decode_total", "prompt_tokens_total", "tokens_predicted_total")
    done = tuple(metrics.total(f"{PREFIX}{name}") for name in names)
    return None if None in done else done


def _capacity(slots: Sequence[Slot], facts: Mapping[str, Any], unified: bool | None) -> int | None:
    """Return the tokens that all slots together can hold, None where that cannot be told."""
    sizes = [slot.n_ctx for slot in slots]
    if not sizes and facts.get("n_ctx_per_slot"):
        sizes = [facts["n_ctx_per_slot"]] * facts.get("total_slots", 0)
    if not sizes or (unified is None and len(sizes) > 1):
        return None
    return sizes[0] if unified else sum(sizes)


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
        decoded=_decoded(entry.get("next_token")),
        task=_whole(entry.get("id_task")),
    )


def _decoded(told: Any) -> int | None:
    """Return the tokens generated so far; older servers give an object, newer ones a list of it."""
    first = told[0] if isinstance(told, list) and told else told
    return _whole(first.get("n_decoded")) if isinstance(first, Mapping) else None


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
