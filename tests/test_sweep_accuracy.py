"""The promise of the README: measured memory agrees with the formula on the real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import localkv

from localkv.sweep.store import RunStore
from localkv.units import MIB

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: The engine prints two decimals of a MiB, so each of its lines is right to half of this.
PRINTED = 0.01 * MIB


def sweep(directory: Path, *options: object) -> dict[str, Any]:
    """Run a sweep and return its JSON, after holding every record against the engine's log."""
    done = localkv("sweep", *options, "--json", "-o", directory, timeout=550)
    assert done.returncode == 0, done.stderr
    for record in RunStore(directory).read_records():
        prediction, engine = record.prediction, record.engine
        lines = len(engine["caches"])
        assert prediction["kv"]["bytes"] == pytest.approx(engine["kv_bytes"], abs=lines * PRINTED)
        assert prediction["output"]["bytes"] == pytest.approx(engine["output_bytes"], abs=PRINTED)
        assert prediction["compute"]["source"] == "engine"
        assert prediction["compute"]["bytes"] == engine["compute_bytes"]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_default_sweep_of_the_demo_model(tmp_path: Path) -> None:
    result = sweep(tmp_path / "run")

    assert result["points"]["ok"] >= 12
    assert result["fit"]["slope"] == pytest.approx(1, abs=0.005)
    assert result["fit"]["held_out_error"] < 0.01
    assert result["peak_error"] < 0.02


def test_sliding_windows_and_a_quantised_cache(tmp_path: Path) -> None:
    result = sweep(
        tmp_path / "run", "-m", "demo-swa", "-np", "1,4", "--cache-type", "f16,q8_0", "-ub", "128"
    )

    assert result["points"]["ok"] == 16
    assert result["fit"]["slope"] == pytest.approx(1, abs=0.005)
    assert result["fit"]["held_out_error"] < 0.02
    assert result["peak_error"] < 0.02
