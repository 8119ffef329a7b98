"""A sweep small enough for a test, and what is needed to interfere with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

from localkv.records import PointRecord
from localkv.sweep.plan import SweepPlan
from localkv.sweep.runner import Progress, run_sweep
from localkv.sweep.session import Session, make_session, remaining
from localkv.sweep.store import RunStore

#: Real points that take a second each: the ubatch is small, so little is decoded.
SMALL = ("-c", "512,1024,2048", "-np", "1,2", "-ub", "64")


def small_session(model: Path, **changes: object) -> Session:
    """Return a session of two points of one slot each on ``model``."""
    settings = {"ctx_size": (512, 1024), "parallel": (1,), "ubatch_size": (64,), **changes}
    return make_session(SweepPlan(model=str(model), **settings))  # type: ignore[arg-type]


def run(
    session: Session, directory: Path, observe: Callable[[Progress], None], *, force: bool = False
) -> list[PointRecord]:
    """Run ``session`` into ``directory`` and return the records in the order of running."""
    store = RunStore(directory)
    store.prepare(len(session.order))
    run_sweep(session, store, remaining(session, store), force=force, observe=observe)
    return store.read_records()


def worker_of(pid: int | None = None) -> psutil.Process:
    """Return the measuring child of process ``pid``, by default of this one."""
    children = psutil.Process(pid).children(recursive=True)
    return next(c for c in children if "localkv.sweep.worker" in c.cmdline())


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Return once ``condition`` holds; fail when it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def patched(source: Path, target: Path, key: str, value: int) -> Path:
    """Copy the header ``source`` to ``target`` with the 32-bit number ``key`` set to ``value``."""
    content = bytearray(source.read_bytes())
    at = content.index(key.encode()) + len(key) + 4  # behind the key stands the type, four bytes
    content[at : at + 4] = value.to_bytes(4, "little")
    target.write_bytes(content)
    return target
