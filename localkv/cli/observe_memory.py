"""Pinned and hidden memory on ``localkv observe``: its option, its look at each look, its lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from localkv.cli.terminal import wrap
from localkv.report.escape import escape_terminal
from localkv.snapshots import HostMemory, Observed, Pinned
from localkv.units import format_bytes

if TYPE_CHECKING:
    from localkv.cli.attach import Attached

#: Characters of a sentence or a command of ours with a name in it.
_LONG = 1000

F = TypeVar("F", bound=Callable[..., Any])

log_option: Callable[[F], F] = click.option(
    "--log",
    metavar="FILE",
    type=click.Path(path_type=Path),
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


def memory_lines(seen: Observed, most: int) -> list[str]:
    """Return what is pinned while idle and what the memory is made of, ``most`` columns wide."""
    lines = [line for pinned in seen.pinned for line in _pinned(pinned, most)]
    return lines + [line for memory in seen.memory for line in _account(memory, most)]


def _pinned(pinned: Pinned, most: int) -> list[str]:
    from localkv.report.growth import pinned_words

    lines = ["", f"pinned while idle: {escape_terminal(pinned.name)}"]
    for words in pinned_words(pinned):
        lines += wrap(escape_terminal(words, _LONG), most, "  ")
    # A command stays whole, so that it can be copied.
    return lines + [f"  to free it: {escape_terminal(command, _LONG)}" for command in pinned.free]


def _account(memory: HostMemory, most: int) -> list[str]:
    from localkv.report.growth import growth_words, part_rows

    measured = "unknown" if memory.measured is None else format_bytes(memory.measured)
    source = f", read from {escape_terminal(memory.log)}" if memory.log else ""
    lines = ["", f"host memory of process {memory.pid}: {measured} allocated{source}"]
    for name, now, grown, note in part_rows(memory):
        row = f"  {name:<20} {now:>16} {grown:>18}"
        # What is said of it begins below itself where it is long.
        lines += wrap(escape_terminal(note), most, f"{row}  ", " " * 59) if note else [row]
    return lines + wrap(escape_terminal(" ".join(growth_words(memory)), _LONG), most, "  ")
