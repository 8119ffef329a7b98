"""An estimate with the engine's own plan in it, for one configuration of one model."""

from __future__ import annotations

from typing import Any

from localkv.engines.check import gpu_count, plans_elsewhere
from localkv.engines.dryrun import dry_run_model
from localkv.engines.llamacpp import cpu_features
from localkv.errors import EngineError
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig
from localkv.predict.engine_plan import with_engine_plan
from localkv.predict.estimate import Estimate
from localkv.predict.predict import estimate
from localkv.units import plural


def planned(shape: ModelShape, config: RunConfig) -> Estimate:
    """Return the estimate of ``shape`` under ``config`` with the engine's own figures in it.

    The engine also tells which weights its CPU back end repacks. Where ``config`` asks for more
    GPUs than it sees, its compute buffers are for other devices and are left out, with a note.

    Raises:
        UsageError: a combination that the engine refuses.
        EngineError: the engine is not installed, or refuses or aborts on this model.
    """
    estimate(shape, config)  # says no before an engine is started
    run = dry_run_model(shape, [config])
    (plan,) = run.plans
    if plan.engine is None:
        raise EngineError(f"the engine gave no plan: {plan.refused}", "try other settings")
    draft = estimate(shape, with_features(config, run.info))
    if not plans_elsewhere(config, gpu_count(run.info)):
        return with_engine_plan(draft, plan.engine)
    note = (
        f"the installed engine sees {gpu_count(run.info)} of {plural(config.n_devices, 'GPU')} "
        "asked for: its compute buffers are for other devices and are not used"
    )
    known = draft if draft.known else with_engine_plan(draft, plan.engine)
    return known._replace(notes=(*known.notes, note))


def with_features(config: RunConfig, info: dict[str, Any]) -> RunConfig:
    """Return ``config`` with the CPU features of the engine with this ``EngineInfo``."""
    if config.cpu_features:
        return config
    return config.with_(cpu_features=cpu_features(str(info.get("system_info", ""))))
