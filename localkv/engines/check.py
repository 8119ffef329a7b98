"""The formula and the engine side by side, for any number of configurations of one model.

The engine's figures are those of its log: two decimals of a MiB per line, so sizes count as equal
within 0.01 MiB. What localkv claims to the byte (caches, state, output, context sizes) must be
equal; the compute buffers are an estimate, which must hold the engine's figure in its band.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localkv.engines.dryrun import Plan, dry_run_model
from localkv.errors import UsageError
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig
from localkv.predict.estimate import CacheEstimate, Estimate
from localkv.predict.predict import estimate
from localkv.units import MIB

EQUAL, DIFFERENT = "equal", "different"
IN_BAND, OUTSIDE = "within the band", "outside the band"
REFUSED, NO_RULE, NO_ANSWER = "refused by both", "no rule", "the engine died"


@dataclass(frozen=True)
class Row:
    """One figure from both: bytes, or tokens and counts where ``unit`` says so.

    ``formula`` or ``engine`` is None where that side has no such figure; ``low`` and ``high`` are
    the band of an estimate; ``lines`` is how many lines of the log ``engine`` sums.
    """

    name: str
    formula: int | None
    engine: int | None
    unit: str = "bytes"
    low: int | None = None
    high: int | None = None
    lines: int = 1

    @property
    def verdict(self) -> str:
        """Return whether the two agree, in words."""
        if self.formula is None or self.engine is None:
            return EQUAL if self.formula == self.engine else DIFFERENT
        slack = printed_slack(self.engine, self.lines) if self.unit == "bytes" else 0
        if self.low is not None and self.high is not None:
            held = self.low - slack <= self.engine <= self.high + slack
            return IN_BAND if held else OUTSIDE
        return EQUAL if self.difference <= slack else DIFFERENT

    @property
    def difference(self) -> int:
        """Return how far the two are apart, 0 where one of them has no such figure."""
        if self.formula is None or self.engine is None:
            return 0
        return abs(self.formula - self.engine)


@dataclass(frozen=True)
class Comparison:
    """Formula and engine for one configuration; ``rows`` is empty where one of them gave none.

    ``formula_refused`` and ``engine_refused`` are their reasons; ``died``: the engine crashed.
    """

    config: RunConfig
    rows: tuple[Row, ...] = ()
    formula_refused: str | None = None
    engine_refused: str | None = None
    died: bool = False
    known: bool = True

    @property
    def verdict(self) -> str:
        """Return equal, different, refused by both, no rule, or the engine died."""
        if self.died:
            return NO_ANSWER
        if self.formula_refused and self.engine_refused:
            return REFUSED
        if self.formula_refused or self.engine_refused:
            return DIFFERENT
        if not self.known:
            return NO_RULE
        return DIFFERENT if any(row.verdict == DIFFERENT for row in self.rows) else EQUAL

    @property
    def compute(self) -> Row | None:
        """Return the row of the compute buffers, None where they were not compared."""
        return next((row for row in self.rows if row.name == "compute"), None)

    @property
    def worst(self) -> int:
        """Return the largest difference among the sizes that must be equal, in bytes."""
        exact = (row for row in self.rows if row.unit == "bytes" and row.low is None)
        return max((row.difference for row in exact), default=0)

    @property
    def agrees(self) -> bool:
        """Return whether every figure is equal, and the compute buffers within their band."""
        outside = self.compute is not None and self.compute.verdict == OUTSIDE
        return self.verdict == EQUAL and not outside

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values."""
        return {
            "config": self.config.to_dict(),
            "verdict": self.verdict,
            "formula_refused": self.formula_refused,
            "engine_refused": self.engine_refused,
            "rows": [{**vars(row), "verdict": row.verdict} for row in self.rows],
        }


def printed_slack(size: int, lines: int = 1) -> int:
    """Return the bytes within which ``size`` bytes, summed over ``lines`` of the log, are right.

    The last printed digit is 0.01 MiB, rounded; the engine prints floats of 24 bits.
    """
    return max(2, lines) * MIB // 200 + 1 + (size >> 23)


def compare_with_engine(
    shape: ModelShape, configs: Sequence[RunConfig], *, jobs: int = 1
) -> tuple[dict[str, Any], list[Comparison]]:
    """Return the engine's ``EngineInfo`` and both answers to each of ``configs``, in order.

    Raises:
        EngineError: the engine is not installed, or cannot load this model at all.
    """
    run = dry_run_model(shape, configs, jobs=jobs)
    gpus = gpu_count(run.info)
    return run.info, [
        _compare(shape, config, plan, gpus) for config, plan in zip(configs, run.plans, strict=True)
    ]


def gpu_count(info: Mapping[str, Any]) -> int:
    """Return how many GPUs the engine with this ``EngineInfo`` sees."""
    return sum(device["type"] in ("gpu", "igpu") for device in info.get("devices", ()))


def plans_elsewhere(config: RunConfig, gpus: int) -> bool:
    """Return whether ``config`` asks for devices that an engine with ``gpus`` GPUs lacks."""
    return config.n_gpu_layers != 0 and config.n_devices > gpus


def _compare(shape: ModelShape, config: RunConfig, plan: Plan, gpus: int) -> Comparison:
    refused = None
    formula = None
    try:
        formula = estimate(shape, config)
    except UsageError as error:
        refused = str(error)
    rows: tuple[Row, ...] = ()
    if formula is not None and plan.engine is not None:
        rows = compare(formula, plan.engine, compute=not plans_elsewhere(config, gpus))
    return Comparison(
        config=config,
        rows=rows,
        formula_refused=refused,
        engine_refused=plan.refused,
        died=plan.died,
        known=formula is None or formula.known,
    )


def compare(
    formula: Estimate, engine: Mapping[str, Any], *, compute: bool = True
) -> tuple[Row, ...]:
    """Return the rows of ``formula`` beside the engine's plan (``EngineLog.to_dict``).

    Without a rule the formula's side is None throughout. ``compute`` False leaves out the compute
    buffers, for an engine that plans for other devices.
    """
    known = formula.known
    settings, caches, states = formula.config, engine["caches"], engine["recurrent"]
    rows = [
        Row("n_ctx", settings["n_ctx"], engine.get("n_ctx"), "tokens"),
        Row("n_ctx per slot", settings["n_ctx_per_slot"], engine.get("n_ctx_seq"), "tokens"),
        Row(
            "KV",
            formula.kv_bytes if known else None,
            engine["kv_bytes"],
            lines=max(len(caches), len(formula.caches)),
        ),
        *_cache_rows(formula, caches),
        Row(
            "state",
            formula.recurrent_bytes if known else None,
            engine["recurrent_bytes"],
            lines=len(states),
        ),
        *_state_rows(formula, states),
        Row("output", formula.output_bytes if known else None, engine["output_bytes"]),
    ]
    if compute:
        size = formula.compute
        rows.append(
            Row("compute", size.bytes, engine["compute_bytes"], low=size.low, high=size.high)
        )
    return tuple(rows)


def _cache_rows(formula: Estimate, told: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return what each cache has on both sides; the states of compressed caches have no line."""
    ours: list[CacheEstimate] = [cache for cache in formula.caches if cache.kind != "state"]
    rows = []
    for index in range(max(len(ours), len(told))):
        mine = ours[index] if index < len(ours) else None
        line = told[index] if index < len(told) else None
        name = f"{mine.kind if mine else 'unknown'} cache"
        for field, unit in (("cells", "cells"), ("streams", "streams"), ("layers", "layers")):
            rows.append(Row(f"{name}, {field}", _of(mine, field), _at(line, field), unit))
        rows.append(Row(f"{name}, K", _of(mine, "k_bytes"), _at(line, "k_bytes")))
        rows.append(Row(f"{name}, V", _of(mine, "v_bytes"), _at(line, "v_bytes")))
    return rows


def _of(cache: CacheEstimate | None, field: str) -> int | None:
    return None if cache is None else int(getattr(cache, field))


def _at(line: Mapping[str, Any] | None, field: str) -> int | None:
    return None if line is None else int(line[field])


def _state_rows(formula: Estimate, told: Sequence[Mapping[str, Any]]) -> list[Row]:
    if not told or not formula.known:
        return []
    ours = {"R": formula.r_bytes, "S": formula.s_bytes, "P": formula.p_bytes}
    return [
        Row(
            f"state, {letter}",
            size,
            sum(int(line[f"{letter.lower()}_bytes"]) for line in told),
            lines=len(told),
        )
        for letter, size in ours.items()
    ]
