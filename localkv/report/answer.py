"""The first part of the report: what fits, and the commands to run it."""

from __future__ import annotations

from localkv.analysis import points
from localkv.analysis.answers import SlotAnswer, best_answers
from localkv.analysis.fit import Interval
from localkv.predict.commands import commands
from localkv.report.escape import code_block, escape_markdown
from localkv.report.page import Page, label, percent, size, tokens
from localkv.report.table import table, varying
from localkv.units import plural

#: A slope this near to 1 is 1; an interval wider than this tells nothing.
CLOSE = 0.005
WIDEST = 0.05


def answer(page: Page) -> list[str]:
    """Return the lines of the answer: the verdict, contexts per slot count, best settings."""
    return [
        f"# How much memory {page.name} needs",
        "",
        *_verdict(page),
        "",
        *_contexts(page),
        *_settings(page),
    ]


def _verdict(page: Page) -> list[str]:
    answers, analysis = page.analysis.answers, page.analysis
    where = "" if answers.device == "host" else " of video memory"
    ok = [r for r in page.records if r.outcome == "ok"]
    peaks = {s.key: s for s in analysis.peak.samples}
    biggest = max(ok, key=lambda r: points.predicted_total(r) or 0, default=None)
    if biggest is None:
        return ["**No point of this sweep could be measured**: the list of failed points says why."]
    sample = peaks.get(biggest.key)
    took = size(sample.measured) if sample else f"about {size(points.predicted_total(biggest))}"
    lines = [
        f"**{_in_a_word(page)}** The largest setting that ran ({label(biggest)}) took {took}; "
        f"{size(answers.available)}{where} were available."
    ]
    short = [a for a in answers.by_slots if a.refused is not None]
    if short:
        a = min(short, key=lambda a: (a.refused or 0, a.slots))
        slots = plural(a.slots, "slot")
        lines[0] += (
            f" The smallest that did not run: {tokens(a.refused)} tokens with {slots}, "
            f"{escape_markdown(a.refused_reason)}."
        )
    return [*lines, *_formula(page)]


def _in_a_word(page: Page) -> str:
    outcomes = {r.outcome for r in page.records if not points.is_impossible(r)}
    if outcomes & {"skipped", "oom"}:
        return "Not everything fits."
    return "Everything that was tried fits." if outcomes == {"ok"} else "Not everything ran."


def _formula(page: Page) -> list[str]:
    fit, peak = page.analysis.fit, page.analysis.peak
    slope = fit.slope
    if slope is None:
        return ["", "The formula could not be checked: " + "; ".join(fit.refused[:1]) + "."]
    text = (
        f"The formula {_judged(slope)} with what was measured: for every predicted byte of "
        f"context the process grew by {slope.value:.4f} bytes"
    )
    if slope.low is not None and slope.high is not None:
        text += f" (95 % interval {slope.low:.4f} to {slope.high:.4f})"
    if peak.worst is not None:
        text += f", and no peak was further than {percent(peak.worst, 1)} from the prediction"
    return ["", text + "."]


def _contexts(page: Page) -> list[str]:
    answers = page.analysis.answers
    if not answers.by_slots:
        return []
    peaks = {s.key: s.measured for s in page.analysis.peak.samples}
    rows = [
        [
            str(a.slots),
            escape_markdown(a.types),
            f"**{tokens(a.measured)}**" if a.measured else "none",
            tokens(a.measured_per_slot) if a.measured else "",
            size(peaks.get(a.key or "")) if a.measured else "",
            _fits(a),
        ]
        for a in answers.by_slots
    ]
    headers = ["slots", "cache", "largest context that ran", "per slot", "took", "should fit"]
    headers, rows, constant = varying(headers, rows, keep=(0, 2, 4, 5))
    lines = table(headers, rows, right=range(len(headers)))
    note = f"All rows: {', '.join(constant)}. " if constant else ""
    if any(a.extrapolated for a in answers.by_slots):
        note += (
            "*should fit* continues the predictions of this run up to the memory that was "
            "available, or to the context the model was trained for."
        )
    return [*lines, "", note.strip(), ""] if note else [*lines, ""]


def _fits(a: SlotAnswer) -> str:
    if a.fits is None:
        return "unknown"
    if a.fits == 0:
        return "nothing"
    reason = "memory" if a.limit == "memory" else "the model's training context"
    return f"{tokens(a.fits)} (limit: {reason})"


def _settings(page: Page) -> list[str]:
    best = best_answers(page.analysis.answers)
    if not best:
        return []
    lines = ["## Best settings", ""]
    for index, a in enumerate(best):
        record = page.record(a.key)
        if record is None or a.measured is None:
            continue
        lines += [f"**{_purpose(a, index)}**", ""]
        lines += _commands(page, a, record.config)
    return lines


def _purpose(a: SlotAnswer, index: int) -> str:
    slots = plural(a.slots, "slot")
    each = "" if a.slots == 1 else f", {tokens(a.measured_per_slot)} for each"
    who = "One conversation at a time" if a.slots == 1 else "Several conversations at a time"
    if index == 0 and a.slots > 1:
        who = "Fewest slots measured"
    return f"{who}: {slots}, {tokens(a.measured)} tokens of context{each}, " + escape_markdown(
        f"{a.types} cache"
    )


def _commands(page: Page, a: SlotAnswer, config: dict[str, object]) -> list[str]:
    lines = []
    per_slot = a.measured_per_slot or a.measured or 0
    model = page.run.model
    path, name = str(model.get("path") or "model.gguf"), str(model.get("name") or "model")
    for command in commands(config, a.measured or 0, per_slot, path=path, name=name):
        note = f": {escape_markdown(command.note)}" if command.note else ""
        lines.append(f"{command.program}{note}")
        lines.append("")
        if command.lines:
            lines += [*code_block(list(command.lines), command.language), ""]
    return lines


def _judged(slope: Interval) -> str:
    """Return what may be said of a slope: nothing without an interval, or with a wide one."""
    if slope.low is None or slope.high is None or slope.high - slope.low > WIDEST:
        return "cannot be told from these points to agree"
    near = abs(slope.value - 1) <= CLOSE or slope.low <= 1 <= slope.high
    return "agrees" if near else "does not agree"
