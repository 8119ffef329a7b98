"""The records of a sweep: what one run of one point left behind, as data.

One line of ``results.jsonl`` is one :class:`PointRecord`. The classes know how to become JSON and
come back from it; a field that a newer localkv wrote is ignored, one that an older localkv did
not write takes its default, so that old runs stay readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

SCHEMA = 1

#: How a point can end. Each is an answer, and the sweep goes on after it.
OUTCOMES = ("ok", "skipped", "failed", "oom", "crashed", "timeout")

#: The phases of a point, in order.
PHASES = ("baseline", "model", "context", "decode", "fill", "closed")

T = TypeVar("T", bound="Record")


class Record:
    """A dataclass that becomes JSON and comes back."""

    @classmethod
    def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
        """Return the record written by :meth:`to_dict`."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**{k: v for k, v in data.items() if k in known})

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        # dataclasses.asdict copies every value deeply, which a watch would do at each look.
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    """Return ``value`` with the records inside it as plain values."""
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Reading(Record):
    """One figure read by a probe: ``value`` in ``unit``, or None because of ``why``."""

    value: int | None
    unit: str = "B"
    source: str = ""
    why: str | None = None


@dataclass(frozen=True)
class Phase(Record):
    """The readings at the end of one phase, ``seconds`` after the worker started.

    Keys of ``readings``: rss, rss_anon, rss_file, uss, peak_rss (host); vram_process,
    vram_device (NVML).
    """

    name: str
    seconds: float
    readings: dict[str, Reading] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Phase:
        """Return the phase written by ``to_dict``."""
        readings = {k: Reading.from_dict(v) for k, v in data.get("readings", {}).items()}
        return cls(name=data["name"], seconds=data.get("seconds", 0.0), readings=readings)

    def value(self, key: str) -> int | None:
        """Return the value of the reading ``key``, None when it is unknown."""
        reading = self.readings.get(key)
        return reading.value if reading else None


@dataclass(frozen=True)
class Speed(Record):
    """Speed at one depth: tokens already in each slot, and tokens per second over all slots."""

    depth: int
    slots: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None


@dataclass(frozen=True)
class PointRecord(Record):
    """One run of one point.

    ``key`` identifies the point among those of a run (same settings, same key); ``config`` is
    ``RunConfig.to_dict()``; ``prediction`` is ``Estimate.to_dict()``; ``engine`` holds what the
    engine's log said (see ``engines.log``), all sizes in bytes; ``peak`` the highest readings,
    by key as in a phase, sampled by the parent and by the kernel's own mark; ``timings`` seconds
    by phase (``load``, ``context``, ``decode``, ``wall``, ...); ``server``, for a point that ran in
    one, its ``program``, whether it was ``attached``, and what it says of itself: ``ps_bytes`` and
    ``ps_vram_bytes`` of Ollama's /api/ps beside the ``ps_predicted`` ones, or ``ps_why`` there are
    none, ``read_tokens`` of each slot's prompt. A server loads weights and context in one go: such
    a point has no phase ``model``. ``resident_compute`` is the part of
    the planned compute buffers, in bytes, that the tokens decoded here can make resident; None
    when the engine gave no plan. ``reason`` explains any outcome
    but ok in one line; ``stage`` says what could not be had: weights, kv, compute, decode; of a
    skipped point ``preflight`` (the memory) or ``settings`` (the engine takes no such pair).
    """

    key: str
    repeat: int
    outcome: str
    config: dict[str, Any]
    schema: int = SCHEMA
    reason: str | None = None
    stage: str | None = None
    phases: tuple[Phase, ...] = ()
    peak: dict[str, Reading] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    prediction: dict[str, Any] = field(default_factory=dict)
    resident_compute: int | None = None
    timings: dict[str, float] = field(default_factory=dict)
    speed: tuple[Speed, ...] = ()
    server: dict[str, Any] = field(default_factory=dict)
    environment: str = "run.json"
    log_tail: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PointRecord:
        """Return the record written by ``to_dict``."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {k: v for k, v in data.items() if k in known}
        values["phases"] = tuple(Phase.from_dict(p) for p in data.get("phases", ()))
        values["peak"] = {k: Reading.from_dict(v) for k, v in data.get("peak", {}).items()}
        values["speed"] = tuple(Speed.from_dict(s) for s in data.get("speed", ()))
        values["log_tail"] = tuple(data.get("log_tail", ()))
        return cls(**values)

    def phase(self, name: str) -> Phase | None:
        """Return the phase called ``name``, None when the run did not get there."""
        return next((p for p in self.phases if p.name == name), None)


@dataclass(frozen=True)
class RunInfo(Record):
    """What a whole run is: written once as ``run.json`` before the first point.

    ``argv`` is the command that started it, ``seed`` the seed of the shuffled order, ``points``
    how many (point, repeat) pairs were planned, ``plan`` the settings it came from.
    ``environment`` records machine, engine, versions, probes; ``model`` the model's facts.
    ``levers`` holds what could be changed to need less, as ``table`` (``Lever.to_dict()``), counted
    from the point ``key``; empty in runs of versions that did not work it out.
    """

    schema: int = SCHEMA
    localkv: str = ""
    created: str = ""
    argv: tuple[str, ...] = ()
    seed: int = 0
    points: int = 0
    repeats: int = 1
    plan: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    levers: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunInfo:
        """Return the record written by ``to_dict``.

        Raises:
            TypeError: a field is not what it should be.
        """
        info = super().from_dict({**data, "argv": tuple(data.get("argv", ()))})
        for each in fields(cls):
            default = getattr(_DEFAULTS, each.name)
            if not isinstance(getattr(info, each.name), type(default)):
                raise TypeError(f"its {each.name} is not what it should be")
        return info


_DEFAULTS = RunInfo()
