"""Start-up of the commands that answer from a header alone, against a bare Python, in one run.

python benchmarks/bench_startup.py [--runs 15]

Every start is a process of its own with bytecode cached, as an installed package has it; the
commands take turns, so that a busy machine slows all of them alike. Exit code 1: a median is
above its limit, in times of the bare start.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("demo", "demo-swa")
#: Of the process, by model: the second has a vocabulary of 262 thousand strings to step over.
PROCESS = {"demo": 5.5, "demo-swa": 11.0}
#: Inside a process, where a bare start takes 15 ms: 10 ms for reading a header (98 thousand
#: strings; the other has 262), 30 ms for loading the formulas and predicting.
READ = {"demo": 10 / 15, "demo-swa": 30 / 15}
PREDICT = {"demo": 30 / 15, "demo-swa": 30 / 15}
ANSWERS = {
    "inspect": (),
    "predict": (),
    "capacity": ("--memory", "24G", "--ctx-per-slot", "8192"),
}
#: What an installer writes as the command.
SCRIPT = "import sys\nfrom localkv.cli import run\nsys.exit(run())\n"
#: Prints the seconds that reading and predicting took, both for the first time in the process.
INSIDE = """
import gc, sys, time
gc.set_threshold(100_000)
from localkv import read_model
import localkv.gguf.demo
began = time.perf_counter()
shape = read_model(sys.argv[1])
read = time.perf_counter()
from localkv.predict.defaults import run_config
from localkv.predict.predict import estimate
estimate(shape, run_config("llama-server", shape))
print(read - began, time.perf_counter() - read)
"""


def commands(script: str) -> dict[str, tuple[list[str], float | None]]:
    """Return the arguments and the limit of each command that is measured, by its name."""
    found: dict[str, tuple[list[str], float | None]] = {
        "python -c pass": (["-c", "pass"], None),
        'python -c "import click"': (["-c", "import click"], None),
        "localkv --help": ([script, "--help"], PROCESS["demo"]),
    }
    for model in MODELS:
        for name, options in ANSWERS.items():
            arguments = [script, name, model, *options]
            found[f"localkv {name} {model}"] = (arguments, PROCESS[model])
    return found


def environment(cache: str) -> dict[str, str]:
    """Return an environment in which every start finds its bytecode in ``cache``."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache}
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"):
        own.pop(name, None)
    return own


def run(arguments: list[str], env: dict[str, str]) -> tuple[float, str]:
    """Return the wall seconds of one fresh Python with ``arguments``, and what it printed."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True
    )
    taken = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    return taken, done.stdout


def measured(runs: int, folder: Path) -> dict[str, tuple[float, float | None]]:
    """Return the median seconds of each line and its limit, all lines taking turns."""
    script = folder / "localkv"
    script.write_text(SCRIPT, encoding="utf-8")
    env = environment(str(folder / "bytecode"))
    lines = commands(str(script))
    inside = {model: ["-c", INSIDE, model] for model in MODELS}
    for arguments in (*(arguments for arguments, _ in lines.values()), *inside.values()):
        run(arguments, env)  # fetches the models and writes the bytecode
    taken: dict[str, list[float]] = {}
    for _ in range(runs):
        for name, (arguments, _limit) in lines.items():
            taken.setdefault(name, []).append(run(arguments, env)[0])
        for model, arguments in inside.items():
            read, predicted = map(float, run(arguments, env)[1].split())
            taken.setdefault(f"read {model}", []).append(read)
            taken.setdefault(f"predict from {model}", []).append(predicted)
    limits = {name: limit for name, (_, limit) in lines.items()}
    limits |= {f"read {model}": limit for model, limit in READ.items()}
    limits |= {f"predict from {model}": limit for model, limit in PREDICT.items()}
    return {name: (statistics.median(values), limits[name]) for name, values in taken.items()}


def main() -> int:
    """Print the medians and their ratio to a bare start; 1 where one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        medians = measured(runs, Path(folder))
    bare, _ = medians["python -c pass"]
    over = 0
    print(f"{'median of ' + str(runs):28} {'ms':>8} {'x bare':>7} {'limit':>7}")
    for name, (value, limit) in medians.items():
        ratio = value / bare
        told = f"{limit:7.2f}" if limit else f"{'':7}"
        late = bool(limit) and ratio > limit
        over += late
        print(f"{name:28} {value * 1000:8.1f} {ratio:7.2f} {told}{'  over' if late else ''}")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
