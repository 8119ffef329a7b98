"""What could be changed to need less memory: single changes, what each saves and costs.

Every saving is the difference of two predictions, never a rule of thumb; the combination of the
cheap ones is predicted anew, since savings do not add up. ``lever_changes`` says what there is to
change, ``flags`` how each program is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localkv.errors import UsageError
from localkv.model.shape import ModelShape
from localkv.predict.budget import Memory, Planner
from localkv.predict.capacity import most_slots
from localkv.predict.config import RunConfig, effective_context
from localkv.predict.defaults import ollama_batch
from localkv.predict.devices import HOST
from localkv.predict.estimate import DeviceEstimate
from localkv.predict.flags import NO_LIMITS, PROGRAMS, Limits, Spoken, change_in_words
from localkv.predict.lever_changes import CHEAP, Change, Situation, single_changes
from localkv.predict.predict import device_needs, estimate
from localkv.tuples import NamedTuple

#: The programs whose settings are those of a llama.cpp context.
_LLAMA_CPP = ("llama-server", "llama-cpp-python", "ollama")


class Lever(NamedTuple):
    """One change, what it saves and what it costs.

    ``saves_bytes`` are saved in ``memory``: "gpu" (the sum over GPUs, where layers are on them) or
    "host"; ``devices`` are the bytes saved on each device by name, negative where they move to.
    ``flags`` tell each program that has the lever how to pull it. ``max_slots`` are the most
    requests that fit afterwards, None where no memory was given or they are not known. ``config``
    are the settings afterwards, None where it takes another model; ``limits`` those of the
    server's host memory. ``bound``: ``saves_bytes`` are what it can come to, not what is reserved
    from the start.
    """

    change: str
    saves_bytes: int
    memory: str
    price: str
    flags: Mapping[str, str]
    devices: Mapping[str, int]
    max_slots: int | None = None
    config: RunConfig | None = None
    limits: Limits = NO_LIMITS
    bound: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the lever as plain JSON values."""
        return {
            "change": self.change,
            "max_slots": self.max_slots,
            "saves_bytes": self.saves_bytes,
            "bound": self.bound,
            "memory": self.memory,
            "devices": dict(self.devices),
            "flags": dict(self.flags),
            "price": self.price,
        }


def find_levers(
    shape: ModelShape,
    config: RunConfig,
    *,
    memory: Memory | None = None,
    ctx_per_slot: int | None = None,
    program: str = "llama-server",
    reserve: int = 0,
    limits: Limits = NO_LIMITS,
) -> tuple[Lever, ...]:
    """Return the changes to ``config`` that save memory and that ``program`` can be told.

    ``memory`` is that of :func:`localkv.kv_capacity`, for the most slots of ``ctx_per_slot``
    tokens (by default those of ``config``) after each change, ``reserve`` bytes kept free;
    ``limits`` are those that the server has now. The order is by bytes saved against the cost: a
    change that costs twice as much comes later unless it saves more than twice as much. Empty
    where no rule gives the caches.

    Raises:
        UsageError: the engine refuses ``config`` itself.
    """
    needs = estimate(shape, config)
    if not needs.known:
        return ()
    before = _Measured(shape, program, _spoken(shape, config, NO_LIMITS), needs.devices)
    fits = None
    if memory is not None:
        each = ctx_per_slot or before.spoken.n_ctx_seq
        fits = _Fits(shape, memory, each, reserve, program)
    found = [
        lever
        for change in single_changes(Situation(shape, config, needs, program, limits))
        if (lever := _pull(before, change, fits)) is not None
    ]
    together = _together(before, [entry for entry in found if entry[0].cost <= CHEAP], fits)
    found += [together] if together else []
    return tuple(lever for _, lever in sorted(found, key=before.rank))


class _Fits:
    """Where to look for the most slots."""

    def __init__(
        self, shape: ModelShape, memory: Memory, ctx_per_slot: int, reserve: int, program: str
    ) -> None:
        self.shape = shape
        self.memory = memory
        self.ctx_per_slot = ctx_per_slot
        self.reserve = reserve
        self.program = program
        self._known: dict[tuple[RunConfig, int], int | None] = {}

    def slots(self, config: RunConfig, ctx_per_slot: int) -> int | None:
        """Return the most slots with ``config``; None where its devices are not those given."""
        follows = config.n_outputs_max == config.n_seq_max
        # How many slots there are now, and how large, does not matter.
        alike = config.with_(
            n_ctx=0, n_seq_max=1, n_outputs_max=1 if follows else config.n_outputs_max
        )
        key = alike, ctx_per_slot
        if key not in self._known:
            self._known[key] = self._most(alike, ctx_per_slot)
        return self._known[key]

    def _most(self, config: RunConfig, ctx_per_slot: int) -> int | None:
        try:
            planner = Planner(
                self.shape, self.memory, reserve=self.reserve, program=self.program, config=config
            )
            return most_slots(planner, ctx_per_slot, planner.engine_slots(ctx_per_slot)[0])
        except UsageError:
            return None


class _Measured:
    """Settings with what each device then holds."""

    def __init__(
        self,
        shape: ModelShape,
        program: str,
        spoken: Spoken,
        devices: tuple[DeviceEstimate, ...],
    ) -> None:
        self.shape = shape
        self.program = program
        self.spoken = spoken
        self.devices = devices
        #: Which memory is short: the GPUs', where they hold anything.
        self.memory = "gpu" if any(device.total for device in devices[1:]) else HOST

    def changed(self, settings: Mapping[str, Any], program: str) -> RunConfig:
        """Return the settings with some of them changed, and what ``program`` makes of that."""
        config = self.spoken.config
        follow: dict[str, Any] = {}
        if config.n_outputs_max == config.n_seq_max:
            follow["n_outputs_max"] = settings.get("n_seq_max", config.n_seq_max)
        total = settings.get("n_ctx")
        if program == "ollama" and total and config.n_ubatch == ollama_batch(self.spoken.n_ctx):
            follow["n_batch"] = follow["n_ubatch"] = ollama_batch(total)
        return config.with_(**{**follow, **settings})

    def rank(self, found: _Found) -> tuple[bool, float]:
        """Return where a lever stands: first what the memory that is short gains for sure."""
        change, lever = found
        return lever.bound or lever.memory != self.memory, -lever.saves_bytes / change.cost

    def spoken_after(self, change: Change, program: str) -> Spoken:
        """Return the settings after ``change`` with the contexts that the engine makes of them."""
        return _spoken(self.shape, self.changed(change.settings or {}, program), change.limits)


def _spoken(shape: ModelShape, config: RunConfig, limits: Limits) -> Spoken:
    context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
    return Spoken(config, context.n_ctx, context.n_ctx_seq, limits)


_Found = tuple[Change, Lever]


def _pull(before: _Measured, change: Change, fits: _Fits | None) -> _Found | None:
    """Return the lever that ``change`` is; None where it saves nothing or cannot be had."""
    if change.settings is None:
        return change, _of_another_model(before, change)
    config = before.changed(change.settings, before.program)
    try:
        after = device_needs(before.shape, config)
    except UsageError:  # the engine does not take it
        return None
    flags = _flags(before, change)
    devices = _saved(before.devices, after)
    memory = change.memory or before.memory
    saved = change.saves_bytes or sum(
        size for name, size in devices.items() if (name == HOST) == (memory == HOST)
    )
    if before.program not in flags or saved <= 0 or not _has_room(config, after, memory):
        return None
    slots = None
    if fits is not None:
        slots = fits.slots(config, change.ctx_per_slot or fits.ctx_per_slot)
    return change, Lever(
        change.words,
        saved,
        memory,
        change.price,
        flags,
        devices,
        slots,
        config,
        change.limits,
        bound=bool(change.saves_bytes),
    )


def _of_another_model(before: _Measured, change: Change) -> Lever:
    saved, memory = change.saves_bytes, before.memory
    return Lever(change.words, saved, memory, change.price, {}, {})


def _flags(before: _Measured, change: Change) -> dict[str, str]:
    """Return how each program is told; vLLM alone serves folders with a config.json."""
    served = ("vllm",) if before.shape.path.endswith(".json") else _LLAMA_CPP
    words = {
        program: change_in_words(program, before.spoken, before.spoken_after(change, program))
        for program in PROGRAMS
        if program in served or program == before.program
    }
    return {program: text for program, text in words.items() if text}


def _saved(before: Sequence[DeviceEstimate], after: Sequence[DeviceEstimate]) -> dict[str, int]:
    """Return the bytes saved on each device, those without any difference left out."""
    held = {device.name: device.total for device in after}
    saved = {device.name: device.total - held.pop(device.name, 0) for device in before}
    saved |= {name: -size for name, size in held.items()}
    return {name: size for name, size in saved.items() if size}


def _has_room(config: RunConfig, after: Sequence[DeviceEstimate], memory: str) -> bool:
    """Return whether what moves to the GPUs fits there, as far as their free memory is known."""
    free = config.device_free
    if memory != HOST or not free:
        return True
    return all(
        device.total <= free[int(device.name[3:])]
        for device in after[1:]
        if int(device.name[3:]) < len(free)
    )


def _together(before: _Measured, cheap: list[_Found], fits: _Fits | None) -> _Found | None:
    """Return the cheap levers pulled at once: each as long as it saves beside the others."""
    usable = sorted(
        (entry for entry in cheap if entry[0].settings and not entry[1].bound),
        key=lambda entry: -entry[1].saves_bytes,
    )
    kept: list[Change] = []
    best: _Found | None = None
    for change, lever in usable:
        if lever.memory != before.memory or _same_kind(change, kept):
            continue
        found = _pull(before, _joined([*kept, change]), None) if best else (change, lever)
        if found and (best is None or found[1].saves_bytes > best[1].saves_bytes):
            kept.append(change)
            best = found
    if best is None or len(kept) < 2:
        return None
    config = best[1].config
    if fits is None or config is None:
        return best
    return best[0], best[1]._replace(max_slots=fits.slots(config, fits.ctx_per_slot))


def _same_kind(change: Change, others: Iterable[Change]) -> bool:
    settings = set(change.settings or ())
    return any(settings & set(other.settings or ()) for other in others)


def _joined(changes: list[Change]) -> Change:
    settings: dict[str, Any] = {}
    for change in changes:
        settings |= change.settings or {}
    return Change(
        words="together: " + ", ".join(change.words for change in changes),
        settings=settings,
        price="; ".join(dict.fromkeys(change.price for change in changes)),
        cost=max(change.cost for change in changes),
    )
