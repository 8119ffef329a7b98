"""``localkv report``: render a run again from its saved results."""

from __future__ import annotations

import json
from pathlib import Path

import click

from localkv.cli.options import json_option
from localkv.report.write import Written, write_report
from localkv.sweep.store import RunStore


@click.command("report", epilog="Example: localkv report reports/example")
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def command(run: Path, as_json: bool) -> None:
    """Render the report of RUN, the directory of a finished or interrupted sweep, again."""
    store = RunStore(run)
    show(write_report(store.directory, store.read_info(), store.read_records()), as_json=as_json)


def show(written: Written, *, as_json: bool) -> None:
    """Print what a report comes to: its JSON, or its summary in plain words."""
    if as_json:
        print(json.dumps(written.to_json()))
        return
    for line in written.summary:
        print(line)
