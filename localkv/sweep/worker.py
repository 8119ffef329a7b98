"""The child that measures one point, phase by phase. Started by ``runner``, one per repeat.

Phases: baseline (interpreter and engine library) -> model -> context -> decode (one full ubatch in
every slot, so that the compute buffers are resident) -> fill (asked for with speed) -> closed.
Each message goes out as soon as its phase is over, so that a death leaves the earlier ones behind.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from localkv.engines.channel import Channel
from localkv.engines.llamacpp import Context, Engine, EngineFailure, Model
from localkv.errors import LocalkvError
from localkv.predict.config import RunConfig
from localkv.probes import open_nvml, read_process
from localkv.sweep.decode import decode_ubatch_in_every_slot
from localkv.sweep.heap import Heap
from localkv.sweep.speed import measure_speed


def main() -> None:
    """Measure the point that the job describes, and say how it went."""
    channel = Channel()
    try:
        _Measurement(channel).run()
    except EngineFailure as failure:
        channel.send(
            {
                "kind": "failure",
                "reason": failure.message,
                "stage": failure.stage,
                "oom": failure.allocation,
            }
        )
    except LocalkvError as error:
        channel.send({"kind": "failure", "reason": str(error), "stage": "engine", "oom": False})


class _Measurement:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._job = channel.job
        self._config = RunConfig.from_dict(self._job["config"])
        self._heap = Heap()
        self._start = time.monotonic()

    def run(self) -> None:
        # NVML costs memory of its own, so it is opened before the baseline is read.
        with open_nvml() as gpu, Engine() as engine:
            self._gpu = gpu
            self._engine = engine
            self._phase("baseline")
            with ExitStack() as stack:
                self._measure(stack)
            self._phase("closed")
        self._channel.send({"kind": "done"})

    def _measure(self, stack: ExitStack) -> None:
        job, config = self._job, self._config
        with self._timed("load"):
            model = stack.enter_context(Model(self._engine, Path(job["path"]), config))
        self._phase("model")
        with self._timed("context"):
            context = stack.enter_context(Context(model, config, n_threads=job["n_threads"]))
        self._phase("context")
        self._channel.send({"kind": "engine", "engine": self._engine.parsed_log().to_dict()})
        with self._timed("decode"):
            decode_ubatch_in_every_slot(context, config.n_ubatch)
        self._phase("decode")
        if job["speed_depths"]:
            with self._timed("fill"):
                for speed in measure_speed(context, config.n_ubatch, job["speed_depths"]):
                    self._channel.send({"kind": "speed", "speed": speed.to_dict()})
            self._phase("fill")

    def _phase(self, name: str) -> None:
        gc.collect()
        self._heap.give_back_free_pages()
        readings = {**read_process(), **self._gpu.read()}
        self._channel.send(
            {
                "kind": "phase",
                "name": name,
                "seconds": time.monotonic() - self._start,
                "readings": {key: reading.to_dict() for key, reading in readings.items()},
            }
        )

    def _timed(self, name: str) -> Any:
        return _Timer(self._channel, name)


class _Timer:
    def __init__(self, channel: Channel, name: str) -> None:
        self._channel = channel
        self._name = name

    def __enter__(self) -> None:
        # Announced before it starts, so that a death or a time-out can be placed.
        self._channel.send({"kind": "stage", "stage": self._name})
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._start
        self._channel.send({"kind": "timing", "name": self._name, "seconds": seconds})


if __name__ == "__main__":
    main()
