"""Requests sent at the same time, each timed, while the server is looked at.

Bounded in number and in time: nothing is sent after the deadline, and every request has one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from localkv.http import Client, ServerError
from localkv.observe.process import ServerProcess
from localkv.observe.sources import Source
from localkv.observe.speakers import Speaker
from localkv.observe.watch import watch
from localkv.snapshots import LoadRequest, LoadStep, Observed

#: Seconds between two looks under load: short enough to see a prompt of some hundred tokens.
LOOK = 0.25
#: Requests that one step may send at once.
MOST_AT_ONCE = 256


@dataclass(frozen=True)
class Task:
    """A step of a load: ``requests`` at once, each of ``prompt_tokens`` and ``n_predict``.

    ``shared`` tokens at the beginning are the same in all of them; ``first`` numbers them, so
    that another step's prompts differ.
    """

    name: str
    requests: int
    prompt_tokens: int
    n_predict: int
    shared: int = 0
    first: int = 0


@dataclass(frozen=True)
class Bench:
    """Where a load runs: the server, how it is asked to generate, and how it is looked at."""

    url: str
    speaker: Speaker
    source: Source
    process: ServerProcess | None = None
    timeout: float = 120.0
    clock: Callable[[], float] = time.monotonic


def run_step(bench: Bench, task: Task) -> LoadStep:
    """Send the requests of ``task`` at once, wait for all of them, and return what was seen.

    Raises:
        EngineError: a prompt of that length cannot be made.
    """
    count = min(task.requests, MOST_AT_ONCE)
    prompts = [
        bench.speaker.prompt(task.prompt_tokens, task.shared, task.first + number)
        for number in range(count)
    ]
    looks: list[Observed] = []
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(bench, done, looks), daemon=True)
    begun = bench.clock()
    watcher.start()
    try:
        with ThreadPoolExecutor(count) as pool:
            requests = list(pool.map(lambda p: _request(bench, task, p, begun), prompts))
    finally:
        done.set()
        watcher.join(bench.timeout)
    return LoadStep(
        name=task.name,
        concurrency=count,
        prompt_tokens=task.prompt_tokens,
        n_predict=task.n_predict,
        shared=task.shared,
        seconds=round(bench.clock() - begun, 3),
        requests=tuple(requests),
        looks=tuple(looks),
    )


def _watch(bench: Bench, done: threading.Event, looks: list[Observed]) -> None:
    looks.extend(
        watch(
            bench.source,
            bench.process,
            interval=LOOK,
            duration=bench.timeout + LOOK,
            wait=lambda seconds: done.wait(seconds),
            clock=bench.clock,
        )
    )


def _request(bench: Bench, task: Task, prompt: object, begun: float) -> LoadRequest:
    """Send one request and return when its tokens came, or why they did not."""
    sent = bench.clock()
    first = last = None
    tokens = 0
    counts: dict[str, int] = {}
    error, status = "", None
    try:
        with Client(bench.url) as client:
            for piece in bench.speaker.generate(client, prompt, task.n_predict, bench.timeout):
                if piece.tokens:
                    last = bench.clock()
                    first = last if first is None else first
                    tokens += piece.tokens
                counts |= {k: int(v) for k, v in piece.counts.items() if v is not None}
    except ServerError as failed:
        error, status = str(failed), failed.status
    generated = counts.get("generated_tokens", tokens)
    return LoadRequest(
        sent=round(sent - begun, 4),
        first_token=None if first is None else round(first - sent, 4),
        seconds=round(bench.clock() - sent, 4),
        generated=generated,
        tokens_per_second=_speed(first, last, generated),
        prompt_tokens=counts.get("prompt_tokens"),
        cached_tokens=counts.get("cached_tokens"),
        error=error,
        status=status,
    )


def _speed(first: float | None, last: float | None, generated: int) -> float | None:
    """Return tokens per second after the first one; None where there is no second."""
    if first is None or last is None or generated < 2 or last <= first:
        return None
    return (generated - 1) / (last - first)


def run_steps(bench: Bench, tasks: Sequence[Task], limit: float) -> list[LoadStep]:
    """Run ``tasks`` one after the other until ``limit`` seconds have passed."""
    deadline = bench.clock() + limit
    steps = []
    for task in tasks:
        if bench.clock() >= deadline:
            break
        steps.append(run_step(bench, task))
    return steps
