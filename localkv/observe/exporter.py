"""The figures of watched servers as Prometheus metrics, for servers that have none of their own.

One scrape of the exporter is one look at each server, so that Prometheus decides how often.
Names, units and types follow Prometheus' conventions: base units, ``_total`` for counters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from localkv.errors import LocalkvError
from localkv.observe.targets import Server
from localkv.observe.watch import error_kind, is_failed, look
from localkv.snapshots import Observed, Snapshot

_LABELS = ("server", "instance_url")
_MEMORY = {"rss_anon": "anonymous", "rss_file": "file", "vram_process": "vram"}
_COUNTERS = {
    "prompt_tokens": ("localkv_prompt_tokens", "Prompt tokens that were read."),
    "cached_prompt_tokens": (
        "localkv_prompt_tokens_cached",
        "Prompt tokens that were in the cache already.",
    ),
    "generated_tokens": ("localkv_generated_tokens", "Tokens that were generated."),
    "preemptions": ("localkv_preemptions", "Requests put back because the KV cache was full."),
}


Predict: TypeAlias = Callable[[Snapshot], Mapping[str, Any]]


@dataclass(frozen=True)
class Awaited:
    """A server that has not answered yet: its labels till then, and what connects to it."""

    name: str
    url: str
    connect: Callable[[], tuple[Server, Predict]]


@dataclass
class Target:
    """A server to export, and what tells what localkv makes of its model, once it answers."""

    server: Server | Awaited
    predict: Predict = lambda _: {}
    before: Observed | None = None
    failures: dict[str, int] = field(default_factory=dict)
    failed: bool = False

    @property
    def labels(self) -> tuple[str, str]:
        """Return the server's name and its address."""
        server = self.server
        name = server.name if isinstance(server, Awaited) else server.source.server
        return name, server.url

    def look(self, clock: Callable[[], float]) -> Observed:
        """Return a look at the server, and count it where it has no answer."""
        seen = self._look(clock)
        self.failed = is_failed(seen)
        if seen.snapshot is not None:
            self.before = seen
        else:
            self.failures[seen.error_kind] = self.failures.get(seen.error_kind, 0) + 1
        return seen

    def _look(self, clock: Callable[[], float]) -> Observed:
        if isinstance(self.server, Awaited):
            begun = clock()
            try:
                self.server, self.predict = self.server.connect()
            except LocalkvError as error:
                took = round(clock() - begun, 4)
                kind = error_kind(error)
                return Observed(seconds=0.0, took=took, error=str(error), error_kind=kind)
        if self.failed:
            self.server.source.forget()
        return look(self.server.source, self.server.process, self.before, at=0.0, clock=clock)


class Exporter(Collector):
    """Looks at its targets whenever it is scraped."""

    def __init__(
        self, targets: Sequence[Target], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Export ``targets``; ``clock`` times the looks, in seconds."""
        self._targets = targets
        self._clock = clock
        # Two that scrape at once must not become two questions at once.
        self._one_at_a_time = threading.Lock()

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not look at the servers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, each with the samples of all targets."""
        families = _Families()
        with self._one_at_a_time:
            for target in self._targets:
                families.add(target, target.look(self._clock))
        yield from families


class _Families:
    """The metric families of one scrape, made as they are needed and in the order of making."""

    def __init__(self) -> None:
        self._known: dict[str, Metric] = {}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._known.values())

    def add(self, target: Target, seen: Observed) -> None:
        """Add what one look at ``target`` told."""
        at = target.labels
        self._gauge("localkv_up", "1 where the server answered.", int(bool(seen.snapshot)), at)
        self._gauge(
            "localkv_scrape_duration_seconds", "Seconds that the server took.", seen.took, at
        )
        for kind, count in target.failures.items():
            self._counter(
                "localkv_scrape_failures",
                "Looks without an answer, by kind (slow is not gone).",
                count,
                (*at, kind),
                "kind",
            )
        for key, reading in seen.process.items():
            self._gauge(
                "localkv_process_memory_bytes",
                "Memory of the server's processes, measured: allocated, of files, on GPUs.",
                reading.value,
                (*at, _MEMORY[key]),
                "kind",
            )
        if seen.snapshot is not None:
            self._cache(seen.snapshot, target.predict(seen.snapshot), at)
            self._requests(seen.snapshot, at)
            self._models(seen.snapshot, at)

    def _cache(self, said: Snapshot, predicted: Mapping[str, Any], at: tuple[str, str]) -> None:
        capacity = said.capacity_tokens or predicted.get("capacity_tokens")
        used, token = said.used_tokens, predicted.get("bytes_per_token")
        self._gauge("localkv_kv_cache_used_tokens", "Tokens (cells) in the KV cache.", used, at)
        self._gauge(
            "localkv_kv_cache_capacity_tokens", "Tokens that the KV cache can hold.", capacity, at
        )
        usage = used / capacity if used is not None and capacity else said.usage
        self._gauge("localkv_kv_cache_usage_ratio", "Used share of the KV cache.", usage, at)
        self._gauge(
            "localkv_kv_cache_bytes",
            "Size of the KV cache by the formula.",
            predicted.get("kv_bytes"),
            at,
        )
        self._gauge(
            "localkv_kv_cache_token_bytes",
            "Bytes that one more token takes by the formula.",
            token,
            at,
        )
        # A cache is reserved whole, so an idle server holds all of it, unless it sleeps.
        held = 0 if said.facts.get("sleeping") else predicted.get("kv_bytes")
        if said.running is not None and held is not None:
            self._gauge(
                "localkv_kv_cache_idle_bytes",
                "Bytes of KV cache held while no request runs.",
                0 if said.running else held,
                at,
            )

    def _requests(self, said: Snapshot, at: tuple[str, str]) -> None:
        self._gauge("localkv_requests_running", "Requests in work.", said.running, at)
        self._gauge("localkv_requests_waiting", "Requests deferred or queued.", said.waiting, at)
        if said.slots:
            self._gauge("localkv_slots", "Slots of the server.", len(said.slots), at)
        for name, (metric, words) in _COUNTERS.items():
            self._counter(metric, words, said.counters.get(name), at)

    def _models(self, said: Snapshot, at: tuple[str, str]) -> None:
        for model in said.loaded:
            labels = (*at, model.name)
            for name, words, value in (
                ("localkv_model_bytes", "A loaded model, as Ollama counts it.", model.bytes),
                ("localkv_model_vram_bytes", "Of that, on GPUs.", model.vram_bytes),
            ):
                self._gauge(name, words, value, labels, "model")

    def _gauge(
        self, name: str, words: str, value: float | None, at: tuple[str, ...], *more: str
    ) -> None:
        if value is not None:
            family = self._known.setdefault(
                name, GaugeMetricFamily(name, words, labels=(*_LABELS, *more))
            )
            family.add_metric(at, value)  # type: ignore[attr-defined]

    def _counter(
        self, name: str, words: str, value: float | None, at: tuple[str, ...], *more: str
    ) -> None:
        if value is not None:
            family = self._known.setdefault(
                name, CounterMetricFamily(name, words, labels=(*_LABELS, *more))
            )
            family.add_metric(at, value)  # type: ignore[attr-defined]
