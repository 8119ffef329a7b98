"""What it costs a server to be watched: generation speed with and without ``localkv observe``.

One llama-server answers the same request again and again. One ``localkv observe`` at its default
interval watches it, stopped (SIGSTOP) for every other block of requests, so that both kinds of
block see the same machine.

The CPU time that the server itself spends on a look, as a share of the time between two, stands
beside it: on a small machine the speeds scatter by many times one percent. Exits 1 where either is
more than ``--limit``; speeds that scatter so much show neither that the limit holds nor that not.

    python benchmarks/bench_observe.py [--server-bin llama-server] [--rounds 30] [--threads 0]
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from localkv.engines.llama_server import LlamaServer, started
from localkv.gguf.demo import fetch
from localkv.http import Client
from localkv.model import read_model
from localkv.observe.watch import INTERVAL
from localkv.predict.defaults import run_config


class Block(NamedTuple):
    """Tokens per second of wall time, and per second of the server's CPU time."""

    speed: float
    cpu_speed: float


def block(server: LlamaServer, seconds: float, n_predict: int) -> Block:
    """Let the server generate for ``seconds`` or a little more."""
    body = {"prompt": [100] * 8, "n_predict": n_predict, "ignore_eos": True, "id_slot": 0}
    tokens = 0
    assert server.pid
    before = cpu_seconds(server.pid)
    with Client(server.url, timeout=600) as client:
        begun = time.perf_counter()
        while (spent := time.perf_counter() - begun) < seconds:
            tokens += client.post_json("/completion", body)["tokens_predicted"]
    return Block(tokens / spent, tokens / (cpu_seconds(server.pid) - before))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that ``pid`` took so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def compare(
    server: LlamaServer, rounds: int, seconds: float, n_predict: int
) -> tuple[list[Block], list[Block], float]:
    """Return the blocks without and with an observer, interleaved, and its CPU time per look."""
    command = [sys.executable, "-m", "localkv", "observe", server.url, "--json"]
    alone: list[Block] = []
    watched: list[Block] = []
    with (
        tempfile.TemporaryFile() as looks,
        subprocess.Popen(command, stdout=looks) as observer,
    ):
        try:
            while looks.seek(0, 2) == 0 and observer.poll() is None:
                time.sleep(0.05)
            begun = cpu_seconds(observer.pid)
            for number in range(2 * rounds):
                # A B B A A B B A: a drift of the machine falls on both.
                on = number % 4 in (1, 2)
                observer.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                (watched if on else alone).append(block(server, seconds, n_predict))
            assert observer.poll() is None, "the observer ended"
            cost = cpu_seconds(observer.pid) - begun
            looks.seek(0)
            count = looks.read().count(b"\n") - 1
        finally:
            observer.send_signal(signal.SIGCONT)
            observer.kill()
    return alone, watched, cost / max(count, 1)


def served_look(server: LlamaServer, looks: int = 1000) -> float:
    """Return the server's CPU seconds for one look at ``/slots`` and ``/metrics``."""
    assert server.pid
    with Client(server.url) as client:
        client.get_json("/slots")
        before = cpu_seconds(server.pid)
        for _ in range(looks):
            client.get_json("/slots")
            client.get_text("/metrics")
    return (cpu_seconds(server.pid) - before) / looks


def main() -> int:
    """Print the speeds and what a look costs; return 1 where watching costs too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server-bin", help="llama-server (default: PATH's, or xllamacpp's)")
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each kind")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a block, at least")
    parser.add_argument("--predict", type=int, default=64, help="tokens of a request")
    parser.add_argument("--threads", type=int, default=0, help="of the server (0: its choice)")
    parser.add_argument("--limit", type=float, default=0.01, help="share that watching may cost")
    asked = parser.parse_args()
    model = fetch("demo")
    config = run_config("llama-server", read_model(model), n_ctx=2048, n_seq_max=4)
    with (
        tempfile.TemporaryDirectory() as folder,
        started(
            config,
            model,
            log=Path(folder) / "server.log",
            server_bin=asked.server_bin,
            n_threads=asked.threads,
        ) as server,
    ):
        block(server, asked.seconds, asked.predict)
        alone, watched, look = compare(server, asked.rounds, asked.seconds, asked.predict)
        served = served_look(server)
    costs = []
    for name, unit in (("speed", "tok/s"), ("cpu_speed", "tok per CPU second")):
        told = [[getattr(each, name) for each in blocks] for blocks in (alone, watched)]
        medians = [statistics.median(values) for values in told]
        for word, values, middle in zip(("alone", "watched"), told, medians, strict=True):
            low, _, high = statistics.quantiles(values, n=4)
            print(f"{word:8} {middle:8.2f} {unit} (half of them {low:.2f} to {high:.2f})")
        costs.append(1 - medians[1] / medians[0])
        print(f"cost     {costs[-1]:8.2%} (at most {asked.limit:.0%})")
    print(f"observer {look * 1000:8.1f} ms of CPU per look")
    print(
        f"server   {served * 1000:8.2f} ms of CPU per look: {served / INTERVAL:.3%} of a core at "
        f"one look in {INTERVAL:g} s (at most {asked.limit:.0%})"
    )
    return int(max(costs[0], served / INTERVAL) > asked.limit)


if __name__ == "__main__":
    sys.exit(main())
