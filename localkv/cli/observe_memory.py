"""Pinned and hidden memory on ``localkv observe``: its option, its look at each look, its lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from localkv.cli.paths import FilledPath
from localkv.cli.terminal import columns, fold, wrap
from localkv.report.escape import escape_terminal
from localkv.snapshots import HostMemory, Observed, Pinned
from localkv.units import format_bytes

if TYPE_CHECKING:
    from localkv.cli.attach import Attached

#: Columns that a note beside its row needs; with less room it stands below.
_LEAST_NOTE = 24
_BELOW = " " * 6
#: Characters of a sentence or a command of ours with a name in it.
_LONG = 1000

F = TypeVar("F", bound=Callable[..., Any])

log_option: Callable[[F], F] = click.option(
    "--log",
    metavar="FILE",
    type=FilledPath(path_type=Path),
    help="The server's log (llama-server -lv 4).  [default: the file that it writes to, if any]",
)


def with_memory(
    looks: Iterable[Observed], found: Attached, predicted: Mapping[str, Any], log: Path | None
) -> Iterator[Observed]:
    """Yield the looks with what the server's processes hold.

    Raises:
        UsageError: ``log`` cannot be read.
    """
    from localkv.observe.accounts import Accountant

    books = Accountant(found.server, log)
    for seen in looks:
        predicted = predicted if seen.predicted is None else seen.predicted
        yield books.add(seen, predicted)


def memory_lines(seen: Observed, most: int, *, gone: bool = False) -> list[str]:
    """Return what is pinned while idle and what the memory is made of, ``most`` columns wide.

    ``gone``: the server was not there any more after ``seen``, so that nothing is pinned and its
    process id may be another's by now.
    """
    held = () if gone else seen.pinned
    lines = [line for pinned in held for line in _pinned(pinned, most)]
    return lines + [line for memory in seen.memory for line in _account(memory, most, gone)]


def _pinned(pinned: Pinned, most: int) -> list[str]:
    from localkv.report.growth import pinned_words

    lines = ["", *wrap(f"pinned while idle: {escape_terminal(pinned.name)}", most, "", "  ")]
    for words in pinned_words(pinned):
        lines += wrap(escape_terminal(words, _LONG), most, "  ")
    # A command stays whole, so that it can be copied.
    return lines + [f"  to free it: {escape_terminal(command, _LONG)}" for command in pinned.free]


def _account(memory: HostMemory, most: int, gone: bool) -> list[str]:
    from localkv.report.growth import growth_words, part_rows, process_words

    measured = "unknown" if memory.measured is None else format_bytes(memory.measured)
    source = f", read from {escape_terminal(memory.log)}" if memory.log else ""
    head = f"host memory of {process_words(memory, gone)}: {measured} allocated{source}"
    lines = ["", *wrap(head, most, "", "  "), *_table(part_rows(memory), most)]
    return lines + wrap(escape_terminal(" ".join(growth_words(memory)), _LONG), most, "  ")


def _table(rows: Sequence[tuple[str, str, str, str]], most: int) -> list[str]:
    """Return the rows of the account under heads, each note beside its row or below it."""
    if not rows:
        return []
    told = [("part", "now", "grown", ""), *rows]
    name_size, now_size, grown_size = (max(columns(row[i]) for row in told) for i in range(3))
    lines = []
    for name, now, grown, note in told:
        row = f"  {name:<{name_size}}  {now:>{now_size}}  {grown:>{grown_size}}"
        start = columns(row) + 2
        said = escape_terminal(note, _LONG)
        if said and most - start >= _LEAST_NOTE:
            # What is said of it begins below itself where it is long.
            lines += wrap(said, most, f"{row}  ", " " * start)
        else:
            lines += fold(row, most) + (wrap(said, most, _BELOW) if said else [])
    return lines
