"""The section about a server that was measured: what it says of itself beside the other figures."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.analysis import points
from localkv.records import PointRecord
from localkv.report.escape import escape_markdown
from localkv.report.page import Page, size, tokens
from localkv.report.table import table, varying
from localkv.units import MIB

_HEADERS = (
    *("n_ctx", "slots", "cache", "KV predicted", "KV in its log", "all predicted"),
    *("/api/ps foretold", "/api/ps", "buffers in its log", "process held"),
)
#: What an Ollama says of itself that was built without being told its version.
_NO_VERSION = "0.0.0"
#: The one column that is left away where it is the same in all rows.
_CACHE = _HEADERS.index("cache")


def served(page: Page) -> list[str]:
    """Return the lines of the section; none for a run that measured no server."""
    records = [r for r in page.points if r.server and r.outcome == "ok"]
    if not records:
        return []
    rows = [_row(record) for record in records]
    used = [i for i in range(len(_HEADERS)) if any(row[i] for row in rows)]
    headers, rows, _ = varying(
        [_HEADERS[i] for i in used],
        [[row[i] for i in used] for row in rows],
        keep=[place for place, i in enumerate(used) if i != _CACHE],
    )
    return [
        "## What the server itself says",
        "",
        " ".join(_words(records)),
        "",
        *table(headers, rows, right=range(len(headers))),
        "",
        *(line for why in _reasons(records) for line in (f"{escape_markdown(why, 400)}.", "")),
    ]


def _row(record: PointRecord) -> list[str]:
    held = record.phase("decode") or record.phase("context")
    return [
        tokens(points.n_ctx(record)),
        str(points.slots(record)),
        escape_markdown(points.types_text(record)),
        size(points.predicted(record, "kv")),
        size(points.dig_int(record.engine, "kv_bytes")) if record.engine else "",
        size(points.predicted_total(record)),
        *_ps(record),
        size(points.logged_total(record)) if record.engine else "",
        size(held.value("rss") if held else None),
    ]


def _ps(record: PointRecord) -> list[str]:
    if record.server.get("program") != "ollama":
        return ["", ""]
    return [size(points.dig_int(record.server, key)) for key in ("ps_predicted", "ps_bytes")]


def _words(records: Sequence[PointRecord]) -> list[str]:
    program = escape_markdown(records[0].server.get("program") or "the server")
    version = escape_markdown(records[0].server.get("version") or "")
    if version == _NO_VERSION:
        version = "(a build without a version)"
    attached = bool(records[0].server.get("attached"))
    said = [
        f"Measured in {program}{f' {version}' if version else ''}, "
        + ("which ran already and was left as it was." if attached else "started for this sweep.")
    ]
    if not any(r.engine for r in records):
        said.append("Its log is not localkv's to read.")
    if any(r.server.get("ps_bytes") is not None for r in records):
        said.append("`/api/ps` is the size that `ollama ps` shows.")
    lost = max((_lost(r) for r in records), default=0)
    if lost > MIB:
        said.append(
            f"It leaves out up to {size(lost)} of the buffers in the same server's log, which are "
            "no less in memory."
        )
    said.append(
        "*Process held* is the whole of the model's process after a prompt in every slot: the "
        "buffers as far as they were touched, and the program itself."
    )
    return said


def _lost(record: PointRecord) -> int:
    told, logged = points.dig_int(record.server, "ps_bytes"), points.logged_total(record)
    return logged - told if told is not None and logged is not None else 0


def _reasons(records: Sequence[PointRecord]) -> list[str]:
    found: dict[str, None] = {}
    for record in records:
        if why := record.server.get("not_decoded"):
            found[f"No prompt was read: {why}"] = None
        if why := record.server.get("ps_why"):
            found[f"/api/ps is not foretold: {why}"] = None
    return list(found)
