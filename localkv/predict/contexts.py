"""The largest context that fits, by slots and cache type; and the inverse, the memory needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from localkv.errors import UsageError
from localkv.predict.budget import Planner
from localkv.predict.config import CTX_PAD, pad
from localkv.predict.estimate import Estimate
from localkv.predict.search import largest
from localkv.tuples import NamedTuple
from localkv.units import plural

SLOTS = (1, 2, 4, 8)
CACHE_TYPES = ("f16", "q8_0", "q4_0")
#: Searched up to here where the header names no training context.
_MOST = 1 << 20


class LargestContext(NamedTuple):
    """The largest context per slot, in tokens, of ``slots`` slots with K and V in ``cache_type``.

    ``limit`` is "memory", "training context" or "engine"; ``ctx_per_slot`` 0: not even the
    smallest context fits; None: the program does not run this, because ``why``.
    """

    slots: int
    cache_type: str
    ctx_per_slot: int | None
    total_bytes: int | None
    limit: str
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return self._asdict()


def largest_contexts(
    planner: Planner, slots: Sequence[int] = SLOTS, types: Sequence[str] = CACHE_TYPES
) -> tuple[LargestContext, ...]:
    """Return the largest context for each number of ``slots`` and each of ``types``.

    In steps of 256 tokens, to which the engine rounds, up to the training context. The answer was
    computed and fits; 256 tokens more per slot were computed and do not.
    """
    return tuple(_rows(planner, slots, types))


def _rows(planner: Planner, slots: Sequence[int], types: Sequence[str]) -> Iterator[LargestContext]:
    for cache_type in types:
        changed = planner.changed(cache_type_k=cache_type, cache_type_v=cache_type)
        for count in slots:
            most, why = planner.engine_slots(CTX_PAD)
            if count > most:
                yield LargestContext(count, cache_type, None, None, "engine", why)
                continue
            try:
                yield _largest(changed, count, cache_type)
            except UsageError as error:
                yield LargestContext(count, cache_type, None, None, "engine", error.message)


def _largest(planner: Planner, slots: int, cache_type: str) -> LargestContext:
    trained = planner.shape.n_ctx_train or _MOST
    steps = pad(trained) // CTX_PAD

    def tokens(step: int) -> int:
        return min(step * CTX_PAD, trained)

    found = largest(lambda step: planner.margin(slots, tokens(step)), steps)
    limit = "training context" if found == steps and planner.shape.n_ctx_train else "memory"
    if not found:
        return LargestContext(slots, cache_type, 0, None, limit)
    used = planner.budget.used(planner.devices(slots, tokens(found)))
    return LargestContext(slots, cache_type, tokens(found), sum(used), limit)


class Needed(NamedTuple):
    """What ``users`` requests of ``ctx_per_slot`` tokens at once need, in bytes.

    ``memory_bytes`` holds the reserve too, and is what to give as ``--memory``; of GPUs it is one
    figure for each, and ``host_bytes`` come on top.
    """

    users: int
    ctx_per_slot: int
    memory_bytes: tuple[int, ...]
    host_bytes: int
    fits: bool
    estimate: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain JSON values."""
        return {
            "users": self.users,
            "ctx_per_slot": self.ctx_per_slot,
            "memory_bytes": sum(self.memory_bytes),
            "devices": list(self.memory_bytes),
            "host_bytes": self.host_bytes,
            "fits": self.fits,
        }


def needed(planner: Planner, users: int, ctx_per_slot: int) -> Needed:
    """Return the memory that ``users`` requests of ``ctx_per_slot`` tokens need at once.

    Raises:
        UsageError: more users than the program has slots.
    """
    most, why = planner.engine_slots(ctx_per_slot)
    if not 1 <= users <= most:
        raise UsageError(f"{plural(users, 'user')} at once, of at most {most}", why)
    found = planner.estimate(users, ctx_per_slot)
    budget = planner.budget
    return Needed(
        users=users,
        ctx_per_slot=ctx_per_slot,
        memory_bytes=tuple(used + budget.reserved for used in budget.used(found.devices)),
        host_bytes=found.devices[0].total if budget.on_gpus else 0,
        fits=budget.margin(found.devices) >= 0,
        estimate=found,
    )
