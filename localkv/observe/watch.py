"""Looking at a server again and again, one question at a time, and noticing what changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from localkv.errors import LocalkvError
from localkv.http import ServerError
from localkv.observe.process import ServerProcess
from localkv.observe.sources import Source
from localkv.snapshots import Observed, Snapshot

#: Seconds between two looks. A look costs the server a queue entry and one HTTP thread for
#: milliseconds; benchmarks/bench_observe.py measures its price.
INTERVAL = 1.0
#: Looks in a row without an answer after which the server counts as gone. One that is restarted
#: is back by then, or says 503 while it loads its model.
GONE_AFTER = 10
#: ``Observed.error_kind`` of a server that says 503.
LOADING = "loading"


class Stop(Protocol):
    """Waits, and says whether to stop; a ``threading.Event``'s ``wait`` is one."""

    def __call__(self, seconds: float) -> bool:
        """Return True when it is time to stop."""


def watch(
    source: Source,
    process: ServerProcess | None = None,
    *,
    interval: float = INTERVAL,
    duration: float | None = None,
    wait: Stop | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Observed]:
    """Yield a look every ``interval`` seconds, for ``duration`` seconds or till the server is gone.

    Never two questions at once, and after an answer that took long a pause as long as it took, so
    that a busy server is not kept busier. A look without an answer is an :class:`Observed` too; the
    last of ``GONE_AFTER`` of them in a row that found nobody or a refusal ends the watch. Slow
    looks never do, nor does a server that is loading its model.
    """
    wait = wait or _sleep
    start = clock()
    before: Observed | None = None
    failed = 0
    while True:
        begun = clock()
        if failed:
            source.forget()
        seen = look(source, process, before, at=begun - start, clock=clock)
        if failed and seen.snapshot is not None:
            seen = replace(seen, events=("the server answers again", *seen.events))
        yield seen
        failed = failed + 1 if is_failed(seen) else 0
        if failed >= GONE_AFTER and seen.error_kind != LOADING:
            return
        before = seen if seen.snapshot is not None else before
        now = clock()
        left = math.inf if duration is None else duration - (now - start)
        pause = max(interval - (now - begun), seen.took if seen.took > interval else 0.0)
        # The last look falls on the end, so that what happened till then is counted.
        if left <= 0 or wait(min(pause, left)):
            return


def error_kind(error: LocalkvError) -> str:
    """Return ``Observed.error_kind`` for ``error``; "answer" where it is not known what answers."""
    if not isinstance(error, ServerError):
        return "answer"
    return LOADING if error.status == 503 else error.kind


def is_failed(seen: Observed) -> bool:
    """Return whether a look found nobody, or a refusal: a slow server is still there."""
    return seen.error_kind not in ("", "slow")


def look(
    source: Source,
    process: ServerProcess | None,
    before: Observed | None,
    *,
    at: float,
    clock: Callable[[], float] = time.monotonic,
) -> Observed:
    """Return one look; ``before`` is the last one with an answer."""
    restarted = process is not None and process.replaced()
    if restarted:
        source.forget()
    begun = clock()
    snapshot, error, kind = None, "", ""
    try:
        snapshot = source.scrape()
    except ServerError as failed:
        error, kind = str(failed), error_kind(failed)
    took = clock() - begun
    events = ["the server was restarted: another process answers"] if restarted else []
    if snapshot is not None and before is not None and before.snapshot is not None:
        events += changes(before.snapshot, snapshot)
    return Observed(
        seconds=round(at, 3),
        took=round(took, 4),
        snapshot=snapshot,
        error=error,
        error_kind=kind,
        process=process.read() if process else {},
        events=tuple(events),
    )


def changes(before: Snapshot, now: Snapshot) -> Iterator[str]:
    """Yield what changed of a server's nature between two snapshots, one sentence each."""
    fell = [name for name, value in now.counters.items() if value < before.counters.get(name, 0)]
    if fell:
        yield f"counters began again, as after a restart ({', '.join(fell)})"
    asleep = [bool(told.facts.get("sleeping")) for told in (before, now)]
    if asleep[0] != asleep[1]:
        yield "the server went to sleep" if asleep[1] else "the server woke up"
    if before.model and now.model and before.model != now.model:
        yield f"the model changed from {before.model} to {now.model}"
    known = before.capacity_tokens is not None and now.capacity_tokens is not None
    if known and before.capacity_tokens != now.capacity_tokens:
        yield f"the capacity changed from {before.capacity_tokens} to {now.capacity_tokens} tokens"
    names = {model.name for model in before.loaded}, {model.name for model in now.loaded}
    yield from (f"{name} was loaded" for name in sorted(names[1] - names[0]))
    yield from (f"{name} was unloaded" for name in sorted(names[0] - names[1]))


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
