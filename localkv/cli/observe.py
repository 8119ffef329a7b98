"""``localkv observe``: watch a live server's KV cache, requests and memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import localkv
from localkv.cli import say
from localkv.cli.observe_load import load_options, refuse_without_load, run_load
from localkv.cli.observe_memory import log_option, with_memory
from localkv.cli.options import FiniteRange, behind_options, json_option
from localkv.cli.paths import FilledPath
from localkv.cli.signals import sigterm_interrupts
from localkv.errors import EngineError

if TYPE_CHECKING:
    from localkv.cli.attach import Attached
    from localkv.cli.observe_screens import Screen
    from localkv.observe.recording import Recorder
    from localkv.snapshots import Observed, RecordingInfo


@click.command("observe", epilog="Example: localkv observe http://127.0.0.1:8080 --duration 60")
@click.argument("target", default="auto")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=FiniteRange(0.05),
    default=1.0,
    show_default=True,
    help="Between two looks.",
)
@click.option(
    "--duration",
    metavar="SECONDS",
    type=FiniteRange(0),
    help="How long to watch.  [default: until Ctrl-C]",
)
@click.option(
    "-o",
    "--output",
    type=FilledPath(path_type=Path),
    help="Record into this folder, with a report.",
)
@behind_options
@log_option
@load_options
@json_option
@sigterm_interrupts()
def command(target: str, as_json: bool, **options: Any) -> None:
    """Watch a live server: its KV cache, requests, speed and memory, beside what localkv predicts.

    TARGET is its URL; llama-server, ollama, vllm or sglang at its usual port on this machine; or
    auto, whichever of them answers. Nothing on the server is changed. An API key is read from
    LOCALKV_API_KEY. --json prints one JSON object per look. Exit code 4: the server did not answer
    at the end.

    --load makes it work: one request, ten at once, a shared prefix, then ever more and longer ones
    until it gives up; the answer says where that was.
    """
    if options["load"]:
        run_load(target, options, as_json=as_json)
        return
    refuse_without_load(click.get_current_context())
    from localkv.cli.attach import attach
    from localkv.observe.watch import is_failed

    last: Observed | None = None
    with ExitStack() as stack:
        found = attach(stack, target, model=options["model"], kv_unified=options["kv_unified"])
        info = _info(found, options["interval"])
        recorder = _recorder(stack, options["output"], info)
        screen = stack.enter_context(_screen(info, as_json))
        try:
            looks = _looks(found, info, options)
            for last in with_memory(looks, found, info.predicted, options["log"]):
                if recorder:
                    recorder.add(last)
                screen.show(last)
        except KeyboardInterrupt:
            pass  # the way to end a watch without a duration; what was seen counts
    if options["output"]:
        _report(options["output"])
    if last and is_failed(last):
        raise EngineError(
            f"{info.server} no longer answers ({last.error})",
            "what was seen is kept" if options["output"] else "-o FOLDER keeps what is seen",
        )


def _info(found: Attached, interval: float) -> RecordingInfo:
    from localkv.snapshots import RecordingInfo

    return RecordingInfo(
        localkv=localkv.__version__,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        server=found.server.source.server,
        url=found.server.url,
        interval=interval,
        pid=found.server.process.pid,
        predicted=found.predict(found.snapshot),
    )


def _recorder(stack: ExitStack, folder: Path | None, info: RecordingInfo) -> Recorder | None:
    from localkv.observe.recording import RECORDING_FILE, Recorder

    return stack.enter_context(Recorder(folder / RECORDING_FILE, info)) if folder else None


def _looks(found: Attached, info: RecordingInfo, options: dict[str, Any]) -> Iterator[Observed]:
    """Yield the looks, with what localkv predicts where that changes."""
    from localkv.observe.watch import watch

    told = info.predicted
    for seen in watch(
        found.server.source,
        found.server.process,
        interval=options["interval"],
        duration=options["duration"],
    ):
        now = found.predict(seen.snapshot) if seen.snapshot else told
        yield seen if now == told else replace(seen, predicted=now)
        told = now


def _screen(info: RecordingInfo, as_json: bool) -> Screen:
    from localkv.cli.observe_screens import JsonScreen, LiveScreen, LogScreen

    if as_json:
        return JsonScreen(info)
    # Without colour the page is the same; a dumb terminal cannot redraw one.
    live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    return LiveScreen(info) if live else LogScreen(info)


def _report(folder: Path) -> None:
    from localkv.observe.recording import RECORDING_FILE, read_recording
    from localkv.report.observation import write_observation

    recording = read_recording(folder / RECORDING_FILE)
    say(f"report: {write_observation(folder, recording.info, recording.seen)}")
