"""One point measured in a server: what was seen of it, and the record that this becomes.

A server loads weights and context in one go, so that a point has the phases baseline (there is no
process yet), context (the model is loaded), decode (a prompt was read in every slot) and closed
(the process is gone). Whatever happens, the result is a record with an outcome.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from localkv.engines.log import EngineLog, allocation_failure
from localkv.errors import LocalkvError
from localkv.http import ServerError
from localkv.probes import read_process
from localkv.probes.listening import is_alive
from localkv.probes.process import PROCESS_KEYS
from localkv.records import Phase, PointRecord, Reading
from localkv.sweep.measure import STAGES, Job, Sampler

#: Seconds that a process may take to be gone after it was told to go.
_GONE_S = 10.0
_POLL = 0.02
_TAIL = 20
#: What Ollama says when it refuses to load a model that it believes not to fit.
_TOO_LARGE = "requires more system memory"
_DIED = "has terminated"

#: Measures one point, given the NVML that is open and who hears the phases.
Measure = Callable[[Job, Any, Callable[[str], None]], PointRecord]


class WouldDisturbError(LocalkvError):
    """Measuring the point would change what a running server holds for somebody else."""


class ServedPoint:
    """What has been seen so far of one run of one point."""

    def __init__(self, job: Job, gpu: Any, on_phase: Callable[[str], None], program: str) -> None:
        self.job = job
        self.config = job.point.config
        self.log: EngineLog | None = None
        self.log_tail: Sequence[str] = ()
        self.server: dict[str, Any] = {"program": program, **job.foretold}
        self.stage = "start"
        self._phases: list[Phase] = []
        self._timings: dict[str, float] = {}
        self._sampler = Sampler(gpu)
        self._gpu = gpu
        self._on_phase = on_phase
        self._start = time.monotonic()

    def seconds_left(self) -> float:
        """Return what is left of the point's time; never 0, which some take for no limit."""
        return max(0.1, self._start + self.job.timeout - time.monotonic())

    def phase(self, name: str, pid: int | None, why: str = "", **more: int | None) -> None:
        """Read the memory of ``pid`` at the end of the phase ``name``.

        Without a ``pid`` nothing is held, or it is unknown because of ``why``. ``more`` are other
        processes to read, by what their readings' names begin with.
        """
        readings = self._read(pid, why)
        for prefix, other in more.items():
            if other is not None:
                readings |= {f"{prefix}_{k}": r for k, r in read_process(other).items()}
        self._phases.append(Phase(name, time.monotonic() - self._start, readings))
        self._sampler.see({key: readings[key] for key in readings if key in self._seen(readings)})
        self._on_phase(name)

    @staticmethod
    def _seen(readings: dict[str, Reading]) -> set[str]:
        return {key for key in readings if key in PROCESS_KEYS or key.startswith("vram")}

    def _read(self, pid: int | None, why: str) -> dict[str, Reading]:
        if why:
            unknown = Reading(None, why=why)
            return {**dict.fromkeys(PROCESS_KEYS, unknown), "vram_process": unknown}
        if pid is None:
            nothing = Reading(0, source="there is no process of the model")
            return {**self._gpu.read(), **dict.fromkeys(PROCESS_KEYS, nothing)}
        return {**read_process(pid), **self._gpu.read(pid)}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Take the time of ``stage``, which is what the point dies of if it dies in it."""
        self.stage = stage
        start = time.monotonic()
        yield
        self._timings[stage] = time.monotonic() - start

    def record(self, error: LocalkvError | None) -> PointRecord:
        """Return the record of the point, which ended well or with ``error``."""
        self._timings["wall"] = time.monotonic() - self._start
        outcome, reason, stage = ("ok", None, None) if error is None else self._judged(error)
        return PointRecord(
            key=self.job.point.key,
            repeat=self.job.repeat,
            outcome=outcome,
            config=self.config.to_dict(),
            reason=reason,
            stage=stage,
            phases=tuple(self._phases),
            peak=self._sampler.peak,
            engine=self.log.to_dict() if self.log else {},
            prediction=dict(self.job.prediction),
            resident_compute=self.job.resident_compute,
            timings=self._timings,
            server=self.server,
            log_tail=() if error is None else tuple(self.log_tail[-_TAIL:]),
        )

    def _judged(self, error: LocalkvError) -> tuple[str, str, str]:
        """Return outcome, reason and stage of a point that ended with ``error``."""
        where = STAGES.get(self.stage, self.stage)
        reason = error.message
        if isinstance(error, WouldDisturbError):
            return "skipped", reason, "preflight"
        short = next(filter(None, map(allocation_failure, [*self.log_tail, reason])), None)
        if short or _TOO_LARGE in reason:
            return "oom", reason, short or where
        if getattr(error, "exit_code", 0) > 128 or _DIED in reason:
            return "crashed", reason, where
        slow = isinstance(error, ServerError) and error.kind == "slow"
        if slow or self._start + self.job.timeout <= time.monotonic():
            limit = f"no end within {self.job.timeout:g} s; it was busy with: {self.stage}"
            return "timeout", limit, where
        if isinstance(error, ServerError) and error.kind == "unreachable":
            return "crashed", f"the server died during: {self.stage} ({reason})", where
        return "failed", reason, where


def measured(point: ServedPoint, work: Callable[[ServedPoint], None]) -> PointRecord:
    """Return the record of ``point`` after ``work`` was done on it."""
    try:
        work(point)
    except LocalkvError as error:
        return point.record(error)
    except OSError as error:
        return point.record(LocalkvError(f"{error.filename}: {error.strerror}", "try again"))
    return point.record(None)


def at_once(asks: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
    """Call ``asks`` at the same time and return their results.

    Ctrl-C passes at once: what was asked is left to end by itself, when its server does.

    Raises:
        LocalkvError: the first of them that one raised, or no end within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    calls = [_Call(ask) for ask in asks]
    for call in calls:
        call.start()
    for call in calls:
        call.join(max(0.0, deadline - time.monotonic()))
        if call.is_alive():
            raise ServerError(f"no answer within {timeout:g} s", "raise --timeout", "slow")
    return [call.result() for call in calls]


class _Call(threading.Thread):
    """A call on a thread of its own, which does not hold localkv back from ending."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self._result: Any = None
        self._error: LocalkvError | None = None

    def run(self) -> None:
        try:
            self._result = self._ask()
        except LocalkvError as error:
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def wait_until_gone(pid: int) -> bool:
    """Return whether the process ``pid`` was gone within a bounded time."""
    deadline = time.monotonic() + _GONE_S
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True
