"""From records to samples: what a point grew by, and what it should have grown by.

Two comparisons are made. *Growth*: what the process gained when the context was created, against
predicted KV + recurrent state + output buffer + the engine's own table of cells; a server loads
the weights in the same go, so that those which are not mapped from the file count too. *Peak*: the
highest the process reached above its baseline, against the predicted total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from localkv.analysis import points
from localkv.records import PointRecord, Reading

#: Memory is handed out in pages: a difference below one page is none.
PAGE = 4096
#: glibc grows its heap in steps of M_TOP_PAD (128 KiB) plus a page: a lone difference of that
#: size says where the heap's edge was, not that the model needs more.
ALLOCATOR_STEP = 128 * 1024 + PAGE

#: Bytes the engine keeps per cell beside K and V: pos 4, ext 12, shift 4 and a bit set of 256
#: sequences 32; and per stream 256 empty ordered sets of 48. Source: class llama_kv_cells in
#: src/llama-kv-cells.h. It is resident as soon as the cache exists and no log line shows it.
CELL_TABLE_BYTES = 52
STREAM_TABLE_BYTES = 256 * 48

#: Host readings that show growth, best first: plain RSS moves with the page cache.
HOST_GROWTH = ("rss_anon", "uss", "rss")
#: Readings of the highest mark, best first: the kernel's own, then the parent's samples.
HOST_PEAK = ("peak_rss", "rss")
#: Video memory, best first: this process's own, then everything on the device.
VRAM = ("vram_process", "vram_device")


@dataclass(frozen=True)
class Sample:
    """One point of a comparison: ``expected`` and ``measured`` bytes.

    ``expected`` is ``formula_bytes``, what the estimate says, and ``table_bytes``, what the
    comparison adds to it. ``measured`` is the median over ``repeats`` runs and ``spread`` the range
    over them, at least a page. ``source`` names the readings.
    """

    key: str
    label: str
    n_ctx: int
    slots: int
    types: str
    expected: int
    measured: int
    spread: int
    repeats: int
    source: str
    formula_bytes: int
    table_bytes: int

    @property
    def error(self) -> float:
        """Return (measured - expected) / measured."""
        return (self.measured - self.expected) / self.measured if self.measured else 0.0


@dataclass(frozen=True)
class Samples:
    """The samples of a comparison, and why some points gave none."""

    samples: tuple[Sample, ...]
    refused: tuple[str, ...]


def cell_table_bytes(record: PointRecord) -> int:
    """Return the bytes of the engine's bookkeeping of cells, over all caches and streams.

    Source: llama_kv_cells in src/llama-kv-cells.h, see ``CELL_TABLE_BYTES``.
    """
    total = 0
    for cache in points.caches(record):
        streams = points.dig_int(cache, "streams") or 0
        cells = points.dig_int(cache, "cells") or 0
        total += streams * (cells * CELL_TABLE_BYTES + STREAM_TABLE_BYTES)
    return total


def context_bytes(record: PointRecord) -> int | None:
    """Return the predicted KV + recurrent state + output, plus the compute buffers of GPUs.

    A GPU's compute buffer is allocated together with the context; the host's becomes resident
    only with the first decode, and is no part of the growth.
    """
    kv = points.predicted(record, "kv")
    if kv is None:
        return None
    gpu = sum(points.dig_int(d, "compute") or 0 for d in points.gpu_devices(record))
    rest = points.predicted(record, "recurrent") or 0, points.predicted(record, "output") or 0
    return kv + sum(rest) + gpu


def growth_samples(records: Iterable[PointRecord]) -> Samples:
    """Return the growth at context creation of every ok point, repeats by their median.

    Expected: ``context_bytes``, the table of cells, and what was loaded in the same go.
    """
    return _collect(records, growth, context_bytes, beside_context_bytes)


def beside_context_bytes(record: PointRecord) -> int:
    """Return the table of cells, and the weights where they were loaded together with it."""
    weights = points.read_weights(record) if points.loaded_at_once(record) else 0
    return cell_table_bytes(record) + weights


def peak_samples(records: Iterable[PointRecord], fixed: int = 0) -> Samples:
    """Return the peak above the baseline of every ok point, repeats by their median.

    Expected: ``resident_total`` and ``fixed``, the bytes that the process holds besides.
    """
    return _collect(records, peak, resident_total, lambda record: fixed)


def resident_total(record: PointRecord) -> int | None:
    """Return the predicted bytes that the tokens decoded in this run can make resident.

    That is the predicted total, with the compute buffer as the engine plans it for a context no
    deeper than what was decoded: the rest of that buffer is reserved, and never touched.
    """
    total, compute = points.predicted_total(record), points.predicted(record, "compute")
    if total is None or compute is None or record.resident_compute is None:
        return total
    return total - compute + record.resident_compute


def growth(record: PointRecord) -> Reading:
    """Return what the process gained from phase ``model`` to phase ``context``, in bytes.

    Of what was loaded at once: from phase ``baseline``.
    """
    first = "baseline" if points.loaded_at_once(record) else "model"
    before, after = record.phase(first), record.phase("context")
    if before is None or after is None:
        return Reading(None, why=f"the run has no readings of the phases {first} and context")
    return _host_and_vram(record, before.readings, after.readings, HOST_GROWTH, HOST_GROWTH)


def peak(record: PointRecord) -> Reading:
    """Return the highest mark of the process above its baseline, in bytes."""
    before = record.phase("baseline")
    if before is None:
        return Reading(None, why="the run has no readings of the phase baseline")
    return _host_and_vram(record, before.readings, record.peak, ("rss", "rss"), HOST_PEAK)


def _host_and_vram(
    record: PointRecord,
    before: dict[str, Reading],
    after: dict[str, Reading],
    keys_before: tuple[str, ...],
    keys_after: tuple[str, ...],
) -> Reading:
    host = _difference(before, after, keys_before, keys_after)
    if host.value is None or not points.gpu_devices(record):
        return host
    vram = _difference(before, after, VRAM, VRAM)
    if vram.value is None:
        return vram
    return Reading(host.value + vram.value, source=f"{host.source} + {vram.source}")


def _difference(
    before: dict[str, Reading],
    after: dict[str, Reading],
    keys_before: tuple[str, ...],
    keys_after: tuple[str, ...],
) -> Reading:
    why = None
    for first, then in zip(keys_before, keys_after, strict=True):
        old, new = before.get(first), after.get(then)
        if old and new and old.value is not None and new.value is not None:
            return Reading(new.value - old.value, source=then)
        why = why or next((r.why for r in (old, new) if r and r.value is None and r.why), None)
    return Reading(None, why=f"{keys_after[0]} is unknown" + (f", because {why}" if why else ""))


def _collect(
    records: Iterable[PointRecord],
    measure: Callable[[PointRecord], Reading],
    formula: Callable[[PointRecord], int | None],
    table: Callable[[PointRecord], int],
) -> Samples:
    samples, refused = [], []
    for key, group in points.by_key(r for r in records if r.outcome == "ok").items():
        first = group[0]
        expected, total = formula(first), points.n_ctx(first)
        readings = [measure(record) for record in group]
        values = [r.value for r in readings if r.value is not None]
        if expected is None or total is None:
            refused.append(f"{points.label(first)}: the record holds no prediction")
        elif not values:
            refused.append(f"{points.label(first)}: {readings[0].why}")
        else:
            samples.append(
                Sample(
                    key=key,
                    label=points.label(first),
                    n_ctx=total,
                    slots=points.slots(first),
                    types=points.types_text(first),
                    expected=expected + table(first),
                    measured=round(median(values)),
                    spread=max(max(values) - min(values), PAGE),
                    repeats=len(values),
                    source=next(r.source for r in readings if r.value is not None),
                    formula_bytes=expected,
                    table_bytes=table(first),
                )
            )
    samples.sort(key=lambda s: (s.expected, s.key))
    return Samples(tuple(samples), tuple(refused))
