"""Text for bytes and numbers, and numbers from text.

Bytes are integers inside localkv; on screen they are IEC units (1 MiB = 2**20 bytes),
as the engine's own log prints them.
"""

from __future__ import annotations

import re

from localkv.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

# 18 digits fit in 64 bits; Python refuses to read some thousand of them.
# Both are compiled when first needed: most commands read no size and no range.
_SIZE = r"^\s*(\d{1,18})(\.\d{1,18})?\s*([kmgt]?)(i?b?)\s*$"
_RANGE = r"^(\d{1,18})(?:-(\d{1,18})(?:([*+])(\d{1,18}))?)?$"
# A list longer than this is a slip of the keyboard, not a plan.
_MAX_VALUES = 10_000


def format_bytes(count: int) -> str:
    """Return ``count`` bytes in the largest IEC unit that leaves a whole part, two decimals.

    >>> format_bytes(188743680)
    '180.00 MiB'
    """
    sign = "-" if count < 0 else ""
    size = abs(count)
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        # Just below a unit, two decimals of the next smaller one would read 1024.00.
        if round(size / unit * 1024, 2) >= 1024:
            return f"{sign}{size / unit:.2f} {name}"
    return f"{sign}{size} B"


def format_count(count: int) -> str:
    """Return ``count`` with a comma for every thousand."""
    return f"{count:,}"


def plural(count: int, noun: str, many: str = "") -> str:
    """Return ``count`` with its noun, as ``1 slot`` and ``1,024 tokens``.

    ``many`` is the noun for other counts than one, where that is not ``noun`` with an s.
    """
    return f"{format_count(count)} {noun if count == 1 else many or noun + 's'}"


def parse_size(text: str) -> int:
    """Return the bytes meant by ``24G``, ``24GiB``, ``512MB``, ``1.5g`` or ``1048576``.

    K, M, G and T are powers of 1024 with or without ``iB``, as llama.cpp and the kernel read
    them; ``KB``, ``MB``, ``GB`` and ``TB`` are read the same way, since that is how memory is sold.

    Raises:
        UsageError: the text is not a size.
    """
    match = re.match(_SIZE, text, re.IGNORECASE)
    if not match:
        raise UsageError(f"{text!r} is not a size", "write bytes or a number with a unit, e.g. 24G")
    whole, fraction, prefix, _ = match.groups()
    unit = 1 << 10 * " kmgt".index(prefix.lower() or " ")
    # The whole part stays an integer: a float would lose bytes from 2**53 on.
    return int(whole) * unit + int(float(fraction or 0) * unit)


def parse_int_values(text: str) -> tuple[int, ...]:
    """Return the integers of a value list: ``1,2,4``, ``2048-32768*2``, ``4096-16384+4096``.

    The forms are llama-bench's: a comma separates parts; ``a-b`` counts up by one, ``a-b+s`` by
    ``s``, ``a-b*m`` multiplies. Order is kept, repeats are dropped.

    Raises:
        UsageError: a part is not of this form, or would never end.
    """
    values: dict[int, None] = {}
    for part in text.split(","):
        for value in _expand(part.strip(), text):
            values[value] = None
            if len(values) > _MAX_VALUES:
                raise UsageError(
                    f"{text!r} has more than {_MAX_VALUES} values", "use a larger step"
                )
    return tuple(values)


def _expand(part: str, text: str) -> range | list[int]:
    match = re.match(_RANGE, part)
    if not match:
        raise UsageError(
            f"{part!r} in {text!r} is not a number or a range",
            "write 1,2,4 or 2048-32768*2 or 4096-16384+4096",
        )
    first, last, operator, step = match.groups()
    low = int(first)
    if last is None:
        return [low]
    high, by = int(last), int(step or 1)
    if high < low:
        raise UsageError(f"{part!r} runs backwards", f"write {high}-{low}")
    if operator != "*":
        if by < 1:
            raise UsageError(f"{part!r} has a step of 0", "use a step of at least 1")
        return range(low, high + 1, by)
    if by < 2 or low < 1:
        raise UsageError(f"{part!r} never ends", "multiply by at least 2, starting at 1 or more")
    values = []
    while low <= high:
        values.append(low)
        low *= by
    return values


def parse_word_values(text: str) -> tuple[str, ...]:
    """Return the words of a comma-separated list, in order, repeats dropped.

    Raises:
        UsageError: an entry is empty.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{text!r} has an empty entry", "separate values by single commas")
    return tuple(dict.fromkeys(words))
