"""The comparison of two runs as Markdown: what differs around them first, then the figures."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.analysis.compare import (
    EQUAL,
    GREW,
    MIN_BYTES,
    MIN_SPEED_EFFECT,
    SHRANK,
    SMALL,
    UNJUDGED,
    UNKNOWN,
    WITHIN,
    Change,
    Comparison,
    PointComparison,
    Run,
)
from localkv.analysis.facts import NOT_RECORDED, FactChange
from localkv.analysis.figures import SPEED, Figure
from localkv.analysis.fit import Interval
from localkv.report.escape import code_span, escape_markdown
from localkv.report.page import signed, size
from localkv.report.table import table
from localkv.units import plural

_VERDICTS = (GREW, SHRANK, SMALL, WITHIN, EQUAL, UNJUDGED, UNKNOWN)


def render_comparison(found: Comparison) -> str:
    """Return the whole page as Markdown."""
    lines = [
        "# Two sweeps compared",
        "",
        f"**{verdict(found)}**",
        "",
        *_sides(found),
        *_facts("The model", found.model),
        *_facts("The environment", found.environment),
        *_summaries(found),
        *_changed(found),
        *_outcomes(found),
        *_unmatched(found),
        *_method(found),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def verdict(found: Comparison) -> str:
    """Return the answer in a sentence or two, ready for Markdown."""
    if not found.points:
        return "Nothing can be compared: the two runs have no point in common."
    if not found.matched:
        return "Nothing can be compared: no point was measured in both runs."
    changed = {GREW: 0, SHRANK: 0}
    for point in found.points:
        for word in changed:
            changed[word] += any(c.is_memory and c.verdict == word for c in point.changes)
    count = f"{plural(found.matched, 'point')} measured in both runs"
    if not any(changed.values()):
        text = f"No memory figure differs beyond what the runs scatter by: {count}."
    else:
        told = [f"memory {word} at {n}" for word, n in changed.items() if n]
        text = f"{' and '.join(told).capitalize()} of {count}."
    if found.lost:
        text += f" {len(found.lost)} measured before could not be measured again."
    return text


def _sides(found: Comparison) -> list[str]:
    rows = [_side("before", found.before), _side("after", found.after)]
    return [*table(["", "run", "made", "by localkv", "points", "runs"], rows, right=(4, 5)), ""]


def _side(word: str, run: Run) -> list[str]:
    return [
        word,
        code_span(run.name, 400),
        escape_markdown(run.info.created or "unknown"),
        escape_markdown(run.info.localkv or "unknown"),
        str(len({record.key for record in run.records})),
        str(len(run.records)),
    ]


def _facts(what: str, changes: Sequence[FactChange]) -> list[str]:
    rows = [
        [escape_markdown(c.name), escape_markdown(c.before, 300), escape_markdown(c.after, 300)]
        for c in changes
        if NOT_RECORDED not in (c.before, c.after)
    ]
    one_sided = [c.name for c in changes if NOT_RECORDED in (c.before, c.after)]
    lines = [f"## {what} differs", "", *table(["", "before", "after"], rows), ""] if rows else []
    if one_sided:
        lines += [f"{what}, as far as only one of the two recorded it: {', '.join(one_sided)}.", ""]
    return lines or [f"{what} does not differ in anything that is recorded.", ""]


def _summaries(found: Comparison) -> list[str]:
    rows = []
    for summary in found.summaries:
        told = [f"{n} {word}" for word in _VERDICTS if (n := summary.counts.get(word))]
        share = "" if summary.median_share is None else signed(summary.median_share, 2)
        largest = "" if summary.largest is None else _difference(summary.largest, summary.unit)
        name = summary.figure if summary.source != SPEED else f"speed: {summary.figure}"
        rows.append([escape_markdown(name), summary.source, ", ".join(told), share, largest])
    if not rows:
        return []
    headers = ["figure", "from", "points", "median change", "largest change"]
    return ["## Figures over all points", "", *table(headers, rows, right=(3, 4)), *_slopes(found)]


def _slopes(found: Comparison) -> list[str]:
    before, after = found.slope
    if before is None or after is None:
        return [""]
    return [
        "",
        "Measured growth per predicted byte (slope of the fit): "
        f"{_interval(before)} before, {_interval(after)} after.",
        "",
    ]


def _interval(value: Interval) -> str:
    if value.low is None or value.high is None:
        return f"{value.value:.4f}"
    return f"{value.value:.4f} ({value.low:.4f} to {value.high:.4f})"


def _changed(found: Comparison) -> list[str]:
    rows = [
        [
            escape_markdown(point.label),
            escape_markdown(change.figure),
            _value(change.before, change.unit),
            _value(change.after, change.unit),
            _difference(change.difference or 0, change.unit),
            "" if change.share is None else signed(change.share, 1),
            _word(change),
        ]
        for point in found.points
        for change in point.changes
        if change.verdict in (GREW, SHRANK)
    ]
    if not rows:
        return []
    headers = ["point", "figure", "before", "after", "difference", "", ""]
    return ["## What changed", "", *table(headers, rows, right=(2, 3, 4, 5)), ""]


def _word(change: Change) -> str:
    if change.source != SPEED:
        return change.verdict
    return "faster" if change.verdict == GREW else "slower"


def _value(figure: Figure, unit: str) -> str:
    if figure.value is None:
        return "unknown"
    return size(round(figure.value)) if unit == "bytes" else f"{figure.value:,.1f} {unit}"


def _difference(value: float, unit: str) -> str:
    if unit != "bytes":
        return f"{value:+,.1f} {unit}"
    whole = round(value)
    return f"{'+' if whole > 0 else ''}{size(whole)}"


def _outcomes(found: Comparison) -> list[str]:
    rows = [
        [
            escape_markdown(point.label),
            escape_markdown(point.outcome_before),
            escape_markdown(point.outcome_after),
            escape_markdown(point.reason or "", 400),
        ]
        for point in found.points
        if not point.measured
    ]
    if not rows:
        return []
    headers = ["point", "before", "after", "reason"]
    return ["## Points without a measurement on both sides", "", *table(headers, rows), ""]


def _unmatched(found: Comparison) -> list[str]:
    lines = []
    for word, run, labels in (
        ("before", found.before, found.only_before),
        ("after", found.after, found.only_after),
    ):
        if labels:
            lines += [f"## Only in {word} ({code_span(run.name, 200)})", ""]
            lines += [f"- {escape_markdown(label)}" for label in labels]
            lines.append("")
    return lines


def _method(found: Comparison) -> list[str]:
    repeats = [_repeats(found.points, side) for side in ("before", "after")]
    return [
        "## How this was judged",
        "",
        f"A figure grew or shrank when the spreads of its two values do not overlap and they are "
        f"at least {100 * found.min_effect:.3g}% of the value before and "
        f"{size(MIN_BYTES)} apart; speed at least "
        f"{max(found.min_effect, MIN_SPEED_EFFECT):.0%}. Overlapping spreads cannot be told apart. "
        "The spread is the range of a point's repeats, at least a page each way; where a point "
        "ran once, twice the robust standard deviation of what the points of its sweep lie off "
        f"their fit. Repeats per point: {repeats[0]} before, {repeats[1]} after.",
        "",
    ]


def _repeats(compared: Sequence[PointComparison], side: str) -> str:
    counts = sorted({getattr(c, side).repeats for p in compared for c in p.changes} - {0})
    if not counts:
        return "none"
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
