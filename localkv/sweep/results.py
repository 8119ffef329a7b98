"""Reads ``results.jsonl``: every whole record, and of every other line why it was left out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localkv.records import SCHEMA, PointRecord, Reading

#: What the fields of a record must be; a record of an older localkv may lack the last ones.
_KINDS = {
    "key": str,
    "repeat": int,
    "outcome": str,
    "config": dict,
    "engine": dict,
    "prediction": dict,
    "timings": dict,
    "server": dict,
}
_MOST_NAMED = 5


@dataclass(frozen=True)
class LeftOut:
    """A line that is no record: its number, counted from 1, and why."""

    line: int
    why: str


@dataclass(frozen=True)
class Results:
    """The records, the last one of each (point, repeat), and the lines that were left out."""

    records: tuple[PointRecord, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def note(self) -> str | None:
        """Return a sentence about the lines left out, None when every line is a record."""
        count = len(self.left_out)
        if not count:
            return None
        told = "; ".join(f"line {each.line}: {each.why}" for each in self.left_out[:_MOST_NAMED])
        more = f"; and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
        are = "line is no record and was" if count == 1 else "lines are no records and were"
        return f"{count} {are} left out of the results ({told}{more})"


def read_results(path: Path) -> Results:
    """Return what the file at ``path`` holds; nothing where there is no file.

    Raises:
        OSError: the file is there and cannot be read.
    """
    records: dict[tuple[str, int], PointRecord] = {}
    left_out = []
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = _record(line)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    torn = not line.endswith(b"\n")
                    why = "torn, as a kill leaves it" if torn else _reason(error)
                    left_out.append(LeftOut(number, why))
                else:
                    records[record.key, record.repeat] = record
    return Results(tuple(records.values()), tuple(left_out))


def _record(line: bytes) -> PointRecord:
    data = json.loads(line)
    if not isinstance(data, dict):
        raise _NoRecordError("no JSON object")
    schema = data.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise _NoRecordError(f"of schema {schema!r:.20}, which a newer localkv wrote")
    record = PointRecord.from_dict(data)
    for name, kind in _KINDS.items():
        if not isinstance(getattr(record, name), kind):
            raise _NoRecordError(f"its {name} is not what it should be")
    readings = [record.peak, *(phase.readings for phase in record.phases)]
    if not all(_known_or_not(reading) for held in readings for reading in held.values()):
        raise _NoRecordError("a reading is no whole number")
    return record


def _known_or_not(reading: Reading) -> bool:
    value: Any = reading.value
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


class _NoRecordError(ValueError):
    """A line is JSON, but no record; the message says why."""


def _reason(error: Exception) -> str:
    if isinstance(error, _NoRecordError):
        return str(error)
    return "a record without its fields" if not isinstance(error, ValueError) else "not JSON"
