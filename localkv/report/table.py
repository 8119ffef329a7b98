"""Markdown tables that show only the columns in which something varies."""

from __future__ import annotations

from collections.abc import Sequence


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a table; cells are Markdown already; ``right`` columns align right."""
    if not rows:
        return []
    marks = ["---:" if index in right else "---" for index in range(len(headers))]
    return ["| " + " | ".join(line) + " |" for line in (headers, marks, *rows)]


def varying(
    headers: Sequence[str], rows: Sequence[Sequence[str]], keep: Sequence[int] = ()
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return headers and rows without the constant columns, and those as ``name value`` texts.

    Columns of ``keep`` stay whatever they hold. A table of one row keeps every column.
    """
    if len(rows) < 2:
        return list(headers), [list(row) for row in rows], []
    stay, constant = [], []
    for index, header in enumerate(headers):
        values = {row[index] for row in rows}
        if index in keep or len(values) > 1:
            stay.append(index)
        elif values != {""}:
            constant.append(f"{header} {rows[0][index]}")
    return [headers[i] for i in stay], [[row[i] for i in stay] for row in rows], constant
