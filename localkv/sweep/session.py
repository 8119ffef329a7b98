"""A sweep made ready: the model read, every point predicted and checked, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localkv.engines.check import gpu_count
from localkv.engines.dryrun import Plan, dry_run
from localkv.engines.plan import with_features
from localkv.errors import UsageError
from localkv.gguf.find import GgufModel, open_model
from localkv.gguf.types import cache_type
from localkv.model.header import shape_from_header
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig, effective_context
from localkv.predict.engine_plan import with_engine_plan
from localkv.predict.estimate import Estimate
from localkv.predict.levers import find_levers
from localkv.predict.predict import estimate
from localkv.records import RunInfo
from localkv.sweep.decode import at_decoded_depth
from localkv.sweep.environment import default_threads, environment, shown_path
from localkv.sweep.plan import BACKENDS, Point, SweepPlan, grid, shuffled
from localkv.sweep.speed import DECODE_TOKENS
from localkv.sweep.store import RunStore

if TYPE_CHECKING:
    from localkv.sweep.served_session import Served

#: What a fresh child needs before any model: interpreter, engine library, the loader's tables.
WORKER_BYTES = 64 << 20
#: A plan of the engine takes about so many times as long as a prediction.
_PLAN_WORK = 4


@dataclass(frozen=True)
class Session:
    """Everything that running needs.

    ``order`` are the (point, repeat) pairs in the order of running; ``estimates`` the prediction
    of each point by key, with the engine's own compute buffers; ``refusals`` what the engine
    already says about points that it will not run; ``impossible`` the engine's reason for each
    point of settings that it never takes, which has no estimate; ``resident_compute`` the compute
    buffers, in bytes, that each point's measurement can make resident. ``served`` measures the
    points in a server, None: in processes of localkv's own.
    """

    plan: SweepPlan
    model: GgufModel
    shape: ModelShape
    points: tuple[Point, ...]
    order: tuple[tuple[Point, int], ...]
    estimates: Mapping[str, Estimate]
    refusals: Mapping[str, str]
    impossible: Mapping[str, str]
    resident_compute: Mapping[str, int]
    environment: Mapping[str, Any]
    n_threads: int
    served: Served | None = None

    @property
    def gpu_reason(self) -> str | None:
        """Return why the sweep runs on RAM alone, None when a GPU takes part."""
        engine, gpu = self.environment["engine"], self.environment["gpu"]
        if self.served is not None:
            return None if gpu["available"] else gpu["reason"] or "there is none"
        if not engine.get("gpu_offload"):
            why = "the installed engine is built without GPU support"
            if not gpu["available"] and gpu["reason"]:
                why += f"; {gpu['reason']}"
            return why
        if not gpu_count(engine):
            return gpu["reason"] or "the engine sees no GPU"
        return None

    def info(self, argv: Sequence[str], created: str) -> RunInfo:
        """Return the record of the run, as ``run.json`` keeps it."""
        return RunInfo(
            localkv=self.environment["localkv"],
            created=created,
            argv=tuple(argv),
            seed=self.plan.seed,
            points=len(self.order),
            repeats=self.plan.repeats,
            plan=self.plan.to_dict(),
            model={**model_facts(self.shape), "header_sha256": _header_sha256(self.model)},
            environment=dict(self.environment),
            levers=self.levers(),
        )

    def levers(self) -> dict[str, Any]:
        """Return what could be changed to need less than the largest point, as run.json keeps it.

        Where no GPU takes part, with the slots that then fit into the memory available here.
        """
        told = {key: e for key, e in self.estimates.items() if key not in self.refusals and e.known}
        if not told:
            return {}
        key = max(told, key=lambda key: told[key].total_bytes)
        config = next(point.config for point in self.points if point.key == key)
        memory = None if config.n_gpu_layers else self.environment["memory"]["available"]
        found = find_levers(self.shape, config, memory=memory)
        return {"key": key, "table": [lever.to_dict() for lever in found]}


def make_session(
    plan: SweepPlan,
    *,
    progress: Any = None,
    planned_share: Callable[[int, float], None] | None = None,
) -> Session:
    """Read the model, lay out the points, and predict each of them.

    ``planned_share`` hears, while a large grid is planned, the number of points and the share of
    the work that is done.

    Raises:
        ModelError: the model cannot be had or read, or its data is not all there.
        UsageError: a value that the engine does not take, or no combination that it takes.
        EngineError: the engine is not installed or will not load this model.
    """
    if plan.backend != BACKENDS[0]:
        from localkv.sweep.served_session import served_session

        return served_session(plan, progress=progress)
    model = open_model(plan.model, need_data=True, progress=progress)
    shape = shape_from_header(
        model.metadata, model.tensors, path=model.path, file_bytes=model.file_bytes
    )
    asked = grid(plan, shape.n_ctx_train)
    work = _Work(len(asked), planned_share)
    # Predicted once before the engine is asked: a combination that cannot be is the person's
    # mistake, and is named as such.
    impossible = impossible_points(asked, shape, work.predicted)
    points = [point for point in asked if point.key not in impossible]
    planned = dry_run(
        Path(model.path),
        [config for point in points for config in (point.config, as_decoded(point, plan, shape))],
        header_only=len(model.files.paths) == 1,
        told=work.planned,
    )
    full, decoded = planned.plans[::2], planned.plans[1::2]
    fitted = {point.key: _on_devices(point, planned.info) for point in asked}
    points = [fitted[point.key] for point in points]
    n_threads = plan.threads or default_threads()
    estimates, refusals = _with_plans(points, shape, full)
    return Session(
        plan=plan,
        model=model,
        shape=shape,
        points=tuple(points),
        order=tuple(shuffled(list(fitted.values()), plan.repeats, plan.seed)),
        estimates=estimates,
        refusals=refusals,
        impossible=impossible,
        resident_compute={
            point.key: int(told.engine["compute_bytes"])
            for point, told in zip(points, decoded, strict=True)
            if told.engine
        },
        environment=environment(planned.info, n_threads),
        n_threads=n_threads,
    )


class _Work:
    """How much of the planning is done: a prediction and two plans of the engine per point."""

    def __init__(self, points: int, tell: Callable[[int, float], None] | None) -> None:
        self._points = points
        self._tell = tell
        self._done = 0

    def predicted(self) -> None:
        self._add(1)

    def planned(self, count: int) -> None:
        self._add(_PLAN_WORK * count)

    def _add(self, work: int) -> None:
        self._done += work
        if self._tell:
            self._tell(self._points, self._done / (self._points * (1 + 2 * _PLAN_WORK)))


def impossible_points(
    points: Sequence[Point], shape: ModelShape, done: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Return the engine's rule against each point that cannot be, by key.

    Raises:
        UsageError: a cache type that there is not, or no point that can be.
    """
    for name in {name for p in points for name in (p.config.cache_type_k, p.config.cache_type_v)}:
        cache_type(name)
    impossible: dict[str, str] = {}
    refusal = None
    for point in points:
        try:
            estimate(shape, point.config)
        except UsageError as error:
            refusal = refusal or error
            impossible[point.key] = error.message
        done()
    if refusal and len(impossible) == len(points):
        raise refusal
    return impossible


def _on_devices(point: Point, info: dict[str, Any]) -> Point:
    """Fit ``point`` to what the engine has: its GPUs, without any the host; its CPU."""
    n_devices = gpu_count(info)
    config = with_features(point.config, info).with_(
        n_gpu_layers=point.config.n_gpu_layers if n_devices else 0,
        n_devices=max(1, n_devices),
    )
    return Point(config, point.key)


def as_decoded(point: Point, plan: SweepPlan, shape: ModelShape) -> RunConfig:
    """Return the settings of ``point`` with a context no larger than what is decoded in it."""
    context = effective_context(point.config, shape.n_ctx_train, causal=shape.causal)
    deepest = max(plan.speed_depths, default=0)
    if plan.speed_depths:
        deepest += context.n_ubatch + DECODE_TOKENS
    return at_decoded_depth(point.config, context, deepest)


def _with_plans(
    points: Sequence[Point], shape: ModelShape, plans: Sequence[Plan]
) -> tuple[dict[str, Estimate], dict[str, str]]:
    estimates: dict[str, Estimate] = {}
    refusals: dict[str, str] = {}
    for point, told in zip(points, plans, strict=True):
        draft = estimate(shape, point.config)
        estimates[point.key] = with_engine_plan(draft, told.engine) if told.engine else draft
        if told.refused:
            refusals[point.key] = told.refused
    return estimates, refusals


def model_facts(shape: ModelShape) -> dict[str, Any]:
    """Return the facts of the model that a report needs, as plain JSON values."""
    return {
        "name": shape.name,
        "architecture": shape.architecture,
        "path": shown_path(shape.path),
        "file_bytes": shape.file_bytes,
        "weights_bytes": shape.weights_bytes,
        "n_layer": shape.n_layer,
        "n_ctx_train": shape.n_ctx_train,
        "n_embd": shape.n_embd,
        "n_vocab": shape.n_vocab,
        "n_params": shape.n_params,
        "rule": shape.rule,
        "quantisation": [list(entry) for entry in shape.quantisation],
        "layers": [
            {
                "kind": layer.kind,
                "n_head": layer.n_head,
                "n_head_kv": layer.n_head_kv,
                "k_width": layer.k_width,
                "v_width": layer.v_width,
                "window": layer.window,
            }
            for layer in shape.layers
        ],
        "assumed": list(shape.assumed),
        "notes": list(shape.notes),
    }


def _header_sha256(model: GgufModel) -> str:
    """Return the SHA-256 of the first file up to its tensor data; quick for any size of model."""
    import hashlib

    with open(model.path, "rb") as file:
        return hashlib.sha256(file.read(model.headers[0].data_offset)).hexdigest()


def remaining(session: Session, store: RunStore) -> list[tuple[Point, int]]:
    """Return the pairs that have no record yet, in the order of running."""
    done = {(record.key, record.repeat) for record in store.read_records()}
    return [(point, repeat) for point, repeat in session.order if (point.key, repeat) not in done]
