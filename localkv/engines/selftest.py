"""Formula against engine over a grid of configurations, model by model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from localkv.engines.check import (
    DIFFERENT,
    EQUAL,
    NO_ANSWER,
    NO_RULE,
    OUTSIDE,
    REFUSED,
    Comparison,
    compare_with_engine,
)
from localkv.errors import LocalkvError
from localkv.model import read_model
from localkv.predict.config import RunConfig

_CONTEXTS = (1000, 5000, 33000)
_SLOTS = (1, 3)
#: Cache types, of which the engine refuses some: quantised V without flash attention, K unlike V
#: for MLA models, blocks that do not divide a head.
_TYPES = (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "f16"), ("f16", "q5_1"))
_SHOWN = 3


@dataclass(frozen=True)
class ModelTest:
    """What the grid showed for one model; ``error`` is why nothing could be shown at all."""

    argument: str
    name: str = ""
    architecture: str = ""
    rule: str = ""
    engine: dict[str, Any] | None = None
    comparisons: tuple[Comparison, ...] = ()
    error: str | None = None

    def count(self, verdict: str) -> int:
        """Return how many configurations came to ``verdict``."""
        return sum(comparison.verdict == verdict for comparison in self.comparisons)

    @property
    def worst(self) -> int:
        """Return the largest difference of a size that must be equal, in bytes."""
        return max((comparison.worst for comparison in self.comparisons), default=0)

    @property
    def outside_band(self) -> int:
        """Return in how many configurations the compute buffers lie outside of their band."""
        rows = (comparison.compute for comparison in self.comparisons)
        return sum(row is not None and row.verdict == OUTSIDE for row in rows)

    @property
    def passed(self) -> bool:
        """Return whether the model could be tested, and nothing differs."""
        return self.error is None and not self.count(DIFFERENT) and not self.count(NO_RULE)

    @property
    def differing(self) -> tuple[Comparison, ...]:
        """Return the first few configurations on which formula and engine do not agree."""
        found = [c for c in self.comparisons if c.verdict in (DIFFERENT, NO_ANSWER)]
        return tuple(found[:_SHOWN])

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        return {
            "model": self.argument,
            "name": self.name,
            "architecture": self.architecture,
            "rule": self.rule,
            "configurations": len(self.comparisons),
            "equal": self.count(EQUAL),
            "different": self.count(DIFFERENT),
            "refused_by_both": self.count(REFUSED),
            "no_rule": self.count(NO_RULE),
            "engine_died": self.count(NO_ANSWER),
            "worst_bytes": self.worst,
            "compute_outside_band": self.outside_band,
            "differing": [comparison.to_dict() for comparison in self.differing],
            "error": self.error,
        }


def grid() -> list[RunConfig]:
    """Return the configurations: contexts x slots x unified x swa_full x flash attention x types.

    Those that the engine refuses belong to it: a refusal is an answer to compare.
    """
    return [
        RunConfig(
            n_ctx=n_ctx,
            n_seq_max=slots,
            n_outputs_max=slots,
            kv_unified=unified,
            swa_full=swa_full,
            flash_attn=flash,
            cache_type_k=type_k,
            cache_type_v=type_v,
        )
        for n_ctx, slots, unified, swa_full, flash, (type_k, type_v) in product(
            _CONTEXTS, _SLOTS, (False, True), (False, True), ("auto", "off"), _TYPES
        )
        if slots > 1 or not unified
    ]


def self_test(argument: str, configs: Sequence[RunConfig] | None = None) -> ModelTest:
    """Return how formula and engine compare for the model that ``argument`` names.

    Never raises: a file that cannot be read, and an engine that will not load it, are results.
    """
    try:
        shape = read_model(argument)
    except LocalkvError as error:
        return ModelTest(argument, error=str(error))
    found = ModelTest(argument, shape.name, shape.architecture, shape.rule)
    if shape.path.endswith(".json"):
        return replace(found, error="a config.json is nothing that this engine reads")
    try:
        jobs = min(os.cpu_count() or 1, 4)
        info, comparisons = compare_with_engine(shape, configs or grid(), jobs=jobs)
    except LocalkvError as error:
        return replace(found, error=str(error))
    return replace(found, engine=info, comparisons=tuple(comparisons))
