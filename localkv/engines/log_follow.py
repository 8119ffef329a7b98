"""A llama-server's log followed while it grows: what its last start told of memory.

Read piece by piece and bounded, since a log has no end: of a long one the end alone is read, and
what the start said is then unknown.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from localkv.engines.log import EngineLog, parse_log
from localkv.engines.server_log import ServerLog, ServerLogReader
from localkv.errors import UsageError
from localkv.tuples import NamedTuple

#: Bytes read at first, and at each look after it.
_FIRST, _EACH = 32 << 20, 8 << 20
#: Lines that say something of memory hold one of these; most lines of a log hold none.
_TELLS = re.compile(
    rb"buffer size =|checkpoint|prompt|n_slots = |sleeping state|loading model|"
    rb"n_ubatch |starting (?:runner|llama-server)"
)
_LOADS = re.compile(
    rb"load_model: loading model|starting (?:runner|llama-server)\" cmd=.* --model "
)
#: Lines about buffers that are kept; a start has some dozen.
_KEPT = 1000


class Told(NamedTuple):
    """What a log tells: of the buffers that the last start made, and of what was saved since."""

    engine: EngineLog
    server: ServerLog


class LogFollower:
    """Follows the log at ``path``; ``name`` is what to call it."""

    def __init__(self, path: Path, name: str = "") -> None:
        """Begin with the end of the log that is there.

        Raises:
            UsageError: it cannot be read.
        """
        self.path = path
        self.name = name or str(path)
        try:
            size = path.stat().st_size
            with path.open("rb"):
                pass
        except OSError as error:
            raise UsageError(
                f"cannot read the log {self.name}: {error.strerror}", "name the server's log file"
            ) from None
        self._at = max(0, size - _FIRST)
        self._skip = self._at > 0
        self._most = _FIRST
        self._begin()

    def _begin(self) -> None:
        self._rest = b""
        self._buffers: list[str] = []
        self._reader = ServerLogReader()

    def read(self) -> Told:
        """Take in what was written since, and return what the log tells now.

        A log that was cut short or replaced is read from its beginning; one that is gone tells
        what it told before.
        """
        try:
            if self.path.stat().st_size < self._at:
                self._at, self._skip = 0, False
                self._begin()
            with self.path.open("rb") as file:
                file.seek(self._at, os.SEEK_SET)
                piece = file.read(self._most)
        except OSError:
            piece = b""
        self._most = _EACH
        self._at += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        # A line without an end is not kept for ever.
        self._rest = self._rest[-_EACH:]
        if self._skip and lines:
            del lines[0]
            self._skip = False
        self._take(lines)
        return Told(parse_log(self._buffers), self._reader.result())

    def _take(self, lines: list[bytes]) -> None:
        for raw in lines:
            if not _TELLS.search(raw[:4096]):
                continue
            if _LOADS.search(raw[:4096]):
                self._buffers, self._reader = [], ServerLogReader()
            line = raw[:4096].decode("utf-8", "replace")
            if ("buffer size" in line or "n_ubatch" in line) and len(self._buffers) < _KEPT:
                self._buffers.append(line)
            self._reader.feed([line])
