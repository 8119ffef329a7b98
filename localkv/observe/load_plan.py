"""What a load asks of a server, from the room that the server says it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from localkv.observe.load import MOST_AT_ONCE, Task
from localkv.snapshots import LoadLimits, Snapshot

#: The scenarios of the field: name, requests at once, prompt tokens.
SCENARIOS = (
    ("a 100-token prompt", 1, 100),
    ("a 3,000-token prompt", 1, 3000),
    ("ten 100-token prompts", 10, 100),
)
#: Tokens of the prefix that two prompts share, and of the rest of each.
SHARED = 2000
_REST = 100
#: Requests at once on a ramp, where the server does not say how many it runs.
_AT_ONCE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MOST_AT_ONCE)
_PROMPT = 100
#: How full the cache is to become, on a ramp of context.
_FILLED = (0.5, 0.75, 1.0, 1.05, 1.25)
#: Requests that fill a cache of blocks together: enough to see some of them pushed out.
_FILLING = 8


def limits_of(snapshot: Snapshot, per_request: int | None = None) -> LoadLimits:
    """Return the room of the server of ``snapshot``.

    ``per_request`` is the longest request, for a server whose snapshot does not say it.
    """
    facts = snapshot.facts
    slots = len(snapshot.slots) or facts.get("total_slots")
    if snapshot.slots:
        per_request = snapshot.slots[0].n_ctx or per_request
    else:
        per_request = facts.get("n_ctx_per_slot") or facts.get("context_length") or per_request
    block = facts.get("block_size") or facts.get("page_size")
    return LoadLimits(
        slots=slots or None,
        per_request=per_request,
        capacity=snapshot.capacity_tokens,
        unified=facts.get("kv_unified"),
        block_size=block if isinstance(block, int) and block > 0 else None,
    )


def scenarios(n_predict: int) -> Iterator[Task]:
    """Yield the scenarios of the field."""
    for name, requests, tokens in SCENARIOS:
        yield Task("scenarios", name, requests, tokens, n_predict)


def prefix(limits: LoadLimits, n_predict: int) -> Iterator[Task]:
    """Yield the same request twice, the second with a prefix that the first has left behind.

    The prefix is shorter where a request has no room for it; nothing where none is left.
    """
    room = SHARED + _REST if limits.per_request is None else limits.per_request - n_predict
    shared = min(SHARED, room - _REST)
    if shared < 1:
        return
    for name in ("prefix not cached", "prefix cached"):
        yield Task("prefix", name, 1, shared + _REST, n_predict, shared)


def concurrency(limits: LoadLimits, n_predict: int) -> Iterator[Task]:
    """Yield ever more requests at once, each of them short."""
    slots = limits.slots
    counts = [1, slots, slots + 1, 2 * slots] if slots else list(_AT_ONCE)
    tokens = min(_PROMPT, max((limits.per_request or _PROMPT + n_predict) - n_predict, 1))
    for count in sorted({min(count, MOST_AT_ONCE) for count in counts}):
        name = f"{count} at once" if count > 1 else "one request"
        yield Task("concurrency", name, count, tokens, n_predict)


def context(limits: LoadLimits, n_predict: int) -> Iterator[Task]:
    """Yield ever longer requests, until the cache or one request's room must be full.

    As many requests share the work as share the cache: all slots of a unified one, one alone where
    slots have caches of their own, some where blocks are handed out.
    """
    requests, room = _filling(limits)
    for share in _FILLED if room else ():
        tokens = int(room * share) // requests - n_predict
        if tokens > 0:
            many = f"{requests} x " if requests > 1 else ""
            name = f"{many}{tokens:,} tokens ({share:.0%} of the room)"
            yield Task("context", name, requests, tokens, n_predict)


def _filling(limits: LoadLimits) -> tuple[int, int]:
    """Return how many requests fill which room; no room where nothing is known."""
    capacity, longest = limits.capacity or 0, limits.per_request or 0
    if limits.slots and not limits.unified:
        return 1, longest
    if limits.slots or not longest or not capacity:
        return limits.slots or 1, capacity or longest
    # A little more than full must still be allowed to every one of them.
    least = -(-capacity * 5 // (longest * 4))
    return min(max(least, _FILLING), MOST_AT_ONCE), capacity


def settings(limits: LoadLimits, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a recording keeps of the plan: what was ``asked`` for, and the limits."""
    return {**asked, "shared": SHARED, "limits": limits.to_dict()}
