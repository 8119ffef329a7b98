"""The plots of a report, each a function from a page to one SVG file, or None without data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localkv.analysis import points
from localkv.analysis.samples import Sample, resident_total
from localkv.records import PointRecord
from localkv.report.escape import plain
from localkv.report.page import Page, r2_text
from localkv.report.style import (
    COLOURS,
    INK,
    KIND_COLOURS,
    MARKERS,
    MUTED,
    context_axis,
    drawing,
    legend_below,
    save,
    tokens_text,
    unit_for,
)
from localkv.units import plural

_MAX_BARS = 24
_KIND_NAMES = {
    "weights": "weights",
    "kv": "KV cache",
    "recurrent": "recurrent state",
    "compute": "compute",
    "output": "output",
}


def draw_fit(page: Page, path: Path) -> Path | None:
    """Draw measured against predicted growth with the fitted line, and the residuals below."""
    fit, samples = page.analysis.fit, page.analysis.growth.samples
    if fit.slope is None or fit.intercept_bytes is None:
        return None
    unit, name = unit_for([s.measured for s in samples])
    rest, rest_name = unit_for([r.bytes for r in fit.residuals])
    with drawing(6.2) as figure:
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        edge = max(max(s.expected, s.measured) for s in samples) / unit * 1.05
        top.plot([0, edge], [0, edge], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        line = [
            (fit.intercept_bytes.value + fit.slope.value * x * unit) / unit for x in (0.0, edge)
        ]
        top.plot([0, edge], line, color=INK, linewidth=1.4)
        for marker, colour, chosen in _series(samples):
            residuals = [r for r in fit.residuals if r.key in {s.key for s in chosen}]
            style: Any = {"color": colour, "marker": marker, "linestyle": "none"}
            style |= {"markeredgecolor": "white", "markeredgewidth": 0.8}
            top.plot(
                [s.expected / unit for s in chosen], [s.measured / unit for s in chosen], **style
            )
            below.plot(
                [r.expected / unit for r in residuals], [r.bytes / rest for r in residuals], **style
            )
        below.axhline(0, color=INK, linewidth=1.2)
        top.set_xlim(0, edge)
        top.set_ylim(0, max(edge, *line))
        top.set_title("Growth at context creation, measured against predicted")
        top.set_ylabel(f"measured ({name})")
        below.set_ylabel(f"residual ({rest_name})")
        below.set_xlabel(f"predicted ({name})")
        below.margins(y=0.25)
        top.text(0.03, 0.93, _fit_text(page), transform=top.transAxes, va="top", linespacing=1.5)
        figure.align_ylabels()
        legend_below(figure, [*_fit_handles(), *_series_handles(samples)])
        return save(figure, path, "Measured against predicted growth, with residuals")


def _fit_text(page: Page) -> str:
    fit = page.analysis.fit
    assert fit.slope is not None
    text = f"slope {fit.slope.value:.4f}"
    if fit.slope.low is not None and fit.slope.high is not None:
        text += f"  (95 %: {fit.slope.low:.4f} to {fit.slope.high:.4f})"
    if fit.r2 is not None:
        text += f"\nR² {r2_text(fit.r2)}"
    return text


def _fit_handles() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=INK, linewidth=1.4, label="fitted line"),
        Line2D(
            [], [], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="measured = predicted"
        ),
    ]


def _series(samples: Sequence[Sample]) -> list[tuple[str, str, list[Sample]]]:
    """Return marker, colour and members: colour tells the slots, the marker the cache type."""
    slots = sorted({s.slots for s in samples})
    types = sorted({s.types for s in samples})
    found = []
    for i, count in enumerate(slots):
        for j, kind in enumerate(types):
            chosen = [s for s in samples if s.slots == count and s.types == kind]
            marker = MARKERS[(j if len(types) > 1 else i) % len(MARKERS)]
            if chosen:
                found.append((marker, COLOURS[i % len(COLOURS)], chosen))
    return found


def _series_handles(samples: Sequence[Sample]) -> list[Any]:
    from matplotlib.lines import Line2D

    several = len({s.types for s in samples}) > 1
    return [
        Line2D(
            [],
            [],
            color=colour,
            marker=marker,
            linestyle="none",
            label=plural(chosen[0].slots, "slot")
            + (f", {plain(chosen[0].types)}" if several else ""),
        )
        for marker, colour, chosen in _series(samples)
    ]


def draw_memory(page: Page, path: Path) -> Path | None:
    """Draw predicted and measured memory against context per slot, a panel per cache type."""
    usable = [r for r in page.points if points.predicted_total(r) and points.n_ctx_seq(r)]
    types = list(dict.fromkeys(points.types_text(r) for r in usable))[:4]
    if not usable or len({points.n_ctx_seq(r) for r in usable}) < 2:
        return None
    peaks = {s.key: s.measured for s in page.analysis.peak.samples}
    fixed = page.analysis.peak.fixed_bytes or 0
    unit, name = unit_for([*(points.predicted_total(r) or 0 for r in usable), *peaks.values()])
    slots = sorted({points.slots(r) for r in usable})
    rows = (len(types) + 1) // 2
    with drawing(1.4 + 3.9 * rows) as figure:
        panels = figure.subplots(rows, min(2, len(types)), sharey=True, squeeze=False).flatten()
        for panel in panels[len(types) :]:
            panel.set_visible(False)
        for panel, kind in zip(panels, types, strict=False):
            group = [r for r in usable if points.types_text(r) == kind]
            _memory_panel(panel, group, slots, peaks, fixed, unit)
            context_axis(panel, [points.n_ctx_seq(r) or 0 for r in usable])
            lead = "Memory against context per slot" if len(types) == 1 else "Memory"
            panel.set_title(f"{lead}, cache in {plain(kind)}")
            panel.set_xlabel("context per slot (tokens)")
        for panel in panels[:: min(2, len(types))]:
            panel.set_ylabel(f"memory ({name})")
        panels[0].set_ylim(bottom=0)
        legend_below(figure, _memory_handles(slots))
        return save(figure, path, "Memory against context per slot")


def _memory_panel(
    panel: Any,
    group: list[PointRecord],
    slots: list[int],
    peaks: dict[str, int],
    fixed: int,
    unit: float,
) -> None:
    weights = next((w for r in group if (w := points.predicted(r, "weights"))), None)
    if weights:
        panel.axhline(weights / unit, color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)))
    for index, count in enumerate(slots):
        line = sorted(
            (r for r in group if points.slots(r) == count), key=lambda r: points.n_ctx_seq(r) or 0
        )
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        predicted = [((resident_total(r) or 0) + fixed) / unit for r in line]
        panel.plot(*_between([points.n_ctx_seq(r) or 0 for r in line], predicted), color=colour)
        seen = [r for r in line if r.key in peaks]
        panel.plot(
            [points.n_ctx_seq(r) for r in seen],
            [peaks[r.key] / unit for r in seen],
            color=colour,
            marker=marker,
            linestyle="none",
            markeredgecolor="white",
            markeredgewidth=0.8,
        )


def _between(contexts: Sequence[float], sizes: Sequence[float]) -> tuple[Any, Any]:
    """Return the points of a line that is straight over the context, for an axis that is not."""
    import numpy as np

    if not contexts:
        return [], []
    dense = np.unique(np.concatenate([np.geomspace(contexts[0], contexts[-1], 200), contexts]))
    return dense, np.interp(dense, contexts, sizes)


def _memory_handles(slots: list[int]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            label=plural(count, "slot"),
        )
        for i, count in enumerate(slots)
    ]
    handles.append(Line2D([], [], color=INK, label="line: predicted"))
    handles.append(
        Line2D([], [], color=INK, marker="o", linestyle="none", label="marker: measured peak")
    )
    handles.append(
        Line2D([], [], color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)), label="weights")
    )
    return handles


def draw_stacked(page: Page, path: Path) -> Path | None:
    """Draw the predicted memory of every point by kind, with its measured peak."""
    known = sorted(
        (r for r in page.points if points.predicted_total(r)),
        key=lambda r: points.predicted_total(r) or 0,
    )
    if not known:
        return None
    shown = known
    if len(known) > _MAX_BARS:
        step = (len(known) - 1) / (_MAX_BARS - 1)
        shown = [known[round(i * step)] for i in range(_MAX_BARS)]
    unit, name = unit_for([points.predicted_total(r) or 0 for r in shown])
    with drawing(1.5 + 0.36 * len(shown)) as figure:
        axes = figure.subplots()
        handles = _stack(axes, page, shown, unit)
        axes.set_yticks(range(len(shown)), [_bar_label(r, shown) for r in shown])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlabel(f"memory ({name})")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        some = f", {len(shown)} of {len(known)} points" if len(shown) < len(known) else ""
        axes.set_title(f"Where the memory goes{some}")
        legend_below(figure, handles, columns=7)
        return save(figure, path, "Memory by kind, point by point")


def _stack(axes: Any, page: Page, shown: list[PointRecord], unit: float) -> list[Any]:
    """Draw the bars and the marks of the peaks, and return what the legend lists."""
    peaks = {s.key: s.measured for s in page.analysis.peak.samples}
    fixed = page.analysis.peak.fixed_bytes or 0
    kinds = [k for k in points.KINDS if any(points.predicted(r, k) for r in shown)]
    parts = [(_KIND_NAMES[k], KIND_COLOURS[k], [_part(r, k) for r in shown]) for k in kinds]
    if fixed > 0:
        parts.append(("process (measured)", "#E4E8EC", [fixed] * len(shown)))
    left = [0.0] * len(shown)
    for label, colour, values in parts:
        widths = [v / unit for v in values]
        axes.barh(range(len(shown)), widths, left=left, color=colour, height=0.7, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    seen = [(i, peaks[r.key] / unit) for i, r in enumerate(shown) if r.key in peaks]
    marks = axes.scatter(
        [x for _, x in seen],
        [i for i, _ in seen],
        marker="|",
        s=190,
        linewidths=2.2,
        color=INK,
        label="measured peak",
        zorder=3,
    )
    return [*axes.containers] + ([marks] if seen else [])


def _part(record: PointRecord, kind: str) -> int:
    """Return the predicted bytes of a kind; of the compute buffer what can be resident."""
    if kind == "compute" and record.resident_compute is not None:
        return record.resident_compute
    return points.predicted(record, kind) or 0


def _bar_label(record: PointRecord, all_records: list[PointRecord]) -> str:
    total = points.n_ctx(record)
    text = f"{tokens_text(total)} tokens" if total else "model's context"
    if len({points.slots(r) for r in all_records}) > 1:
        text += f", {plural(points.slots(record), 'slot')}"
    if len({points.types_text(r) for r in all_records}) > 1:
        text += f", {plain(points.types_text(record), 20)}"
    for switch, word in (("kv_unified", "unified"), ("swa_full", "swa_full")):
        if len({bool(r.config.get(switch)) for r in all_records}) > 1 and record.config.get(switch):
            text += f", {word}"
    return text


def draw_speed(page: Page, path: Path) -> Path | None:
    """Draw prefill and decode speed against the tokens already in each slot."""
    lines: dict[str, list[Any]] = {}
    for record in page.points:
        for entry in record.speed:
            lines.setdefault(_speed_label(record, page.points), []).append(entry)
    if not lines:
        return None
    depths = [e.depth for entries in lines.values() for e in entries]
    with drawing(4.9) as figure:
        panels = figure.subplots(1, 2)
        for panel, attribute, title in (
            (panels[0], "prefill_tokens_per_s", "Prefill (reading)"),
            (panels[1], "decode_tokens_per_s", "Decode (writing), all slots together"),
        ):
            for index, entries in enumerate(lines.values()):
                known = sorted(
                    (e.depth, getattr(e, attribute))
                    for e in entries
                    if getattr(e, attribute) is not None
                )
                panel.plot(
                    [d for d, _ in known],
                    [v for _, v in known],
                    color=COLOURS[index % len(COLOURS)],
                    marker=MARKERS[index % len(MARKERS)],
                    markeredgecolor="white",
                    markeredgewidth=0.8,
                )
            panel.set_title(title)
            panel.set_xlabel("tokens already in each slot")
            panel.set_xticks(sorted(set(depths)), [tokens_text(d) for d in sorted(set(depths))])
            panel.set_ylim(bottom=0)
        panels[0].set_ylabel("tokens per second")
        legend_below(figure, _speed_handles(list(lines)), columns=4)
        return save(figure, path, "Speed against the tokens in each slot")


def _speed_label(record: PointRecord, all_records: list[PointRecord]) -> str:
    chosen = [r for r in all_records if r.speed]
    return _bar_label(record, chosen)


def _speed_handles(labels: list[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [],
            [],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            label=label,
        )
        for i, label in enumerate(labels)
    ]
