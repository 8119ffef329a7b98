"""A run's directory: ``run.json`` once, ``results.jsonl`` one line per run of a point.

Every record is on disk before the next point starts. A line torn by a kill is dropped when the
run is taken up again; the point it belonged to is simply measured again.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from localkv.errors import LocalkvError, UsageError
from localkv.locks import folder_lock
from localkv.records import SCHEMA, PointRecord, RunInfo
from localkv.sweep.results import Results, read_results

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
            raise _cannot_write(self.directory, error) from None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make the directory and keep every other sweep out of it while the block runs.

        The lock ends with the process that holds it; where the file system has no locks, nobody
        is kept out.

        Raises:
            UsageError: another sweep is running into it, or it cannot be made.
        """
        with ExitStack() as stack:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                held = stack.enter_context(folder_lock(str(self.directory)))
            except OSError as error:
                raise _cannot_write(self.directory, error) from None
            if held is False:
                raise UsageError(
                    f"another localkv is sweeping into {self.directory}",
                    "wait for it to end, or name another directory with -o",
                )
            yield

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
        """Return ``run.json``; fields that an older localkv did not write take their defaults.

        Raises:
            UsageError: there is none, it cannot be read, or a newer localkv wrote it.
        """
        path = self.directory / RUN_FILE
        try:
            data = json.loads(path.read_bytes())
            if not isinstance(data, dict):
                raise ValueError("it holds no run")
            info = RunInfo.from_dict(data)
        except OSError as error:
            raise UsageError(
                f"{self.directory} holds no run: {RUN_FILE}: {error.strerror}",
                "name the directory that a sweep wrote",
            ) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"{path} is damaged ({error})", "run the sweep again") from None
        if info.schema > SCHEMA:
            raise UsageError(
                f"{path} was written by a newer localkv (schema {info.schema}, this one reads "
                f"up to {SCHEMA})",
                "update localkv: python -m pip install --upgrade localkv",
            )
        return info

    def read_results(self) -> Results:
        """Return the records, the last one of each (point, repeat), in the order of writing.

        Lines that are not whole records, as a kill leaves them, are left out and told about.
        """
        return read_results(self.results)

    def read_records(self) -> list[PointRecord]:
        """Return the records of :meth:`read_results`."""
        return list(self.read_results().records)

    def mend(self) -> None:
        """Cut off a torn last line, so that the next record starts on a line of its own."""
        if not self.results.exists():
            return
        content = self.results.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            self._write_whole(RESULTS_FILE, whole)

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


def _cannot_write(directory: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write the results to {directory}: {error.strerror}",
        "name another directory with -o",
    )
