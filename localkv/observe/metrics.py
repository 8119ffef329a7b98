"""Prometheus text: the samples that a server gives, and the lines that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from localkv.units import plural

#: How many unreadable lines are told one by one.
_TOLD = 3
_SHOWN = 80


@dataclass(frozen=True)
class Sample:
    """One value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """The samples of one scrape, by name; ``warnings`` name the lines that were left out."""

    def __init__(self, samples: Iterable[Sample], warnings: tuple[str, ...] = ()) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)
        self.warnings = warnings

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def has_prefix(self, prefix: str) -> bool:
        """Return whether any sample's name begins with ``prefix``."""
        return any(name.startswith(prefix) for name in self._by_name)

    def samples(self, *names: str) -> list[Sample]:
        """Return the samples of the first of ``names`` that is there: names change by version."""
        return next((self._by_name[name] for name in names if name in self._by_name), [])

    def total(self, *names: str) -> float | None:
        """Return the sum over all labels (engines, sources) of the first of ``names``."""
        values = [s.value for s in self.samples(*names) if math.isfinite(s.value)]
        return sum(values) if values else None

    def mean(self, *names: str) -> float | None:
        """Return the mean over all labels of the first of ``names``: for shares."""
        values = [s.value for s in self.samples(*names) if math.isfinite(s.value)]
        return sum(values) / len(values) if values else None

    def count(self, *names: str) -> int | None:
        """Return :meth:`total` as a whole number, None for a negative one."""
        total = self.total(*names)
        return round(total) if total is not None and total >= 0 else None

    def label(self, label: str, *names: str) -> str:
        """Return the first value of ``label`` in the samples of ``names``, empty for none."""
        return next((v for s in self.samples(*names) if (v := s.labels.get(label))), "")

    def counters(self, names: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """Return the totals that are there; ``names`` maps a counter to its names by version."""
        found = {name: self.total(*sources) for name, sources in names.items()}
        return {name: value for name, value in found.items() if value is not None}


def parse_metrics(text: str) -> Metrics:
    """Return the samples of Prometheus text; a malformed line is a warning, not an end."""
    # What stands in the comments, help and types, is not used; reading it takes most of the time.
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    try:
        return Metrics(list(_samples("\n".join(lines))))
    except ValueError:
        pass
    found: list[Sample] = []
    bad: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            found.extend(_samples(line + "\n"))
        except ValueError:
            bad.append(f"line {number} of the metrics cannot be read: {line[:_SHOWN]!r}")
    more = len(bad) - _TOLD
    if more > 0:
        bad = [*bad[:_TOLD], f"{plural(more, 'more line')} of the metrics cannot be read"]
    return Metrics(found, tuple(bad))


def _samples(text: str) -> Iterator[Sample]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield Sample(sample.name, sample.labels, float(sample.value))
