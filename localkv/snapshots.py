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
)


@dataclass(frozen=True)
class Slot(Record):
    """One slot of llama-server: ``n_ctx`` tokens at most; ``tokens`` in its cache, kept after use.

    ``cached`` of the prompt's tokens were there already.
    """

    id: int
    n_ctx: int
    busy: bool
    tokens: int
    cached: int | None = None


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
class Observed(Record):
    """One look at a server, ``seconds`` after the first; ``took`` are those of the look itself.

    ``snapshot`` is None where the server did not answer: ``error`` says so in one line and
    ``error_kind`` as :class:`localkv.http.ServerError` has it (slow is not gone). ``process`` holds
    the readings of the server's processes on this machine; ``events`` what changed since the last
    look (a restart, a counter that fell).
    """

    seconds: float
    took: float
    snapshot: Snapshot | None = None
    error: str = ""
    error_kind: str = ""
    process: dict[str, Reading] = field(default_factory=dict)
    events: tuple[str, ...] = ()

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
            }
        )


@dataclass(frozen=True)
class LoadRequest(Record):
    """One request of a load; seconds, None where it did not come that far.

    ``sent`` after the step began, ``first_token`` and ``seconds`` after it was sent. Counts are
    the server's own; ``cached_tokens`` of the prompt were in its cache. ``error`` in one line, with
    the HTTP ``status`` where there was one.
    """

    sent: float
    first_token: float | None
    seconds: float
    generated: int
    tokens_per_second: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    status: int | None = None


@dataclass(frozen=True)
class LoadStep(Record):
    """Requests sent at once, and the looks at the server meanwhile.

    ``shared`` of each request's ``prompt_tokens`` are the same in all of them.
    """

    name: str
    concurrency: int
    prompt_tokens: int
    n_predict: int
    shared: int
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
    model behind it: ``capacity_tokens``, ``kv_bytes``, ``model``, ``source``.
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
