"""What a llama-server has allocated, taken apart look by look: from its log, or from the rules.

Sources: ``server_memory`` and ``engines.server_log`` for the prompt cache and the checkpoints. The
cache is cleared when it is made, so that it is resident from then on; compute buffers become
resident with the first full batch; a slot's sampler keeps the candidates of its last token, 12
bytes for each token of the vocabulary (common_sampler in common/sampling.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localkv.engines.log_follow import LogFollower, Told
from localkv.errors import LocalkvError
from localkv.model import ModelShape, read_model
from localkv.observe.behind import server_config
from localkv.observe.slot_history import SlotHistory
from localkv.predict.config import RunConfig
from localkv.predict.estimate import DeviceEstimate, Estimate
from localkv.predict.predict import estimate
from localkv.predict.server_memory import (
    CACHE_RAM,
    ServerMemory,
    server_memory,
)
from localkv.snapshots import HostMemory, MemoryPart, Slot, Snapshot
from localkv.units import format_bytes, plural

_CANDIDATE = 12
#: The parts in the order in which they are shown.
KV, STATE, OUTPUT, WEIGHTS = "KV cache", "recurrent state", "output buffer", "weights in memory"
COMPUTE, SAMPLERS = "compute buffers", "samplers"
PROMPT_CACHE, CHECKPOINTS = "prompt cache", "context checkpoints"
_ORDER = (KV, STATE, OUTPUT, WEIGHTS, COMPUTE, SAMPLERS, PROMPT_CACHE, CHECKPOINTS)
_BUFFERS = {"KV": KV, "RS": STATE, "output": OUTPUT, "model": WEIGHTS, "compute": COMPUTE}

#: (least, most) bytes, where it is from, what to say of it.
_Range = tuple[int, int, str, str]


class Ledger:
    """Keeps the books of one llama-server process from when it was first seen."""

    def __init__(
        self,
        pid: int,
        settings: Mapping[str, Any],
        *,
        name: str = "",
        log: LogFollower | None = None,
    ) -> None:
        """Begin with the process ``pid`` that was told ``settings``; ``log`` is its own."""
        self.pid = pid
        self.name = name
        self._settings = settings
        self._log = log
        self._measured: int | None = None
        self._first: dict[str, _Range] = {}
        self._model: _Model | None = None
        self._why = ""

    def read(self, snapshot: Snapshot, measured: int | None) -> HostMemory:
        """Return what ``measured`` bytes are made of; ``snapshot`` holds this server's slots."""
        if self._measured is None:
            self._measured = measured
        told = self._log.read() if self._log else None
        if self._model is None:
            self._model = self._read_model(snapshot)
        parts: tuple[MemoryPart, ...] = ()
        if self._model is not None:
            now = self._model.parts(snapshot, told)
            self._first = self._first or now
            parts = tuple(self._part(name, now[name]) for name in _ORDER if name in now)
        return HostMemory(
            pid=self.pid,
            model=self.name or (self._model.shape.name if self._model else ""),
            measured=measured,
            first=self._measured,
            parts=parts,
            log=self._log.name if self._log and told and told.server.n_slots else "",
            why=self._why if self._model is None else "",
        )

    def state_bytes(self, tokens: Sequence[int]) -> int | None:
        """Return the bytes of KV cache that ``tokens`` of each slot take, None where unknown."""
        return self._model.cells_bytes(tokens) if self._model else None

    def _read_model(self, snapshot: Snapshot) -> _Model | None:
        path = snapshot.facts.get("model_path") or self._settings.get("model")
        if snapshot.facts.get("sleeping") and not snapshot.slots:
            self._why = "the server sleeps: its memory was never seen"
        if not path or not (snapshot.slots or snapshot.facts.get("n_ctx_per_slot")):
            self._why = self._why or "the model's file or the slots are not known"
            return None
        try:
            shape = read_model(str(path))
            return _Model(shape, server_config(shape, snapshot, self._settings), self._settings)
        except LocalkvError as error:
            self._why = str(error)
            return None

    def _part(self, name: str, found: _Range) -> MemoryPart:
        least, most, source, note = found
        before = self._first.get(name, (0, 0, "", ""))
        if source == "slots":
            # The first look cannot tell what was there, so that only what came since counts.
            return MemoryPart(
                name, least, most, least - before[0], max(most - before[0], 0), source, note
            )
        grown, grown_most = least - before[1], most - before[0]
        return MemoryPart(name, least, most, min(grown, grown_most), grown_most, source, note)


class _Model:
    """The model of a server, and what follows from its settings."""

    def __init__(self, shape: ModelShape, config: RunConfig, settings: Mapping[str, Any]) -> None:
        self.shape = shape
        mmap = settings.get("mmap", settings.get("load_mode", "auto") in ("auto", "mmap"))
        self._config = config.with_(mmap=bool(mmap))
        self._settings = settings
        self._plan = estimate(shape, self._config)
        self._sizes: dict[int, ServerMemory] = {}
        limit = settings.get("cache_ram", CACHE_RAM)
        self._limit: int | None = None if limit < 0 else limit
        self._history = SlotHistory(
            lambda tokens: self._saved(tokens).entry_bytes or 0,
            self._limit,
            idle_too=settings.get("cache_idle_slots", True),
        )
        self._begun = False
        self._from_start = False

    def parts(self, snapshot: Snapshot, told: Told | None) -> dict[str, _Range]:
        """Return the parts as they are now."""
        if told and told.server.n_slots is None:
            told = None  # a log that says nothing of it
        self._history.see(snapshot.slots)
        idle = bool(snapshot.slots) and all(slot.task is None for slot in snapshot.slots)
        fresh = not self._begun and (not told.server.slots_served if told else idle)
        # Whether the watch began before the server had anything to save.
        self._from_start = self._from_start or fresh
        self._begun = True
        asleep = bool(snapshot.facts.get("sleeping"))
        found = _logged(told) if told and told.engine.buffers else _planned(self._plan, self.shape)
        found |= self._work(told, snapshot, found.pop(COMPUTE, None), fresh)
        if asleep or (told and told.server.asleep):
            found = {name: (0, 0, part[2], "asleep") for name, part in found.items()}
        # Below -lv 4 a log has the slots and nothing of what is saved.
        if told and told.server.cache_ram is not None:
            return found | self._told_saved(told)
        return found | self._likely_saved(snapshot, fresh)

    def cells_bytes(self, tokens: Sequence[int]) -> int | None:
        """Return the bytes of cells that hold so many tokens, slot by slot."""
        sizes = [self._saved(count).state_bytes for count in tokens if count]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def _work(
        self, told: Told | None, snapshot: Snapshot, planned: _Range | None, fresh: bool
    ) -> dict[str, _Range]:
        """Return compute buffers and samplers: resident when they have been used."""
        longest = told.server.longest_read if told else self._history.longest_read
        served = told.server.slots_served if told else self._history.served
        batch = self._plan.config["n_ubatch"]
        found = {}
        if planned:
            low, high, source, _ = planned
            full = longest >= batch
            note = f"resident with the first batch of {batch} tokens"
            least, most = (low if full else 0), (0 if fresh else high)
            found[COMPUTE] = (least, most, source, note)
        size = self.shape.n_vocab * _CANDIDATE
        note = f"candidates for the next token, {format_bytes(size)} {_in_slots(served)}"
        found[SAMPLERS] = (served * size, served * size, "formula", note)
        return found

    def _told_saved(self, told: Told) -> dict[str, _Range]:
        """Return what the log says of prompt cache and checkpoints."""
        server = told.server
        cached, held = server.prompt_cache_bytes or 0, server.checkpoint_bytes
        entries = server.cache.prompts if server.cache else 0
        found = {
            PROMPT_CACHE: (cached, cached, "log", self._cache_note(entries, server.cache_ram)),
        }
        count = server.checkpoints_held
        if count or not self._saved(1).rolls_back:
            found[CHECKPOINTS] = (held, held, "log", self._checkpoint_note(count))
        return found

    def _likely_saved(self, snapshot: Snapshot, fresh: bool) -> dict[str, _Range]:
        """Return what the rules and the slots say of them: at least what was seen."""
        seen = self._history.bytes
        limit = self._limit if self._limit is not None else 1 << 62
        entries = self._history.entries if self._history.entries or self._from_start else None
        note = self._cache_note(entries, self._settings.get("cache_ram", CACHE_RAM))
        found = {PROMPT_CACHE: (seen, 0 if fresh else limit, "slots", note)}
        held = [self._saved(slot.tokens) for slot in snapshot.slots if slot.tokens]
        points = [point for each in held for point in each.checkpoints]
        if not self._saved(1).rolls_back:
            most = sum(each.slot_bytes or 0 for each in held)
            note = self._checkpoint_note(len(points))
            found[CHECKPOINTS] = (sum(point.bytes for point in points), most, "slots", note)
        return found

    def _saved(self, tokens: int) -> ServerMemory:
        """Return the sizes for a conversation of ``tokens``, as many as a slot holds at most."""
        if tokens not in self._sizes:
            limits = {
                name: self._settings[name]
                for name in ("ctx_checkpoints", "checkpoint_min_step")
                if name in self._settings
            }
            try:
                found = server_memory(self.shape, self._config, n_tokens=tokens, **limits)
            except LocalkvError:
                found = server_memory(self.shape, self._config, **limits)
            self._sizes[tokens] = found
        return self._sizes[tokens]

    def _cache_note(self, entries: int | None, limit: int | None) -> str:
        if limit == 0:
            return "off"
        prompts = "none seen since the watch began; earlier ones are not known"
        if entries is not None:
            prompts = plural(entries, "saved prompt")
        bound = "no limit" if limit is None or limit < 0 else f"at most {format_bytes(limit)}"
        return f"{prompts}, {bound} (--cache-ram)"

    def _checkpoint_note(self, count: int) -> str:
        memory = self._saved(1)
        what = "recurrent state" if not self.shape.window else "sliding windows"
        return (
            f"{count} of the {what}, at most {memory.ctx_checkpoints} "
            f"{_in_slots(memory.slots)} (--ctx-checkpoints)"
        )


def _in_slots(count: int) -> str:
    return "in its slot" if count == 1 else f"in each of {count} slots"


def _logged(told: Told) -> dict[str, _Range]:
    """Return the buffers that the log says are in allocated host memory."""
    found: dict[str, _Range] = {}
    for buffer in told.engine.buffers:
        name = _BUFFERS.get(buffer.kind, KV)
        if _on_host(buffer.device):
            size = buffer.bytes + found.get(name, (0, 0, "", ""))[0]
            found[name] = (size, size, "log", "")
    return found


def _on_host(device: str) -> bool:
    """Return whether a buffer of ``device`` is memory that this process allocated."""
    return device in ("CPU", "CPU_REPACK") or device.endswith("_Host") or device == ""


def _planned(plan: Estimate, shape: ModelShape) -> dict[str, _Range]:
    """Return the buffers of the estimate that are in allocated host memory."""
    host = next((d for d in plan.devices if d.name == "host"), DeviceEstimate("host"))
    sizes = {KV: host.kv, STATE: host.recurrent, OUTPUT: host.output}
    if not plan.config["mmap"]:
        sizes[WEIGHTS] = host.weights
    found: dict[str, _Range] = {
        name: (size, size, "formula", "") for name, size in sizes.items() if size
    }
    if not plan.known:
        found.pop(KV, None)
    spread = host.compute - plan.compute.bytes
    low, high = (max(0, edge + spread) for edge in (plan.compute.low, plan.compute.high))
    found[COMPUTE] = (low, high, "formula", "")
    return found


def slots_of(snapshot: Snapshot, runner: int) -> tuple[Slot, ...]:
    """Return the slots of ``snapshot`` that are the runner's of that process id."""
    return tuple(slot for slot in snapshot.slots if slot.runner == runner)
