"""How a load reads on a terminal: a line per step, and a page of what it came to."""

from __future__ import annotations

from localkv.analysis.loaded import Load, StepSummary
from localkv.cli.terminal import table, width, wrap
from localkv.report.escape import escape_terminal
from localkv.report.load_words import exhaustion_texts, prefix_texts, seconds
from localkv.snapshots import RecordingInfo
from localkv.units import plural

_HEADERS = ("step", "ok", "prompt", "gen", "TTFT p50", "p90", "p99", "tok/s", "peak", "after")
#: Columns that a narrow terminal does without.
_OPTIONAL = (6, 5, 3, 9)
_UNKNOWN = "-"


def step_line(step: StepSummary) -> str:
    """Return one finished step as one line of progress."""
    parts = [f"{step.name}: {step.answered} of {step.concurrency} answered"]
    if step.first_token:
        parts.append(f"first token {step.first_token['p50']:.2f} s")
    if step.throughput:
        parts.append(f"{step.throughput:.0f} tok/s")
    if step.peak_used is not None:
        parts.append(f"cache {plural(step.peak_used, 'token')}")
    if step.peak_waiting:
        parts.append(f"{step.peak_waiting} waited")
    if step.preemptions:
        parts.append(f"{step.preemptions} preempted")
    return ", ".join(parts) + (f" ({step.notes[0]})" if step.notes else "")


def page(info: RecordingInfo, load: Load) -> list[str]:
    """Return the page of a load: every step, where the server gave up, what a prefix is worth."""
    most = width()
    lines = [escape_terminal(f"{info.server} at {info.url} under load, {load.ended}"), ""]
    lines += table(_HEADERS, [_row(s) for s in load.steps], most, optional=_OPTIONAL)
    lines += ["", "tok/s: of one request after its first token. peak, after: tokens in the cache."]
    for step in load.steps:
        for note in step.notes:
            lines += wrap(escape_terminal(f"{step.name}: {note}", 300), most, "note: ", "  ")
    lines.append("")
    for texts in (*exhaustion_texts(info, load), prefix_texts(load.prefix)):
        for number, text in enumerate(texts):
            lines += wrap(escape_terminal(text, 400), most, "  " if number else "", "    ")
    return lines


def _row(step: StepSummary) -> list[str]:
    usage = "" if step.peak_usage is None else f" ({step.peak_usage:.0%})"
    return [
        escape_terminal(step.name, 60),
        f"{step.answered}/{step.concurrency}" if step.fits else "too long",
        f"{step.prompt_tokens:,}",
        f"{step.generated:,}",
        *(seconds(step.first_token.get(p)) for p in ("p50", "p90", "p99")),
        f"{step.speed['p50']:.1f}" if step.speed else _UNKNOWN,
        _count(step.peak_used) + usage,
        _count(step.used_after),
    ]


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"
