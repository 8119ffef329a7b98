"""Ollama, read from ``/api/ps`` and ``/api/version``: it tells what is loaded, not what is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localkv.snapshots import Loaded, Snapshot

SERVER = "ollama"


def snapshot(ps: Mapping[str, Any] | None, version: str = "") -> Snapshot:
    """Return what Ollama says of the models that it holds.

    Used cells, slots and waiting requests have no field in its API; where its runner is a
    llama-server of this machine, that one's ``/slots`` has them.
    """
    entries = (ps or {}).get("models")
    listed = entries if isinstance(entries, list) else []
    models = [_loaded(entry) for entry in listed if isinstance(entry, Mapping)]
    silent = "Ollama's API has no field for it"
    return Snapshot(
        server=SERVER,
        model=models[0].name if models else "",
        loaded=tuple(models),
        facts={"version": version} if version else {},
        unknown=dict.fromkeys(("used_tokens", "capacity_tokens", "running", "waiting"), silent),
    )


def with_runners(told: Snapshot, runners: Mapping[int, Snapshot], silent: str = "") -> Snapshot:
    """Return ``told`` with what its ``runners`` (by process id) say of their caches, added up.

    ``silent`` says why one of them gave no answer: then nothing is known in all.
    """
    if silent:
        why = dict.fromkeys(("used_tokens", "capacity_tokens", "running"), silent)
        return replace(told, unknown={**told.unknown, **why})
    if not runners:
        return told
    used, capacity, running = (
        _sum([getattr(each, name) for each in runners.values()])
        for name in ("used_tokens", "capacity_tokens", "running")
    )
    return replace(
        told,
        used_tokens=used,
        capacity_tokens=capacity,
        running=running,
        slots=tuple(
            replace(slot, runner=pid) for pid, each in runners.items() for slot in each.slots
        ),
        unknown={name: why for name, why in told.unknown.items() if name == "waiting"},
        warnings=tuple(text for each in runners.values() for text in each.warnings),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    """Return the sum, None where one of them is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _loaded(entry: Mapping[str, Any]) -> Loaded:
    return Loaded(
        name=str(entry.get("name") or entry.get("model") or ""),
        digest=str(entry.get("digest") or ""),
        bytes=_bytes(entry.get("size")),
        vram_bytes=_bytes(entry.get("size_vram")),
        context_length=_bytes(entry.get("context_length")),
        expires_at=str(entry.get("expires_at") or ""),
    )


def _bytes(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
