"""``localkv observe --load``: ask a server to generate until it gives up, and say where it did."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

import localkv
from localkv.cli import say
from localkv.cli.options import FiniteRange
from localkv.errors import EngineError, Interrupted, UsageError

if TYPE_CHECKING:
    from localkv.cli.attach import Attached
    from localkv.observe.load_run import LoadRun
    from localkv.observe.recording import Recorder
    from localkv.observe.targets import Server
    from localkv.snapshots import LoadStep, RecordingInfo, Snapshot

F = TypeVar("F", bound=Callable[..., Any])

#: As ``analysis.loaded.PARTS``, which is not loaded before it is needed.
_PARTS = ("scenarios", "prefix", "concurrency", "context")
_OPTIONS = (
    click.option("--load", is_flag=True, help="Send it requests, until it gives up."),
    click.option(
        "--only",
        type=click.Choice(_PARTS),
        multiple=True,
        help="With --load: only this part; repeat for more.  [default: all]",
    ),
    click.option(
        "--generate",
        metavar="N",
        type=click.IntRange(1, 4096),
        default=32,
        show_default=True,
        help="With --load: tokens that each request generates.",
    ),
    click.option(
        "--max-requests",
        metavar="N",
        type=click.IntRange(1, 10_000),
        default=300,
        show_default=True,
        help="With --load: no more requests than this.",
    ),
    click.option(
        "--max-seconds",
        metavar="SECONDS",
        type=FiniteRange(1, 86_400),
        default=300,
        show_default=True,
        help="With --load: no longer than this.",
    ),
    click.option(
        "--price",
        type=FiniteRange(0),
        metavar="PRICE",
        help="With --load: of a million prompt tokens, to say what a cached prefix saves.",
    ),
    click.option(
        "--discount",
        metavar="PERCENT",
        type=FiniteRange(0, 100),
        default=90,
        show_default=True,
        help="With --load: how much cheaper cached prompt tokens are.",
    ),
    click.option(
        "--yes-remote", is_flag=True, help="With --load: load a server on another machine as well."
    ),
)


#: The options that mean nothing without --load.
_FOR_LOAD = (
    "only",
    "generate",
    "max_requests",
    "max_seconds",
    "price",
    "discount",
    "yes_remote",
)


def load_options(function: F) -> F:
    """Add the options of a load to ``observe``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def refuse_without_load(ctx: click.Context) -> None:
    """Refuse the options of a load in a command that has none.

    Raises:
        UsageError: one was given.
    """
    for name in _FOR_LOAD:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} is for --load", "add --load")


def run_load(target: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Load the server of ``target`` and print what it came to.

    Raises:
        UsageError: the server is on another machine, or the recording is there already.
        ModelError: the model that was named cannot be read.
        EngineError: it does not answer, or stopped answering; what was measured is printed first.
        Interrupted: Ctrl-C; what was measured is printed first.
    """
    from localkv.observe.load_recording import LOAD_FILE
    from localkv.observe.recording import Recorder

    with ExitStack() as stack:
        info, run = _prepare(stack, target, options)
        folder: Path | None = options["output"]
        recorder = None
        if folder is not None:
            recorder = stack.enter_context(Recorder(folder / LOAD_FILE, info))
        steps: list[LoadStep] = []
        failed = _measure(run, info, steps, recorder)
        ended = run.ended or (failed.message if failed else "")
        if recorder is not None:
            recorder.end(ended)
    _show(info, steps, ended, as_json=as_json)
    if folder is not None:
        from localkv.report.load import write_load

        say(f"report: {write_load(folder, info, steps, ended)}")
    if failed:
        raise failed


def _prepare(
    stack: ExitStack, target: str, options: dict[str, Any]
) -> tuple[RecordingInfo, LoadRun]:
    """Attach to the server, have Ollama load its model, and return what is to be recorded."""
    from localkv.analysis.loaded import PARTS
    from localkv.cli.attach import attach
    from localkv.observe.bench import bench_for, load_model, local_only, model_to_load
    from localkv.observe.load_plan import settings
    from localkv.observe.load_run import Budget, LoadRun

    model = options["model"]
    found = attach(stack, target, model=model, kv_unified=options["kv_unified"], loads=True)
    server, snapshot = found.server, found.snapshot
    local_only(server.url, options["yes_remote"])
    if snapshot.server == "ollama" and (model or not snapshot.loaded):
        load_model(server.url, model_to_load(snapshot, model))
        snapshot = server.source.scrape()
    bench, limits = bench_for(stack, server, snapshot, model=model, seed=time.time_ns())
    asked = {name: options[name] for name in ("generate", "price", "discount")}
    info = _info(server, _predicted(found, snapshot), settings(limits, asked))
    run = LoadRun(
        bench,
        limits,
        Budget(options["max_requests"], options["max_seconds"]),
        options["generate"],
        options["only"] or PARTS,
        tell=lambda task: say(f"{task.name}: {task.requests} x {task.prompt_tokens:,} tokens"),
    )
    return info, run


def _predicted(found: Attached, snapshot: Snapshot) -> dict[str, Any]:
    """Return what localkv predicts; the file that the server has open says more than a name."""
    from localkv.observe.behind import Predictor

    told = Predictor(found.server.process)(snapshot)
    return found.predict(snapshot) if "why" in told else told


def _info(server: Server, predicted: dict[str, Any], load: dict[str, Any]) -> RecordingInfo:
    from localkv.observe.load import LOOK
    from localkv.observe.load_recording import KIND
    from localkv.snapshots import RecordingInfo

    return RecordingInfo(
        kind=KIND,
        localkv=localkv.__version__,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        server=server.source.server,
        url=server.url,
        interval=LOOK,
        pid=server.process.pid,
        predicted=predicted,
        load=load,
    )


def _measure(
    run: LoadRun, info: RecordingInfo, steps: list[LoadStep], recorder: Recorder | None
) -> EngineError | Interrupted | None:
    """Run the load into ``steps``; return what broke it off, None when it came to its end."""
    from localkv.analysis.loaded import summarise_step
    from localkv.cli.load_lines import step_line

    try:
        for step in run.steps():
            steps.append(step)
            if recorder is not None:
                recorder.add(step)
            say(step_line(summarise_step(step, info.server)))
    except KeyboardInterrupt:
        return Interrupted("interrupted", "what was measured until then is kept")
    except EngineError as error:
        return error
    return None


def _show(info: RecordingInfo, steps: Sequence[LoadStep], ended: str, *, as_json: bool) -> None:
    from localkv.analysis.loaded import summarise_load
    from localkv.cli.load_lines import page
    from localkv.cli.terminal import print_json, show

    load = summarise_load(info, steps, ended)
    if as_json:
        print_json({**info.to_dict(), **load.to_dict()})
    else:
        show(page(info, load))
    sys.stdout.flush()
