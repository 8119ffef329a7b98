"""A load, summed up: percentiles, where the server gave up, what a shared prefix is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localkv.analysis.exhausted import (
    Exhaustion,
    exhaustion,
    fits,
    highest,
    queued,
    server_said,
    snapshots,
)
from localkv.analysis.observed import total_growth
from localkv.records import Record
from localkv.snapshots import LoadLimits, LoadStep, RecordingInfo
from localkv.units import plural

#: The parts of a load, in the order in which they run.
PARTS = ("scenarios", "prefix", "concurrency", "context")
_POINTS = (50, 90, 99)
#: More requests at once than any load sends.
MOST = 1 << 30


@dataclass(frozen=True)
class StepSummary(Record):
    """What one step came to. None is unknown; tokens and requests are counts.

    ``first_token`` (seconds) and ``speed`` (tokens per second of one request after its first token)
    map p50, p90 and p99 to a value. ``throughput`` counts all generated tokens against the whole
    step. ``used_after`` is what the cache held when all was answered. ``fits`` is False where the
    server refused the prompt as too long, or cut it. ``notes`` are sentences.
    """

    part: str
    name: str
    concurrency: int
    prompt_tokens: int
    shared: int
    started: float
    seconds: float
    answered: int
    failed: int
    fits: bool
    generated: int
    first_token: dict[str, float]
    speed: dict[str, float]
    throughput: float | None
    peak_used: int | None
    peak_usage: float | None
    used_after: int | None
    peak_running: int | None
    peak_waiting: int | None
    queued: int
    preemptions: int | None
    cached_tokens: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Prefix(Record):
    """A prompt read twice, the second time with ``shared`` of its tokens in the cache.

    ``cached_tokens`` as the server counts them, by ``source``; times to the first token in seconds.
    ``asked`` is the shared length that was wanted. With a ``price`` per million tokens:
    ``saved_share`` of the price of a prompt, and ``saved_per_1000`` prompts.
    """

    asked: int
    shared: int
    prompt_tokens: int
    first_token_without: float | None
    first_token_with: float | None
    cached_tokens: int | None
    source: str
    price: float | None = None
    discount: float | None = None
    saved_share: float | None = None
    saved_per_1000: float | None = None


@dataclass(frozen=True)
class Load:
    """What a load came to: its ``steps``, every ramp's ``exhaustion``, the ``prefix``."""

    steps: tuple[StepSummary, ...]
    exhaustion: tuple[Exhaustion, ...]
    prefix: Prefix | None
    predicted: dict[str, Any] = field(default_factory=dict)
    ended: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "steps": [step.to_dict() for step in self.steps],
            "exhaustion": [each.to_dict() for each in self.exhaustion],
            "prefix": self.prefix.to_dict() if self.prefix else None,
            "predicted": self.predicted,
            "ended": self.ended,
        }


def summarise_load(info: RecordingInfo, steps: Sequence[LoadStep], ended: str = "") -> Load:
    """Return what ``steps`` say about the server of ``info``; ``ended`` says why it stopped."""
    ramps = [[s for s in steps if s.part == part] for part in PARTS[2:]]
    predicted = predicted_room(info)
    limits = LoadLimits.from_dict(info.load.get("limits", {}))
    found = [
        replace(
            point,
            predicted_tokens=predicted["tokens"],
            predicted_requests=predicted_requests(
                limits, predicted["tokens"], point.prompt_tokens + point.n_predict
            ),
        )
        for ramp in ramps
        if (point := exhaustion_point(ramp, info.server))
    ]
    return Load(
        steps=tuple(summarise_step(step, info.server) for step in steps),
        exhaustion=tuple(found),
        prefix=_prefix(info, [s for s in steps if s.part == "prefix"]),
        predicted=predicted,
        ended=ended,
    )


def exhaustion_point(ramp: Sequence[LoadStep], server: str) -> Exhaustion | None:
    """Return the first time that a server gave up on a ramp; queueing counts if nothing else."""
    found = [point for step in ramp if (point := exhaustion(step, server))]
    return next((p for p in found if p.kind != "queued"), found[0] if found else None)


def predicted_room(info: RecordingInfo) -> dict[str, Any]:
    """Return the room that there should be: ``tokens`` in all, ``slots``, tokens ``per_request``.

    The tokens are localkv's from the model's header, the server's own (``source``) where that
    could not be read, ``why``.
    """
    limits = LoadLimits.from_dict(info.load.get("limits", {}))
    own = info.predicted.get("capacity_tokens")
    return {
        "tokens": own or limits.capacity,
        "source": "localkv" if own else "the server" if limits.capacity else "",
        "slots": limits.slots,
        "per_request": limits.per_request,
        **({"why": info.predicted["why"]} if info.predicted.get("why") else {}),
    }


def predicted_requests(limits: LoadLimits, capacity: int | None, tokens: int) -> int | None:
    """Return how many requests of ``tokens`` each should run at once in ``capacity`` tokens.

    Slots with caches of their own each take one that fits; slots that share a cache take what fits
    into it. Blocks are handed out whole, and one of a server's blocks never (vLLM's null block).
    None is unknown.
    """
    if limits.per_request is not None and tokens > limits.per_request:
        return 0
    if limits.slots and not limits.unified:
        return limits.slots
    if not capacity:
        return None
    if limits.block_size:
        blocks = -(-tokens // limits.block_size)
        return (capacity // limits.block_size - 1) // max(blocks, 1)
    return min(capacity // max(tokens, 1), limits.slots or MOST)


def summarise_step(step: LoadStep, server: str) -> StepSummary:
    """Return what ``step`` came to."""
    seen = snapshots(step)
    answered = [r for r in step.requests if not r.error]
    generated = sum(r.generated for r in step.requests)
    used = [s.used_tokens for s in seen if s.used_tokens is not None]
    last = step.looks[-1].snapshot if step.looks else None
    return StepSummary(
        part=step.part,
        name=step.name,
        concurrency=step.concurrency,
        prompt_tokens=step.prompt_tokens,
        shared=step.shared,
        started=step.started,
        seconds=step.seconds,
        answered=len(answered),
        failed=len(step.requests) - len(answered),
        fits=fits(step, server),
        generated=generated,
        first_token=percentiles([r.first_token for r in answered if r.first_token is not None]),
        speed=percentiles([r.tokens_per_second for r in answered if r.tokens_per_second]),
        throughput=generated / step.seconds if answered and step.seconds > 0 else None,
        peak_used=max(used, default=None),
        peak_usage=max((s.usage for s in seen if s.usage is not None), default=None),
        used_after=last.used_tokens if last else None,
        peak_running=highest(seen, "running"),
        peak_waiting=highest(seen, "waiting"),
        queued=queued(step),
        preemptions=total_growth(seen, "preemptions"),
        cached_tokens=_cached(step)[0],
        notes=tuple(_notes(step)),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90 and p99 of ``values``, straight between neighbours; empty for none."""
    ordered = sorted(values)
    found = {}
    for point in _POINTS if ordered else ():
        place = (len(ordered) - 1) * point / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        found[f"p{point}"] = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return found


def _notes(step: LoadStep) -> list[str]:
    """Return what is not as asked: other counts than asked for, and why requests failed."""
    notes = []
    counts = {r.prompt_tokens for r in step.requests if r.prompt_tokens is not None}
    if other := sorted(counts - {step.prompt_tokens}):
        said = ", ".join(f"{count:,}" for count in other)
        notes.append(
            f"asked for {plural(step.prompt_tokens, 'prompt token')}, the server read {said}"
        )
    errors: dict[str, int] = {}
    for request in step.requests:
        if request.error:
            said = server_said(request)
            errors[said] = errors.get(said, 0) + 1
    notes += [f"{count} failed: {error}" for error, count in errors.items()]
    return notes


def _cached(step: LoadStep) -> tuple[int | None, str]:
    """Return the cached prompt tokens of ``step`` and who counted them."""
    told = [r.cached_tokens for r in step.requests if r.cached_tokens is not None]
    if told:
        return sum(told), "the answer"
    seen = snapshots(step)
    for counter in ("prefix_hits", "cached_prompt_tokens"):
        if (grown := total_growth(seen, counter)) is not None:
            return grown, "the server's counters"
    # A slot forgets the count when its request is done.
    slots = [
        slot.cached
        for each in seen
        for slot in each.slots
        if slot.busy and slot.cached is not None and slot.tokens >= step.prompt_tokens
    ]
    return (max(slots), "the slot") if slots and step.concurrency == 1 else (None, "")


def _prefix(info: RecordingInfo, steps: Sequence[LoadStep]) -> Prefix | None:
    if len(steps) < 2:
        return None
    without, again = steps[0], steps[1]
    cached, source = _cached(again)
    price, discount = info.load.get("price"), info.load.get("discount")
    share = None
    if price is not None and discount is not None and cached is not None:
        share = cached / (again.prompt_tokens * again.concurrency) * discount / 100
    return Prefix(
        asked=info.load.get("shared", again.shared),
        shared=again.shared,
        prompt_tokens=again.prompt_tokens,
        first_token_without=_first(without),
        first_token_with=_first(again),
        cached_tokens=cached,
        source=source,
        price=price,
        discount=discount if price is not None else None,
        saved_share=share,
        saved_per_1000=None if share is None else share * price * again.prompt_tokens / 1000,
    )


def _first(step: LoadStep) -> float | None:
    return percentiles([r.first_token for r in step.requests if r.first_token is not None]).get(
        "p50"
    )
