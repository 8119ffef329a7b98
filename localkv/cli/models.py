"""``localkv models``: what lies on this machine already, and what of it fits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from localkv.cli.options import json_option
from localkv.cli.paths import FilledPath
from localkv.cli.terminal import print_json, show, table, width, wrap
from localkv.predict.shelf import (
    BROKEN,
    MODEL,
    N_CTX,
    OTHER,
    Room,
    ShelfRow,
    counted,
    shelf,
    total_bytes,
)
from localkv.report.escape import escape_terminal as safe
from localkv.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    from localkv.gguf.places import Places

#: Seconds after which no further file is looked at: a network drive may hold any number.
_PATIENCE = 30.0
_INDENT = "  "
_HEADERS = ("size", "kind", "trained", "KV/1k", "at 8k", "fits")
#: Columns that a narrow terminal goes without, the first of them first.
_LESS = (2, 1, 3)
_LEGEND = (
    "trained: tokens of the training context; KV/1k: the cache of 1,024 tokens; at 8k: all that "
    "one request of 8,192 tokens takes (or of the training context), and where that fits. "
    "`localkv inspect NAME` tells more."
)


@click.command("models", epilog="Example: localkv models ~/Downloads")
@click.argument("folders", nargs=-1, type=FilledPath(), metavar="[FOLDER]...")
@json_option
def command(folders: tuple[str, ...], as_json: bool) -> None:
    """List the models on this machine, and whether each fits here with a context of 8,192 tokens.

    It looks into Ollama's store, the caches of Hugging Face, llama.cpp, LM Studio and localkv, and
    every FOLDER that is given. Only headers are read. The first line of each entry is the name
    that other commands take, as in localkv inspect ollama:llama3.2.
    """
    from localkv.gguf.places import places
    from localkv.gguf.stores import Search

    end = time.monotonic() + _PATIENCE

    def going_on() -> bool:
        return time.monotonic() < end

    where = places()
    search = Search(where, folders, going_on=going_on)
    models = search.models()
    notes = [*_unreadable(where, folders), *search.notes]
    room, source = _room()
    rows = shelf(models, room, going_on=going_on)
    if as_json:
        print_json(
            {
                "schema": 1,
                "n_ctx": N_CTX,
                "ram_available": room.ram,
                "gpus_free": list(room.gpus),
                "models": [row.to_dict() for row in rows],
                "notes": notes,
            }
        )
        return
    show(page(rows, source, notes, width()))


def _unreadable(where: Places, folders: Sequence[str]) -> Iterator[str]:
    """Yield a note for each folder that is there and cannot be read: its models are not listed."""
    stores = [os.path.join(root, "manifests") for root in where.ollama]
    caches = [*where.hubs, *where.llama_cpp, *where.lm_studio, where.demo]
    named = [folder for folder in folders if os.path.isdir(folder)]
    for folder in dict.fromkeys((*stores, *caches, *named)):
        try:
            os.scandir(folder).close()
        except FileNotFoundError:
            continue
        except OSError as error:
            yield f"{folder} cannot be read ({error.strerror}): its models are not listed"


def _room() -> tuple[Room, str]:
    """Return the memory that is free here, and a sentence about it."""
    from localkv.probes.gpu import gpu_summary
    from localkv.probes.memory import available_memory

    ram = available_memory().value
    free = [device.free for device in gpu_summary().devices]
    gpus = tuple(size for size in free if size is not None)
    words = "RAM unknown" if ram is None else f"{format_bytes(ram)} of RAM"
    if gpus:
        words += f" and {' + '.join(map(format_bytes, gpus))} of GPU memory"
    return Room(ram, gpus), f"{words} free"


def page(rows: Sequence[ShelfRow], source: str, notes: Sequence[str], most: int) -> list[str]:
    """Return the lines of the page, at most ``most`` columns wide but for names that are longer.

    Each model has a line with its name, to be copied, and one of a table below that.
    """
    said = [line for note in notes for line in wrap(f"note: {safe(note, 400)}", most, "", _INDENT)]
    if not rows:
        return [*wrap("No models found: name a folder, or try `localkv inspect demo`", most), *said]
    title = f"{plural(counted(rows, MODEL), 'model')}, {format_bytes(total_bytes(rows))} of files"
    lines = wrap(f"{title}; {source}", most)
    figures = [row for row in rows if row.kind == MODEL and row.same_as is None]
    header, *cells = table(
        _HEADERS, [_cells(row) for row in figures], most - len(_INDENT), left=(1,), optional=_LESS
    ) or [""]
    lines += ["", _INDENT + header] if figures else []
    below = dict(zip((row.argument for row in figures), cells, strict=True))
    for row in rows:
        # Never wrapped or cut: the line is there to be copied.
        lines += [""] * (row.kind != MODEL) + [_typed(row.argument)]
        lines += [_INDENT + below[row.argument]] if row.argument in below else []
        for text in _remarks(row):
            lines += wrap(text, most, _INDENT, _INDENT * 2)
    lines += ["", *wrap(_LEGEND, most)] if figures else []
    return lines + said


def _typed(argument: str) -> str:
    """Return ``argument`` as a shell takes it, or as it can be shown where it is not printable."""
    from shlex import quote

    shown = safe(argument, 4096)
    return quote(argument) if shown == argument else shown


def _cells(row: ShelfRow) -> list[str]:
    return [
        _size(row.file_bytes),
        safe(row.architecture or "", 16),
        "?" if row.n_ctx_train is None else format_count(row.n_ctx_train),
        _size(row.kv_per_1k),
        _size(row.need),
        row.fits or "?",
    ]


def _remarks(row: ShelfRow) -> list[str]:
    """Return what stands below the name of a row, and below its figures."""
    if row.same_as is not None:
        return [f"the same file as {safe(row.same_as, 400)}"]
    if row.kind == BROKEN:
        return [f"cannot be read: {safe(row.reason or '', 400)}"]
    if row.kind == OTHER:
        return [f"not a model to run: {safe(row.reason or '', 400)}, {_size(row.file_bytes)}"]
    return [f"note: {safe(row.reason, 400)}"] if row.reason else []


def _size(size: int | None) -> str:
    return "?" if size is None else format_bytes(size)
