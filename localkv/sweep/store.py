"""A run's directory: ``run.json`` once, ``results.jsonl`` one line per run of a point.

Every record is on disk before the next point starts. A line torn by a kill is dropped when the
run is taken up again; the point it belonged to is simply measured again.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localkv.errors import LocalkvError, UsageError
from localkv.records import PointRecord, RunInfo

RUN_FILE = "run.json"
RESULTS_FILE = "results.jsonl"
# What a run may need: a few KiB for each record, and the report with its plots.
_BYTES_PER_RECORD = 32_768
_BYTES_FOR_REPORT = 4 << 20


class RunStore:
    """The directory of one run."""

    def __init__(self, directory: Path) -> None:
        """Name the directory; nothing is touched yet."""
        self.directory = directory

    @property
    def results(self) -> Path:
        """Return the path of the results file."""
        return self.directory / RESULTS_FILE

    def exists(self) -> bool:
        """Return whether the directory holds a run, or what is left of one."""
        return any((self.directory / name).exists() for name in (RUN_FILE, RESULTS_FILE))

    def prepare(self, records: int) -> None:
        """Create the directory and make sure that ``records`` records and a report fit in it.

        Raises:
            UsageError: it cannot be created or written, or the disk is too full.
        """
        probe = self.directory / ".space"
        size = _BYTES_FOR_REPORT + records * _BYTES_PER_RECORD
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                with probe.open("wb") as file:
                    # Written rather than asked for: quotas and some file systems only tell then.
                    for _ in range(-(-size // _BYTES_PER_RECORD)):
                        file.write(bytes(_BYTES_PER_RECORD))
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot write the results to {self.directory}: {error.strerror}",
                "name another directory with -o",
            ) from None

    def create(self, info: RunInfo) -> None:
        """Write ``run.json``, whole or not at all."""
        self._write_whole(RUN_FILE, json.dumps(info.to_dict(), indent=1).encode() + b"\n")

    def append(self, record: PointRecord) -> None:
        """Add one record; it is on disk when this returns.

        Raises:
            LocalkvError: the record could not be written.
        """
        line = json.dumps(record.to_dict(), separators=(",", ":")) + "\n"
        try:
            with self.results.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise LocalkvError(
                f"cannot write to {self.results}: {error.strerror}",
                f"make room, then: localkv sweep --resume -o {shlex.quote(str(self.directory))}",
            ) from None

    def read_info(self) -> RunInfo:
        """Return ``run.json``.

        Raises:
            UsageError: there is none, or it cannot be read.
        """
        path = self.directory / RUN_FILE
        try:
            data = json.loads(path.read_bytes())
            if not isinstance(data, dict) or not isinstance(data.get("plan"), dict):
                raise ValueError("it holds no plan")
            return RunInfo.from_dict(data)
        except OSError as error:
            raise UsageError(
                f"{self.directory} holds no run: {RUN_FILE}: {error.strerror}",
                "name the directory that a sweep wrote",
            ) from None
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is damaged ({error})", "run the sweep again") from None

    def read_records(self) -> list[PointRecord]:
        """Return the records, the last one of each (point, repeat), in the order of writing.

        Lines that are not whole records, as a kill leaves them, are passed over.
        """
        records: dict[tuple[str, int], PointRecord] = {}
        for data in self._lines():
            try:
                record = PointRecord.from_dict(data)
                records[record.key, record.repeat] = record
            except (TypeError, KeyError, AttributeError):
                continue
        return list(records.values())

    def mend(self) -> None:
        """Cut off a torn last line, so that the next record starts on a line of its own."""
        if not self.results.exists():
            return
        content = self.results.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            self._write_whole(RESULTS_FILE, whole)

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.results.exists():
            return
        with self.results.open("rb") as file:
            for line in file:
                try:
                    data = json.loads(line)
                except ValueError:
                    continue
                if isinstance(data, dict):
                    yield data

    def _write_whole(self, name: str, content: bytes) -> None:
        path = self.directory / name
        temporary = path.with_name(f".{name}.new")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise LocalkvError(f"cannot write {path}: {error.strerror}", "make room") from None
