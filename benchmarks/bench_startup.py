"""Start-up of commands that do not measure, against ``python -c "import click"``, in one run.

python benchmarks/bench_startup.py [--runs 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Without bytecode every start would compile every module; a person's Python writes it once.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    'python -c "import click"': ["-c", "import click"],
    "localkv --help": ["-m", "localkv", "--help"],
    "localkv inspect demo": ["-m", "localkv", "inspect", "demo"],
    "localkv predict demo": ["-m", "localkv", "predict", "demo"],
}


def seconds(arguments: list[str]) -> float:
    """Return the wall seconds of one fresh Python with ``arguments``."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start


def main() -> None:
    """Print the median of each command, and its ratio to bare Python and to click."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    for arguments in COMMANDS.values():
        seconds(arguments)  # fetches the model and writes the bytecode
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, arguments in COMMANDS.items():
            taken[name].append(seconds(arguments))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    bare, click = list(medians.values())[:2]
    print(f"{'command':28} {'median s':>9} {'x bare':>7} {'x click':>8}")
    for name, value in medians.items():
        print(f"{name:28} {value:9.4f} {value / bare:7.2f} {value / click:8.2f}")


if __name__ == "__main__":
    main()
