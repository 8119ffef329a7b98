"""What it costs a server to be watched: its throughput with and without ``localkv observe``.

One llama-server streams one answer after the other, every token stamped as it arrives. One
``localkv observe`` at its default interval watches it in one of every two stretches of time, and is
stopped (SIGSTOP) in the other; a coin decides in which, so that drift and whatever else the machine
does fall on both alike. The cost is the median over these pairs, since a busy machine spoils some
of them wholly; its 95 % interval is that of the ranks, whatever the scatter looks like. The sums
over all pairs stand beside it: a look that stalled the server once in a while would show there.

What a look costs is over soon after it. So the same is told once more for the quarter of a second
after each look, as a share of the whole interval: it scatters much less, and judges nothing. So
does the CPU time that the server itself spends on a look.

Exits 0 where the whole interval lies below ``--limit``, 1 where it lies above, and 3 where nobody
can tell: the run was too short, or other programs had more than a tenth of the machine. A server
that waits for a processor goes faster or slower for reasons of the scheduler's.

    python benchmarks/bench_observe.py [--server-bin llama-server] [--rounds 200] [--threads 1]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from localkv.engines.llama_server import LlamaServer, started
from localkv.gguf.demo import fetch
from localkv.http import Client
from localkv.model import read_model
from localkv.observe.streams import events
from localkv.observe.watch import INTERVAL
from localkv.predict.defaults import run_config

UNKNOWN = 3
#: Seconds after a look in which all that it costs has come and gone.
_SOON = 0.25
_GUESTS = ("guest", "guest_nice")
#: The share of the machine that other programs may take.
_OTHERS = 0.1
_TOKEN = 100


@dataclass
class Stream:
    """When each token came, and when each answer began: seconds of one clock."""

    tokens: list[float] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)

    def part(self, start: float, seconds: float) -> tuple[int, float] | None:
        """Return the tokens of a stretch and how long they took; None where an answer began.

        A token belongs where it came, with all the time that it took: one that a look delays has
        often begun before it.
        """
        first = bisect_right(self.tokens, start) - 1
        last = bisect_right(self.tokens, start + seconds) - 1
        if first < 0 or last == first or last == len(self.tokens) - 1:
            return None
        since, until = self.tokens[first], self.tokens[last]
        if any(since < begun < until for begun in self.begun):
            return None
        return last - first, until - since


class Pair(NamedTuple):
    """When the stretch with the observer began, and that without."""

    watched: float
    alone: float


class Cost(NamedTuple):
    """A share of the throughput: the median over pairs, its 95 % interval, and that of the sums."""

    pairs: int
    median: float
    low: float
    high: float
    total: float


def cost(stream: Stream, pairs: Sequence[Pair], seconds: float, interval: float) -> Cost:
    """Return what watching took of each ``interval``, by the first ``seconds`` of the stretches.

    Raises:
        ValueError: there are too few whole pairs for an interval.
    """
    parts = [[stream.part(start, seconds) for start in pair] for pair in pairs]
    whole = [(watched, alone) for watched, alone in parts if watched and alone]
    scale = seconds / interval
    shares = [scale * (1 - speed([watched]) / speed([alone])) for watched, alone in whole]
    low, high = median_interval(shares)
    total = scale * (1 - speed([pair[0] for pair in whole]) / speed([pair[1] for pair in whole]))
    return Cost(len(shares), statistics.median(shares), low, high, total)


def speed(parts: Sequence[tuple[int, float]]) -> float:
    """Return the tokens per second of all ``parts`` together."""
    return sum(tokens for tokens, _ in parts) / sum(seconds for _, seconds in parts)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median: the ranks between which it lies, by the signs."""
    count = len(values)
    rank = math.floor((count - 1.96 * math.sqrt(count)) / 2)
    if rank < 1:
        raise ValueError(f"{count} whole pairs are too few: more --rounds, or a longer --predict")
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def verdict(found: Cost, limit: float, others: float = 0.0) -> tuple[int, str]:
    """Return the exit code and what it means; ``others`` is the share of other programs."""
    if others > _OTHERS:
        return UNKNOWN, f"other programs took {others:.0%} of the machine: nothing is shown"
    if found.high < limit:
        return 0, f"watching costs less than {limit:.0%}"
    if found.low > limit:
        return 1, f"watching costs more than {limit:.0%}"
    needed = (found.high - found.low) / max(2 * abs(limit - found.median), 1e-9)
    longer = f"some {math.ceil(found.pairs * max(needed, 1.1) ** 2):,} rounds"
    return UNKNOWN, f"too short to tell whether watching costs less than {limit:.0%}: {longer}"


class Generation(threading.Thread):
    """Lets the server answer again and again, and keeps when the tokens came."""

    def __init__(self, server: LlamaServer, n_predict: int) -> None:
        super().__init__(daemon=True)
        self.stream = Stream()
        self.failed: BaseException | None = None
        self._server = server
        # One and the same word all the time: a token of half a letter would not be sent.
        self._body = {
            "prompt": [_TOKEN] * 8,
            "n_predict": n_predict,
            "ignore_eos": True,
            "logit_bias": [[_TOKEN, 100.0]],
            "temperature": 0,
            "id_slot": 0,
            "stream": True,
        }
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            with Client(self._server.url) as client:
                while not self._ended.is_set():
                    self.stream.begun.append(time.monotonic())
                    for _ in events(client, "/completion", self._body, timeout=3600):
                        self.stream.tokens.append(time.monotonic())
                        if self._ended.is_set():
                            return
        except BaseException as error:
            self.failed = error

    def end(self) -> Stream:
        """Let the server rest, and return what it did."""
        self._ended.set()
        self.join()
        if self.failed:
            raise self.failed
        return self.stream


class Watched(NamedTuple):
    """The pairs of stretches; the observer's CPU seconds and looks; the others' share of CPU."""

    pairs: list[Pair]
    cpu: float
    looks: int
    others: float


def alternate(
    server: LlamaServer,
    observer: subprocess.Popen[bytes],
    output: IO[bytes],
    asked: argparse.Namespace,
) -> Watched:
    """Let the stopped ``observer`` watch in one of every two stretches.

    A look that fell due while it was stopped comes as soon as it goes on. It is stopped again while
    it sleeps, shortly before the next stretch's look.
    """
    pairs = []
    assert server.pid
    pids = server.pid, observer.pid, os.getpid()
    before, looks = [machine_seconds(), *map(cpu_seconds, pids)], lines(output)
    due = begin = time.monotonic()
    for _ in range(asked.rounds):
        begun = {}
        for on in random.sample((True, False), 2):
            sleep_until(due)
            if on:
                observer.send_signal(signal.SIGCONT)
            begun[on] = time.monotonic()
            due = begun[on] + asked.seconds
            sleep_until(due - 0.1 * asked.interval)
            observer.send_signal(signal.SIGSTOP)
        pairs.append(Pair(begun[True], begun[False]))
    sleep_until(due)
    assert observer.poll() is None, "the observer ended"
    after = [machine_seconds(), *map(cpu_seconds, pids)]
    everyone, *ours = [now - then for now, then in zip(after, before, strict=True)]
    others = (everyone - sum(ours)) / (time.monotonic() - begin) / (os.cpu_count() or 1)
    return Watched(pairs, ours[1], lines(output) - looks, max(others, 0.0))


def sleep_until(when: float) -> None:
    """Sleep until ``when`` on the clock of the stretches."""
    time.sleep(max(0.0, when - time.monotonic()))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that ``pid`` took so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def machine_seconds() -> float:
    """Return the CPU time that all programs of this machine took so far."""
    times = psutil.cpu_times()._asdict()
    # A guest's time stands in user time as well.
    return float(sum(times[name] for name in times if name not in ("idle", "iowait", *_GUESTS)))


def lines(output: IO[bytes]) -> int:
    """Return the lines that were written to ``output`` so far."""
    output.seek(0)
    return output.read().count(b"\n")


def measure(server: LlamaServer, asked: argparse.Namespace) -> tuple[Stream, Watched]:
    """Let the server generate, and be watched in one of every two stretches."""
    command = [sys.executable, "-m", "localkv", "observe", server.url, "--json"]
    command += ["--interval", str(asked.interval)]
    generation = Generation(server, asked.predict)
    # The observer writes to a place of its own: to move in one that is shared would move both.
    with (
        tempfile.NamedTemporaryFile() as output,
        open(output.name, "ab") as theirs,
        subprocess.Popen(command, stdout=theirs) as observer,
    ):
        try:
            while lines(output) < 3 and observer.poll() is None:
                time.sleep(0.05)
            observer.send_signal(signal.SIGSTOP)
            generation.start()
            while len(generation.stream.tokens) < 20 and generation.is_alive():
                time.sleep(0.05)
            watched = alternate(server, observer, output, asked)
            time.sleep(asked.seconds)
        finally:
            observer.kill()
            stream = generation.end()
    return stream, watched


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


def tell(word: str, found: Cost) -> None:
    print(
        f"{word:10} {found.median:+7.2%} of the throughput (95 %: {found.low:+.2%} to "
        f"{found.high:+.2%}; by the sums {found.total:+.2%}; {found.pairs} pairs)"
    )


def main() -> int:
    """Print what watching costs; return 1 where that is too much, 3 where nobody can tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server-bin", help="llama-server (default: PATH's, or xllamacpp's)")
    parser.add_argument("--rounds", type=int, default=200, help="of two stretches each")
    parser.add_argument("--seconds", type=float, default=INTERVAL, help="of a stretch")
    parser.add_argument("--predict", type=int, default=1900, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=0, help="of the server (0: its choice)")
    parser.add_argument("--interval", type=float, default=INTERVAL, help="of the observer")
    parser.add_argument("--limit", type=float, default=0.01, help="share that watching may cost")
    asked = parser.parse_args()
    model = fetch("demo")
    config = run_config("llama-server", read_model(model), n_ctx=8192, n_seq_max=4)
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
        stream, watched = measure(server, asked)
        served = served_look(server)
    per_second = watched.looks / (asked.rounds * asked.seconds)
    rate = speed([(len(stream.tokens), stream.tokens[-1] - stream.tokens[0])])
    print(f"server     {rate:7.1f} tok/s; {per_second:.2f} looks a second where it is watched")
    print(f"others     {watched.others:7.1%} of the machine")
    found = cost(stream, watched.pairs, asked.seconds, asked.seconds)
    tell("watching", found)
    if asked.interval > 2 * _SOON:
        tell("near looks", cost(stream, watched.pairs, _SOON, asked.interval))
    print(f"observer   {watched.cpu / max(watched.looks, 1) * 1000:7.1f} ms of CPU per look")
    print(
        f"server     {served * 1000:7.2f} ms of CPU per look: {served / asked.interval:.3%} of a "
        f"core at one look in {asked.interval:g} s"
    )
    code, said = verdict(found, asked.limit, watched.others)
    print(said)
    return code


if __name__ == "__main__":
    sys.exit(main())
