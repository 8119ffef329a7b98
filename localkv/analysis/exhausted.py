"""Did a server give up under a load, how, and what shows it?

Each server gives up in its own way. vLLM takes running requests back (preemption), SGLang too
(retraction). llama-server defers what has no free slot, refuses a prompt that is longer than one,
and fails all requests in flight when a cache that slots share is full. Ollama queues, refuses
when its queue is full, and cuts prompts that are too long without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from localkv.analysis.observed import total_growth
from localkv.records import Record
from localkv.snapshots import LoadRequest, LoadStep, Snapshot
from localkv.units import plural

#: Kinds of giving up, the gravest first.
KINDS = ("cache full", "preempted", "refused", "too long", "cut", "queued")
#: What a kind is called where a server has a word of its own.
WORDS = {("sglang", "preempted"): "retracted", ("llama-server", "queued"): "deferred"}
_FULL = "context size has been exceeded"


@dataclass(frozen=True)
class Exhaustion(Record):
    """How and where a server gave up: ``kind`` is one of ``KINDS``, ``evidence`` sentences.

    ``asked_tokens`` are those of all requests together, prompts and answers; ``peak_used`` the most
    that the server said it held. ``predicted_requests`` such requests should have run at once, in
    ``predicted_tokens`` for all of them. ``over_time`` has [seconds, running, waiting, preemptions,
    used tokens] for each look, seconds from the step's beginning.
    """

    kind: str
    part: str
    step: str
    concurrency: int
    prompt_tokens: int
    n_predict: int
    asked_tokens: int
    peak_used: int | None
    peak_running: int | None
    evidence: tuple[str, ...]
    over_time: tuple[tuple[float, int | None, int | None, int | None, int | None], ...]
    predicted_requests: int | None = None
    predicted_tokens: int | None = None

    def word(self, server: str) -> str:
        """Return what ``server`` calls it."""
        return WORDS.get((server, self.kind), self.kind)


def exhaustion(step: LoadStep, server: str) -> Exhaustion | None:
    """Return how ``server`` gave up in ``step``, the gravest kind first; None if it did not."""
    for kind in KINDS:
        evidence = tuple(_EVIDENCE[kind](step, server))
        if evidence:
            seen = snapshots(step)
            return Exhaustion(
                kind=kind,
                part=step.part,
                step=step.name,
                concurrency=step.concurrency,
                prompt_tokens=step.prompt_tokens,
                n_predict=step.n_predict,
                asked_tokens=step.concurrency * (step.prompt_tokens + step.n_predict),
                peak_used=highest(seen, "used_tokens"),
                peak_running=highest(seen, "running"),
                evidence=evidence,
                over_time=tuple(_over_time(step)),
            )
    return None


def snapshots(step: LoadStep) -> list[Snapshot]:
    """Return the answers to the looks of ``step``."""
    return [look.snapshot for look in step.looks if look.snapshot is not None]


def highest(seen: Sequence[Snapshot], name: str) -> int | None:
    """Return the highest value of a field; None where it is unknown throughout."""
    return max((v for s in seen if (v := getattr(s, name)) is not None), default=None)


def too_long(request: LoadRequest) -> bool:
    """Return whether the server refused the prompt as longer than a request may be."""
    return request.status == 400 and "context" in request.error.lower()


def fits(step: LoadStep, server: str) -> bool:
    """Return whether the server took the prompts of ``step`` as long as they were."""
    return not any(too_long(r) for r in step.requests) and not any(_cut(step, server))


def queued(step: LoadStep) -> int:
    """Return how many requests waited longer for a first token than another took in all.

    So it looks from outside when fewer run than were sent, whatever the server tells. Answers of
    one token do not show it.
    """
    took = [r.seconds for r in step.requests if not r.error and r.generated > 1]
    waited = [r.first_token for r in step.requests if r.first_token is not None]
    return sum(seconds > min(took) for seconds in waited) if took else 0


def _cache_full(step: LoadStep, server: str) -> Iterator[str]:
    failed = [r for r in step.requests if r.status == 500 and _FULL in r.error.lower()]
    if failed:
        said = f'"{server_said(failed[0])}" (500)'
        yield f"{len(failed)} of {plural(step.concurrency, 'request')} failed: {said}"


def _preempted(step: LoadStep, server: str) -> Iterator[str]:
    seen = snapshots(step)
    word = "retracted" if server == "sglang" else "preempted"
    if count := total_growth(seen, "preemptions"):
        yield f"the server counted {plural(count, 'request')} {word}"
    now = max((int(s.facts.get("retracted_now") or 0) for s in seen), default=0)
    if now:
        yield f"at most {plural(now, 'request')} {word} at the same time"
    # Its counter lags: requests that go back to waiting, none having come or ended, show it first.
    told = [(look.seconds, look.snapshot) for look in step.looks if look.snapshot is not None]
    for (_, before), (seconds, after) in pairwise(told):
        if _went_back(before, after):
            yield (
                f"running fell from {before.running} to {after.running} while waiting rose from "
                f"{before.waiting} to {after.waiting}, {seconds:.1f} s after the start"
            )
            return


def _went_back(before: Snapshot, after: Snapshot) -> bool:
    counts = (before.running, before.waiting, after.running, after.waiting)
    if before.server not in ("vllm", "sglang") or None in counts:
        return False
    ran, waited, runs, waits = (count or 0 for count in counts)
    return runs < ran and waits > waited and runs + waits <= ran + waited


def _refused(step: LoadStep, server: str) -> Iterator[str]:
    failed = [r for r in step.requests if r.status in (429, 503)]
    if failed:
        said = f'"{server_said(failed[0])}" ({failed[0].status})'
        yield f"{len(failed)} of {plural(step.concurrency, 'request')} refused: {said}"


def _too_long(step: LoadStep, server: str) -> Iterator[str]:
    failed = [r for r in step.requests if too_long(r)]
    if failed:
        said = f'"{server_said(failed[0])}" (400)'
        yield f"{len(failed)} of {plural(step.concurrency, 'request')} refused: {said}"


def _cut(step: LoadStep, server: str) -> Iterator[str]:
    read = [
        r.prompt_tokens
        for r in step.requests
        if r.prompt_tokens is not None and r.prompt_tokens < step.prompt_tokens
    ]
    if read and server == "ollama":
        yield (
            f"{len(read)} of {plural(step.concurrency, 'prompt')} cut without a word: "
            f"{min(read):,} of {step.prompt_tokens:,} tokens were read"
        )


def _queued(step: LoadStep, server: str) -> Iterator[str]:
    seen = snapshots(step)
    waiting, running = highest(seen, "waiting"), highest(seen, "running")
    late = queued(step)
    if waiting is not None:
        # Every request of vLLM waits for a moment; one that llama-server defers has found no slot.
        if waiting and (late or server == "llama-server"):
            word = "deferred" if server == "llama-server" else "waiting"
            yield f"at most {plural(waiting, 'request')} {word} while {running} ran"
    elif late and running is not None and 0 < running < step.concurrency:
        yield f"at most {running} of {step.concurrency} requests ran at once"
    elif running is not None:
        return
    if late and (waiting or waiting is None):
        yield f"{late} of {step.concurrency} requests waited longer than another took in all"


_EVIDENCE: dict[str, Callable[[LoadStep, str], Iterator[str]]] = {
    "cache full": _cache_full,
    "preempted": _preempted,
    "refused": _refused,
    "too long": _too_long,
    "cut": _cut,
    "queued": _queued,
}


def server_said(request: LoadRequest) -> str:
    """Return what the server itself said, without the address before it."""
    return request.error.partition(": ")[2] or request.error


def _over_time(
    step: LoadStep,
) -> Iterator[tuple[float, int | None, int | None, int | None, int | None]]:
    for look in step.looks:
        if (seen := look.snapshot) is not None:
            counted = seen.counters.get("preemptions")
            preempted = None if counted is None else round(counted)
            yield (look.seconds, seen.running, seen.waiting, preempted, seen.used_tokens)
