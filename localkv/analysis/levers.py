"""What could be changed to need less memory, and the bytes that each change saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from localkv.analysis import points
from localkv.records import PointRecord, RunInfo

#: Bytes per element of a cache, by type: block bytes over block size (ggml-common.h).
ELEMENT_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
_BLOCK = 32
_CTX_STEP = 256


@dataclass(frozen=True)
class Lever:
    """A change, the flag that makes it, the bytes it saves, and what it costs otherwise."""

    change: str
    flag: str
    saves_bytes: int
    price: str


def find_levers(run: RunInfo, record: PointRecord) -> tuple[Lever, ...]:
    """Return the changes to ``record``'s settings that save memory, the largest saving first.

    The bytes follow from the predicted caches: rows of a type shrink with its block, the caches
    of full layers with the context, all of them with the slots of a cache that is split.
    """
    found = [
        *_context(record),
        *_slots(record),
        *_types(run, record),
        *_window(run, record),
    ]
    return tuple(sorted((x for x in found if x.saves_bytes > 0), key=lambda x: -x.saves_bytes))


def _size(cache: Mapping[str, Any]) -> int:
    return (points.dig_int(cache, "k_bytes") or 0) + (points.dig_int(cache, "v_bytes") or 0)


def _context(record: PointRecord) -> Iterator[Lever]:
    total, slots = points.n_ctx(record), points.slots(record)
    step = _CTX_STEP if record.config.get("kv_unified") else _CTX_STEP * slots
    if total is None or total % (2 * step):
        return
    saved = sum(_size(c) for c in points.caches(record) if c.get("kind") == "full") // 2
    yield Lever(
        f"half the context: {total // 2} tokens",
        f"-c {total // 2}",
        saved,
        "shorter conversations",
    )


def _slots(record: PointRecord) -> Iterator[Lever]:
    total, slots = points.n_ctx(record), points.slots(record)
    if total is None or slots < 2 or slots % 2 or record.config.get("kv_unified"):
        return
    yield Lever(
        f"half the slots, each as long as now: {slots // 2}",
        f"-np {slots // 2} -c {total // 2}",
        sum(_size(c) for c in points.caches(record)) // 2
        + (points.predicted(record, "recurrent") or 0) // 2,
        "fewer answers at a time, the others wait",
    )


def _types(run: RunInfo, record: PointRecord) -> Iterator[Lever]:
    k_type, v_type = points.cache_types(record)
    k = sum(points.dig_int(c, "k_bytes") or 0 for c in points.caches(record))
    v = sum(points.dig_int(c, "v_bytes") or 0 for c in points.caches(record))
    for target, price in (
        ("q8_0", "hardly any loss of quality; needs flash attention"),
        ("q4_0", "answers may get worse: try it on your own prompts; needs flash attention"),
    ):
        if not _divides(run) or record.config.get("flash_attn") == "off":
            continue
        saved = _shrunk(k, k_type, target) + _shrunk(v, v_type, target)
        yield Lever(f"cache in {target}", f"-ctk {target} -ctv {target}", saved, price)


def _shrunk(size: int, current: str, target: str) -> int:
    old, new = ELEMENT_BYTES.get(current), ELEMENT_BYTES[target]
    return 0 if old is None or new >= old else round(size * (1 - new / old))


def _divides(run: RunInfo) -> bool:
    """Return whether every head is a whole number of blocks, which the engine demands."""
    layers = run.model.get("layers")
    if not isinstance(layers, list | tuple) or not layers:
        return False
    for layer in layers:
        heads = points.dig_int(layer, "n_head_kv") or 0
        for width in (points.dig_int(layer, "k_width") or 0, points.dig_int(layer, "v_width") or 0):
            if width and (not heads or (width // heads) % _BLOCK):
                return False
    return True


def _window(run: RunInfo, record: PointRecord) -> Iterator[Lever]:
    """Return what sliding layers save by keeping their window only (llama_kv_cache_iswa)."""
    if not record.config.get("swa_full"):
        return
    windows = [points.dig_int(layer, "window") or 0 for layer in run.model.get("layers") or ()]
    window, per_slot = max(windows, default=0), points.n_ctx_seq(record)
    if not window or not per_slot:
        return
    ubatch = points.dig_int(record.prediction, "config", "n_ubatch") or 512
    shared = points.slots(record) if record.config.get("kv_unified") else 1
    cells = min(per_slot, -(-(window * shared + ubatch) // _CTX_STEP) * _CTX_STEP)
    saved = sum(
        _size(c) * (per_slot - cells) // per_slot
        for c in points.caches(record)
        if c.get("kind") == "sliding"
    )
    yield Lever(
        "sliding layers keep their window only",
        "no --swa-full",
        saved,
        "a prompt that shares its beginning with an older one is read anew",
    )
