"""The report of a load: every step, where the server gave up, and what a prefix is worth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from localkv.analysis.exhausted import Exhaustion
from localkv.analysis.loaded import Load, StepSummary, summarise_load
from localkv.analysis.observed import summarise
from localkv.report.escape import code_span, escape_markdown
from localkv.report.load_words import exhaustion_texts, prefix_texts, seconds
from localkv.report.style import COLOURS, MARKERS, drawing, legend_below, save
from localkv.report.table import table
from localkv.report.timeline import draw_timeline
from localkv.snapshots import LoadStep, Observed, RecordingInfo
from localkv.units import plural

LOAD_REPORT = "load.md"
#: Rows of what a server said while it gave up.
_ROWS = 20
_ALTS = {
    "cache": "Tokens in the KV cache over time, with the steps marked",
    "requests": "Requests running and waiting, and preemptions, over time",
    "first": "Time to the first token by requests at once",
}


def write_load(
    folder: Path,
    info: RecordingInfo,
    steps: Sequence[LoadStep],
    ended: str = "",
    left_out: int = 0,
) -> Path:
    """Write ``load.md`` and its plots into ``folder`` and return the report's path.

    ``ended`` says why the load stopped, ``left_out`` counts lines that could not be read.
    """
    load = summarise_load(info, steps, ended)
    pictures = _draw(folder, info, steps, load)
    report = folder / LOAD_REPORT
    fresh = report.with_suffix(".md.new")
    fresh.write_text("\n".join(_lines(info, load, pictures, left_out)), "utf-8", newline="\n")
    os.replace(fresh, report)
    return report


def _lines(
    info: RecordingInfo, load: Load, pictures: dict[str, str | None], left_out: int
) -> list[str]:
    lines = [
        f"# {escape_markdown(info.server)} under load",
        "",
        f"{code_span(info.url)}, {escape_markdown(info.created)}. How it ended: "
        f"{escape_markdown(load.ended)}.",
        "",
    ]
    for texts in (*exhaustion_texts(info, load), prefix_texts(load.prefix)):
        lines += [f"{'  ' * bool(n)}- {escape_markdown(text, 400)}" for n, text in enumerate(texts)]
    lines.append("")
    for found in load.exhaustion:
        lines += _over_time(found)
    for name, alt in _ALTS.items():
        if pictures[name]:
            lines += [f"![{alt}]({pictures[name]})", ""]
    lines += ["## Steps", "", *_table(load.steps), ""]
    lines += [
        "First token and speed (tokens per second of one request after its first) are p50 / p90 / "
        "p99 over the requests of a step; used are tokens in the cache at most and after the step.",
        "",
    ]
    notes = [
        f"- {escape_markdown(f'{step.name}: {note}', 400)}"
        for step in load.steps
        for note in step.notes
    ]
    lines += ["## Not as asked", "", *notes, ""] if notes else []
    if left_out:
        lines += [f"{plural(left_out, 'line')} of the recording left out as not whole.", ""]
    return lines


def _over_time(found: Exhaustion) -> list[str]:
    """Return what the server said while it gave up, where something changed, a row for each."""
    changed = [
        row
        for before, row in zip((None, *found.over_time), found.over_time, strict=False)
        if before is None or before[1:4] != row[1:4]
    ]
    if not changed:
        return []
    shown = changed[:_ROWS]
    rows = [[f"{row[0]:.1f}", *(_count(value) for value in row[1:])] for row in shown]
    more = f"The first {_ROWS} of {len(changed)} changes. " if len(changed) > _ROWS else ""
    return [
        f"{more}While {escape_markdown(found.step)} ran, the preemptions since the server began:",
        "",
        *table(
            ["seconds", "running", "waiting", "preemptions", "used tokens"],
            rows,
            right=(0, 1, 2, 3, 4),
        ),
        "",
    ]


def _table(steps: Sequence[StepSummary]) -> list[str]:
    headers = ["", "step", "answered", "prompt", "cached", "generated", "first token", "speed"]
    headers += ["used", "after", "running", "waiting", "preempted"]
    rows = [
        [
            str(number),
            escape_markdown(step.name),
            f"{step.answered} of {step.concurrency}" if step.fits else "too long",
            f"{step.prompt_tokens:,}",
            _count(step.cached_tokens),
            f"{step.generated:,}",
            " / ".join(seconds(value) for value in step.first_token.values()) or "-",
            " / ".join(f"{value:.1f}" for value in step.speed.values()) or "-",
            _count(step.peak_used),
            _count(step.used_after),
            _count(step.peak_running),
            _count(step.peak_waiting),
            _count(step.preemptions),
        ]
        for number, step in enumerate(steps, 1)
    ]
    return table(headers, rows, right=(0, *range(2, len(headers))))


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _draw(
    folder: Path, info: RecordingInfo, steps: Sequence[LoadStep], load: Load
) -> dict[str, str | None]:
    seen = summarise(info, list(_looks(steps)))
    marks = [(step.started, str(number)) for number, step in enumerate(steps, 1)]
    capacity = load.predicted.get("tokens") or seen.capacity
    return {
        "cache": draw_timeline(
            folder / "load-cache.svg",
            [("used", seen.series("used_tokens"))],
            "Tokens in the KV cache, by step",
            "tokens",
            ceiling=capacity,
            marks=marks,
        ),
        "requests": draw_timeline(
            folder / "load-requests.svg",
            [(name, seen.series(name)) for name in ("running", "waiting", "preemptions")],
            "Requests, by step",
            "requests",
            steps=True,
            marks=marks,
        ),
        "first": _draw_first(folder / "load-first-token.svg", load.steps),
    }


def _looks(steps: Sequence[LoadStep]) -> list[Observed]:
    """Return all looks, counted from the beginning of the load."""
    return [
        replace(look, seconds=round(step.started + look.seconds, 3))
        for step in steps
        for look in step.looks
    ]


def _draw_first(path: Path, steps: Sequence[StepSummary]) -> str | None:
    """Draw the time to the first token against requests at once, prompts being alike."""
    path.unlink(missing_ok=True)
    ramp = [s for s in steps if s.part == "concurrency" and s.first_token]
    if len(ramp) < 2:
        return None
    title = "Time to the first token by requests at once"
    with drawing(3.4) as figure:
        axes = figure.subplots()
        handles: list[Any] = []
        for index, point in enumerate(("p50", "p90", "p99")):
            handles += axes.plot(
                [s.concurrency for s in ramp],
                [s.first_token[point] for s in ramp],
                color=COLOURS[index],
                marker=MARKERS[index],
                label=point,
            )
        axes.set_title(title)
        axes.set_xlabel(f"requests at once, {plural(ramp[0].prompt_tokens, 'prompt token')} each")
        axes.set_xticks([s.concurrency for s in ramp])
        axes.set_ylabel("seconds")
        axes.set_ylim(bottom=0)
        legend_below(figure, handles)
        save(figure, path, title)
    return path.name
