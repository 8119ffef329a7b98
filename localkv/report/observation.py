"""The report of a recording: what a live server did, in words, a table and plots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from localkv.analysis.observed import Observation, summarise
from localkv.report.escape import code_span, escape_markdown
from localkv.report.growth import memory_section
from localkv.report.page import percent, size, tokens
from localkv.report.style import unit_for
from localkv.report.table import table
from localkv.report.timeline import draw_timeline
from localkv.snapshots import Observed, RecordingInfo
from localkv.units import plural

REPORT_FILE = "report.md"


def write_observation(
    folder: Path, info: RecordingInfo, seen: Sequence[Observed], left_out: int = 0
) -> Path:
    """Write ``report.md`` and its plots into ``folder`` and return the report's path.

    ``left_out`` counts the lines of the recording that could not be read.
    """
    found = summarise(info, seen)
    pictures = {
        "cache": _draw_cache(folder / "observed-cache.svg", found),
        "requests": _draw_requests(folder / "observed-requests.svg", found),
        "memory": _draw_memory(folder / "observed-memory.svg", found),
    }
    report = folder / REPORT_FILE
    fresh = report.with_suffix(".md.new")
    text = "\n".join(_lines(info, found, pictures, left_out))
    fresh.write_text(text, encoding="utf-8", newline="\n")
    os.replace(fresh, report)
    return report


def _lines(
    info: RecordingInfo, found: Observation, pictures: dict[str, str | None], left_out: int
) -> list[str]:
    lines = [
        f"# {escape_markdown(info.server)} observed",
        "",
        f"{code_span(info.url)}, {escape_markdown(info.created)}, "
        f"{plural(found.answered, 'look')} with an answer in {found.seconds:.0f} s, "
        f"every {info.interval:g} s.",
        "",
        *(f"- {line}" for line in summary_lines(found)),
        "",
    ]
    for name, alt in (
        ("cache", "Tokens in the KV cache over time"),
        ("requests", "Requests running and waiting, and preemptions, over time"),
        ("memory", "Memory of the server's processes over time"),
    ):
        if pictures[name]:
            lines += [f"![{alt}]({pictures[name]})", ""]
    lines += _predicted(found)
    lines += memory_section(found.seen)
    lines += _happened(found)
    if left_out:
        lines += [f"{plural(left_out, 'line')} of the recording left out as not whole.", ""]
    return lines


def _happened(found: Observation) -> list[str]:
    said = [f"- {at:.1f} s: {escape_markdown(event)}" for at, event in found.events]
    if found.last_error:
        said.append(f"- at the end: {escape_markdown(found.last_error)}")
    said += [
        f"- {escape_markdown(text)}" + (f" ({count} times)" if count > 1 else "")
        for text, count in found.warnings
    ]
    return ["## What happened", "", *said, ""] if said else []


def summary_lines(found: Observation) -> list[str]:
    """Return what the recording says, one sentence each."""
    said = []
    if found.peak_used is not None:
        used = plural(found.peak_used, "token")
        if found.capacity:
            used = f"{tokens(found.peak_used)} of {plural(found.capacity, 'token')}"
        share = f" ({percent(found.peak_share, 0)})" if found.peak_share is not None else ""
        said.append(f"The cache held at most {used}{share}.")
    if found.peak_running is not None:
        waiting = "" if found.peak_waiting is None else f", at most {found.peak_waiting} waited"
        said.append(f"At most {plural(found.peak_running, 'request')} ran at once{waiting}.")
    for name, noun, words in (
        ("preemptions", "request", "preempted: the cache was too small for what ran"),
        ("prompt_tokens", "prompt token", "read"),
        ("cached_prompt_tokens", "prompt token", "taken from the cache"),
        ("generated_tokens", "token", "generated"),
    ):
        count = found.grown.get(name)
        if count:
            said.append(f"{plural(count, noun)} {words}.")
    if found.peak_memory is not None:
        said.append(
            f"Its processes held {size(found.first_memory)} at first and {size(found.peak_memory)} "
            "at most (allocated memory)."
        )
    if found.slow:
        said.append(f"{plural(found.slow, 'slow look')}: the server was busy, not gone.")
    if found.missed:
        said.append(f"{plural(found.missed, 'look')} had no answer at all.")
    return said or ["The server gave no figures."]


def _predicted(found: Observation) -> list[str]:
    told = found.predicted
    if told.get("why"):
        return [f"Nothing is predicted: {escape_markdown(told['why'])}", ""]
    if not told.get("capacity_tokens"):
        return []
    rows = [
        ["capacity in tokens", tokens(told["capacity_tokens"]), tokens(found.capacity)],
        ["KV cache", size(told.get("kv_bytes")), "not told by servers"],
    ]
    return [
        "## Predicted and reported",
        "",
        *table(["", "localkv", "the server"], rows, right=(1, 2)),
        "",
    ]


def _draw_cache(path: Path, found: Observation) -> str | None:
    series = [("used", found.series("used_tokens"))]
    return draw_timeline(path, series, "Tokens in the KV cache", "tokens", ceiling=found.capacity)


def _draw_requests(path: Path, found: Observation) -> str | None:
    series = [(name, found.series(name)) for name in ("running", "waiting", "preemptions")]
    return draw_timeline(path, series, "Requests", "requests", steps=True)


def _draw_memory(path: Path, found: Observation) -> str | None:
    series = [
        (words, found.readings(key))
        for key, words in (
            ("rss_anon", "allocated"),
            ("rss_file", "of files"),
            ("vram_process", "VRAM"),
        )
    ]
    values = [value for _, points in series for _, value in points]
    divisor, unit = unit_for(values)
    scaled = [(name, [(t, v / divisor) for t, v in points]) for name, points in series]
    return draw_timeline(path, scaled, "Memory of the server's processes", unit)
