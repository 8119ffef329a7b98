"""A sweep made ready: the model read, every point predicted and checked, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localkv.engines.check import gpu_count
from localkv.engines.dryrun import DryRun, Plan, dry_run
from localkv.engines.plan import with_features
from localkv.gguf.find import GgufModel, open_model
from localkv.model.header import shape_from_header
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig, effective_context
from localkv.predict.engine_plan import with_engine_plan
from localkv.predict.estimate import Estimate
from localkv.predict.predict import estimate
from localkv.records import RunInfo
from localkv.sweep.decode import at_decoded_depth
from localkv.sweep.environment import default_threads, environment, shown_path
from localkv.sweep.plan import Point, SweepPlan, grid, shuffled
from localkv.sweep.speed import DECODE_TOKENS
from localkv.sweep.store import RunStore

#: What a fresh child needs before any model: interpreter, engine library, the loader's tables.
WORKER_BYTES = 64 << 20


@dataclass(frozen=True)
class Session:
    """Everything that running needs.

    ``order`` are the (point, repeat) pairs in the order of running; ``estimates`` the prediction
    of each point by key, with the engine's own compute buffers; ``refusals`` what the engine
    already says about points that it will not run; ``resident_compute`` the compute buffers, in
    bytes, that each point's measurement can make resident.
    """

    plan: SweepPlan
    model: GgufModel
    shape: ModelShape
    points: tuple[Point, ...]
    order: tuple[tuple[Point, int], ...]
    estimates: Mapping[str, Estimate]
    refusals: Mapping[str, str]
    resident_compute: Mapping[str, int]
    environment: Mapping[str, Any]
    n_threads: int

    @property
    def gpu_reason(self) -> str | None:
        """Return why the sweep runs on RAM alone, None when a GPU takes part."""
        engine, gpu = self.environment["engine"], self.environment["gpu"]
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
            model=model_facts(self.shape),
            environment=dict(self.environment),
        )


def make_session(plan: SweepPlan, *, progress: Any = None) -> Session:
    """Read the model, lay out the points, and predict each of them.

    Raises:
        ModelError: the model cannot be had or read, or its data is not all there.
        UsageError: a value or a combination that the engine does not take.
        EngineError: the engine is not installed or will not load this model.
    """
    model = open_model(plan.model, need_data=True, progress=progress)
    shape = shape_from_header(
        model.metadata, model.tensors, path=model.path, file_bytes=model.file_bytes
    )
    points = grid(plan, shape.n_ctx_train)
    # Predicted once before the engine is asked: a combination that cannot be is the person's
    # mistake, and is named as such.
    drafts = {point.key: estimate(shape, point.config) for point in points}
    planned = dry_run(
        Path(model.path),
        [config for point in points for config in (point.config, _as_decoded(point, plan, shape))],
        header_only=len(model.files.paths) == 1,
    )
    full, decoded = planned.plans[::2], planned.plans[1::2]
    points, drafts = _on_devices(points, drafts, planned, shape)
    n_threads = plan.threads or default_threads()
    estimates, refusals = _with_plans(points, drafts, full)
    return Session(
        plan=plan,
        model=model,
        shape=shape,
        points=tuple(points),
        order=tuple(shuffled(points, plan.repeats, plan.seed)),
        estimates=estimates,
        refusals=refusals,
        resident_compute={
            point.key: int(told.engine["compute_bytes"])
            for point, told in zip(points, decoded, strict=True)
            if told.engine
        },
        environment=environment(planned.info, n_threads),
        n_threads=n_threads,
    )


def _on_devices(
    points: list[Point], drafts: dict[str, Estimate], planned: DryRun, shape: ModelShape
) -> tuple[list[Point], dict[str, Estimate]]:
    """Fit the points to what the engine has: its GPUs, without any the host; its CPU."""
    n_devices = gpu_count(planned.info)
    fitted = [
        Point(
            with_features(point.config, planned.info).with_(
                n_gpu_layers=point.config.n_gpu_layers if n_devices else 0,
                n_devices=max(1, n_devices),
            ),
            point.key,
        )
        for point in points
    ]
    return fitted, {
        new.key: drafts[new.key] if new == old else estimate(shape, new.config)
        for new, old in zip(fitted, points, strict=True)
    }


def _as_decoded(point: Point, plan: SweepPlan, shape: ModelShape) -> RunConfig:
    context = effective_context(point.config, shape.n_ctx_train, causal=shape.causal)
    deepest = max(plan.speed_depths, default=0)
    if plan.speed_depths:
        deepest += context.n_ubatch + DECODE_TOKENS
    return at_decoded_depth(point.config, context, deepest)


def _with_plans(
    points: Sequence[Point], drafts: Mapping[str, Estimate], plans: Sequence[Plan]
) -> tuple[dict[str, Estimate], dict[str, str]]:
    estimates: dict[str, Estimate] = {}
    refusals: dict[str, str] = {}
    for point, told in zip(points, plans, strict=True):
        draft = drafts[point.key]
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


def remaining(session: Session, store: RunStore) -> list[tuple[Point, int]]:
    """Return the pairs that have no record yet, in the order of running."""
    done = {(record.key, record.repeat) for record in store.read_records()}
    return [(point, repeat) for point, repeat in session.order if (point.key, repeat) not in done]
