"""How many requests fit into a memory at once: exact against the predictor.

The number is never taken from a division: the answer N is a configuration that was computed and
fits, and so is N + 1, which does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from localkv.errors import UsageError
from localkv.model import ModelShape, read_model
from localkv.predict.budget import Budget, Memory, Planner
from localkv.predict.config import RunConfig
from localkv.predict.estimate import Estimate
from localkv.predict.search import largest
from localkv.tuples import NamedTuple
from localkv.units import format_bytes, plural

SCHEMA = 1
#: So many numbers of slots are all computed before the promising ones are picked.
_FEW = 12
#: Programs that cut what one request may have to the training context.
_CUTTING = ("llama-server", "ollama")


class Capacity(NamedTuple):
    """The most requests of ``ctx_per_slot`` tokens that ``memory_bytes`` hold at once.

    ``limit`` says why there are no more: "memory", "engine" (its own maximum, see ``why``), or
    "training context": the program cuts each slot to ``ctx_usable`` tokens, fewer than were asked
    for. ``config`` and ``estimate`` are those of the answer; of one slot where not even one fits.
    ``next_bytes`` is what one slot more would take, None where the engine has no more slots.
    Bytes of GPUs are sums over them; ``host_bytes`` come on top, in the host's memory.
    """

    memory_bytes: int
    reserved_bytes: int
    ctx_per_slot: int
    ctx_usable: int
    max_slots: int
    limit: str
    why: str
    program: str
    config: RunConfig
    estimate: Estimate
    budget: Budget
    next_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether at least one request fits."""
        return self.max_slots > 0

    @property
    def shown_bytes(self) -> int:
        """Return what ``estimate`` takes of the budget, in bytes."""
        return sum(self.budget.used(self.estimate.devices))

    @property
    def total_bytes_at_max(self) -> int | None:
        """Return the bytes used with ``max_slots``; None where not even one fits."""
        return self.shown_bytes if self.fits else None

    @property
    def host_bytes(self) -> int:
        """Return what the host holds beside the GPUs; 0 where one pool holds everything."""
        return self.estimate.devices[0].total if self.budget.on_gpus else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the stable JSON object, without levers and commands, which others add."""
        return {
            "schema": SCHEMA,
            "memory_bytes": self.memory_bytes,
            "reserved_bytes": self.reserved_bytes,
            "ctx_per_slot": self.ctx_per_slot,
            "ctx_usable": self.ctx_usable,
            "max_slots": self.max_slots,
            "fits": self.fits,
            "total_bytes_at_max": self.total_bytes_at_max,
            "next_bytes": self.next_bytes,
            "limit": self.limit,
            "why": self.why,
            "program": self.program,
            "model": dict(self.estimate.model),
            "config": {**self.config.to_dict(), **self.estimate.config},
            "parts": parts(self),
            "host_bytes": self.host_bytes,
            "devices": self._devices(),
            "notes": list(self.notes),
        }

    def _devices(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "memory_bytes": size, "reserved_bytes": self.budget.reserved, "used": u}
            for name, size, u in zip(
                self.budget.names,
                self.budget.sizes,
                self.budget.used(self.estimate.devices),
                strict=True,
            )
        ]


def kv_capacity(
    model: ModelShape | str | os.PathLike[str],
    memory: Memory,
    ctx_per_slot: int,
    *,
    reserve: int = 0,
    program: str = "llama-server",
    config: RunConfig | None = None,
    engine: bool = False,
    **settings: Any,
) -> Capacity:
    """Return how many requests of ``ctx_per_slot`` tokens ``memory`` holds at once.

    ``memory`` is bytes or a size as text ("24G"): one pool for everything, or one GPU where
    ``n_gpu_layers`` is given; a sequence of them ("24G,24G"): GPUs, every layer on them unless
    ``n_gpu_layers`` says otherwise. ``reserve`` bytes of each stay free. ``program`` is
    llama-server, ollama or llama-cpp-python, whose defaults fill in what ``settings`` (the fields
    of :class:`RunConfig`) leave open; ``config`` replaces those defaults, but for n_ctx and
    n_seq_max, and n_outputs_max where it is the number of slots.

    The answer N was computed and fits, and N + 1 was computed and does not, unless N is the
    engine's own limit.

    Raises:
        UsageError: a size or setting that is not one, or a combination that the engine refuses.
        ModelError: the model cannot be read.
        LocalkvError: no rule for the architecture, and ``engine`` is False.
    """
    shape = model if isinstance(model, ModelShape) else read_model(os.fspath(model))
    planner = Planner(
        shape,
        memory,
        reserve=reserve,
        program=program,
        config=config,
        engine=engine,
        **settings,
    )
    return capacity_of(planner, ctx_per_slot)


def capacity_of(planner: Planner, ctx_per_slot: int) -> Capacity:
    """Return the capacity that ``planner`` finds for slots of ``ctx_per_slot`` tokens.

    Raises:
        UsageError: ``ctx_per_slot`` is not positive, or the engine refuses the settings.
    """
    if not 1 <= ctx_per_slot < 1 << 31:
        asked = f"{plural(ctx_per_slot, 'token')} per slot"
        raise UsageError(asked, f"give 1 to {(1 << 31) - 1}, as 8192")
    most, why = planner.engine_slots(ctx_per_slot)
    slots = most_slots(planner, ctx_per_slot, most)
    shown = max(slots, 1)
    found = planner.estimate(shown, ctx_per_slot)
    budget = planner.budget
    usable = _usable(planner, ctx_per_slot)
    after = None if slots == most else planner.estimate(slots + 1, ctx_per_slot)
    limit = "engine" if slots == most else "memory"
    why = why if after is None else _short(planner.budget, after, slots)
    if slots and usable < ctx_per_slot:
        limit, why = "training context", _cut(planner)
    return Capacity(
        memory_bytes=sum(budget.sizes),
        reserved_bytes=budget.reserved * len(budget.sizes),
        ctx_per_slot=ctx_per_slot,
        ctx_usable=usable,
        max_slots=slots,
        limit=limit,
        why=why,
        program=planner.program,
        config=planner.config(shown, ctx_per_slot),
        estimate=found,
        budget=budget,
        next_bytes=sum(budget.used(after.devices)) if after else None,
        notes=_notes(found, budget),
    )


def most_slots(planner: Planner, ctx_per_slot: int, most: int) -> int:
    """Return the largest number of slots up to ``most`` that fits, 0 for none.

    Compute buffers do not grow evenly: a batch is rounded up to a multiple of the slots, so that
    one slot more can need less. Hence the numbers beyond the first that does not fit are looked
    at as well, see :func:`_worth_a_look`.
    """

    def margin(slots: int) -> int:
        return planner.margin(slots, ctx_per_slot)

    def floor(slots: int) -> int:
        return planner.floor_margin(slots, ctx_per_slot)

    found = largest(margin, most, rough=floor)
    while planner.formula:
        another = next(
            (n for n in _worth_a_look(planner, ctx_per_slot, found, most) if margin(n) >= 0), 0
        )
        if not another:
            break
        found = largest(margin, most, another, floor)
    return found


def _worth_a_look(planner: Planner, ctx_per_slot: int, found: int, most: int) -> Iterator[int]:
    """Yield the numbers above ``found`` + 1 that could fit, from the largest down.

    All that fit without any compute buffers; where those are many, the ones among them whose
    batch has fewer rows than that of every smaller number that does not fit: nothing else in a
    buffer shrinks with the slots.
    """
    first = found + 2
    if first > most or planner.floor_margin(first, ctx_per_slot) < 0:
        return
    top = largest(lambda slots: planner.floor_margin(slots, ctx_per_slot), most, first)
    if top - first < _FEW:
        yield from range(top, first - 1, -1)
        return
    fewest = planner.batch_rows(found + 1, ctx_per_slot)
    records = []
    for slots in range(first, top + 1):
        rows = planner.batch_rows(slots, ctx_per_slot)
        if rows < fewest:
            fewest = rows
            records.append(slots)
    yield from reversed(records)


def parts(capacity: Capacity) -> dict[str, int]:
    """Return what the budget holds by kind, in bytes, with the reserve and what is left over."""
    devices = capacity.estimate.devices
    if capacity.budget.on_gpus:
        devices = devices[1:]
    held = {
        kind: sum(getattr(device, kind) for device in devices)
        for kind in ("weights", "kv", "recurrent", "compute", "output")
    }
    free = capacity.memory_bytes - capacity.reserved_bytes - sum(held.values())
    return {**held, "reserve": capacity.reserved_bytes, "free": free}


def _usable(planner: Planner, ctx_per_slot: int) -> int:
    """Return the tokens that one request can have: server_context::n_ctx_slot of llama-server."""
    trained = planner.shape.n_ctx_train
    cut = planner.program in _CUTTING and trained
    return min(ctx_per_slot, trained) if cut else ctx_per_slot


def _notes(estimate: Estimate, budget: Budget) -> tuple[str, ...]:
    compute = estimate.compute
    left = budget.margin(estimate.devices)
    if left < 0 or left >= compute.high - compute.bytes:
        return estimate.notes
    more = format_bytes(compute.high - compute.bytes)
    return (
        *estimate.notes,
        f"compute buffers are an estimate that may be {more} short, and {format_bytes(left)} are "
        "left beside the reserve: --engine asks the engine for the exact figure",
    )


def _short(budget: Budget, after: Estimate, slots: int) -> str:
    """Return which memory one request more than ``slots`` would not fit into."""
    used = budget.used(after.devices)
    full = [
        f"{format_bytes(used[index] + budget.reserved)} of {format_bytes(size)}"
        + (f" on {budget.names[index]}" if budget.on_gpus else "")
        for index, size in enumerate(budget.sizes)
        if used[index] + budget.reserved > size
    ]
    reserve = ", the reserve included" if budget.reserved else ""
    return f"{'one more' if slots else 'one'} would take {', '.join(full)}{reserve}"


def _cut(planner: Planner) -> str:
    trained = planner.shape.n_ctx_train
    if planner.program == "ollama":
        return f"Ollama cuts num_ctx to the {trained} tokens that the model was trained for"
    return (
        f"llama-server gives each slot the {trained} tokens that the model was trained for at "
        "most; what is kept beyond them is wasted"
    )
