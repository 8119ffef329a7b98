"""The answers a person came for: what fits on this machine, and how long a context may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localkv.analysis import points
from localkv.records import PointRecord, RunInfo

#: The engine rounds contexts up to this many tokens (GGML_PAD in src/llama-context.cpp).
CTX_STEP = 256

#: Bytes that a total context needs with a slot count on the device that holds the cache.
Predict = Callable[[int, int], int]


@dataclass(frozen=True)
class SlotAnswer:
    """What is known for one slot count under one pair of cache types; contexts are totals.

    ``measured`` is the largest context that ran, ``refused`` the smallest that did not and why;
    ``fits`` the largest that should fit, limited by ``limit``: memory or training context.
    ``extrapolated`` tells that ``fits`` rests on the predictions of this run alone.
    """

    slots: int
    types: str
    key: str | None = None
    measured: int | None = None
    measured_per_slot: int | None = None
    predicted_bytes: int | None = None
    refused: int | None = None
    refused_reason: str | None = None
    fits: int | None = None
    limit: str | None = None
    extrapolated: bool = False


@dataclass(frozen=True)
class Answers:
    """``available`` bytes on ``device`` (host or GPU) before the sweep, and an answer per group."""

    device: str
    available: int | None
    source: str
    n_ctx_train: int | None
    by_slots: tuple[SlotAnswer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the answers as plain JSON values."""
        return {**asdict(self), "by_slots": [asdict(answer) for answer in self.by_slots]}


def find_answers(
    run: RunInfo, records: Iterable[PointRecord], predict: Predict | None = None
) -> Answers:
    """Return the answers of a run.

    ``predict`` gives the bytes of any context; without it the line through the predictions of the
    two largest contexts of a group is followed, which is right once sliding windows are full.
    """
    chosen = points.one_per_point(records)
    on_gpu = any(points.gpu_devices(r) for r in chosen)
    available, source = _available(run, on_gpu)
    n_ctx_train = points.dig_int(run.model, "n_ctx_train") or None
    groups: dict[tuple[str, int], list[PointRecord]] = {}
    for record in chosen:
        groups.setdefault((points.types_text(record), points.slots(record)), []).append(record)
    answers = [_answer(group, available, n_ctx_train, on_gpu, predict) for group in groups.values()]
    return Answers("GPU" if on_gpu else "host", available, source, n_ctx_train, tuple(answers))


def _available(run: RunInfo, on_gpu: bool) -> tuple[int | None, str]:
    if not on_gpu:
        memory = points.dig(run.environment, "memory")
        source = points.dig(memory, "source")
        return points.dig_int(memory, "available"), str(source or "")
    devices = points.dig(run.environment, "gpu", "devices") or ()
    free = [points.dig_int(device, "free") for device in devices]
    known = [value for value in free if value is not None]
    return (sum(known) if known and len(known) == len(free) else None), "NVML free memory"


def need(record: PointRecord, on_gpu: bool) -> int | None:
    """Return the predicted bytes on the device in question: the GPUs together, or the host."""
    found = points.gpu_devices(record) if on_gpu else []
    if found:
        return sum(points.dig_int(device, "total") or 0 for device in found)
    return points.predicted_total(record)


def _answer(
    group: Sequence[PointRecord],
    available: int | None,
    n_ctx_train: int | None,
    on_gpu: bool,
    predict: Predict | None,
) -> SlotAnswer:
    slots, types = points.slots(group[0]), points.types_text(group[0])
    ok = [r for r in group if r.outcome == "ok" and points.n_ctx(r)]
    best = max(ok, key=lambda r: points.n_ctx(r) or 0, default=None)
    refused = min(
        (r for r in group if r.outcome != "ok" and points.n_ctx(r) and not points.is_impossible(r)),
        key=lambda r: points.n_ctx(r) or 0,
        default=None,
    )
    formula = predict or _line(group, on_gpu)
    fits, limit = _largest(formula, slots, available, n_ctx_train, _shared(group[0]))
    return SlotAnswer(
        slots=slots,
        types=types,
        key=best.key if best else None,
        measured=points.n_ctx(best) if best else None,
        measured_per_slot=points.n_ctx_seq(best) if best else None,
        predicted_bytes=points.predicted_total(best) if best else None,
        refused=points.n_ctx(refused) if refused else None,
        refused_reason=(refused.reason or refused.outcome) if refused else None,
        fits=fits,
        limit=limit,
        extrapolated=predict is None and fits is not None,
    )


def _shared(record: PointRecord) -> bool:
    return bool(record.config.get("kv_unified"))


def _line(group: Sequence[PointRecord], on_gpu: bool) -> Predict | None:
    sizes = {points.n_ctx(r): need(r, on_gpu) for r in group}
    known = sorted((c, n) for c, n in sizes.items() if c and n)
    if len(known) < 2:
        return None
    (c0, n0), (c1, n1) = known[-2:]
    return lambda n_ctx, _slots: n1 + (n_ctx - c1) * (n1 - n0) // (c1 - c0)


def _largest(
    predict: Predict | None,
    slots: int,
    available: int | None,
    n_ctx_train: int | None,
    shared: bool,
) -> tuple[int | None, str | None]:
    """Return the largest total context that fits and what limits it; None when unknown."""
    if predict is None or available is None or n_ctx_train is None:
        return None, None
    step = CTX_STEP if shared else CTX_STEP * slots
    ceiling = n_ctx_train if shared else n_ctx_train * slots
    low, high = 0, max(1, ceiling // step)
    if predict(high * step, slots) <= available:
        return high * step, "training context"
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predict(middle * step, slots) <= available else (low, middle)
    return low * step, "memory"


def best_answers(answers: Answers) -> tuple[SlotAnswer, ...]:
    """Return the settings to recommend: for the fewest and for the most slots that ran.

    The longest context per slot wins; among equals the one whose cache takes more memory, since a
    coarser cache type buys nothing where the finer one fits.
    """
    ran = [a for a in answers.by_slots if a.measured]
    counts = sorted({a.slots for a in ran})
    return tuple(
        max(
            (a for a in ran if a.slots == count),
            key=lambda a: (a.measured or 0, a.predicted_bytes or 0),
        )
        for count in dict.fromkeys((counts[0], counts[-1]) if counts else ())
    )
