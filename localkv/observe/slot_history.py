"""What a llama-server must have saved to its prompt cache, told by its slots alone.

A lower bound: what came and went between two looks is not seen. Sources in tools/server of
llama.cpp: get_available_slot and the launch of a task in server-context.cpp (which slots are
saved), server_prompt_cache::alloc and load in server-task.cpp (what is dropped).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from localkv.snapshots import Slot
from localkv.tuples import NamedTuple

#: Below this share of its tokens kept, a slot's prompt is saved before the new one replaces it.
_KEEP = 0.5
#: Below this share an entry is not taken back out of the cache.
_TAKE = 0.25


class _Held(NamedTuple):
    """What a slot holds: the tokens of ``task``, which went on from the entry ``before``."""

    task: int
    tokens: int
    before: tuple[int, int] | None


class SlotHistory:
    """Follows the slots and keeps the prompts that were saved meanwhile.

    ``size`` gives the bytes of an entry of so many tokens; ``limit`` is ``--cache-ram`` in bytes,
    None for no limit; ``idle_too`` is ``--cache-idle-slots``.
    """

    def __init__(
        self, size: Callable[[int], int], limit: int | None, *, idle_too: bool = True
    ) -> None:
        self._size = size
        self._limit = limit
        self._idle_too = idle_too
        self._held: dict[int, _Held] = {}
        self._cleared: set[int] = set()
        self._saved: dict[tuple[int, int], int] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        #: Most tokens of one prompt that were read, as far as they were seen.
        self.longest_read = 0

    @property
    def bytes(self) -> int:
        """Return the bytes of the entries."""
        return sum(self._saved.values())

    @property
    def entries(self) -> int:
        """Return the number of entries."""
        return len(self._saved)

    @property
    def served(self) -> int:
        """Return how many slots have answered a request."""
        return len(self._held)

    def see(self, slots: Iterable[Slot]) -> None:
        """Take in the slots as they are now."""
        now = {slot.id: slot for slot in slots if slot.task is not None}
        fresh = [s for s in now.values() if self._held.get(s.id, _NONE).task != s.task]
        if fresh and self._idle_too:
            self._save_idle(now)
        for slot in sorted(fresh, key=lambda s: s.task or 0):
            self._launched(slot)
        for slot in now.values():
            if slot.tokens:
                self._held[slot.id] = self._held[slot.id]._replace(tokens=slot.tokens)
            elif self._held[slot.id].tokens:
                # Slots that share one cache are emptied once they are saved.
                self._cleared.add(slot.id)

    def _save_idle(self, now: Mapping[int, Slot]) -> None:
        """A request began: what idle slots held was saved."""
        for number, held in list(self._held.items()):
            slot = now.get(number)
            if slot is None or (slot.task == held.task and not slot.busy):
                self._save(number, held)

    def _launched(self, slot: Slot) -> None:
        """A request began in ``slot``, whose old prompt was saved unless it goes on."""
        old, cached = self._held.get(slot.id), slot.cached or 0
        kept = old.tokens if old and slot.id not in self._cleared else 0
        taken = self._fitting(cached) if cached > kept else None
        goes_on = kept > 0 and cached >= _KEEP * kept and taken is None
        if not goes_on:
            if old:
                self._save(slot.id, old)
            self._drop(self._fitting(cached))
        before = (slot.id, old.task) if old and goes_on else None
        self._held[slot.id] = _Held(slot.task or 0, slot.tokens, before)
        self._cleared.discard(slot.id)
        self.longest_read = max(self.longest_read, slot.tokens - cached - (slot.decoded or 0))

    def _save(self, slot: int, held: _Held) -> None:
        key = (slot, held.task)
        if held.tokens == 0 or key in self._saved:
            return
        if held.before in self._saved:
            self._drop(held.before)  # it is the beginning of this one
        size = self._size(held.tokens)
        if self._limit is not None:
            if size > self._limit:
                return
            while self._saved and self.bytes + size > self._limit:
                self._drop(next(iter(self._saved)))
        self._saved[key], self._tokens[key] = size, held.tokens

    def _fitting(self, cached: int) -> tuple[int, int] | None:
        """Return the entry that ``cached`` tokens were taken of, by a slot with another prompt."""
        fits = [
            (tokens, key)
            for key, tokens in self._tokens.items()
            if 0 < cached <= tokens and cached >= _TAKE * tokens
        ]
        return min(fits)[1] if fits else None

    def _drop(self, key: tuple[int, int] | None) -> None:
        if key is not None:
            self._saved.pop(key, None)
            self._tokens.pop(key, None)


_NONE = _Held(-1, 0, None)
