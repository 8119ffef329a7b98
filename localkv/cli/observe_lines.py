"""How a look at a server reads: one line in a log, a small page on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localkv.cli.terminal import cut, wrap
from localkv.observe.rates import Rates, share_used
from localkv.report.escape import escape_terminal
from localkv.snapshots import Observed, RecordingInfo, Slot, Snapshot
from localkv.units import format_bytes, format_count, plural

#: Events that a page keeps in view, and slots that it has room for.
EVENTS, _SLOTS = 4, 16
_BAR = 30
_INDENT = " " * 11
STYLES: Mapping[str, str] = {
    r"^event:": "yellow",
    r"^(?:slow|loading|no answer):": "bold red",
    r"\[#+\.*\](?= (?:9\d|1\d\d)%)": "red",
}


def head_lines(
    info: RecordingInfo, predicted: Mapping[str, Any], snapshot: Snapshot | None, most: int
) -> list[str]:
    """Return what is said once: which server, which model, what localkv makes of it."""
    where = "" if info.pid is None else f" (process {info.pid})"
    lines = [f"{info.server} at {escape_terminal(info.url)}{where}"]
    if snapshot and snapshot.model:
        lines.append(f"model      {escape_terminal(_short(snapshot.model))}")
    if predicted:
        lines.append(predicted_line(predicted))
    if snapshot:
        lines += [
            f"unknown    {name.replace('_', ' ')}: {escape_terminal(why)}"
            for name, why in snapshot.unknown.items()
        ]
    return [piece for line in lines for piece in wrap(line, most, hanging=_INDENT)]


def _short(model: str) -> str:
    """Return a model's name, of a path its last part."""
    import ntpath

    # As Windows reads paths: both kinds of slashes, a drive. A name like org/model is none.
    return ntpath.basename(model) if ntpath.isabs(model) else model


def predicted_line(told: Mapping[str, Any]) -> str:
    """Return what localkv makes of the server's cache."""
    if told.get("why"):
        return f"predicted  unknown: {escape_terminal(told['why'])}"
    token, capacity, kv = (
        told.get(name) for name in ("bytes_per_token", "capacity_tokens", "kv_bytes")
    )
    parts = [
        plural(capacity, "token") if capacity else "",
        f"KV {format_bytes(kv)}" if kv else "",
        f"{format_bytes(token)} per token" if token else "",
    ]
    return "predicted  " + ", ".join(part for part in parts if part)


def log_line(seen: Observed, rate: Rates, predicted: Mapping[str, Any]) -> str:
    """Return one look as one line."""
    start = f"{seen.seconds:7.1f} s"
    if seen.snapshot is None:
        return f"{start}  {silence(seen)}"
    parts = [cache_text(seen.snapshot, predicted), requests_text(seen.snapshot)]
    parts += [speed_text(rate), memory_text(seen)]
    return "  ".join([start, *(part for part in parts if part)])


def silence(seen: Observed) -> str:
    """Return what a look without an answer says: slow is not gone."""
    word = seen.error_kind if seen.error_kind in ("slow", "loading") else "no answer"
    return f"{word}: {escape_terminal(seen.error)}"


def cache_text(snapshot: Snapshot, predicted: Mapping[str, Any]) -> str:
    """Return used and capacity of the cache, and what Ollama holds."""
    loaded = ""
    if snapshot.loaded:
        held = sum(model.bytes or 0 for model in snapshot.loaded)
        loaded = f"{len(snapshot.loaded)} loaded, {format_bytes(held)}"
    elif snapshot.server == "ollama":
        loaded = "nothing loaded"
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
    """Return the speeds since the last answer."""
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


def live_lines(
    info: RecordingInfo,
    predicted: Mapping[str, Any],
    seen: Observed,
    rate: Rates,
    events: Sequence[str],
    most: int,
) -> list[str]:
    """Return the page that a terminal redraws with every look, at most ``most`` columns wide."""
    lines = [*head_lines(info, predicted, seen.snapshot, most), ""]
    if seen.snapshot is None:
        lines.append(silence(seen))
    else:
        lines += _said(seen.snapshot, predicted, rate)
    lines.append(f"memory     {memory_text(seen) or _no_memory(seen)}")
    lines.append(f"look       took {seen.took * 1000:.0f} ms, at {seen.seconds:.0f} s")
    lines += [f"event: {escape_terminal(event)}" for event in events]
    if seen.snapshot is not None:
        lines += [f"warning: {escape_terminal(text)}" for text in seen.snapshot.warnings]
    return [cut(line, most) for line in lines]


def _said(said: Snapshot, predicted: Mapping[str, Any], rate: Rates) -> list[str]:
    """Return the lines about the cache, the requests and the speed."""
    lines = []
    share = share_used(said, predicted.get("capacity_tokens"))
    if share is not None:
        filled = min(round(share * _BAR), _BAR)
        lines.append(f"cache      [{'#' * filled}{'.' * (_BAR - filled)}] {share:.0%}")
    if text := cache_text(said, predicted):
        lines.append(_INDENT + text)
    lines += [f"  slot {slot.id:<3} {_slot(slot)}" for slot in said.slots[:_SLOTS]]
    if more := len(said.slots) - _SLOTS:
        lines += [f"  and {plural(more, 'more slot')}"] if more > 0 else []
    lines += [
        f"  {escape_terminal(model.name, 40)}  until {escape_terminal(model.expires_at, 19)}"
        for model in said.loaded
    ]
    lines.append(f"requests   {requests_text(said) or 'unknown'}")
    if rate.cached_prompt_tokens:
        cached = plural(rate.cached_prompt_tokens, "prompt token")
        lines.append(f"cached     {cached} since the last look")
    source = " (as the slots count)" if rate.source == "slots" and rate.generated else ""
    lines.append(f"speed      {speed_text(rate) or _no_speed(rate)}{source}")
    return lines


def _no_speed(rate: Rates) -> str:
    return "unknown" if rate.generated is None and rate.prompt is None else "idle"


def _no_memory(seen: Observed) -> str:
    reading = seen.process.get("rss_anon")
    return f"unknown: {escape_terminal(reading.why)}" if reading and reading.why else "unknown"


def _slot(slot: Slot) -> str:
    state = "busy" if slot.busy else "idle"
    return f"{format_count(slot.tokens)}/{format_count(slot.n_ctx)} {state}"
