"""How a look at a server reads: one line in a log, a small table on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localkv.observe.rates import Rates, share_used
from localkv.report.escape import escape_terminal
from localkv.snapshots import Observed, RecordingInfo, Snapshot
from localkv.units import format_bytes, format_count

_BAR = 30


def head_lines(info: RecordingInfo, snapshot: Snapshot | None) -> list[str]:
    """Return what is said once: which server, which model, what localkv makes of it."""
    where = "" if info.pid is None else f" (process {info.pid})"
    lines = [f"{info.server} at {escape_terminal(info.url)}{where}"]
    if snapshot and snapshot.model:
        lines.append(f"model      {escape_terminal(snapshot.model, 60)}")
    told = info.predicted
    if told.get("why"):
        lines.append(f"predicted  unknown: {escape_terminal(told['why'])}")
    elif told:
        parts = [
            f"{format_count(told['capacity_tokens'])} tokens"
            if told.get("capacity_tokens")
            else "",
            f"KV {format_bytes(told['kv_bytes'])}" if told.get("kv_bytes") else "",
            f"{format_bytes(told['bytes_per_token'])} per token"
            if told.get("bytes_per_token")
            else "",
        ]
        lines.append("predicted  " + ", ".join(part for part in parts if part))
    if snapshot:
        lines += [
            f"unknown    {name.replace('_', ' ')}: {escape_terminal(why)}"
            for name, why in snapshot.unknown.items()
        ]
    return lines


def log_line(seen: Observed, rate: Rates, predicted: Mapping[str, Any]) -> str:
    """Return one look as one line."""
    start = f"{seen.seconds:7.1f} s"
    if seen.snapshot is None:
        word = "slow" if seen.error_kind == "slow" else "no answer"
        return f"{start}  {word}: {escape_terminal(seen.error)}"
    parts = [cache_text(seen.snapshot, predicted), requests_text(seen.snapshot)]
    parts += [speed_text(rate), memory_text(seen)]
    return "  ".join([start, *(part for part in parts if part)])


def cache_text(snapshot: Snapshot, predicted: Mapping[str, Any]) -> str:
    """Return used and capacity of the cache, and what Ollama holds."""
    loaded = ""
    if snapshot.loaded:
        held = sum(model.bytes or 0 for model in snapshot.loaded)
        loaded = f"{len(snapshot.loaded)} loaded, {format_bytes(held)}"
    capacity = snapshot.capacity_tokens or predicted.get("capacity_tokens")
    if snapshot.used_tokens is None:
        return loaded if snapshot.usage is None else f"cache {snapshot.usage:.0%}"
    text = f"{loaded}  cache" if loaded else "cache"
    text += f" {format_count(snapshot.used_tokens)}"
    share = share_used(snapshot, capacity)
    of = f"/{format_count(capacity)}" if capacity else ""
    return text + of + (f" ({share:.0%})" if share is not None else "")


def requests_text(snapshot: Snapshot) -> str:
    """Return running, waiting and preempted requests."""
    counts = {
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "preempted": snapshot.counters.get("preemptions"),
    }
    return " ".join(f"{name} {count:.0f}" for name, count in counts.items() if count is not None)


def speed_text(rate: Rates) -> str:
    """Return the speeds since the last look."""
    parts = [
        f"{word} {value:.0f} tok/s"
        for word, value in (("prompt", rate.prompt), ("gen", rate.generated))
        if value
    ]
    return " ".join(parts)


def memory_text(seen: Observed) -> str:
    """Return the memory of the server's processes, as far as it can be read."""
    names = {"rss_anon": "RAM", "vram_process": "VRAM"}
    parts = [
        f"{word} {format_bytes(value)}"
        for key, word in names.items()
        if key in seen.process and (value := seen.process[key].value) is not None
    ]
    return " ".join(parts)


def live_lines(info: RecordingInfo, seen: Observed, rate: Rates, events: list[str]) -> list[str]:
    """Return the page that a terminal redraws with every look."""
    lines = head_lines(info, seen.snapshot)
    lines.append("")
    if seen.snapshot is None:
        word = "slow" if seen.error_kind == "slow" else "no answer"
        lines.append(f"{word}: {escape_terminal(seen.error)}")
    else:
        said = seen.snapshot
        share = share_used(said, info.predicted.get("capacity_tokens"))
        if share is not None:
            filled = min(round(share * _BAR), _BAR)
            lines.append(f"cache      [{'#' * filled}{'.' * (_BAR - filled)}] {share:.0%}")
        lines.append(f"           {cache_text(said, info.predicted)}")
        lines += [f"  slot {s.id}   {_slot(s)}" for s in said.slots[:16]]
        lines += [
            f"  {escape_terminal(m.name, 40)}  until {m.expires_at[:19]}" for m in said.loaded
        ]
        lines.append(f"requests   {requests_text(said) or 'unknown'}")
        cached = rate.cached_prompt_tokens
        if cached:
            lines.append(f"cached     {format_count(cached)} prompt tokens since the last look")
    lines.append(f"speed      {speed_text(rate) or 'idle'}")
    lines.append(f"memory     {memory_text(seen) or 'not readable from here'}")
    lines.append(f"look       took {seen.took * 1000:.0f} ms, at {seen.seconds:.0f} s")
    return lines + [f"event: {escape_terminal(event)}" for event in events[-4:]]


def _slot(slot: Any) -> str:
    state = "busy" if slot.busy else "idle"
    return f"{format_count(slot.tokens)}/{format_count(slot.n_ctx)} {state}"
