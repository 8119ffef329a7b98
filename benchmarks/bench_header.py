"""Time and peak memory of reading the headers of the two built-in models, as whole processes.

Each row is one fresh Python: nothing but starting it, localkv's reader, ``localkv inspect``, and
the ``gguf`` package's GGUFReader, taken in turns so that a busy moment hits all of them alike.

    python benchmarks/bench_header.py [--runs 9] [--peer-runs 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = "import sys; from localkv.gguf import open_model; open_model(sys.argv[1])"
INSPECT = (
    "import sys; from localkv.cli import main; sys.argv[1:] = ['inspect', sys.argv[1]]; main()"
)
PEER = "import sys; from gguf import GGUFReader; GGUFReader(sys.argv[1])"
BARE = "bare python"


# As installed: compiled modules are there, whatever the caller's environment says about them.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
ENVIRONMENT |= {
    "PYTHONPATH": str(ROOT),
    "PYTHONPYCACHEPREFIX": os.path.join(tempfile.gettempdir(), "localkv-bench-pycache"),
}

#: The kernel's own mark of the highest RSS, told at exit; ru_maxrss would start at the parent's.
TELL_PEAK = """
import atexit, sys
def _peak():
    with open("/proc/self/status") as status:
        sys.stderr.write(next(line for line in status if line.startswith("VmHWM")))
atexit.register(_peak)
"""


def one_run(code: str, argument: str) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds and peak MiB of one process that runs ``code``."""
    linux = sys.platform == "linux"
    begin = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", TELL_PEAK * linux + code, argument],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    told = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{code!r} ended with code {child.returncode}: {told}")
    peak = int(told.split()[-2]) / 1024 if linux else usage.ru_maxrss / (1 << 20)
    return seconds, usage.ru_utime + usage.ru_stime, peak


def measure(path: str, runs: int, peer_runs: int) -> list[dict[str, object]]:
    """Return one row per reader: medians over its runs."""
    readers = {BARE: ("pass", runs), "localkv reader": (OURS, runs)}
    if (ROOT / "localkv" / "cli" / "inspect.py").exists():
        readers["localkv inspect"] = (INSPECT, runs)
    readers["gguf.GGUFReader"] = (PEER, peer_runs)
    for name in readers:
        if name != "gguf.GGUFReader":
            one_run(readers[name][0], path)  # warm: the file's header and the compiled modules
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in readers}
    for index in range(max(runs, peer_runs)):
        for name, (code, count) in readers.items():
            if index < count:
                taken[name].append(one_run(code, path))
    bare = statistics.median(run[0] for run in taken[BARE])
    rows = []
    for name, results in taken.items():
        if not results:
            continue
        seconds, cpu, peak = (statistics.median(column) for column in zip(*results, strict=True))
        rows.append(
            {
                "model": Path(path).name,
                "reader": name,
                "seconds": round(seconds, 4),
                "cpu_seconds": round(cpu, 4),
                "times_bare_python": round(seconds / bare, 2),
                "peak_mib": round(peak, 1),
                "runs": len(results),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--peer-runs", type=int, default=1, help="it takes 10 to 80 s each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from localkv.gguf.demo import fetch

    rows = [
        row
        for name in ("demo", "demo-swa")
        for row in measure(fetch(name), options.runs, options.peer_runs)
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(
        f"{'model':33} {'reader':17} {'seconds':>8} {'CPU s':>7} {'x bare':>7} {'peak MiB':>9}"
        f" {'runs':>5}"
    )
    for row in rows:
        print(
            f"{row['model']:33} {row['reader']:17} {row['seconds']:8.3f} {row['cpu_seconds']:7.3f} "
            f"{row['times_bare_python']:7.2f} {row['peak_mib']:9.1f} {row['runs']:5}"
        )


if __name__ == "__main__":
    main()
