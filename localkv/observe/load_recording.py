"""A recording of a load, read back: what was asked of which server, the steps, why it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localkv.observe.recording import read_lines
from localkv.snapshots import LoadStep, RecordingInfo

LOAD_FILE = "load.jsonl"
KIND = "load"


@dataclass(frozen=True)
class LoadRecording:
    """A load that was read back; ``left_out`` counts lines that are no whole steps."""

    info: RecordingInfo
    steps: tuple[LoadStep, ...]
    ended: str = ""
    left_out: int = 0


def read_load(path: Path) -> LoadRecording:
    """Return what a :class:`~localkv.observe.recording.Recorder` wrote of a load.

    A last line that was torn off is left out, and so is any that is no step.

    Raises:
        UsageError: there is no such file, it is no load, or a newer localkv wrote it.
    """
    info, lines = read_lines(path, KIND)
    steps, ended, left_out = [], "it was broken off", 0
    for data in lines:
        if data is not None and "ended" in data:
            ended = str(data["ended"])
        elif step := _step(data):
            steps.append(step)
        else:
            left_out += 1
    return LoadRecording(info, tuple(steps), ended, left_out)


def _step(data: Mapping[str, Any] | None) -> LoadStep | None:
    try:
        return LoadStep.from_dict(data) if data else None
    except (TypeError, AttributeError, ValueError):
        return None
