"""``localkv report``: render a run again from its saved results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from localkv.cli import say
from localkv.cli.options import complete_run, json_option
from localkv.cli.paths import FilledPath
from localkv.cli.terminal import print_json
from localkv.errors import UsageError
from localkv.report.write import write_report
from localkv.sweep.store import RunStore
from localkv.units import plural


@click.command("report", epilog="Example: localkv report reports/example")
@click.argument("run", type=FilledPath(path_type=Path), shell_complete=complete_run)
@json_option
def command(run: Path, as_json: bool) -> None:
    """Write the report of RUN again: the directory of a sweep, or of localkv observe -o.

    A sweep may be interrupted, or made by an older version of localkv. Lines that a kill or a full
    disk has cut off are left out, and the report says so.
    """
    from localkv.observe.load_recording import LOAD_FILE
    from localkv.observe.recording import RECORDING_FILE

    store = RunStore(run)
    if not store.exists() and (run / RECORDING_FILE).exists():
        render_observation(run, as_json=as_json)
    elif not store.exists() and (run / LOAD_FILE).exists():
        render_load(run, as_json=as_json)
    elif store.exists():
        render(store, as_json=as_json)
    else:
        raise UsageError(
            f"{run} holds no run and no recording",
            "name the directory that localkv sweep or localkv observe -o wrote",
        )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say in one line, as a sweep does, that ``folder`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write the report to {folder}: {error.strerror}",
            "make room there, or copy the folder to where you may write",
        ) from None


def render(store: RunStore, *, as_json: bool) -> None:
    """Write the report of the run in ``store``, and print its JSON or its summary."""
    results = store.read_results()
    notes = [results.note] if results.note else []
    for note in notes:
        say(f"note: {store.results}: {note}")
    info = store.read_info()
    with _writing(store.directory):
        written = write_report(store.directory, info, results.records, notes=notes)
    if as_json:
        print_json(written.to_json())
        return
    for line in written.summary:
        print(line)


def render_observation(folder: Path, *, as_json: bool = False) -> None:
    """Write the report of the recording in ``folder``, and print its JSON or where it is."""
    from localkv.analysis.observed import summarise
    from localkv.observe.recording import RECORDING_FILE, read_recording
    from localkv.report.observation import summary_lines, write_observation

    recording = read_recording(folder / RECORDING_FILE)
    if recording.left_out:
        say(f"note: {plural(recording.left_out, 'line')} of {folder / RECORDING_FILE} left out")
    with _writing(folder):
        report = write_observation(folder, recording.info, recording.seen, recording.left_out)
    found = summarise(recording.info, recording.seen)
    if as_json:
        print_json({"kind": recording.info.kind, **found.to_dict(), "report": str(report)})
        return
    for line in summary_lines(found):
        print(line)
    print(f"report: {report}")


def render_load(folder: Path, *, as_json: bool = False) -> None:
    """Write the report of the load in ``folder``, and print its JSON or its page."""
    from localkv.analysis.loaded import summarise_load
    from localkv.cli.load_lines import page
    from localkv.cli.terminal import show
    from localkv.observe.load_recording import LOAD_FILE, read_load
    from localkv.report.load import write_load

    read = read_load(folder / LOAD_FILE)
    if read.left_out:
        say(f"note: {plural(read.left_out, 'line')} of {folder / LOAD_FILE} left out")
    with _writing(folder):
        report = write_load(folder, read.info, read.steps, read.ended, read.left_out)
    load = summarise_load(read.info, read.steps, read.ended)
    if as_json:
        print_json({**read.info.to_dict(), **load.to_dict(), "report": str(report)})
        return
    show(page(read.info, load))
    print(f"report: {report}")
