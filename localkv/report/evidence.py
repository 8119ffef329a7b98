"""The sections that show what the prediction is worth: the fit, the peak, the points."""

from __future__ import annotations

from localkv.analysis import points
from localkv.analysis.fit import Fit, Interval
from localkv.report.escape import escape_markdown
from localkv.report.page import Page, percent, picture, r2_text, signed, size, tokens
from localkv.report.table import table, varying
from localkv.units import KIB, format_bytes, plural


def evidence(page: Page) -> list[str]:
    """Return the lines about measured against predicted, and where the memory goes."""
    if not any(r.outcome == "ok" for r in page.records):
        return []
    return [
        "## Measured against predicted",
        "",
        *_fit(page),
        *_groups(page),
        *_per_token(page),
        *_refused(page),
        "## Where the memory goes",
        "",
        *picture(page, "stacked", "Memory by kind for every point, with the measured peak"),
        *_peak(page),
        *_points(page),
    ]


def _range(value: Interval | None, digits: int = 4) -> str:
    if value is None:
        return "not determined"
    if value.low is None or value.high is None:
        return f"{value.value:.{digits}f}"
    return f"{value.value:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def _bytes_range(value: Interval | None) -> str:
    if value is None:
        return "not determined"
    text = size(round(value.value))
    if value.low is None or value.high is None:
        return text
    return f"{text} ({size(round(value.low))} to {size(round(value.high))})"


def _fit(page: Page) -> list[str]:
    fit, growth = page.analysis.fit, page.analysis.growth
    sources = sorted({s.source for s in growth.samples})
    at_once = any(points.loaded_at_once(record) for record in page.points)
    lines = [
        ("What the server's process held" if at_once else "What the process grew by")
        + (" when the model was loaded" if at_once else " when the context was created")
        + (f" ({escape_markdown(', '.join(sources))})" if sources else "")
        + ", against the predicted KV cache, recurrent state, output buffer and the engine's "
        "table of cells"
        + (", and the weights where they are not mapped from the file" if at_once else "")
        + ". The slope is 1 when the formula is right; the intercept is what a "
        "context costs whatever its size.",
        "",
        *picture(page, "fit", "Measured against predicted growth with the fitted line, residuals"),
    ]
    if fit.slope is None:
        return lines
    repeats = max((s.repeats for s in growth.samples), default=1)
    rows = [
        [
            "points",
            f"{fit.points}" + (f" (medians of up to {repeats} runs)" if repeats > 1 else ""),
        ],
        ["slope (95 % interval)", _range(fit.slope)],
        ["intercept (95 % interval)", _bytes_range(fit.intercept_bytes)],
        ["R²", r2_text(fit.r2)],
        ["largest residual", size(fit.max_residual_bytes)],
        ["error on points held out of the fit", _held_out(fit)],
    ]
    return [*lines, *table(["", "value"], rows, right=(1,)), ""]


def _held_out(fit: Fit) -> str:
    if fit.held_out_error is None:
        return "not determined"
    return f"{percent(fit.held_out_error)} on average, {percent(fit.held_out_worst)} at worst"


def _groups(page: Page) -> list[str]:
    groups = page.analysis.groups
    parts = []
    if len({s.types for s in page.analysis.growth.samples}) > 1:
        parts += [(f"cache {g.name}", g.fit) for g in groups.by_types]
    if len({s.slots for s in page.analysis.growth.samples}) > 1:
        parts += [(plural(int(g.name), "slot"), g.fit) for g in groups.by_slots]
    rows = [
        [
            escape_markdown(name),
            str(fit.points),
            _range(fit.slope),
            size(round(fit.intercept_bytes.value)) if fit.intercept_bytes else "not determined",
            size(fit.max_residual_bytes),
        ]
        for name, fit in parts
    ]
    lines = table(
        ["part", "points", "slope (95 % interval)", "intercept", "largest residual"],
        rows,
        right=(1, 2, 3, 4),
    )
    slot = groups.per_slot_bytes
    if slot is not None:
        nothing = slot.low is not None and slot.high is not None and slot.low <= 0 <= slot.high
        lines += [
            "",
            f"A slot costs {'nothing' if nothing else 'something'} beyond the prediction: "
            f"{_bytes_range(slot)}.",
        ]
    return [*lines, ""] if lines else []


def _per_token(page: Page) -> list[str]:
    rows = [
        [
            escape_markdown(p.types),
            _token_bytes(p.measured),
            _token_bytes(p.formula),
            f"{p.table:.0f} B",
            signed(p.measured / (p.formula + p.table) - 1, 2) if p.formula + p.table else "",
        ]
        for p in page.analysis.groups.per_token
    ]
    lines = table(
        ["cache", "measured per token", "KV by formula", "engine's table of cells", "difference"],
        rows,
        right=(1, 2, 3, 4),
    )
    return [*lines, ""] if lines else []


def _token_bytes(value: float) -> str:
    return f"{value / KIB:.3f} KiB" if value >= KIB else f"{value:.1f} B"


def _refused(page: Page) -> list[str]:
    refused = page.analysis.refused
    if not refused:
        return []
    return [
        "Not determined by these points:",
        "",
        *(f"- {escape_markdown(reason, 400)}" for reason in refused),
        "",
    ]


def _peak(page: Page) -> list[str]:
    peak = page.analysis.peak
    if peak.worst is None:
        return []
    return [
        f"The highest mark of the process above its baseline is within {percent(peak.worst, 1)} "
        f"of the prediction (median {percent(peak.median, 1)}). The prediction is the sum of the "
        "engine's buffers, of the compute buffer as much as the decoded tokens can touch"
        + (
            f", and {size(peak.fixed_bytes)} that the process holds besides: vocabulary, graph, "
            "libraries (one figure for all points, the median of what was measured). "
            f"Without it the worst is {percent(peak.worst_bare, 1)}."
            if peak.fixed_bytes is not None
            else "."
        ),
        "",
    ]


def _points(page: Page) -> list[str]:
    growth = {s.key: s for s in page.analysis.growth.samples}
    peaks = {s.key: s for s in page.analysis.peak.samples}
    residuals = {r.key: r for r in page.analysis.fit.residuals}
    rows = []
    for record in page.points:
        g, p = growth.get(record.key), peaks.get(record.key)
        r = residuals.get(record.key)
        if record.outcome != "ok" or g is None:
            continue
        rows.append(
            [
                tokens(points.n_ctx(record)),
                str(points.slots(record)),
                escape_markdown(points.types_text(record)),
                size(g.expected),
                size(g.measured),
                (format_bytes(r.bytes) + (" (outlier)" if r.outlier else "")) if r else "",
                size(p.expected) if p else "unknown",
                size(p.measured) if p else "unknown",
                signed(p.error) if p else "",
            ]
        )
    if not rows:
        return []
    headers = ["n_ctx", "slots", "cache", "growth predicted", "measured", "residual"]
    headers += ["peak predicted", "peak measured", "difference"]
    headers, rows, _ = varying(headers, rows, keep=(0, 1, 3, 4, 5, 6, 7, 8))
    return [
        "<details><summary>Every point</summary>",
        "",
        *table(headers, rows, right=range(len(headers))),
        "",
        "</details>",
        "",
    ]
