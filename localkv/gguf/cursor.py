"""A bounded forward cursor over a binary stream: every read is checked before it happens.

The stream is read in windows, so that a header of many megabytes costs little memory. Nothing is
allocated for a length that the file cannot hold, and there are caps on what is kept and walked.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import length_hint
from struct import Struct
from struct import error as StructError
from typing import Any, BinaryIO

from localkv.errors import ModelError
from localkv.gguf.text import shown
from localkv.units import plural

#: Bytes read from the stream at a time.
WINDOW = 1 << 16
#: Strings stepped over in one header. The largest vocabularies have 0.3 million, with as many
#: merges; a sparse file can hold billions of empty ones.
MAX_STRINGS = 1 << 24
#: Bytes read from the stream for one header: a sparse file can hold long strings by the million.
MAX_READ = 1 << 30
#: Bytes of names, strings and short arrays kept from one header.
MAX_KEPT = 1 << 25

DAMAGED = "the file is cut short or damaged: download or convert it again"
LIMIT = "no real model comes near this: the file is damaged or made to do harm"


class Cursor:
    """Reads forward through ``stream``, of ``size`` bytes, and counts what it hands out.

    ``order`` is the byte order for :mod:`struct`: "<" or ">"; ``name`` stands in errors; ``kept``
    caps the bytes of text and arrays handed out.
    """

    def __init__(self, stream: BinaryIO, size: int, name: str, kept: int = MAX_KEPT) -> None:
        self._stream = stream
        self._window = b""
        self._start = 0  # offset of the window in the stream
        self._at = 0  # position in the window; may point beyond its end
        self._strings_left = MAX_STRINGS
        self._kept = self._kept_left = kept
        self._read_left = max(MAX_READ, kept)
        self.size = size
        self.name = name
        self.order = "<"

    @property
    def offset(self) -> int:
        """Return the offset of the next byte, from the start of the stream."""
        return self._start + self._at

    @property
    def remaining(self) -> int:
        """Return how many bytes lie between here and the end."""
        return self.size - self.offset

    def error(self, message: str, hint: str = DAMAGED, offset: int | None = None) -> ModelError:
        """Return the error that says what is wrong at byte ``offset`` (default: here)."""
        at = self.offset if offset is None else offset
        return ModelError(f"{shown(self.name)}: byte {at}: {message}", hint)

    def require(self, count: int, what: str) -> None:
        """Raise a ModelError unless ``count`` more bytes are there for ``what``."""
        if count > self.remaining:
            raise self.error(
                f"{what} needs {plural(count, 'byte')}, but the file ends after {self.remaining}"
            )

    def take(self, count: int, what: str) -> bytes:
        """Return the next ``count`` bytes."""
        end = self._at + count
        if end > len(self._window):  # which holds nothing from beyond the end of the file
            self.require(count, what)
            self._fill(count, what)
            end = count
        data = self._window[self._at : end]
        self._at = end
        return data

    def skip(self, count: int, what: str) -> None:
        """Step over ``count`` bytes without reading them."""
        self.require(count, what)
        self._at += count

    def unpack(self, layout: Struct, what: str) -> tuple[Any, ...]:
        """Return the next values, laid out as ``layout``."""
        at = self._at
        end = at + layout.size
        if end > len(self._window):
            return layout.unpack(self.take(layout.size, what))
        self._at = end
        return layout.unpack_from(self._window, at)

    def keep(self, count: int, what: str) -> None:
        """Count ``count`` bytes towards what one header may keep in memory."""
        self._kept_left -= count
        if self._kept_left < 0:
            raise self.error(f"{what} takes the header above {self._kept >> 20} MiB of text", LIMIT)

    def text(self, length: int, what: str) -> str:
        """Return the next ``length`` bytes as text; bytes that are not UTF-8 come out escaped."""
        if self._at + length > len(self._window):
            self.require(length, what)
        self.keep(length, what)
        return self.take(length, what).decode("utf-8", "backslashreplace")

    def string(self, what: str) -> str:
        """Return the next string, a 64-bit length and its bytes."""
        (length,) = self.unpack(Struct(self.order + "Q"), what)
        return self.text(length, what)

    def skip_strings(self, count: int, what: str) -> None:
        """Step over ``count`` strings, each a 64-bit length and its bytes.

        This is where the time of reading a header goes, hence the bare loop over the window.
        """
        self.require(8 * count, what)
        self._strings_left -= count
        if self._strings_left < 0:
            raise self.error(f"{what} takes the header above {MAX_STRINGS} strings", LIMIT)
        unpack_length = Struct(self.order + "Q").unpack_from
        while count:
            if self._at + 8 > len(self._window):
                self.require(8, what)
                self._fill(8, what)
            begin, rest = self._at, count
            if self.order == "<":
                self._at, rest = _leap(self._window, begin, count, unpack_length)
            self._at, left = _step_over(self._window, self._at, rest, unpack_length)
            if self.remaining < 0:
                last, _ = _step_over(self._window, begin, count - left - 1, unpack_length)
                problem = f"a string of {what} runs beyond the end of the file"
                raise self.error(problem, offset=self._start + last)
            count = left

    def _fill(self, count: int, what: str) -> None:
        """Move the window here, with at least ``count`` bytes in it."""
        start = self.offset
        wanted = min(max(count, WINDOW), self.size - start)
        self._read_left -= wanted
        if self._read_left < 0:
            raise self.error(f"{what} lies behind more than {MAX_READ >> 20} MiB of header", LIMIT)
        self._stream.seek(start)
        window = self._stream.read(wanted)
        while 0 < len(window) < wanted:  # raw streams may hand out less than asked for
            more = self._stream.read(wanted - len(window))
            if not more:
                break
            window += more
        self._window, self._start, self._at = window, start, 0
        if len(window) < count:
            raise self.error(f"{what} is not whole: the file ends at byte {start + len(window)}")


def _leap(
    window: bytes, at: int, count: int, unpack_length: Callable[[bytes, int], tuple[int]]
) -> tuple[int, int]:
    """Step over strings as :func:`_step_over` does, by the low byte of each length alone.

    Half the work, and right where every string is shorter than 256 bytes: the other seven bytes of
    each length are zero then. Text holds no zeros, so that fewer are found behind a longer string,
    and more where a string is empty: where they do not add up, or whole lengths lead elsewhere at
    the end, not one step is made. (Both could be made to cancel out, in a file built for that.)
    The last strings in reach are left for whole lengths.
    """
    heads = window[:-7]  # where a whole length can begin
    begin = before = here = at
    rounds = repeat(None, count // 4)
    try:
        for _ in rounds:
            before, here = here, at
            at += heads[at] + 8
            at += heads[at] + 8
            at += heads[at] + 8
            at += heads[at] + 8
    except IndexError:  # the next length lies beyond the window
        pass
    stepped = 4 * (count // 4 - length_hint(rounds) - 1)
    if stepped < 4 or window.count(0, begin, here) != 7 * stepped:
        return begin, count
    checked, _ = _step_over(window, before, 4, unpack_length)
    return (here, count - stepped) if checked == here else (begin, count)


def _step_over(
    window: bytes, at: int, count: int, unpack_length: Callable[[bytes, int], tuple[int]]
) -> tuple[int, int]:
    """Step over up to ``count`` strings from ``at`` on, as far as their lengths are in ``window``.

    Returns where the next one begins, and how many are left. Running into the end of the window
    and counting what is left only then cost less than doing either a quarter million times.
    """
    rounds = repeat(None, count)
    try:
        for _ in rounds:
            (length,) = unpack_length(window, at)
            at += 8 + length
    except (StructError, OverflowError):  # the next length lies beyond the window
        return at, length_hint(rounds) + 1
    return at, 0
