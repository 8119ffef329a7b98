"""From two looks at a server to what happened in between."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.analysis.observed import generated, grown
from localkv.snapshots import Observed, Snapshot


@dataclass(frozen=True)
class Rates:
    """Tokens per second between two looks, and what was counted there; None is unknown.

    ``source`` says whether "counters" or "slots" told of ``generated``.
    """

    prompt: float | None = None
    generated: float | None = None
    source: str = ""
    cached_prompt_tokens: int | None = None
    preemptions: int | None = None


def rates(before: Observed | None, now: Observed) -> Rates:
    """Return the rates from ``before`` to ``now``.

    Nothing is known where a look had no answer, or where a counter fell (a restart).
    """
    if before is None or before.snapshot is None or now.snapshot is None:
        return Rates()
    seconds = now.seconds - before.seconds
    prompt = grown(before.snapshot, now.snapshot, "prompt_tokens")
    tokens, source = generated(before.snapshot, now.snapshot)
    return Rates(
        prompt=None if prompt is None or seconds <= 0 else prompt / seconds,
        generated=None if tokens is None or seconds <= 0 else tokens / seconds,
        source=source if tokens is not None else "",
        cached_prompt_tokens=_whole(grown(before.snapshot, now.snapshot, "cached_prompt_tokens")),
        preemptions=_whole(grown(before.snapshot, now.snapshot, "preemptions")),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def share_used(snapshot: Snapshot, predicted_capacity: int | None = None) -> float | None:
    """Return the used share of the cache: the server's own, or used over capacity tokens."""
    capacity = snapshot.capacity_tokens or predicted_capacity
    if snapshot.usage is None and snapshot.used_tokens is not None and capacity:
        return snapshot.used_tokens / capacity
    return snapshot.usage
