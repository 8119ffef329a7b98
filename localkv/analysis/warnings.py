"""What a person should know before trusting a run: each with a likely cause and what to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from localkv.analysis import points
from localkv.analysis.answers import Answers
from localkv.analysis.fit import Fit
from localkv.analysis.peak import Peak
from localkv.analysis.samples import PAGE, Samples
from localkv.records import PointRecord, RunInfo
from localkv.units import MIB, format_bytes, plural

#: A slope within this of 1 is right, however small its interval is.
SLOPE_TOLERANCE = 0.005
#: A fixed cost of a context above this is worth a word.
LARGE_INTERCEPT = 8 * MIB
#: A peak further than this from the prediction is worth a word.
PEAK_TOLERANCE = 0.02
#: What a closed process may keep beyond its baseline before it is worth a word.
KEPT_FLOOR = 64 * MIB
#: The engine prints MiB with two decimals: half of the last one, per figure.
PRINTED_STEP = int(0.005 * MIB) + 1
_NAMED = 4


@dataclass(frozen=True)
class RunWarning:
    """One finding: ``code`` for programs; ``text``, ``cause`` and ``remedy`` for people.

    ``severity`` is warning or note. The texts may quote the engine or a file: escape them.
    """

    code: str
    text: str
    cause: str
    remedy: str
    severity: str = "warning"

    def to_dict(self) -> dict[str, Any]:
        """Return the warning as plain JSON values."""
        return asdict(self)


def find_warnings(
    run: RunInfo,
    records: Sequence[PointRecord],
    growth: Samples,
    fit: Fit,
    peak: Peak,
    answers: Answers,
) -> tuple[RunWarning, ...]:
    """Return the warnings of a run, those that change its answers first."""
    found = [
        *_interrupted(run, records),
        *_outcomes(records),
        *_slope(fit),
        *_outliers(fit, growth),
        *_intercept(fit, records),
        *_peak(peak),
        *_engine_differs(records),
        *_not_returned(records),
        *_machine(run, records),
        *_rounding(records),
        *_over_weights(records),
        *_swa_full(records),
        *_unknown_rule(run),
    ]
    return tuple(sorted(found, key=lambda w: w.severity == "note"))


def _names(records: Sequence[PointRecord]) -> str:
    names = [points.label(r) for r in records]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def _interrupted(run: RunInfo, records: Sequence[PointRecord]) -> Iterator[RunWarning]:
    if 0 <= len(records) < run.points:
        yield RunWarning(
            "interrupted",
            f"{len(records)} of {plural(run.points, 'planned run')} made",
            "the sweep was stopped before its end",
            "finish it with localkv sweep --resume -o and this directory: it measures only "
            "what is missing",
        )


_OUTCOMES = {
    "skipped": (
        "their predicted need exceeds the memory that was available",
        "close other programs, or lower -c, -np or the cache type; --force tries them anyway",
    ),
    "oom": (
        "the engine could not allocate a buffer",
        "lower -c or -np, or use -ctk q8_0 -ctv q8_0",
    ),
    "crashed": (
        "a signal ended the worker: out of memory, an instruction the CPU lacks, or an engine bug",
        "look at the log lines of the point in results.jsonl; run it alone",
    ),
    "timeout": (
        "the point took longer than the limit",
        "raise --timeout, or measure fewer tokens per point",
    ),
    "failed": (
        "the engine refused the combination",
        "its message says why; see the list of failed points",
    ),
}


def _outcomes(records: Sequence[PointRecord]) -> Iterator[RunWarning]:
    for outcome, (cause, remedy) in _OUTCOMES.items():
        group = [r for r in records if r.outcome == outcome and not points.is_impossible(r)]
        if group:
            runs = plural(len(group), "run")
            yield RunWarning(outcome, f"{runs} {outcome}: {_names(group)}", cause, remedy)


def _slope(fit: Fit) -> Iterator[RunWarning]:
    slope = fit.slope
    if slope is None or abs(slope.value - 1) <= SLOPE_TOLERANCE:
        return
    if slope.low is not None and slope.high is not None and slope.low <= 1 <= slope.high:
        yield RunWarning(
            "slope-uncertain",
            f"the slope is {slope.value:.4f}, and the points do not say better than "
            f"{slope.low:.4f} to {slope.high:.4f}",
            "few points, or contexts so small that the allocator's steps count",
            "measure larger contexts, or more of them",
            "note",
        )
        return
    more = "more" if slope.value > 1 else "less"
    yield RunWarning(
        "slope",
        f"memory grows by {abs(slope.value - 1):.2%} {more} than the formula says "
        f"(slope {slope.value:.4f})",
        "a rule of this architecture is not as localkv knows it, something else is allocated "
        "per token, or another program's memory was counted",
        "compare the KV size in the engine's log with the prediction; run again on an idle machine",
    )


def _outliers(fit: Fit, growth: Samples) -> Iterator[RunWarning]:
    for r in fit.outliers:
        yield RunWarning(
            "outlier",
            f"{r.label} is {format_bytes(r.bytes)} off the line; it stays in the fit, whose "
            f"robust slope is {fit.robust_slope or 0:.4f}",
            "another allocation fell into the same phase, or this point follows another rule",
            "repeat it with --repeats 3: if it stays, the formula is wrong there",
        )
    for s in growth.samples:
        if s.repeats > 1 and s.spread > max(PAGE, s.measured // 100):
            yield RunWarning(
                "spread",
                f"{s.label}: {s.repeats} repeats differ by {format_bytes(s.spread)}",
                "the machine was busy or swapping",
                "run again on an idle machine",
            )


def _intercept(fit: Fit, records: Sequence[PointRecord]) -> Iterator[RunWarning]:
    fixed = fit.intercept_bytes
    if fixed is None or abs(fixed.value) <= LARGE_INTERCEPT:
        return
    cost = format_bytes(round(fixed.value))
    if any(points.loaded_at_once(record) for record in records):
        what = f"the server holds {cost} beside weights and context, whatever the context's size"
        cause = "the program itself, its vocabulary and its threads"
    else:
        what = f"a context costs {cost} whatever its size"
        cause = "the driver's context, a large graph, or the engine's work space"
    yield RunWarning("intercept", what, cause, "count it once per process when planning", "note")


def _peak(peak: Peak) -> Iterator[RunWarning]:
    # Without the allowance for what every process holds besides, a difference says nothing.
    if peak.fixed_bytes is not None and peak.worst is not None and peak.worst > PEAK_TOLERANCE:
        worst = max(peak.samples, key=lambda s: abs(s.error))
        over = "above" if worst.error > 0 else "below"
        yield RunWarning(
            "peak",
            f"{worst.label} peaked {abs(worst.error):.1%} {over} the prediction "
            f"({format_bytes(worst.measured)} against {format_bytes(worst.expected)})",
            "weights not all touched (below), or temporary copies while loading (above)",
            "look at the phases of the point in results.jsonl",
        )


def _engine_differs(records: Sequence[PointRecord]) -> Iterator[RunWarning]:
    for kind, what, read in (
        ("kv", "KV cache", _engine_kv),
        ("weights", "weights", _engine_weights),
    ):
        differing = []
        for record in records:
            told, expected = read(record), points.predicted(record, kind)
            if told is not None and expected is not None:
                size, figures = told
                if abs(size - expected) > figures * PRINTED_STEP:
                    differing.append(
                        f"{points.label(record)}: {format_bytes(size)} in its log, "
                        f"{format_bytes(expected)} predicted"
                    )
        if differing:
            more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
            yield RunWarning(
                f"engine-differs-{kind}",
                f"the engine gives another size of the {what} than the prediction "
                f"({differing[0]}{more})",
                "another engine version, or a rule that localkv does not know",
                "trust the engine's figure, and report the model's architecture to localkv",
            )


def _engine_kv(record: PointRecord) -> tuple[int, int] | None:
    """Return the KV bytes of the engine's log and over how many printed figures they are summed."""
    caches = record.engine.get("caches")
    if not isinstance(caches, list | tuple) or not caches:
        return None
    sizes = [points.dig_int(cache, "bytes") for cache in caches]
    known = [size for size in sizes if size is not None]
    return (sum(known), 2 * len(known)) if len(known) == len(sizes) else None


def _engine_weights(record: PointRecord) -> tuple[int, int] | None:
    buffers = record.engine.get("model_buffers")
    if not isinstance(buffers, list | tuple) or not buffers:
        return None
    return sum(points.dig_int(buffer, "bytes") or 0 for buffer in buffers), 2 * len(buffers)


def _not_returned(records: Sequence[PointRecord]) -> Iterator[RunWarning]:
    kept = []
    for record in records:
        first, last = record.phase("baseline"), record.phase("closed")
        if first is None or last is None:
            continue
        before, after = first.value("rss_anon"), last.value("rss_anon")
        total = points.predicted_total(record)
        if before is None or after is None or total is None:
            continue
        if after - before > max(KEPT_FLOOR, total // 5):
            kept.append(after - before)
    if kept:
        yield RunWarning(
            "not-returned",
            f"after closing the model {format_bytes(round(median(kept)))} stayed with the process "
            f"in {plural(len(kept), 'run')}",
            "the allocator keeps freed memory, or something leaks",
            "compare the phases baseline and closed; a server that reloads models may grow",
        )


def _machine(run: RunInfo, records: Sequence[PointRecord]) -> Iterator[RunWarning]:
    host = points.dig(run.environment, "host")
    load, cpus = points.dig(host, "load"), points.dig_int(host, "cpus_usable")
    if isinstance(load, list | tuple) and load and cpus and load[0] > cpus:
        yield RunWarning(
            "busy",
            f"the machine was busy: load {load[0]:.1f} on {plural(cpus, 'CPU')}",
            "other programs were running",
            "memory figures hold; times and speeds do not: measure those on an idle machine",
            "note",
        )
    if any(_swapped(r) for r in records):
        yield RunWarning(
            "swapped",
            "part of a measured process was swapped out",
            "the machine ran out of memory",
            "its figures are too low: close other programs and run again",
        )


def _swapped(record: PointRecord) -> bool:
    return any((phase.value("swap") or 0) > 0 for phase in record.phases)


def _rounding(records: Sequence[PointRecord]) -> Iterator[RunWarning]:
    grown = {
        (asked, got, points.slots(r))
        for r in records
        if (asked := points.n_ctx_asked(r)) and (got := points.n_ctx(r)) and got != asked
    }
    if grown:
        shown = [f"{a} over {plural(n, 'slot')} gives {g}" for a, g, n in sorted(grown)]
        more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
        yield RunWarning(
            "rounding",
            f"the engine rounds contexts up: {'; '.join(shown[:_NAMED])}{more}",
            "each slot gets a multiple of 256 tokens",
            "choose a context that is a multiple of 256 times the slots",
            "note",
        )


def _over_weights(records: Sequence[PointRecord]) -> Iterator[RunWarning]:
    over = [
        r
        for r in points.one_per_point(records)
        if (points.predicted(r, "weights") or 0) > 0
        and (points.predicted(r, "kv") or 0) > (points.predicted(r, "weights") or 0)
    ]
    if over:
        yield RunWarning(
            "kv-exceeds-weights",
            f"the KV cache is larger than the model itself at "
            f"{plural(len(over), 'point')}: {_names(over)}",
            "long contexts: the cache grows with every token, the weights do not",
            "-ctk q8_0 -ctv q8_0 nearly halves it",
            "note",
        )


def _swa_full(records: Sequence[PointRecord]) -> Iterator[RunWarning]:
    chosen = points.one_per_point(records)
    saved = []
    for record in chosen:
        if not record.config.get("swa_full"):
            continue
        twin = {**record.config, "swa_full": False}
        other = next((r for r in chosen if r.config == twin), None)
        full, windowed = points.predicted(record, "kv"), other and points.predicted(other, "kv")
        if full and windowed and full > windowed:
            saved.append((full - windowed, record))
    if saved:
        most, record = max(saved, key=lambda pair: pair[0])
        yield RunWarning(
            "swa-full",
            f"swa_full costs {format_bytes(most)} at {points.label(record)}",
            "sliding-window layers keep the whole context instead of their window",
            "leave --swa-full away (llama-cpp-python has it on: pass swa_full=False)",
            "note",
        )


def _unknown_rule(run: RunInfo) -> Iterator[RunWarning]:
    if run.model.get("rule") == "none":
        yield RunWarning(
            "no-rule",
            f"localkv has no rule for the architecture {run.model.get('architecture')}",
            "the predictions are the engine's own dry run, not a formula",
            "the fit then compares the engine's plan with what was measured",
            "note",
        )
