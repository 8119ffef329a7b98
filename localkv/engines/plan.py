"""An estimate with the engine's own plan in it, for one configuration of one model."""

from __future__ import annotations

from pathlib import Path

from localkv.engines.dryrun import dry_run
from localkv.errors import EngineError
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig
from localkv.predict.engine_plan import with_engine_plan
from localkv.predict.estimate import Estimate
from localkv.predict.predict import estimate


def planned(shape: ModelShape, config: RunConfig) -> Estimate:
    """Return the estimate of ``shape`` under ``config`` with the engine's own figures in it.

    Raises:
        UsageError: a combination that the engine refuses.
        EngineError: the engine is not installed, or refuses or aborts on this model.
    """
    draft = estimate(shape, config)
    (plan,) = dry_run(Path(shape.path), [config], header_only=len(shape.paths) <= 1).plans
    if plan.engine is None:
        raise EngineError(f"the engine gave no plan: {plan.refused}", "try other settings")
    return with_engine_plan(draft, plan.engine)
