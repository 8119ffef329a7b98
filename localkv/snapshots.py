"""What a server says of itself at one moment, whichever server it is, and over time.

One line of a recording is one :class:`Observed`, after a first line, :class:`RecordingInfo`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localkv.records import Reading, Record

SCHEMA = 1

#: Counters that a snapshot may hold, as they only ever grow while a server lives.
COUNTERS = (
    "prompt_tokens",
    "cached_prompt_tokens",
    "prefix_queries",
    "prefix_hits",
    "generated_tokens",
    "prompt_seconds",
    "generated_seconds",
    "preemptions",
    "requests_done",
    "decodes",
)


@dataclass(frozen=True)
class Slot(Record):
    """One slot of llama-server: ``n_ctx`` tokens at most; ``tokens`` in its cache, kept after use.

    ``cached`` of the prompt's tokens were there already, ``decoded`` new ones were generated for
    the request ``task``; ``runner`` is the process id where a server has several of its kind.
    """

    id: int
    n_ctx: int
    busy: bool
    tokens: int
    cached: int | None = None
    decoded: int | None = None
    task: int | None = None
    runner: int | None = None


@dataclass(frozen=True)
class Loaded(Record):
    """A model that Ollama holds: ``bytes`` in all and ``vram_bytes`` of them, as Ollama counts.

    ``context_length`` tokens per request; ``expires_at`` as the server writes it.
    """

    name: str
    digest: str
    bytes: int | None
    vram_bytes: int | None
    context_length: int | None
    expires_at: str


@dataclass(frozen=True)
class Snapshot(Record):
    """What ``server`` (llama-server, ollama, vllm, sglang) said; None is unknown, never zero.

    ``used_tokens`` of ``capacity_tokens`` are in the cache, ``usage`` is the share that the server
    itself gives (0 to 1). ``running`` and ``waiting`` are requests; ``speed_prompt`` and
    ``speed_generated`` tokens per second as the server averages them. ``counters`` only grow (see
    ``COUNTERS``), so that one that fell tells of a restart. ``unknown`` says why a field is None;
    ``warnings`` what could not be read.
    """

    server: str
    model: str = ""
    used_tokens: int | None = None
    capacity_tokens: int | None = None
    usage: float | None = None
    running: int | None = None
    waiting: int | None = None
    speed_prompt: float | None = None
    speed_generated: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    loaded: tuple[Loaded, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot that ``to_dict`` wrote; unknown names are ignored."""
        return super().from_dict(
            {
                **data,
                "slots": tuple(Slot.from_dict(slot) for slot in data.get("slots", ())),
                "loaded": tuple(Loaded.from_dict(model) for model in data.get("loaded", ())),
                "warnings": tuple(data.get("warnings", ())),
            }
        )


@dataclass(frozen=True)
class MemoryPart(Record):
    """A part of a server's allocated memory: from ``least`` to ``most`` bytes now.

    ``grown`` to ``grown_most`` of them came since the server was first seen. ``source`` is log,
    formula, or slots (the rules, and what the slots showed); ``note`` says more in words.
    """

    name: str
    least: int
    most: int
    grown: int
    grown_most: int
    source: str
    note: str = ""


@dataclass(frozen=True)
class HostMemory(Record):
    """What one server process has allocated (RssAnon), taken apart; bytes, None is unknown.

    ``first`` is what was measured when it was first seen. ``log`` names the log that was read, ""
    where there is none; ``why`` says why there are no parts.
    """

    pid: int
    model: str = ""
    measured: int | None = None
    first: int | None = None
    parts: tuple[MemoryPart, ...] = ()
    log: str = ""
    why: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HostMemory:
        """Return what ``to_dict`` wrote."""
        parts = tuple(MemoryPart.from_dict(part) for part in data.get("parts", ()))
        return super().from_dict({**data, "parts": parts})

    def part(self, name: str) -> MemoryPart | None:
        """Return the part called ``name``."""
        return next((part for part in self.parts if part.name == name), None)


@dataclass(frozen=True)
class Pinned(Record):
    """Memory that a model or a server holds also while it is idle; bytes, None is unknown.

    ``bytes`` as measured (allocated by its process), ``told_bytes`` as the server says,
    ``kv_bytes`` of KV cache by the formula, of which ``used_bytes`` hold ``tokens`` of finished
    requests. ``idle`` None: not known. It ends ``seconds_left`` from now (None: not by itself, or
    ``until`` says when); ``free`` is the command that frees it.
    """

    name: str
    bytes: int | None = None
    told_bytes: int | None = None
    kv_bytes: int | None = None
    tokens: int | None = None
    used_bytes: int | None = None
    idle: bool | None = None
    until: str = ""
    seconds_left: float | None = None
    free: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Pinned:
        """Return what ``to_dict`` wrote."""
        return super().from_dict({**data, "free": tuple(data.get("free", ()))})


@dataclass(frozen=True)
class Observed(Record):
    """One look at a server, ``seconds`` after the first; ``took`` are those of the look itself.

    ``snapshot`` is None where the server did not answer: ``error`` says so in one line and
    ``error_kind`` as :class:`localkv.http.ServerError` has it (slow is not gone), or "loading"
    for a 503. ``process`` holds the readings of the server's processes on this machine; ``events``
    what changed since the last look (a restart, a counter that fell). ``predicted`` is as in
    :class:`RecordingInfo`, where it is no longer what was said last. ``memory`` takes apart what
    the server's processes allocated; ``pinned`` is what stays while nothing runs.
    """

    seconds: float
    took: float
    snapshot: Snapshot | None = None
    error: str = ""
    error_kind: str = ""
    process: dict[str, Reading] = field(default_factory=dict)
    events: tuple[str, ...] = ()
    predicted: dict[str, Any] | None = None
    memory: tuple[HostMemory, ...] = ()
    pinned: tuple[Pinned, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Observed:
        """Return the look that ``to_dict`` wrote."""
        told = data.get("snapshot")
        return super().from_dict(
            {
                **data,
                "snapshot": Snapshot.from_dict(told) if told else None,
                "process": {k: Reading.from_dict(v) for k, v in data.get("process", {}).items()},
                "events": tuple(data.get("events", ())),
                "memory": tuple(HostMemory.from_dict(m) for m in data.get("memory", ())),
                "pinned": tuple(Pinned.from_dict(each) for each in data.get("pinned", ())),
            }
        )


@dataclass(frozen=True)
class LoadRequest(Record):
    """One request of a load; seconds, None where it did not come that far.

    ``sent`` after the step began, ``first_token`` and ``seconds`` after it was sent. Counts are
    the server's own; ``cached_tokens`` of the prompt were in its cache. ``error`` in one line, with
    its kind as :class:`localkv.http.ServerError` has it ("stopped" where localkv itself gave up)
    and the HTTP ``status`` where there was one.
    """

    sent: float
    first_token: float | None
    seconds: float
    generated: int
    tokens_per_second: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    error_kind: str = ""
    status: int | None = None


@dataclass(frozen=True)
class LoadLimits(Record):
    """What a server said of its room, in tokens, before a load; None is unknown.

    ``slots`` requests run at once, each with ``per_request`` tokens at most, prompt and answer;
    ``capacity`` tokens are there for all of them, shared by them where ``unified``, in blocks of
    ``block_size`` where it has such.
    """

    slots: int | None = None
    per_request: int | None = None
    capacity: int | None = None
    unified: bool | None = None
    block_size: int | None = None


@dataclass(frozen=True)
class LoadStep(Record):
    """Requests sent at once, and the looks at the server meanwhile, the last one after the end.

    ``part`` of the load: scenarios, prefix, concurrency or context. ``started`` and ``seconds``
    are those since the load began and those of the step; looks count from the step's beginning.
    ``shared`` of each request's ``prompt_tokens`` are the same in all of the same part.
    """

    part: str
    name: str
    concurrency: int
    prompt_tokens: int
    n_predict: int
    shared: int
    started: float
    seconds: float
    requests: tuple[LoadRequest, ...]
    looks: tuple[Observed, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoadStep:
        """Return the step that ``to_dict`` wrote."""
        requests = tuple(LoadRequest.from_dict(r) for r in data.get("requests", ()))
        looks = tuple(Observed.from_dict(look) for look in data.get("looks", ()))
        return super().from_dict({**data, "requests": requests, "looks": looks})


@dataclass(frozen=True)
class RecordingInfo(Record):
    """What was recorded: the first line of a recording.

    ``url`` without credentials; ``created`` as ISO 8601; ``interval`` seconds between two looks;
    ``pid`` of the server on this machine, None elsewhere; ``predicted`` what localkv makes of the
    model behind it: ``capacity_tokens``, ``kv_bytes``, ``model``, ``source``. A recording of kind
    "load" holds :class:`LoadStep` instead of looks, and in ``load`` what was asked for and the
    ``limits`` as :class:`LoadLimits`.
    """

    kind: str = "observation"
    schema: int = SCHEMA
    localkv: str = ""
    created: str = ""
    server: str = ""
    url: str = ""
    interval: float = 1.0
    pid: int | None = None
    predicted: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
