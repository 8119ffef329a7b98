"""The sections about what did not go as planned, and about speed."""

from __future__ import annotations

from localkv.analysis import points
from localkv.report.escape import code_span, escape_markdown
from localkv.report.page import Page, label, picture
from localkv.report.table import table, varying


def speed(page: Page) -> list[str]:
    """Return the lines about speed against context; none where it was not measured."""
    rows = [
        [
            f"{points.n_ctx(record) or 0:,}",
            str(entry.slots),
            escape_markdown(points.types_text(record)),
            f"{entry.depth:,}",
            _rate(entry.prefill_tokens_per_s),
            _rate(entry.decode_tokens_per_s),
            _rate(_per_slot(entry.decode_tokens_per_s, entry.slots)),
        ]
        for record in page.points
        for entry in record.speed
    ]
    if not rows:
        return []
    headers = ["n_ctx", "slots", "cache", "tokens already in each slot", "prefill tokens/s"]
    headers += ["decode tokens/s, all slots", "decode tokens/s, each slot"]
    headers, rows, constant = varying(headers, rows, keep=(1, 3, 4, 5))
    return [
        "## Speed against context",
        "",
        *picture(page, "speed", "Prefill and decode speed against the tokens in each slot"),
        *table(headers, rows, right=range(len(headers))),
        "",
        *([f"All rows: {', '.join(constant)}.", ""] if constant else []),
    ]


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.1f}"


def _per_slot(value: float | None, slots: int) -> float | None:
    return None if value is None or slots < 1 else value / slots


def not_measured(page: Page) -> list[str]:
    """Return the lines about points that did not end well, each with its reason."""
    rows = [
        [
            label(record),
            str(record.repeat),
            record.outcome if record.outcome.isalpha() else escape_markdown(record.outcome),
            escape_markdown(record.stage or ""),
            escape_markdown(record.reason or "no reason recorded", 400),
        ]
        for record in sorted(page.records, key=lambda r: (r.outcome, r.key, r.repeat))
        if record.outcome != "ok"
    ]
    if not rows:
        return []
    headers = ["point", "repeat", "outcome", "while", "reason"]
    headers, rows, _ = varying(headers, rows, keep=(0, 2, 4))
    return ["## Points without a measurement", "", *table(headers, rows), ""]


def warnings(page: Page) -> list[str]:
    """Return the lines of the warnings, each with its likely cause and what to try."""
    found = page.analysis.warnings
    notes = page.analysis.notes
    if not found and not notes:
        return []
    lines = ["## Warnings and notes", ""]
    for warning in found:
        lines += [
            f"- **{'Warning' if warning.severity == 'warning' else 'Note'}:** "
            f"{escape_markdown(warning.text, 400)}.",
            f"  Likely cause: {escape_markdown(warning.cause, 400)}.",
            f"  What to try: {escape_markdown(warning.remedy, 400)}.",
        ]
    lines += [f"- **Note:** {escape_markdown(note, 400)}." for note in notes]
    return [*lines, ""]


def command_line(page: Page) -> str:
    """Return the command that made the run, as inline code."""
    import shlex

    return code_span(shlex.join(page.run.argv), 400) if page.run.argv else "unknown"
