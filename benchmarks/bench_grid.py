"""A grid of 1,000 configurations, by the engine's dry run and by the formula.

python benchmarks/bench_grid.py [--configs 1000] [--jobs 2] [MODEL ...]
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice, product
from pathlib import Path

from localkv.engines.check import compare
from localkv.engines.dryrun import dry_run
from localkv.model import read_model
from localkv.predict.config import RunConfig
from localkv.predict.predict import estimate


def grid(count: int) -> list[RunConfig]:
    """Return ``count`` different configurations that the engine takes."""
    settings = product(
        range(1024, 1024 * 257, 1024), (1, 2, 3, 4, 8), (False, True), ("f16", "q8_0"), (512, 256)
    )
    return [
        RunConfig(
            n_ctx=n_ctx,
            n_seq_max=slots,
            n_outputs_max=slots,
            kv_unified=unified,
            cache_type_k=kind,
            cache_type_v=kind,
            n_ubatch=ubatch,
        )
        for n_ctx, slots, unified, kind, ubatch in islice(settings, count)
    ]


def main() -> None:
    """Print both times per model, their ratio, and whether the two agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("models", nargs="*", default=["demo", "demo-swa"])
    arguments = parser.parse_args()
    configs = grid(arguments.configs)
    print(f"{len(configs)} configurations, {arguments.jobs} processes with one load each")
    print(f"{'model':20} {'engine s':>9} {'CPU s':>6} {'formula s':>10} {'ratio':>7} {'differ':>7}")
    for name in arguments.models:
        shape = read_model(name)
        before, start = os.times(), time.perf_counter()
        plans = dry_run(Path(shape.path), configs, jobs=arguments.jobs).plans
        after, middle = os.times(), time.perf_counter()
        estimates = [estimate(shape, config) for config in configs]
        end = time.perf_counter()
        different = sum(
            plan.engine is None
            or any(row.verdict == "different" for row in compare(ours, plan.engine))
            for ours, plan in zip(estimates, plans, strict=True)
        )
        engine, formula = middle - start, end - middle
        cpu = sum(after[2:4]) - sum(before[2:4])  # user and system time of the children
        label = os.path.basename(name)[:20]
        print(
            f"{label:20} {engine:9.2f} {cpu:6.2f} {formula:10.3f} {engine / formula:7.1f} "
            f"{different:7}"
        )


if __name__ == "__main__":
    main()
