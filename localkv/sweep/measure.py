"""The parent's side of one point: start the child, listen, sample, and turn the end into a record.

Whatever happens to the child, the result is a record with an outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localkv.engines.channel import Child, Exit
from localkv.engines.log import allocation_failure
from localkv.probes import sample_process
from localkv.records import Phase, PointRecord, Reading, Speed
from localkv.sweep.plan import Point

WORKER = "localkv.sweep.worker"
_SAMPLE_S = 0.02
_GPU_SAMPLE_EVERY = 10  # NVML takes about a millisecond; the host reading a few microseconds

#: What a stage needs memory for, when a measurement dies in it.
STAGES = {"load": "weights", "context": "context", "decode": "compute", "fill": "compute"}


@dataclass(frozen=True)
class Job:
    """What to measure: the model file, the point, and how.

    ``foretold`` is what a server should say of itself.
    """

    path: Path
    point: Point
    repeat: int
    n_threads: int
    timeout: float
    speed_depths: tuple[int, ...] = ()
    prediction: Mapping[str, Any] = field(default_factory=dict)
    resident_compute: int | None = None
    foretold: Mapping[str, Any] = field(default_factory=dict)


class Sampler:
    """Keeps the highest reading of each kind that the parent has seen of the child."""

    def __init__(self, gpu: Any) -> None:
        """Sample host memory, and device memory through ``gpu``, an open NVML."""
        self._gpu = gpu
        self._count = 0
        self.peak: dict[str, Reading] = {}

    def sample(self, pid: int) -> None:
        """Read once."""
        readings = sample_process(pid)
        anon, file = (readings[key].value for key in ("rss_anon", "rss_file"))
        if anon is not None and file is not None:
            readings["rss"] = Reading(anon + file, source=readings["rss_anon"].source)
        if self._count % _GPU_SAMPLE_EVERY == 0:
            readings.update(self._gpu.read(pid))
        self._count += 1
        self.see(readings)

    def see(self, readings: Mapping[str, Reading]) -> None:
        """Take readings from elsewhere into account."""
        for key, reading in readings.items():
            highest = self.peak[key].value if key in self.peak else None
            # An unknown is less than a known 0.
            if highest is None or (reading.value is not None and reading.value > highest):
                self.peak[key] = reading


@dataclass
class _Heard:
    """What the child has said so far."""

    phases: list[Phase] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    speed: list[Speed] = field(default_factory=list)
    failure: dict[str, Any] | None = None
    stage: str = "start"
    done: bool = False

    def take(self, message: Mapping[str, Any]) -> None:
        match message.get("kind"):
            case "phase":
                self.phases.append(Phase.from_dict(message))
            case "stage":
                self.stage = message["stage"]
            case "timing":
                self.timings[message["name"]] = message["seconds"]
            case "engine":
                self.engine = message["engine"]
            case "speed":
                self.speed.append(Speed.from_dict(message["speed"]))
            case "failure":
                self.failure = dict(message)
            case "done":
                self.done, self.stage = True, "exit"


def measure(job: Job, gpu: Any, on_phase: Callable[[str], None] = lambda _: None) -> PointRecord:
    """Return the record of one run of one point, whatever becomes of the child.

    ``gpu`` is an open NVML or its stand-in that knows why there is none; ``on_phase`` hears the
    name of each phase as it ends.
    """
    heard = _Heard()
    sampler = Sampler(gpu)
    start = time.monotonic()
    request = {
        "path": str(job.path),
        "config": job.point.config.to_dict(),
        "n_threads": job.n_threads,
        "speed_depths": list(job.speed_depths),
    }
    with Child(WORKER, request) as child:
        for message in child.messages(
            timeout=job.timeout, interval=_SAMPLE_S, tick=lambda: sampler.sample(child.pid)
        ):
            heard.take(message)
            if message.get("kind") == "phase":
                sampler.see(heard.phases[-1].readings)
                on_phase(heard.phases[-1].name)
        end = child.finish()
    heard.timings["wall"] = time.monotonic() - start
    outcome, reason, stage = judge(heard.done, heard.failure, heard.stage, end, job.timeout)
    return PointRecord(
        key=job.point.key,
        repeat=job.repeat,
        outcome=outcome,
        config=job.point.config.to_dict(),
        reason=reason,
        stage=stage,
        phases=tuple(heard.phases),
        peak=sampler.peak,
        engine=heard.engine,
        prediction=dict(job.prediction),
        resident_compute=job.resident_compute,
        timings=heard.timings,
        speed=tuple(heard.speed),
        log_tail=() if outcome == "ok" else end.stderr_tail,
    )


def judge(
    done: bool, failure: Mapping[str, Any] | None, stage: str, end: Exit, timeout: float
) -> tuple[str, str | None, str | None]:
    """Return (outcome, reason, stage) from what a child said and how it ended."""
    if done and end.code == 0:
        return "ok", None, None
    where = STAGES.get(stage, stage)
    if end.timed_out:
        return "timeout", f"no end within {timeout:g} s; it was busy with: {stage}", where
    if failure is not None:
        outcome = "oom" if failure["oom"] else "failed"
        return outcome, failure["reason"], failure["stage"]
    said = end.stderr_tail[-1] if end.stderr_tail else ""
    if end.signal_name == "SIGKILL":
        reason = f"killed by the system (SIGKILL) during: {stage}; it was probably out of memory"
        return "crashed", reason, where
    short = next((found for line in end.stderr_tail if (found := allocation_failure(line))), None)
    if short or "MemoryError" in said or "bad_alloc" in said:
        return "oom", f"{said or 'out of memory'} (during: {stage})", short or where
    how = end.signal_name or f"exit code {end.code}"
    return (
        "crashed",
        f"the engine died ({how}) during: {stage}" + (f": {said}" if said else ""),
        where,
    )
