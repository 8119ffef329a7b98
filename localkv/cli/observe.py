"""``localkv observe``: watch a live server's KV cache, requests and memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import localkv
from localkv.cli.options import json_option
from localkv.cli.terminal import coloured, print_json, show
from localkv.errors import EngineError
from localkv.report.escape import escape_terminal

if TYPE_CHECKING:
    from localkv.observe.process import ServerProcess
    from localkv.observe.sources import Source
    from localkv.snapshots import Observed, RecordingInfo

RECORDING_FILE = "observation.jsonl"


@click.command("observe", epilog="Example: localkv observe http://127.0.0.1:8080 --duration 60")
@click.argument("target", default="auto")
@click.option(
    "--interval", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Seconds."
)
@click.option("--duration", type=click.FloatRange(0), help="Seconds to watch.  [default: no end]")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Record there, and write a report."
)
@click.option("--model", help="The model behind the server, where its own path is not readable.")
@click.option(
    "--kv-unified/--no-kv-unified",
    default=None,
    help="llama-server: whether slots share one cache.  [default: as its process was started]",
)
@json_option
def command(target: str, as_json: bool, **options: Any) -> None:
    """Watch a live server: TARGET is its URL, llama-server, ollama, vllm, sglang, or auto.

    Cache use against capacity, requests running and waiting, preemptions, speed and the memory of
    the server's processes, beside what localkv predicts. Nothing on the server is changed. --json
    prints one JSON object per look. An API key is read from LOCALKV_API_KEY.
    """
    with ExitStack() as stack:
        source, process, info = _attach(stack, target, options)
        looks = _looks(source, process, options)
        seen = _recorded(stack, looks, info, options["output"])
        show_looks = _json if as_json else _live if coloured() else _log
        answered = show_looks(seen, info)
    if options["output"]:
        _report(options["output"])
    if not answered:
        raise EngineError(
            f"{info.url} stopped answering",
            "what was seen until then is kept"
            if options["output"]
            else "-o FOLDER records what is seen",
        )


def _attach(
    stack: ExitStack, target: str, options: dict[str, Any]
) -> tuple[Source, ServerProcess, RecordingInfo]:
    """Return the server, its process, and what is known before the first look."""
    from localkv.observe.behind import predicted
    from localkv.observe.command_line import is_unified
    from localkv.observe.process import ServerProcess, settings_of
    from localkv.observe.sources import LlamaServer
    from localkv.observe.targets import connect, local_port
    from localkv.snapshots import RecordingInfo

    client, source = connect(target, os.environ)
    stack.callback(client.close)
    process = ServerProcess(local_port(client), "the server is on another machine")
    stack.callback(process.close)
    settings = settings_of(process.pid)
    if isinstance(source, LlamaServer):
        said = options["kv_unified"]
        source.unified = is_unified(settings) if said is None else said
    snapshot = source.scrape()
    info = RecordingInfo(
        localkv=localkv.__version__,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        server=source.server,
        url=client.base_url,
        interval=options["interval"],
        pid=process.pid,
        predicted=predicted(snapshot, settings, options["model"]),
    )
    return source, process, info


def _looks(source: Source, process: ServerProcess, options: dict[str, Any]) -> Iterator[Observed]:
    """Yield the looks until the time is up, the server is gone, or Ctrl-C."""
    from localkv.observe.watch import watch

    try:
        yield from watch(
            source, process, interval=options["interval"], duration=options["duration"]
        )
    except KeyboardInterrupt:
        # The way to end a watch without a duration; what was seen counts.
        return


def _recorded(
    stack: ExitStack, looks: Iterator[Observed], info: RecordingInfo, folder: Path | None
) -> Iterator[Observed]:
    if folder is None:
        return looks
    from localkv.observe.recording import Recorder

    recorder = stack.enter_context(Recorder(folder / RECORDING_FILE, info))

    def kept() -> Iterator[Observed]:
        for seen in looks:
            recorder.add(seen)
            yield seen

    return kept()


def _json(looks: Iterable[Observed], info: RecordingInfo) -> bool:
    print_json(info.to_dict())
    answered = True
    for seen in looks:
        print_json(seen.to_dict())
        sys.stdout.flush()
        answered = seen.error_kind != "unreachable"
    return answered


def _log(looks: Iterable[Observed], info: RecordingInfo) -> bool:
    """Print a line per look; return whether the last one had an answer."""
    from localkv.cli import observe_lines as lines
    from localkv.observe.rates import rates

    before: Observed | None = None
    answered = True
    for seen in looks:
        if before is None:
            show(lines.head_lines(info, seen.snapshot))
        for event in seen.events:
            print(f"event: {escape_terminal(event)}")
        print(lines.log_line(seen, rates(before, seen), info.predicted), flush=True)
        before = seen
        answered = seen.error_kind != "unreachable"
    return answered


def _live(looks: Iterable[Observed], info: RecordingInfo) -> bool:
    """Redraw a page with every look; return whether the last one had an answer."""
    from rich.live import Live
    from rich.text import Text

    from localkv.cli import observe_lines as lines
    from localkv.observe.rates import rates

    before: Observed | None = None
    events: list[str] = []
    answered = True
    with Live(auto_refresh=False) as live:
        for seen in looks:
            events += seen.events
            page = lines.live_lines(info, seen, rates(before, seen), events)
            live.update(Text("\n".join(page)), refresh=True)
            before = seen
            answered = seen.error_kind != "unreachable"
    return answered


def _report(folder: Path) -> None:
    from localkv.observe.recording import read_recording
    from localkv.report.observation import write_observation

    recording = read_recording(folder / RECORDING_FILE)
    report = write_observation(folder, recording.info, recording.seen, recording.left_out)
    print(f"localkv: report: {report}", file=sys.stderr)
