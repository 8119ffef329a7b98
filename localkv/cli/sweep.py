"""``localkv sweep``: measure the grid, fit it, report it."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import click

from localkv.cli import say
from localkv.cli.backend import with_server
from localkv.cli.options import INT_LIST, FiniteRange, ValueList, complete_model, json_option
from localkv.cli.paths import FilledPath
from localkv.cli.progress import download_progress, duration, planning_progress, sweep_progress
from localkv.cli.report import render
from localkv.cli.signals import sigterm_interrupts
from localkv.cli.terminal import print_json
from localkv.errors import EngineError, Interrupted, LocalkvError, UsageError
from localkv.gguf.demo import DEMOS
from localkv.records import RunInfo
from localkv.report.escape import escape_terminal, safe_filename
from localkv.sweep.plan import (
    BACKENDS,
    DEFAULT_DEPTHS,
    SweepPlan,
    merge,
    parse_gpu_layers,
    read_plan,
)
from localkv.sweep.runner import guess_seconds, run_sweep
from localkv.sweep.session import Session, make_session, model_facts, remaining
from localkv.sweep.store import RunStore
from localkv.units import format_bytes, parse_word_values, plural

_MOST_NOTES = 6

_WORDS = ValueList("types", parse_word_values)
_LAYERS = ValueList("layers", parse_gpu_layers)


@click.command(
    "sweep",
    epilog="Example: localkv sweep -m model.gguf -c 2048-16384*2 -np 1,2,4 -ctk f16,q8_0",
)
@click.argument("plan", required=False, type=FilledPath(), metavar="[PLAN.toml]")
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    shell_complete=complete_model,
    help="The model to measure.  [default: demo]",
)
@click.option(
    "-c",
    "--ctx-size",
    type=INT_LIST,
    help="Contexts of all slots together: 1024-8192*2 or 4096,8192.",
)
@click.option("--ctx-per-slot", type=INT_LIST, help="Contexts per slot, instead of totals.")
@click.option("-np", "--parallel", type=INT_LIST, help="Slots: 1,2,4.")
@click.option("-ctk", "--cache-type-k", type=_WORDS, help="Types of the K cache: f16,q8_0.")
@click.option("-ctv", "--cache-type-v", type=_WORDS, help="Types of the V cache.")
@click.option("--cache-type", type=_WORDS, help="Types of K and V together.")
@click.option("-b", "--batch-size", type=INT_LIST, help="Logical batch sizes.")
@click.option("-ub", "--ubatch-size", type=INT_LIST, help="Physical batch sizes.")
@click.option("-ngl", "--gpu-layers", type=_LAYERS, help="Layers on the GPUs: 0,16,all.")
@click.option("-fa", "--flash-attn", type=_WORDS, help="Flash attention: auto,on,off.")
@click.option("--kv-unified/--no-kv-unified", default=None, help="One cache that the slots share.")
@click.option(
    "--swa-full/--no-swa-full", default=None, help="Sliding layers keep all of the context."
)
@click.option(
    "-t",
    "--threads",
    metavar="N",
    type=click.IntRange(0, 512),
    help="Threads; 0: one per physical core.",
)
@click.option("--repeats", metavar="N", type=click.IntRange(1, 1000), help="Runs of each point.")
@click.option("--seed", metavar="N", type=click.IntRange(0), help="Seed of the shuffled order.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=FiniteRange(0, min_open=True),
    help="How long one run may take.",
)
@click.option("--speed", is_flag=True, help="Measure prefill and decode speed at several depths.")
@click.option("--speed-depths", type=INT_LIST, help="The depths, in tokens per slot.")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    help=f"What measures: the engine by itself, or a server.  [default: {BACKENDS[0]}]",
)
@click.option("--server-bin", metavar="PROGRAM", help="The server's program, started and ended.")
@click.option("--server-url", metavar="URL", help="A server that runs; it stays as it was.")
@click.option(
    "--resume", is_flag=True, help="Go on with an interrupted sweep, by default the latest."
)
@click.option("--force", is_flag=True, help="Also try points that should not fit in memory.")
@click.option(
    "--dry-run", is_flag=True, help="Print the points, what each needs and the time; stop."
)
@click.option(
    "-o",
    "--output",
    type=FilledPath(path_type=Path),
    help="Folder of the run.  [default: reports/MODEL/TIME]",
)
@json_option
@sigterm_interrupts()
def command(
    plan: str | None,
    resume: bool,
    force: bool,
    dry_run: bool,
    output: Path | None,
    as_json: bool,
    speed: bool,
    **options: Any,
) -> int:
    """Measure a model's real memory over a grid of contexts and slots, and write a report.

    Every point of the grid is a fresh process that loads the model, creates the context and
    decodes one full batch in every slot. What that took is compared with the prediction and
    fitted. Without options: the demo model, 12 points, two minutes.

    VALUES are 1,2,4 or 1024-8192*2 (doubling) or 4096-16384+4096 (in steps). PLAN.toml holds the
    same settings as the options; options win.
    """
    began = None
    if resume:
        store = RunStore(output or _latest_run())
        began = store.read_info()
        _refuse_new_settings(plan, options, speed)
        if not began.plan:
            raise UsageError(
                f"{store.directory} does not say what to measure: its run.json holds no plan",
                "start a run of its own with another -o",
            )
    chosen = SweepPlan.from_dict(began.plan) if began else _plan_from(plan, options, speed)
    with download_progress() as progress:
        session = make_session(chosen, progress=progress, planned_share=planning_progress())
    if dry_run:
        _print_points(session, as_json=as_json)
        return 0
    if began:
        _refuse_other_model(session, began)
    else:
        store = RunStore(output or _new_run_directory(session))
    with store.alone():
        if not began:
            _refuse_existing(store)
        return _run(session, store, resume=resume, force=force, as_json=as_json)


def _plan_from(plan: str | None, options: dict[str, Any], speed: bool) -> SweepPlan:
    given = {name: value for name, value in options.items() if value is not None}
    if "cache_type" in given and given.keys() & {"cache_type_k", "cache_type_v"}:
        raise UsageError("--cache-type sets K and V together", "leave it, or -ctk and -ctv, away")
    for name in ("model", "server_bin", "server_url"):
        if given.get(name) == "":
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is empty", "give it a value, or leave it away")
    for flag in ("kv_unified", "swa_full"):
        if flag in given:
            given[flag] = (given[flag],)
    if speed and "speed_depths" not in given:
        given["speed_depths"] = DEFAULT_DEPTHS
    settings: dict[str, Any] = {}
    if plan is not None:
        if plan.endswith(".gguf") or plan in DEMOS:
            raise UsageError(f"{plan} is a model, not a plan", f"name it with -m {plan}")
        settings = read_plan(Path(plan))
    return with_server(merge(settings, given), model_named="model" in {**settings, **given})


def _refuse_new_settings(plan: str | None, options: dict[str, Any], speed: bool) -> None:
    given = [name for name, value in options.items() if value is not None]
    if plan or given or speed:
        raise UsageError(
            "--resume takes the settings of the run that it takes up",
            "leave the others away: localkv sweep --resume -o DIR",
        )


def _latest_run() -> Path:
    runs = sorted(Path("reports").glob("*/*/run.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UsageError("there is no run to resume under reports/", "name it with -o DIR")
    return runs[-1].parent


def _new_run_directory(session: Session) -> Path:
    name = safe_filename(session.shape.name or Path(session.model.path).stem)
    return Path("reports") / name / time.strftime("%Y%m%d-%H%M%S")


def _refuse_other_model(session: Session, info: RunInfo) -> None:
    """Refuse to go on with a run when its model's file is not the one that it began with."""
    began, now = info.model, model_facts(session.shape)
    for fact in ("name", "architecture", "file_bytes", "weights_bytes", "n_layer", "n_params"):
        if began.get(fact) != now[fact]:
            raise UsageError(
                f"the model has changed since this run began: {fact} was {began.get(fact)!r}, "
                f"is {now[fact]!r}",
                "put the old file back, or start a run of its own with another -o",
            )


def _refuse_existing(store: RunStore) -> None:
    if store.exists():
        raise UsageError(
            f"{store.directory} already holds a run",
            f"add --resume to finish it, or name another directory: "
            f"localkv sweep --resume -o {shlex.quote(str(store.directory))}",
        )


def _run(session: Session, store: RunStore, *, resume: bool, force: bool, as_json: bool) -> int:
    store.prepare(len(session.order))
    if resume:
        store.mend()
    else:
        store.create(session.info(["localkv", *sys.argv[1:]], time.strftime("%Y-%m-%dT%H:%M:%S%z")))
    pairs = remaining(session, store)
    _announce(session, store, len(pairs))
    try:
        with sweep_progress(len(pairs)) as observe:
            run_sweep(session, store, pairs, force=force, observe=observe)
    except KeyboardInterrupt:
        command = f"localkv sweep --resume -o {shlex.quote(str(store.directory))}"
        raise Interrupted("stopped; what was measured is kept", f"go on with: {command}") from None
    return _finish(store, as_json=as_json)


def _announce(session: Session, store: RunStore, runs: int) -> None:
    for note in _point_notes(session):
        say(f"note: {note}")
    if session.gpu_reason:
        say(f"No GPU takes part, so memory is measured in RAM: {session.gpu_reason}.")
    name = escape_terminal(session.shape.name)
    say(f"{plural(runs, 'run')} of {name}; results go to {store.directory}")
    for key, why in session.refusals.items():
        say(f"note: no plan from the engine for {key}: {why}")
    for note in session.served.notes if session.served else ():
        say(f"note: {note}")
    for line in _impossible_lines(session):
        say(f"note: {line}")


def _impossible_lines(session: Session) -> list[str]:
    """Return a sentence for each reason why the engine takes some of the points never."""
    reasons = dict.fromkeys(session.impossible.values())
    counts = list(session.impossible.values())
    return [f"{counts.count(why)} of the points skipped: {why}" for why in reasons]


def _point_notes(session: Session) -> list[str]:
    """Return what is worth knowing of the points before they run, each sentence once."""
    notes = dict.fromkeys(
        note for estimate in session.estimates.values() for note in estimate.notes
    )
    told = [note for note in notes if not note.startswith("assumed: ")]
    if 0 in session.plan.ctx_size:
        told.insert(0, f"n_ctx 0 is the training context, {session.shape.n_ctx_train} tokens")
    if len(told) <= _MOST_NOTES:
        return told
    return [*told[:_MOST_NOTES], f"and {len(told) - _MOST_NOTES} more; see the report"]


def _finish(store: RunStore, *, as_json: bool) -> int:
    """Write the report, print the answer, and return the exit code it stands for."""
    records = store.read_results().records
    render(store, as_json=as_json)
    outcomes = {record.outcome for record in records}
    if "ok" in outcomes:
        return 0
    reason = next((record.reason for record in records if record.reason), None)
    say(f"localkv: no point could be measured: {reason or 'no reason recorded'}")
    return (EngineError if outcomes & {"failed", "crashed"} else LocalkvError).exit_code


def _print_points(session: Session, *, as_json: bool) -> None:
    rows = [
        {
            "key": point.key,
            "n_ctx": session.estimates[point.key].config["n_ctx"],
            "n_ctx_per_slot": session.estimates[point.key].config["n_ctx_per_slot"],
            "n_seq_max": point.config.n_seq_max,
            "cache_type_k": point.config.cache_type_k,
            "cache_type_v": point.config.cache_type_v,
            "kv_bytes": session.estimates[point.key].kv_bytes,
            "total_bytes": session.estimates[point.key].total_bytes,
            "seconds": guess_seconds(session, point),
        }
        for point in session.points
    ]
    repeats = session.plan.repeats
    seconds = repeats * sum(guess_seconds(session, point) for point in session.points)
    if as_json:
        skipped = [{"key": key, "reason": why} for key, why in session.impossible.items()]
        print_json(
            {
                "schema": 1,
                "points": rows,
                "skipped": skipped,
                "repeats": repeats,
                "seconds": seconds,
            }
        )
        return
    runs = f"{plural(len(rows), 'point')}, {plural(repeats, 'run')} of each"
    print(f"{escape_terminal(session.shape.name)}: {runs}")
    print(f"{'n_ctx':>8} {'per slot':>8} {'slots':>5} {'K/V':>11} {'KV':>11} {'total':>11} about")
    for row in rows:
        types = f"{row['cache_type_k']}/{row['cache_type_v']}"
        print(
            f"{row['n_ctx']:>8} {row['n_ctx_per_slot']:>8} {row['n_seq_max']:>5} {types:>11} "
            f"{format_bytes(row['kv_bytes']):>11} {format_bytes(row['total_bytes']):>11} "
            f"{duration(row['seconds'])}"
        )
    for note in (*_impossible_lines(session), *_point_notes(session)):
        print(f"note: {escape_terminal(note, 400)}")
    print(f"about {duration(seconds)} in all; nothing was run")
