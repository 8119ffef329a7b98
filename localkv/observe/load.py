"""Requests sent at the same time, each timed, while the server is looked at.

Bounded in number and in time: every request has a time limit, and one that is stopped is left to
end by itself: the server sees its connection close.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from localkv.http import Client, ServerError
from localkv.observe.process import ServerProcess
from localkv.observe.sources import Source
from localkv.observe.speakers import Speaker
from localkv.observe.watch import look, watch
from localkv.snapshots import LoadRequest, LoadStep, Observed

#: Seconds between two looks under load: short enough to see a prompt of some hundred tokens.
LOOK = 0.1
#: Requests that one step may send at once.
MOST_AT_ONCE = 256
#: Seconds that a request gets to end by itself when it is stopped or out of time.
_GRACE = 2.0
_OUT_OF_TIME = "the time was up before its end"


@dataclass(frozen=True)
class Task:
    """A step of a load: ``requests`` at once, each of ``prompt_tokens`` and ``n_predict``.

    ``shared`` tokens at the beginning are the same in all of them and in other tasks' prompts.
    """

    part: str
    name: str
    requests: int
    prompt_tokens: int
    n_predict: int
    shared: int = 0


@dataclass(frozen=True)
class Bench:
    """Where a load runs: the server, how it is asked to generate, and how it is looked at."""

    url: str
    speaker: Speaker
    source: Source
    process: ServerProcess | None = None
    clock: Callable[[], float] = time.monotonic


class _Sending:
    """One request on a thread of its own; ``done`` is what came of it, None until then."""

    def __init__(self, bench: Bench, task: Task, prompt: object, stop: threading.Event) -> None:
        self.done: LoadRequest | None = None
        self._bench, self._task, self._prompt, self._stop = bench, task, prompt, stop
        self._client = Client(bench.url)

    def start(self, begun: float, timeout: float) -> None:
        # A daemon: a request that hangs must not hold localkv back from ending.
        self._thread = threading.Thread(target=self._run, args=(begun, timeout), daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        self._thread.join(max(seconds, 0.0))

    def _run(self, begun: float, timeout: float) -> None:
        clock, speaker, task = self._bench.clock, self._bench.speaker, self._task
        sent = clock()
        first = last = None
        tokens, counts = 0, dict[str, int]()
        error, kind, status = "", "", None
        try:
            for piece in speaker.generate(self._client, self._prompt, task.n_predict, timeout):
                if piece.tokens:
                    last = clock()
                    first = last if first is None else first
                    tokens += piece.tokens
                counts |= {k: v for k, v in piece.counts.items() if isinstance(v, int)}
                if self._stop.is_set():
                    error, kind = "stopped before its end", "stopped"
                    break
        except ServerError as failed:
            error, kind, status = failed.message, failed.kind, failed.status
            if kind == "slow":
                error, kind = _OUT_OF_TIME, "stopped"
        finally:
            self._client.close()
        generated = counts.get("generated_tokens", tokens)
        self.done = LoadRequest(
            sent=round(sent - begun, 4),
            first_token=None if first is None else round(first - sent, 4),
            seconds=round(clock() - sent, 4),
            generated=generated,
            tokens_per_second=_speed(first, last, generated),
            prompt_tokens=counts.get("prompt_tokens"),
            cached_tokens=counts.get("cached_tokens"),
            error=error,
            error_kind=kind,
            status=status,
        )


def run_step(
    bench: Bench, task: Task, *, first: int = 0, timeout: float = 120.0, started: float = 0.0
) -> LoadStep:
    """Send the requests of ``task`` at once, wait for all of them, and return what was seen.

    ``first`` numbers the prompts, so that they differ from those of other steps; ``timeout``
    seconds are for the whole step, which began ``started`` seconds after the load. Ctrl-C
    (KeyboardInterrupt) stops the requests and passes on.

    Raises:
        EngineError: a prompt of that length cannot be made.
    """
    count = min(task.requests, MOST_AT_ONCE)
    stop, done = threading.Event(), threading.Event()
    prompts = [
        bench.speaker.prompt(task.prompt_tokens, task.shared, first + number)
        for number in range(count)
    ]
    sendings = [_Sending(bench, task, prompt, stop) for prompt in prompts]
    looks: list[Observed] = []
    begun = bench.clock()
    watcher = threading.Thread(target=_watch, args=(bench, done, looks), daemon=True)
    watcher.start()
    try:
        for sending in sendings:
            sending.start(begun, timeout)
        for sending in sendings:
            sending.wait(begun + timeout + _GRACE - bench.clock())
    finally:
        stop.set()
        done.set()
        watcher.join(_GRACE)
    seconds = bench.clock() - begun
    looks.append(_last_look(bench, looks, begun))
    return LoadStep(
        part=task.part,
        name=task.name,
        concurrency=count,
        prompt_tokens=task.prompt_tokens,
        n_predict=task.n_predict,
        shared=task.shared,
        started=round(started, 3),
        seconds=round(seconds, 3),
        requests=tuple(sending.done or _unended(seconds) for sending in sendings),
        looks=tuple(looks),
    )


def _watch(bench: Bench, done: threading.Event, looks: list[Observed]) -> None:
    looking = watch(
        bench.source,
        bench.process,
        interval=LOOK,
        wait=lambda seconds: done.wait(seconds),
        clock=bench.clock,
    )
    for seen in looking:
        looks.append(seen)


def _last_look(bench: Bench, looks: list[Observed], begun: float) -> Observed:
    """Look once more: counters are written when the work is done."""
    before = next((seen for seen in reversed(looks) if seen.snapshot is not None), None)
    return look(bench.source, bench.process, before, at=bench.clock() - begun, clock=bench.clock)


def _unended(seconds: float) -> LoadRequest:
    return LoadRequest(
        sent=0.0,
        first_token=None,
        seconds=round(seconds, 4),
        generated=0,
        error=_OUT_OF_TIME,
        error_kind="stopped",
    )


def _speed(first: float | None, last: float | None, generated: int) -> float | None:
    """Return tokens per second after the first one; None where there is no second."""
    if first is None or last is None or generated < 2 or last <= first:
        return None
    return (generated - 1) / (last - first)
