"""What the analysis and the report want to know of a record, whatever it lacks.

Records may come from an older localkv or from a run that died half-way, so every accessor answers
None (never 0) for a figure that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from localkv.records import PointRecord
from localkv.units import plural

#: The kinds of memory of an estimate, in the order in which the report stacks them.
KINDS = ("weights", "kv", "recurrent", "compute", "output")

#: The same in the record of the engine's log.
_LOGGED = ("model", "kv", "recurrent", "compute", "output")


def dig(data: Any, *path: str) -> Any:
    """Return ``data[path[0]][path[1]]...``, None where a step is missing or no mapping."""
    for step in path:
        if not isinstance(data, Mapping) or step not in data:
            return None
        data = data[step]
    return data


def dig_int(data: Any, *path: str) -> int | None:
    """Return the integer at ``path``, None when it is missing or no integer."""
    value = dig(data, *path)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def n_ctx(record: PointRecord) -> int | None:
    """Return the context in tokens over all slots, after the engine's rounding."""
    for value in (
        dig_int(record.engine, "n_ctx"),
        dig_int(record.prediction, "config", "n_ctx"),
        dig_int(record.config, "n_ctx"),
    ):
        if value:
            return value
    return None


def n_ctx_asked(record: PointRecord) -> int | None:
    """Return the context that was asked for, None when it was left to the model (0)."""
    asked = dig_int(record.prediction, "config", "n_ctx_requested")
    return asked or dig_int(record.config, "n_ctx") or None


def n_ctx_seq(record: PointRecord) -> int | None:
    """Return the context in tokens that one slot can use."""
    told = dig_int(record.engine, "n_ctx_seq")
    told = told or dig_int(record.prediction, "config", "n_ctx_per_slot")
    if told:
        return told
    total = n_ctx(record)
    if total is None:
        return None
    return total if record.config.get("kv_unified") else total // slots(record)


def slots(record: PointRecord) -> int:
    """Return the number of slots (n_seq_max)."""
    return dig_int(record.config, "n_seq_max") or 1


def cache_types(record: PointRecord) -> tuple[str, str]:
    """Return the types of the K and the V cache."""
    k, v = record.config.get("cache_type_k"), record.config.get("cache_type_v")
    return str(k or "f16"), str(v or "f16")


def types_text(record: PointRecord) -> str:
    """Return the cache types in a word: ``f16``, or ``q8_0/f16`` when K and V differ."""
    k, v = cache_types(record)
    return k if k == v else f"{k}/{v}"


def label(record: PointRecord) -> str:
    """Return the point in words: context, slots, cache types and the switches that are set."""
    total = n_ctx(record)
    count = slots(record)
    parts = [
        f"n_ctx {total}" if total else "n_ctx of the model",
        plural(count, "slot"),
        types_text(record),
    ]
    parts += [name for name in ("kv_unified", "swa_full") if record.config.get(name)]
    if record.config.get("flash_attn") in ("on", "off"):
        parts.append(f"fa {record.config['flash_attn']}")
    if record.config.get("n_gpu_layers"):
        parts.append(f"ngl {record.config['n_gpu_layers']}")
    return ", ".join(parts)


def predicted(record: PointRecord, kind: str) -> int | None:
    """Return the predicted bytes of one of ``KINDS``."""
    return dig_int(record.prediction, kind, "bytes")


def predicted_total(record: PointRecord) -> int | None:
    """Return the predicted bytes of everything."""
    return dig_int(record.prediction, "total_bytes")


def logged_total(record: PointRecord) -> int | None:
    """Return the bytes of all buffers in the engine's log, None when the log tells none."""
    parts = [dig_int(record.engine, f"{kind}_bytes") for kind in _LOGGED]
    return None if parts[0] is None else sum(part or 0 for part in parts)


def caches(record: PointRecord) -> list[Mapping[str, Any]]:
    """Return the predicted caches: kind, cells per stream, streams, layers, K and V bytes."""
    found = dig(record.prediction, "kv", "caches")
    return [c for c in found if isinstance(c, Mapping)] if isinstance(found, list | tuple) else []


def devices(record: PointRecord) -> list[Mapping[str, Any]]:
    """Return the predicted devices with the bytes that each holds."""
    found = record.prediction.get("devices")
    return [d for d in found if isinstance(d, Mapping)] if isinstance(found, list | tuple) else []


def gpu_devices(record: PointRecord) -> list[Mapping[str, Any]]:
    """Return the predicted devices that are not the host and hold something."""
    return [
        d for d in devices(record) if d.get("name") != "host" and (dig_int(d, "total") or 0) > 0
    ]


def is_impossible(record: PointRecord) -> bool:
    """Return whether the engine takes no such settings, whatever memory there is."""
    return record.outcome == "skipped" and record.stage == "settings"


def loaded_at_once(record: PointRecord) -> bool:
    """Return whether weights and context were loaded in one go, as a server does it."""
    return record.phase("model") is None and record.phase("context") is not None


def read_weights(record: PointRecord) -> int:
    """Return the weights on the host that are not mapped from the file: read, or repacked."""
    host = next((d for d in devices(record) if d.get("name") == "host"), None)
    held = dig_int(host, "weights") or 0
    if record.config.get("mmap") is False:
        return held
    return max(0, held - (predicted(record, "weights") or 0))


def unique(records: Iterable[PointRecord]) -> tuple[list[PointRecord], list[str]]:
    """Return the records with one per (point, repeat), and a sentence per record set aside.

    The latest of several wins: a run that was resumed over a torn line may hold one twice.
    """
    latest: dict[tuple[str, int], PointRecord] = {}
    notes = []
    for record in records:
        place = (record.key, record.repeat)
        if place in latest:
            notes.append(f"{label(record)}, repeat {record.repeat}: recorded twice, latest used")
        latest[place] = record
    return list(latest.values()), notes


def by_key(records: Iterable[PointRecord]) -> dict[str, list[PointRecord]]:
    """Return the records grouped by point, in the order in which the points first appear."""
    groups: dict[str, list[PointRecord]] = {}
    for record in records:
        groups.setdefault(record.key, []).append(record)
    return groups


def one_per_point(records: Iterable[PointRecord]) -> list[PointRecord]:
    """Return one record per point (an ok one where there is one), by types, slots and context."""
    chosen = [
        next((r for r in group if r.outcome == "ok"), group[0])
        for group in by_key(records).values()
    ]
    return sorted(chosen, key=lambda r: (types_text(r), slots(r), n_ctx(r) or 0, r.key))
