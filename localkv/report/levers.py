"""The section about what to change: the levers that the sweep worked out from its predictor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localkv.analysis import points
from localkv.predict.commands import shell_path
from localkv.report.escape import code_span, escape_markdown
from localkv.report.page import Page, label, size
from localkv.report.table import table, varying

_HEADERS = ("change", "llama-server", "Ollama", "saves", "slots that fit then", "price")
#: A path is longer than a name, and the command is there to be pasted.
_COMMAND_LENGTH = 1000


def levers(page: Page) -> list[str]:
    """Return the lines of the section: the table, or how to get it for a run that has none."""
    stored = page.run.levers.get("table")
    rows = [_row(x) for x in stored if isinstance(x, Mapping)] if isinstance(stored, list) else []
    if not rows:
        return _elsewhere(page) if not page.run.levers else []
    headers, shown, constant = varying(_HEADERS, rows, keep=(0, 1, 2, 3, 5))
    note = f" All rows: {', '.join(constant)}." if constant else ""
    return [
        "## What to change to need less",
        "",
        f"Counted from {_base(page)}; each saving is the difference of two predictions, and the "
        f"first rows save most for what they cost.{note}",
        "",
        *table(headers, shown, right=(3, 4) if len(headers) == len(_HEADERS) else (3,)),
        "",
    ]


def _row(lever: Mapping[str, Any]) -> list[str]:
    flags = [points.dig(lever, "flags", program) for program in ("llama-server", "ollama")]
    slots = points.dig_int(lever, "max_slots")
    saved = size(points.dig_int(lever, "saves_bytes"))
    where = points.dig(lever, "memory")
    if points.dig(lever, "bound"):
        saved = f"up to {saved}"
    return [
        escape_markdown(lever.get("change")),
        *(code_span(flag) if flag else "" for flag in flags),
        f"{saved} ({escape_markdown(where)})" if where != "host" else saved,
        "" if slots is None else str(slots),
        escape_markdown(lever.get("price")),
    ]


def _base(page: Page) -> str:
    record = page.record(page.run.levers.get("key"))
    return label(record) if record else "the largest setting of the plan"


def _elsewhere(page: Page) -> list[str]:
    path = page.run.model.get("path")
    if not isinstance(path, str) or not path:
        return []
    command = f"localkv capacity {shell_path(path)} --memory auto"
    return [
        "## What to change to need less",
        "",
        "This run was recorded without that table; "
        f"{code_span(command, _COMMAND_LENGTH)} shows it for this machine.",
        "",
    ]
