"""A recording of a live server, summed up: peaks, growth, and the series to plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from localkv.snapshots import COUNTERS, Observed, RecordingInfo, Snapshot


@dataclass(frozen=True)
class Observation:
    """What a recording says. Tokens and requests are counts, memory is bytes, None is unknown.

    ``answered`` looks had an answer within ``seconds``; ``slow`` and ``missed`` ones had none, the
    last of which was ``last_error`` if nothing came after it. ``grown`` are the counters' growth,
    restarts left out, tokens of requests that still ran included; ``events`` (seconds, sentence);
    ``warnings`` (sentence, how often); ``predicted`` as in :class:`RecordingInfo`, at the end.
    """

    seen: tuple[Observed, ...]
    seconds: float
    answered: int
    slow: int
    missed: int
    capacity: int | None
    peak_used: int | None
    peak_share: float | None
    peak_running: int | None
    peak_waiting: int | None
    first_memory: int | None
    peak_memory: int | None
    grown: dict[str, int] = field(default_factory=dict)
    events: tuple[tuple[float, str], ...] = ()
    warnings: tuple[tuple[str, int], ...] = ()
    last_error: str = ""
    predicted: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON, without the looks."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "seen"}

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return (seconds, value) of a snapshot's field, or of a counter counted from the start."""
        return _from_zero(self.seen, name) if name in COUNTERS else _values(self.seen, name)

    def readings(self, key: str) -> list[tuple[float, float]]:
        """Return (seconds, bytes) of a reading of the server's processes."""
        return [
            (each.seconds, float(value))
            for each in self.seen
            if key in each.process and (value := each.process[key].value) is not None
        ]


def summarise(info: RecordingInfo, seen: Sequence[Observed]) -> Observation:
    """Return what ``seen`` says about the server of ``info``."""
    answered = [each.snapshot for each in seen if each.snapshot is not None]
    told = [s.capacity_tokens for s in answered if s.capacity_tokens is not None]
    predicted = next((s.predicted for s in reversed(seen) if s.predicted), info.predicted)
    capacity = told[-1] if told else predicted.get("capacity_tokens")
    peak = _highest(answered, "used_tokens")
    memory = [
        value
        for each in seen
        if "rss_anon" in each.process and (value := each.process["rss_anon"].value) is not None
    ]
    shares = [s.usage for s in answered if s.usage is not None]
    share = max(shares) if shares else (peak / capacity if peak is not None and capacity else None)
    grown = {name: total_growth(answered, name) for name in COUNTERS}
    warnings = Counter(text for s in answered for text in s.warnings)
    return Observation(
        seen=tuple(seen),
        seconds=seen[-1].seconds if seen else 0.0,
        answered=len(answered),
        slow=sum(each.error_kind == "slow" for each in seen),
        missed=sum(each.error_kind not in ("", "slow") for each in seen),
        capacity=capacity,
        peak_used=peak,
        peak_share=share,
        peak_running=_highest(answered, "running"),
        peak_waiting=_highest(answered, "waiting"),
        first_memory=memory[0] if memory else None,
        peak_memory=max(memory, default=None),
        grown={name: count for name, count in grown.items() if count is not None},
        events=tuple((each.seconds, event) for each in seen for event in each.events),
        warnings=tuple(warnings.items()),
        last_error=seen[-1].error if seen else "",
        predicted=predicted,
    )


def grown(before: Snapshot, now: Snapshot, name: str) -> float | None:
    """Return by how much the counter ``name`` grew; None where it is unknown or fell."""
    if name not in before.counters or name not in now.counters:
        return None
    growth = now.counters[name] - before.counters[name]
    return growth if growth >= 0 else None


def generated(before: Snapshot, now: Snapshot) -> tuple[float | None, str]:
    """Return the tokens generated between two looks, and who says so: "counters" or "slots".

    llama-server counts a request's tokens when it ends, its slots while it runs. Of a request that
    ended in between the slot tells no more; then it is what was counted, less what the slots had
    told before: but at most one token per slot and decode, since counters and slots are not read
    at the same moment.
    """
    counted = grown(before, now, "generated_tokens")
    busy = [slot for slot in now.slots if slot.busy]
    if not now.slots or any(slot.decoded is None for slot in busy):
        return counted, "counters"
    told = {(s.runner, s.id, s.task): s.decoded or 0 for s in before.slots if s.busy}
    going_on = sum(max((s.decoded or 0) - told.get((s.runner, s.id, s.task), 0), 0) for s in busy)
    decodes = grown(before, now, "decodes")
    if counted is None or decodes is None:
        return going_on, "slots"
    ended = counted + sum(s.decoded or 0 for s in busy) - sum(told.values())
    return max(going_on, min(ended, decodes * len(now.slots))), "slots"


def total_growth(snapshots: Sequence[Snapshot], name: str) -> int | None:
    """Return by how much the counter ``name`` grew in all, restarts left out; None if unknown."""
    steps = [_growth(a, b, name) for a, b in pairwise(snapshots)]
    known = [step for step in steps if step is not None]
    return round(sum(known)) if known else None


def _growth(before: Snapshot, now: Snapshot, name: str) -> float | None:
    if name == "generated_tokens":
        return generated(before, now)[0]
    return grown(before, now, name)


def _highest(snapshots: Sequence[Snapshot], name: str) -> int | None:
    return max((v for s in snapshots if (v := getattr(s, name)) is not None), default=None)


def _values(seen: Sequence[Observed], name: str) -> list[tuple[float, float]]:
    return [
        (each.seconds, float(value))
        for each in seen
        if each.snapshot is not None and (value := getattr(each.snapshot, name)) is not None
    ]


def _from_zero(seen: Sequence[Observed], name: str) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    before: Snapshot | None = None
    total = 0.0
    for each in seen:
        if each.snapshot is None or name not in each.snapshot.counters:
            continue
        total += (grown(before, each.snapshot, name) or 0.0) if before else 0.0
        points.append((each.seconds, total))
        before = each.snapshot
    return points
