"""``localkv compare``: two sweeps side by side."""

from __future__ import annotations

import re
from pathlib import Path

import click

from localkv.analysis.compare import MIN_EFFECT, Comparison, Run, compare_runs
from localkv.cli import say
from localkv.cli.options import complete_run, json_option
from localkv.cli.paths import FilledPath
from localkv.cli.terminal import to_json
from localkv.errors import UsageError
from localkv.report.compare import render_comparison
from localkv.report.escape import escape_terminal as safe
from localkv.sweep.store import RunStore


@click.command("compare", epilog="Example: localkv compare reports/example reports/example")
@click.argument("before", type=FilledPath(path_type=Path), shell_complete=complete_run)
@click.argument("after", type=FilledPath(path_type=Path), shell_complete=complete_run)
@click.option(
    "--min-effect",
    metavar="SHARE",
    help=f"Ignore differences below this: 2% or 0.02.  [default: {MIN_EFFECT:.0%}]",
)
@click.option(
    "--fail-on-growth",
    is_flag=True,
    help="Exit code 1 when memory grew, or a point is no longer measured.",
)
@click.option("-o", "--output", type=FilledPath(path_type=Path), help="Write the page here.")
@json_option
def command(
    before: Path,
    after: Path,
    min_effect: str | None,
    fail_on_growth: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare the sweep AFTER with the sweep BEFORE, both directories of runs.

    Points are matched by their settings. First comes what differs in model, machine, engine and
    software; then every figure beside its spread: the range of the repeats, or how far the points
    lie off their fit. The page is Markdown. Runs that were interrupted, or made by an older
    version of localkv, are compared as far as they go.
    """
    share = MIN_EFFECT if min_effect is None else _share(min_effect)
    found = compare_runs(_read(before), _read(after), min_effect=share)
    text = to_json(found.to_dict()) + "\n" if as_json else render_comparison(found)
    if output is None:
        print(text, end="")
    else:
        _write(output, text)
    reasons = _reasons(found)
    if fail_on_growth and reasons:
        say(f"localkv: {safe('; '.join(reasons), 600)}")
        raise SystemExit(1)


def _share(text: str) -> float:
    """Return the share that ``text`` names: ``2%`` or ``0.02``."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,9})?)\s*(%?)\s*", text)
    if not match:
        raise UsageError(f"--min-effect {text!r} is no share", "write 2% or 0.02")
    return float(match[1]) / (100 if match[2] else 1)


def _read(directory: Path) -> Run:
    store = RunStore(directory)
    info, results = store.read_info(), store.read_results()
    if results.note:
        say(f"note: {store.results}: {results.note}")
    return Run(str(directory), info, results.records)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", "name another file with -o"
        ) from None


def _reasons(found: Comparison) -> list[str]:
    """Return why ``--fail-on-growth`` says no; what could not be compared is no success either."""
    if not found.matched:
        return ["nothing was measured in both runs, so growth cannot be ruled out"]
    reasons = []
    grown = [s.figure for s in found.summaries if s.source != "speed" and s.counts.get("grew")]
    if grown:
        reasons.append(f"memory grew: {', '.join(grown)}")
    if found.lost:
        points = ", ".join(f"{point.label} ({point.outcome_after})" for point in found.lost[:4])
        reasons.append(f"not measured any more: {points}")
    return reasons
