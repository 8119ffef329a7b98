"""What a sweep costs beyond the engine: its wall time over the engine's own time.

The engine's own time is what the workers spent loading, creating contexts and decoding, summed
over the points; the wall time is that of ``localkv sweep`` as a whole process, with one fresh
process per point, the plan, the fit and the report.

    python benchmarks/bench_sweep.py [--runs 1] [-- SWEEP OPTIONS]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINE_TIMINGS = ("load", "context", "decode", "fill")


def one_sweep(options: list[str]) -> tuple[float, float, int, dict[str, object]]:
    """Return wall seconds, the engine's seconds, the points, and the sweep's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "localkv", "sweep", *options, "--json", "-o", str(run)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
        wall = time.perf_counter() - start
        records = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    engine = sum(record["timings"].get(name, 0.0) for record in records for name in ENGINE_TIMINGS)
    return wall, engine, len(records), json.loads(done.stdout)


def main() -> None:
    """Print one row per run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("options", nargs="*", help="options of the sweep; default: the demo model")
    arguments = parser.parse_args()
    print(
        f"{'wall s':>8} {'engine s':>9} {'ratio':>6} {'points':>7} {'slope':>8} {'peak error':>11}"
    )
    for _ in range(arguments.runs):
        wall, engine, points, result = one_sweep(arguments.options)
        fit = result["fit"]
        assert isinstance(fit, dict)
        print(
            f"{wall:8.1f} {engine:9.1f} {wall / engine:6.2f} {points:7} {fit['slope']:8.5f} "
            f"{result['peak_error']:11.4f}"
        )


if __name__ == "__main__":
    main()
