"""A sweep of a server made ready: as :mod:`localkv.sweep.session`, by the formula alone.

The installed engine need not be the server's, so that it is not asked for its plan; what it knows
of the processor is used, for the weights that are repacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from localkv.engines.info import ask_engine
from localkv.engines.plan import with_features
from localkv.errors import UsageError
from localkv.gguf.find import GgufModel, Progress
from localkv.model.header import shape_from_header
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig
from localkv.predict.estimate import Estimate
from localkv.predict.ollama_plan import Gpu
from localkv.predict.predict import estimate
from localkv.probes.gpu import gpu_summary
from localkv.sweep.environment import default_threads, environment
from localkv.sweep.plan import Point, SweepPlan, shuffled
from localkv.sweep.served import Measure
from localkv.sweep.session import Session, as_decoded, impossible_points


class Backend(Protocol):
    """A server that is measured."""

    def facts(self) -> dict[str, Any]:
        """Return what the environment record says of the engine."""

    def model(self, progress: Progress | None) -> GgufModel:
        """Return the model to measure."""

    def points(self, shape: ModelShape) -> list[Point]:
        """Return the points of the plan as the server runs them."""

    def refusal(self, config: RunConfig) -> str | None:
        """Return why the server cannot be measured with ``config``."""

    def notes(self) -> list[str]:
        """Return what whoever measures should know of the server."""

    def measuring(self, folder: Path, shape: ModelShape) -> AbstractContextManager[Measure]:
        """Give what measures a point."""

    def foretold(self, shape: ModelShape, estimate: Estimate, config: RunConfig) -> dict[str, Any]:
        """Return what the server should say of itself under ``config``."""


@dataclass(frozen=True)
class Served:
    """How a session's points are measured in a server."""

    backend: Backend
    shape: ModelShape
    foretold: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = ()

    def measuring(self, folder: Path) -> AbstractContextManager[Measure]:
        """Give what measures a point."""
        return self.backend.measuring(folder, self.shape)


def served_session(plan: SweepPlan, *, progress: Progress | None = None) -> Session:
    """Read the model, ask the server, lay out the points and predict each of them.

    Raises:
        ModelError: the model cannot be had or read, or its data is not all there.
        UsageError: something that the server cannot be told, or no combination that it takes.
        EngineError: there is no such server.
    """
    if plan.speed_depths:
        raise UsageError(
            f"--speed is not measured with --backend {plan.backend}",
            "leave it away, or use llama-cpp-python",
        )
    n_threads = plan.threads or default_threads()
    gpus = [Gpu(d.total or 0, d.free or 0) for d in gpu_summary().devices]
    backend = _backend(plan, gpus, n_threads)
    model = backend.model(progress)
    shape = shape_from_header(
        model.metadata, model.tensors, path=model.path, file_bytes=model.file_bytes
    )
    info = ask_engine().info
    points = [
        Point(with_features(point.config, dict(info)), point.key) for point in backend.points(shape)
    ]
    impossible = {**impossible_points(points, shape), **dict(_refusals(backend, points))}
    if len(impossible) == len(points):
        raise UsageError(next(iter(impossible.values())), "ask for settings that it takes")
    possible = [point for point in points if point.key not in impossible]
    estimates = {point.key: estimate(shape, point.config) for point in possible}
    return Session(
        plan=plan,
        model=model,
        shape=shape,
        points=tuple(possible),
        order=tuple(shuffled(points, plan.repeats, plan.seed)),
        estimates=estimates,
        refusals={},
        impossible=impossible,
        resident_compute={
            point.key: estimate(shape, as_decoded(point, plan, shape)).compute.bytes
            for point in possible
        },
        environment=environment(backend.facts(), n_threads),
        n_threads=n_threads,
        served=Served(
            backend,
            shape,
            {p.key: backend.foretold(shape, estimates[p.key], p.config) for p in possible},
            tuple(backend.notes()),
        ),
    )


def _backend(plan: SweepPlan, gpus: list[Gpu], n_threads: int) -> Backend:
    if plan.server_bin and plan.server_url:
        raise UsageError(
            "both --server-bin and --server-url were given", "start a server or take a running one"
        )
    if plan.backend == "ollama":
        from localkv.sweep.ollama import OllamaBackend

        return OllamaBackend(plan, gpus)
    from localkv.sweep.llama_server import AttachedLlamaServer, StartedLlamaServer

    if plan.server_url:
        return AttachedLlamaServer(plan, len(gpus))
    return StartedLlamaServer(plan, len(gpus), n_threads)


def _refusals(backend: Backend, points: list[Point]) -> Iterator[tuple[str, str]]:
    for point in points:
        if why := backend.refusal(point.config):
            yield point.key, why
