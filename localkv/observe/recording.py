"""A recording of a server: one line to say what it is, then one for each look or step of a load."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from localkv.errors import LocalkvError, UsageError
from localkv.snapshots import SCHEMA, LoadStep, Observed, RecordingInfo

#: What a recording is called in its folder.
RECORDING_FILE = "observation.jsonl"


class Recorder:
    """Writes a recording to ``path``; every line is on disk when the next look begins."""

    def __init__(self, path: Path, info: RecordingInfo) -> None:
        """Begin the recording.

        Raises:
            UsageError: the file is there already, or cannot be made.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("xb")
        except FileExistsError:
            if not path.parent.is_dir():
                raise UsageError(f"{path.parent} is a file", "name a folder") from None
            raise UsageError(f"{path} is there already", "name another folder") from None
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}", "name another folder"
            ) from None
        self._write(info.to_dict())

    def add(self, seen: Observed | LoadStep) -> None:
        """Add one look, or one step of a load.

        Raises:
            LocalkvError: it could not be written.
        """
        self._write(seen.to_dict())

    def end(self, why: str) -> None:
        """Add why a load ended."""
        self._write({"ended": why})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(data, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise LocalkvError(
                f"cannot write to {self.path}: {error.strerror}", "what is recorded so far is kept"
            ) from None


@dataclass(frozen=True)
class Recording:
    """A recording that was read back; ``left_out`` counts lines that are no whole looks."""

    info: RecordingInfo
    seen: tuple[Observed, ...]
    left_out: int = 0


def read_recording(path: Path) -> Recording:
    """Return what :class:`Recorder` wrote, also when its last line was torn off.

    Raises:
        UsageError: there is no such file, or it is no recording, or a newer localkv wrote it.
    """
    info, lines = read_lines(path, "observation")
    seen = [_observed(line) for line in lines]
    whole = tuple(each for each in seen if each is not None)
    return Recording(info, whole, len(seen) - len(whole))


def read_lines(path: Path, kind: str) -> tuple[RecordingInfo, list[dict[str, Any] | None]]:
    """Return the first line of a recording of ``kind`` and the others, None for a broken one.

    Raises:
        UsageError: there is no such file, or it is no such recording, or a newer localkv wrote it.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", "name a recording of localkv observe"
        ) from None
    first = _json(lines[0]) if lines else None
    if first is None or first.get("kind") != kind:
        raise UsageError(f"{path} is no recording", "name one that localkv observe wrote")
    info = RecordingInfo.from_dict(first)
    if not isinstance(info.schema, int) or info.schema > SCHEMA:
        raise UsageError(f"{path} was written by a newer localkv", "update localkv")
    return info, [_json(line) for line in lines[1:]]


def _json(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _observed(data: dict[str, Any] | None) -> Observed | None:
    try:
        return Observed.from_dict(data) if data else None
    except (TypeError, AttributeError, ValueError):
        return None
