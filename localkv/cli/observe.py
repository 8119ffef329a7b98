"""``localkv observe``: watch a live server's KV cache, requests and memory."""

from __future__ import annotations

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
    from localkv.cli.attach import Attached
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
    from localkv.cli.attach import attach

    with ExitStack() as stack:
        found = attach(stack, target, model=options["model"], kv_unified=options["kv_unified"])
        info = _info(found, options["interval"])
        looks = _looks(found, options)
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


def _info(found: Attached, interval: float) -> RecordingInfo:
    from localkv.snapshots import RecordingInfo

    return RecordingInfo(
        localkv=localkv.__version__,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        server=found.server.source.server,
        url=found.server.url,
        interval=interval,
        pid=found.server.process.pid,
        predicted=dict(found.predicted),
    )


def _looks(found: Attached, options: dict[str, Any]) -> Iterator[Observed]:
    """Yield the looks until the time is up, the server is gone, or Ctrl-C."""
    from localkv.observe.watch import watch

    try:
        yield from watch(
            found.server.source,
            found.server.process,
            interval=options["interval"],
            duration=options["duration"],
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
