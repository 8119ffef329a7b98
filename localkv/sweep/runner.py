"""Runs the points of a session, each in a fresh child, and keeps every result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from localkv.predict.estimate import Estimate
from localkv.probes import available_memory, open_nvml
from localkv.probes.nvidia import Nvml
from localkv.records import PointRecord
from localkv.sweep.environment import shown_path
from localkv.sweep.measure import Job, measure
from localkv.sweep.plan import Point
from localkv.sweep.session import WORKER_BYTES, Session
from localkv.sweep.store import RunStore
from localkv.units import format_bytes

# Rates of the first guess at a duration; replaced by what the run itself shows.
_START_S = 0.6
_SKIP_S = 0.01
_LOAD_BYTES_PER_S = 1 << 30
_FLOP_PER_S_PER_THREAD = 2e10


@dataclass(frozen=True)
class Progress:
    """Where a sweep stands: point ``index`` of ``total``, and the seconds that are left, guessed.

    ``record`` is None when the point starts and its result when it is done.
    """

    index: int
    total: int
    point: Point
    repeat: int
    seconds_left: float = 0.0
    phase: str = ""
    record: PointRecord | None = None


def run_sweep(
    session: Session,
    store: RunStore,
    pairs: Sequence[tuple[Point, int]],
    *,
    force: bool = False,
    observe: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Measure ``pairs`` in order; each record is on disk before the next point starts.

    A point that would not fit in the memory that is free is recorded as skipped, unless ``force``.

    Raises:
        LocalkvError: a record could not be written.
        KeyboardInterrupt: passed on, after the child has been ended.
    """
    clock = _Clock(session, pairs)
    with open_nvml() as gpu, _measuring(session, store) as measure_point:
        for index, (point, repeat) in enumerate(pairs):
            tell = partial(_tell, observe, clock, Progress(index, len(pairs), point, repeat))
            tell()
            record = _refused(session, point, repeat, gpu, force=force)
            if record is None:
                record = measure_point(_job(session, point, repeat), gpu, tell)
            store.append(record)
            clock.finished(index)
            tell(record=record)


def _measuring(session: Session, store: RunStore) -> AbstractContextManager[Any]:
    """Give what measures a point: a server, or a child of this process."""
    if session.served is None:
        return nullcontext(measure)
    return session.served.measuring(store.directory)


def _tell(
    observe: Callable[[Progress], None],
    clock: _Clock,
    now: Progress,
    phase: str = "",
    record: PointRecord | None = None,
) -> None:
    left = clock.left(now.index + (record is not None))
    observe(replace(now, seconds_left=left, phase=phase, record=record))


def _job(session: Session, point: Point, repeat: int) -> Job:
    return Job(
        path=Path(session.model.path),
        point=point,
        repeat=repeat,
        n_threads=session.n_threads,
        timeout=session.plan.timeout,
        speed_depths=session.plan.speed_depths,
        prediction=_prediction(session.estimates[point.key]),
        resident_compute=session.resident_compute.get(point.key),
        foretold=session.served.foretold[point.key] if session.served else {},
    )


def _refused(
    session: Session, point: Point, repeat: int, gpu: object, *, force: bool
) -> PointRecord | None:
    """Return the record of a point that cannot be or would not fit, None when it may be tried."""
    estimate = session.estimates.get(point.key)
    reason = session.impossible.get(point.key)
    stage = "settings" if reason else "preflight"
    if estimate is not None and not force:
        reason = shortage(estimate, _free(gpu))
    if reason is None:
        return None
    return PointRecord(
        key=point.key,
        repeat=repeat,
        outcome="skipped",
        config=point.config.to_dict(),
        reason=reason,
        stage=stage,
        prediction=_prediction(estimate) if estimate else {},
    )


def _prediction(estimate: Estimate) -> dict[str, Any]:
    told = estimate.to_dict()
    told["model"]["path"] = shown_path(told["model"]["path"])
    return told


def _free(gpu: object) -> dict[str, int | None]:
    free = {"host": available_memory().value}
    if isinstance(gpu, Nvml):
        free |= {f"gpu{device.index}": device.free for device in gpu.devices}
    return free


def shortage(estimate: Estimate, free: dict[str, int | None]) -> str | None:
    """Return what is short for ``estimate`` where ``free`` bytes are left, by device, or None.

    A device whose free memory is unknown is not held against the point.
    """
    for device in estimate.devices:
        available = free.get(device.name)
        need = device.total + (WORKER_BYTES if device.name == "host" else 0)
        if available is not None and need > available:
            where = "" if device.name == "host" else f" on {device.name}"
            return f"needs {format_bytes(need)}{where}, {format_bytes(available)} available"
    return None


def guess_seconds(session: Session, point: Point) -> float:
    """Return about how long one run of ``point`` takes; a first guess from the model's size."""
    if point.key in session.impossible:
        return _SKIP_S
    config = point.config
    per_slot = config.n_ctx // config.n_seq_max or session.shape.n_ctx_train
    depth = min(per_slot, max(session.plan.speed_depths, default=0))
    tokens = config.n_seq_max * (min(config.n_ubatch, per_slot) + depth)
    rate = _FLOP_PER_S_PER_THREAD * session.n_threads
    compute = tokens * 2 * session.shape.n_params / rate
    return _START_S + session.shape.file_bytes / _LOAD_BYTES_PER_S + compute


class _Clock:
    """Guesses the time left: the first guess, scaled by how wrong it has been so far."""

    def __init__(self, session: Session, pairs: Sequence[tuple[Point, int]]) -> None:
        self._guess = [guess_seconds(session, point) for point, _ in pairs]
        self._start = time.monotonic()
        self._scale = 1.0

    def finished(self, index: int) -> None:
        spent = time.monotonic() - self._start
        self._scale = spent / sum(self._guess[: index + 1])

    def left(self, index: int) -> float:
        return self._scale * sum(self._guess[index:])
