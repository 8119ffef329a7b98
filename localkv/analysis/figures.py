"""The figures of one run that can be held against those of another, point by point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from localkv.analysis import points, samples
from localkv.analysis.fit import MAD_TO_SIGMA
from localkv.analysis.samples import PAGE
from localkv.records import PointRecord, Reading

#: A normal residual lies within so many standard deviations in 95 of 100 cases.
_DEVIATIONS = 2.0
_LEAST_RESIDUALS = 3


@dataclass(frozen=True)
class Figure:
    """One figure of one point in one run: the median over ``repeats`` runs, and its spread.

    ``low`` to ``high`` is the range of the repeats; where there is one run alone, what the other
    points of the same sweep scatter by. ``value`` is None when it is unknown, because of ``why``.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    repeats: int = 0
    why: str | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of figure. ``source`` is memory-measured, memory-predicted or speed."""

    name: str
    source: str
    unit: str
    read: Callable[[PointRecord], Reading]


def _from_phase(key: str) -> Callable[[PointRecord], Reading]:
    def read(record: PointRecord) -> Reading:
        phase = record.phase("decode")
        found = phase.readings.get(key) if phase else None
        return found or Reading(None, why=f"no reading of {key} after decoding")

    return read


def _peak(*keys: str) -> Callable[[PointRecord], Reading]:
    def read(record: PointRecord) -> Reading:
        why = None
        for key in keys:
            found = record.peak.get(key)
            if found and found.value is not None:
                return found
            why = why or (found.why if found else None)
        return Reading(None, why=why or f"no reading of {keys[0]}")

    return read


def _predicted(read: Callable[[PointRecord], int | None]) -> Callable[[PointRecord], Reading]:
    def wrapped(record: PointRecord) -> Reading:
        value = read(record)
        why = None if value is not None else "the record does not hold it"
        return Reading(value, source="prediction", why=why)

    return wrapped


def _compute(record: PointRecord) -> int | None:
    told = points.dig_int(record.engine, "compute_bytes")
    return points.predicted(record, "compute") if told is None else told


MEASURED, PREDICTED, SPEED = "measured", "predicted", "speed"

#: The figures in the order of the page. Peak and growth are what an answer rests on.
KINDS: tuple[Kind, ...] = (
    Kind("context growth", MEASURED, "bytes", samples.growth),
    Kind("peak above baseline", MEASURED, "bytes", samples.peak),
    Kind("peak RSS", MEASURED, "bytes", _peak(*samples.HOST_PEAK)),
    Kind("RSS after decoding", MEASURED, "bytes", _from_phase("rss")),
    Kind("peak VRAM", MEASURED, "bytes", _peak(*samples.VRAM)),
    Kind("KV cache", PREDICTED, "bytes", _predicted(lambda r: points.predicted(r, "kv"))),
    Kind("compute buffers", PREDICTED, "bytes", _predicted(_compute)),
    Kind("predicted total", PREDICTED, "bytes", _predicted(points.predicted_total)),
)


def figure(kind: Kind, runs: Sequence[PointRecord], scatter: int) -> Figure:
    """Return the figure of one point from its ``runs``, which ended well.

    ``scatter`` is the half-width, in bytes, that stands for a spread where one run is all there is.
    """
    readings = [kind.read(record) for record in runs]
    values = [reading.value for reading in readings if reading.value is not None]
    if not values:
        why = next((reading.why for reading in readings if reading.why), None)
        return Figure(None, why=why or "the point was not measured")
    return _figure(values, 0 if kind.source == PREDICTED else max(scatter, PAGE))


def _figure(values: Sequence[float], scatter: int) -> Figure:
    middle = median(values)
    low, high = min(values), max(values)
    if len(values) == 1:
        low, high = low - scatter, high + scatter
    elif scatter:
        # Memory comes in pages: equal repeats do not pin a figure down any further.
        low, high = min(low, middle - PAGE), max(high, middle + PAGE)
    return Figure(middle, low, high, len(values))


def speeds(runs: Iterable[PointRecord]) -> Iterator[tuple[str, Figure]]:
    """Yield the prefill and decode speed at every depth that was measured, tokens per second."""
    held: dict[str, list[float]] = {}
    for record in runs:
        for each in record.speed:
            for word, value in (
                ("prefill", each.prefill_tokens_per_s),
                ("decode", each.decode_tokens_per_s),
            ):
                if value is not None:
                    held.setdefault(f"{word} at depth {each.depth}", []).append(value)
    for name, values in held.items():
        yield name, Figure(median(values), min(values), max(values), len(values))


def scatter(residuals: Sequence[int]) -> int:
    """Return the half-width of the 95 % range of ``residuals`` (bytes), without their outliers.

    0 for fewer than three: what two points leave over says nothing of a third.
    """
    if len(residuals) < _LEAST_RESIDUALS:
        return 0
    return round(_DEVIATIONS * MAD_TO_SIGMA * median(abs(each) for each in residuals))
