"""Memory that stays while nothing runs: for how long still, and the command that frees it.

Sources: server/sched.go of Ollama (keep_alive); tools/server of llama.cpp (README.md, "Sleeping on
idle"; post_slots in server-context.cpp: erasing a slot needs ``--slot-save-path``).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any

from localkv.engines.ollama_host import ollama_command
from localkv.snapshots import HostMemory, Loaded, Pinned, Snapshot

#: Beyond this many seconds Ollama means "for ever" (keep_alive below zero).
_EVER = 10 * 365 * 86_400
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)")


def pinned_by_ollama(
    url: str,
    snapshot: Snapshot,
    memory: Sequence[HostMemory],
    used: Mapping[int, int | None],
    kv_bytes: int | None,
    now: float,
) -> tuple[Pinned, ...]:
    """Return what each loaded model holds.

    ``memory`` are the runners', told apart by model; ``used`` the bytes of finished requests in
    their caches, by process id; ``kv_bytes`` the KV cache of the only model where no runner's parts
    say it; ``now`` is the time in seconds of the epoch.
    """
    found = []
    for model in snapshot.loaded:
        of = next((each for each in memory if each.model == model.name), None)
        part = of.part("KV cache") if of else None
        slots = [slot for slot in snapshot.slots if of and slot.runner == of.pid]
        kv = part.most if part else kv_bytes if len(snapshot.loaded) == 1 else None
        seconds = seconds_left(model.expires_at, now)
        found.append(
            Pinned(
                name=model.name,
                bytes=of.measured if of else None,
                told_bytes=model.bytes,
                kv_bytes=kv,
                tokens=sum(s.tokens for s in slots if not s.busy) if slots else None,
                used_bytes=used.get(of.pid) if of else None,
                idle=not any(slot.busy for slot in slots) if slots else None,
                until="for ever (keep_alive below zero)" if _is_ever(seconds) else "",
                seconds_left=None if _is_ever(seconds) else seconds,
                free=_stop(url, model),
            )
        )
    return tuple(found)


def _is_ever(seconds: float | None) -> bool:
    return seconds is not None and seconds > _EVER


def seconds_left(expires_at: str, now: float) -> float | None:
    """Return the seconds until ``expires_at`` (as Ollama writes it), None where it is no time."""
    match = _TIME.match(expires_at)
    if match is None:
        return None
    try:
        # Fractions of a second are left out: they have more digits than Python reads.
        then = datetime.fromisoformat(match[1] + match[2].replace("Z", "+00:00"))
        return round(max(0.0, (then - datetime.fromtimestamp(now, timezone.utc)).total_seconds()))
    except (ValueError, OverflowError):
        return None


def _stop(url: str, model: Loaded) -> tuple[str, ...]:
    body = json.dumps({"model": model.name, "keep_alive": 0})
    return (
        ollama_command(url, "stop", model.name),
        f"curl {shlex.quote(url + '/api/generate')} -d {shlex.quote(body)}",
    )


def pinned_by_llama_server(
    url: str,
    snapshot: Snapshot,
    memory: HostMemory | None,
    kv_bytes: int | None,
    used_bytes: int | None,
    settings: Mapping[str, Any] | None,
) -> tuple[Pinned, ...]:
    """Return what the server holds: its cache, reserved whole, and finished requests in it.

    ``used_bytes`` are those of the cells that hold tokens of finished requests.
    """
    told = settings or {}
    idle = [slot for slot in snapshot.slots if not slot.busy]
    tokens = sum(slot.tokens for slot in idle) if snapshot.slots else None
    asleep = bool(snapshot.facts.get("sleeping"))
    sleeps = int(told.get("sleep_idle", -1))
    if asleep:
        until, note = "it sleeps: model and KV cache are unloaded until the next request", ""
    elif sleeps > 0:
        until, note = f"until no request came for {sleeps} s (--sleep-idle-seconds)", ""
    else:
        until = "as long as the server runs"
        note = "--sleep-idle-seconds N lets it unload model and cache by itself"
    if snapshot.facts.get("sleeping") is None and sleeps <= 0:
        note = "this version cannot sleep"
    free: tuple[str, ...] = ()
    if memory and not asleep:
        free += (f"kill {memory.pid}  # ends the server",)
    if tokens and told.get("slot_save_path"):
        first = next(slot.id for slot in idle if slot.tokens)
        free += (f"curl -X POST {shlex.quote(f'{url}/slots/{first}?action=erase')}",)
        note += "; erasing a slot drops its tokens and checkpoints, the cache stays reserved"
    return (
        Pinned(
            name=PurePath(snapshot.model).name,
            bytes=memory.measured if memory else None,
            kv_bytes=0 if asleep else kv_bytes,
            tokens=tokens,
            used_bytes=used_bytes,
            idle=None if snapshot.running is None else snapshot.running == 0,
            until=until,
            free=free,
            note=note.removeprefix("; "),
        ),
    )
