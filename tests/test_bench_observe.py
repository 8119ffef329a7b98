"""The benchmark of watching can tell: what it makes of tokens whose cost is known."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT = 0.01


def _benchmark() -> Any:
    path = Path(__file__).parents[1] / "benchmarks/bench_observe.py"
    spec = importlib.util.spec_from_file_location("bench_observe", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_observe"] = module
    spec.loader.exec_module(module)
    return module


bench = _benchmark()


def generated(
    rounds: int, lost: float, *, scatter: float = 0.01, drift: float = 0.0
) -> tuple[Any, list[Any]]:
    """Return tokens of 25 ms, of which each look delays one by ``lost`` seconds, and the pairs.

    The speed wanders by ``scatter`` from token to token, and falls by ``drift`` in each second.
    """
    chance = random.Random(7)
    pairs = [bench.Pair(*chance.sample((at, at + 1.0), 2)) for at in range(1, 2 * rounds, 2)]
    looks = [pair.watched for pair in pairs]
    tokens = [0.0]
    wandered = 1.0
    while tokens[-1] < 2 * rounds + 2:
        wandered = 1 + 0.95 * (wandered - 1) + chance.gauss(0, scatter)
        took = 0.025 / wandered / (1 - drift * tokens[-1])
        if looks and tokens[-1] + took > looks[0]:
            took += lost
            del looks[0]
        tokens.append(tokens[-1] + took)
    return bench.Stream(tokens, [-1.0]), pairs


@pytest.mark.parametrize(
    ("lost", "drift", "code"), [(0.0, 0.0, 0), (0.0, 0.001, 0), (0.002, 0.0, 0), (0.03, 0.0, 1)]
)
def test_a_cost_is_told_on_the_right_side_of_the_limit(
    lost: float, drift: float, code: int
) -> None:
    stream, pairs = generated(300, lost, drift=drift)
    found = bench.cost(stream, pairs, 1.0, 1.0)
    assert found.pairs == 300
    assert found.low <= lost <= found.high
    assert found.total == pytest.approx(lost, abs=0.005)
    assert bench.verdict(found, LIMIT)[0] == code
    # A delayed token has begun before its look: all of its delay counts nevertheless.
    near = bench.cost(stream, pairs, 0.25, 1.0)
    assert near.median == pytest.approx(lost, abs=0.002)
    assert near.high - near.low < found.high - found.low


@pytest.mark.parametrize(
    ("low", "high", "code"),
    [(0.001, 0.0099, 0), (-0.05, 0.0099, 0), (0.001, 0.011, 3), (0.009, 0.03, 3), (0.011, 0.03, 1)],
)
def test_the_whole_interval_decides(low: float, high: float, code: int) -> None:
    found = bench.Cost(100, (low + high) / 2, low, high, 0.0)
    assert bench.verdict(found, LIMIT)[0] == code


def test_a_run_that_cannot_tell_says_so() -> None:
    found = bench.cost(*generated(30, 0.0, scatter=0.05), 1.0, 1.0)
    code, said = bench.verdict(found, LIMIT)
    assert code == bench.UNKNOWN
    assert "too short" in said
    calm = bench.cost(*generated(300, 0.0), 1.0, 1.0)
    code, said = bench.verdict(calm, LIMIT, others=0.5)
    assert code == bench.UNKNOWN
    assert "other programs took 50%" in said


def test_stretches_where_an_answer_began_are_left_out() -> None:
    stream, pairs = generated(100, 0.0)
    stream.begun.append(pairs[40].alone + 0.5)
    assert bench.cost(stream, pairs, 1.0, 1.0).pairs == 99
    with pytest.raises(ValueError, match="too few"):
        bench.cost(stream, pairs[:4], 1.0, 1.0)


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    chance = random.Random(3)
    held = 0
    for _ in range(400):
        low, high = bench.median_interval([chance.expovariate(1) for _ in range(60)])
        held += low <= 0.6931 <= high
    assert 0.92 < held / 400 < 0.99
