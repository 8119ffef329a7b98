"""Parser of the lines in which llama-server tells of its prompt cache and its checkpoints.

From ``-lv 4`` on the server says what it saves to host memory; these lines stand between those of
``log``, in the same dress. Sizes are printed with three decimals of a MiB. A server's log has no
end, so lists hold the latest lines alone and a log can be read piece by piece.

Sources in tools/server of llama.cpp: server_prompt_cache in server-task.cpp; load_model,
prompt_save, prompt_clear, create_checkpoint and update_slots in server-context.cpp.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from localkv.engines.log import INTEGER, NUMBER, mebibytes, plain_line
from localkv.predict.config import MAX_SEQ

_SETTINGS = re.compile(rf"n_slots = {INTEGER}, n_ctx_slot = {INTEGER}, kv_unified = '(true|false)'")
_LIMIT = re.compile(
    rf"prompt cache is (?:enabled, size limit: (?:{INTEGER} MiB|(no limit))|(disabled))"
)
_CHECKPOINTS = re.compile(
    rf"context checkpoints (?:enabled, max = {INTEGER}, min spacing = {INTEGER}|disabled)"
)
_SAVED = re.compile(
    rf"saving prompt with length {INTEGER}, total state size = {NUMBER} MiB "
    rf"\(draft: {NUMBER} MiB\)"
)
_STATE = re.compile(
    rf"cache state: {INTEGER} prompts, {NUMBER} MiB \(limits: {NUMBER} MiB, {INTEGER} tokens"
)
_ENTRY = re.compile(
    rf"- prompt (?:0x)?[0-9A-Fa-f]{{1,16}}:\s*{INTEGER} tokens, checkpoints:\s*{INTEGER},"
    rf"\s*{NUMBER} MiB"
)
_SLOT = rf"\bid\s+{INTEGER} \| task -?\d{{1,10}} \| "
_CREATED = re.compile(
    rf"{_SLOT}created context checkpoint {INTEGER} of {INTEGER} "
    rf"\([^)]*n_tokens = {INTEGER}, size = {NUMBER} MiB\)"
)
_ERASED = re.compile(
    rf"{_SLOT}(?:eras(?:ed|ing) [a-z ]*context checkpoint[a-z ]*\([^)]*n_tokens = {INTEGER},"
    rf"|superseding context checkpoint at n_tokens = {INTEGER}|clearing prompt with {INTEGER} )"
)
_TIMING = re.compile(rf"{_SLOT}prompt eval time =[^/]{{1,40}}/\s*{INTEGER} tokens")
_SLEEPS = "server is entering sleeping state"
#: How many of the latest saved prompts and checkpoints are kept.
_KEPT = 1000
#: More checkpoints than that no slot holds: such a line says nothing.
_MOST_CHECKPOINTS = 4096
#: Lines of a cache state that are kept; a server with more entries counts them all the same.
_ENTRIES = 10_000


@dataclass(frozen=True)
class SavedPrompt:
    """A slot's state that was saved: its tokens, and bytes of which ``draft_bytes`` a draft's."""

    n_tokens: int
    bytes: int
    draft_bytes: int


@dataclass(frozen=True)
class SavedCheckpoint:
    """A context checkpoint as it was made: the ``number``-th that its slot then held."""

    slot: int
    n_tokens: int
    number: int
    bytes: int


@dataclass(frozen=True)
class CachedPrompt:
    """An entry of the prompt cache, with its checkpoints, in bytes."""

    n_tokens: int
    checkpoints: int
    bytes: int


@dataclass(frozen=True)
class CacheState:
    """The prompt cache as the server last told it, in bytes; ``limit`` 0: no limit in bytes."""

    prompts: int
    bytes: int
    limit: int
    limit_tokens: int
    entries: tuple[CachedPrompt, ...] = ()


@dataclass(frozen=True)
class ServerLog:
    """What a server's log says of host memory; None is what it has not said.

    ``cache_ram`` is the prompt cache's limit in bytes, 0 when it is off, -1 when it has none;
    ``ctx_checkpoints`` 0 when they are off. ``saved`` and ``checkpoints`` are the latest events.
    ``slot_checkpoints`` are the bytes of the checkpoints that each slot holds now, and
    ``checkpoints_held`` their number. ``slots_served`` slots have answered a request, of which the
    one with most to read had ``longest_read`` tokens. ``asleep``: the model is unloaded.
    """

    n_slots: int | None = None
    n_ctx_slot: int | None = None
    kv_unified: bool | None = None
    cache_ram: int | None = None
    ctx_checkpoints: int | None = None
    checkpoint_min_step: int | None = None
    saved: tuple[SavedPrompt, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    cache: CacheState | None = None
    slot_checkpoints: tuple[tuple[int, int], ...] = ()
    checkpoints_held: int = 0
    slots_served: int = 0
    longest_read: int = 0
    asleep: bool = False

    @property
    def prompt_cache_bytes(self) -> int | None:
        """Return what the prompt cache holds, its entries' checkpoints included."""
        if self.cache is None:
            return 0 if self.cache_ram == 0 else None
        return self.cache.bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Return what the slots' own checkpoints hold."""
        return sum(size for _, size in self.slot_checkpoints)


def parse_server_log(lines: Iterable[str]) -> ServerLog:
    """Return what ``lines`` of a server's log say of its host memory."""
    reader = ServerLogReader()
    reader.feed(lines)
    return reader.result()


class ServerLogReader:
    """Reads a server's log piece by piece; :meth:`result` is the state after the last piece.

    What was said before a model was loaded, at a start or on waking, no longer holds.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._settings: dict[str, Any] = {}
        self._saved: deque[SavedPrompt] = deque(maxlen=_KEPT)
        self._made: deque[SavedCheckpoint] = deque(maxlen=_KEPT)
        self._state: CacheState | None = None
        self._entries: list[CachedPrompt] = []
        self._slots: dict[int, _Slot] = {}
        self._served: set[int] = set()
        self._longest = 0
        self._asleep = False

    def feed(self, lines: Iterable[str]) -> None:
        """Take in whole lines, in the order in which they were written."""
        for raw in lines:
            self._take(plain_line(raw))

    def result(self) -> ServerLog:
        """Return what all the lines so far say."""
        state = self._state
        if state is not None:
            state = CacheState(
                state.prompts, state.bytes, state.limit, state.limit_tokens, tuple(self._entries)
            )
        return ServerLog(
            **self._settings,
            saved=tuple(self._saved),
            checkpoints=tuple(self._made),
            cache=state,
            slot_checkpoints=tuple(
                (number, slot.bytes) for number, slot in sorted(self._slots.items())
            ),
            checkpoints_held=sum(slot.count for slot in self._slots.values()),
            slots_served=len(self._served),
            longest_read=self._longest,
            asleep=self._asleep,
        )

    def _take(self, line: str) -> None:
        if match := _CREATED.search(line):
            self._created(match)
        elif match := _ERASED.search(line):
            self._erased(match)
        elif match := _SAVED.search(line):
            length, size, draft = match.groups()
            self._saved.append(SavedPrompt(int(length), mebibytes(size), mebibytes(draft)))
        elif match := _STATE.search(line):
            prompts, size, limit, tokens = match.groups()
            self._state = CacheState(int(prompts), mebibytes(size), mebibytes(limit), int(tokens))
            self._entries = []
        elif match := _ENTRY.search(line):
            length, checkpoints, size = match.groups()
            if len(self._entries) < _ENTRIES:
                self._entries.append(CachedPrompt(int(length), int(checkpoints), mebibytes(size)))
        elif match := _TIMING.search(line):
            slot, tokens = match.groups()
            if int(slot) < MAX_SEQ:
                self._served.add(int(slot))
                self._longest = max(self._longest, int(tokens))
        elif _SLEEPS in line:
            self._asleep = True
        else:
            self._setting(line)

    def _created(self, match: re.Match[str]) -> None:
        slot, number, limit, n_tokens, size = match.groups()
        most = min(int(limit), _MOST_CHECKPOINTS)
        if int(slot) < MAX_SEQ and 1 <= int(number) <= most:
            made = SavedCheckpoint(int(slot), int(n_tokens), int(number), mebibytes(size))
            self._made.append(made)
            self._slots.setdefault(made.slot, _Slot()).add(made)

    def _erased(self, match: re.Match[str]) -> None:
        slot, erased, superseded, _ = match.groups()
        holder = self._slots.get(int(slot))
        if holder is None:
            return
        if at := erased or superseded:
            holder.remove(int(at))
        else:
            del self._slots[int(slot)]

    def _setting(self, line: str) -> None:
        if match := _SETTINGS.search(line):
            slots, each, unified = match.groups()
            self._begin()
            self._settings = {
                "n_slots": int(slots),
                "n_ctx_slot": int(each),
                "kv_unified": unified == "true",
            }
        elif match := _LIMIT.search(line):
            limit, none, _ = match.groups()
            self._settings["cache_ram"] = -1 if none else mebibytes(limit or "0")
        elif match := _CHECKPOINTS.search(line):
            most, step = match.groups()
            self._settings["ctx_checkpoints"] = int(most or 0)
            self._settings["checkpoint_min_step"] = int(step) if step else None


class _Slot:
    """The checkpoints that one slot holds, by the tokens they cover.

    The server does not say what comes with a prompt that a slot takes from the cache; the number
    in the next checkpoint's line shows it, and those unseen count as large as that one.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._unseen = 0
        self._unseen_size = 0

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values()) + self._unseen * self._unseen_size

    @property
    def count(self) -> int:
        return len(self._sizes) + self._unseen

    def add(self, made: SavedCheckpoint) -> None:
        self._sizes.pop(made.n_tokens, None)
        self._sizes[made.n_tokens] = made.bytes
        # What an earlier prompt had left is gone when there are more than the server counts.
        for stale in list(self._sizes)[: -made.number]:
            del self._sizes[stale]
        self._unseen = made.number - len(self._sizes)
        self._unseen_size = made.bytes

    def remove(self, n_tokens: int) -> None:
        if self._sizes.pop(n_tokens, None) is None:
            self._unseen = max(self._unseen - 1, 0)
