"""The few lines that end a sweep on a terminal."""

from __future__ import annotations

from localkv.analysis import points
from localkv.report.escape import escape_terminal
from localkv.report.page import Page, percent, size, tokens
from localkv.units import plural


def summary_lines(page: Page, report: str) -> list[str]:
    """Return five to eight short lines in plain words; ``report`` is the path of the report."""
    name = escape_terminal(page.run.model.get("name") or "the model", 60)
    counts = page.analysis.counts
    done = ", ".join(f"{n} {escape_terminal(outcome, 20)}" for outcome, n in counts.items() if n)
    lines = [f"{name}: {done or 'no point measured'}"]
    lines += _largest(page)
    lines += _formula(page)
    serious = [w for w in page.analysis.warnings if w.severity == "warning"]
    if serious:
        more = f" (and {len(serious) - 1} more)" if len(serious) > 1 else ""
        lines.append(f"Warning: {escape_terminal(serious[0].text, 160)}{more}")
    lines.append(f"Report: {escape_terminal(report, 4000)}")
    return lines


def _largest(page: Page) -> list[str]:
    answers = page.analysis.answers
    ran = [a for a in answers.by_slots if a.measured]
    if not ran:
        return []
    by_slots: dict[int, int] = {}
    for a in ran:
        by_slots[a.slots] = max(by_slots.get(a.slots, 0), a.measured or 0)
    shown = ", ".join(
        f"{tokens(n)} with {plural(slots, 'slot')}" for slots, n in sorted(by_slots.items())
    )
    lines = [f"Largest context that ran, in tokens over all slots: {shown}"]
    peaks = page.analysis.peak.samples
    if peaks:
        top = max(peaks, key=lambda s: s.measured)
        whole = {r.outcome for r in page.points} == {"ok"}
        word = "It fits" if whole else "What ran fits"
        lines.append(
            f"{word}: at most {size(top.measured)} were used beyond the baseline, "
            f"{size(answers.available)} available"
        )
    over = [a for a in answers.by_slots if a.fits is not None]
    if over:
        best = max(over, key=lambda a: a.fits or 0)
        lines.append(
            f"Should fit as well: {tokens(best.fits)} tokens over "
            f"{plural(best.slots, 'slot')} (limit: {best.limit})"
        )
    return lines


def _formula(page: Page) -> list[str]:
    fit, peak = page.analysis.fit, page.analysis.peak
    if fit.slope is None:
        return ["Formula against measurement: not determined, too few points"]
    text = f"Formula against measurement: slope {fit.slope.value:.4f}"
    if fit.slope.low is not None and fit.slope.high is not None:
        text += f" ({fit.slope.low:.4f} to {fit.slope.high:.4f})"
    if fit.held_out_error is not None:
        text += f", held-out error {percent(fit.held_out_error)}"
    if peak.worst is not None:
        text += f", peak within {percent(peak.worst, 1)}"
    tokens_of = page.analysis.groups.per_token
    lines = [text]
    if tokens_of and len({points.types_text(r) for r in page.points}) == 1:
        one = tokens_of[0]
        lines.append(
            f"One token of context: {one.measured / 1024:.2f} KiB measured, "
            f"{one.formula / 1024:.2f} KiB by the formula"
        )
    return lines
