"""How a page reaches the terminal: its width, tables that fit into it, colour where it may be.

Every page is made as plain lines first, and means the same without colour: a pipe, ``TERM=dumb``,
``NO_COLOR`` and a screen reader get those lines as they are. On a terminal :func:`show` paints the
same lines with rich, which nothing else here loads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.text import Text

MIN_WIDTH = 40
#: Of a page that goes to a file or a pipe, unless COLUMNS says otherwise.
PLAIN_WIDTH = 80
_MAX_WIDTH = 200
_GAP = "  "
_JOINT = "\0"
#: A text column is cut to this before a table gives up being one.
_LEAST_TEXT = 12
_NO_COLOUR = ("0", "false", "no")

#: What is painted in any page: pattern -> style. Colours of the terminal's own palette only.
STYLES: Mapping[str, str] = {
    r"^(?:note|assumed|hint):": "yellow",
    r"^(?:warning|error):": "bold red",
    r"^[A-Za-z][^:.]{0,16}?(?=  +\S)": "cyan",
    r"^[A-Z][^.]* .*:$": "bold",
    r"\d\S* [KMGT]?i?B(?: +\d+%)?\*|\d+%\*": "bold red",
}


def width(stream: TextIO | None = None) -> int:
    """Return the columns that a page on ``stream`` (standard output) may use, at least 40.

    COLUMNS goes first, then the terminal itself; a pipe or a file counts as 80.
    """
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and int(stated[:9]) > 0:
        found = int(stated[:9])
    else:
        try:
            found = os.get_terminal_size((stream or sys.stdout).fileno()).columns or PLAIN_WIDTH
        except (OSError, ValueError, AttributeError):
            found = PLAIN_WIDTH
    return min(max(found, MIN_WIDTH), _MAX_WIDTH)


def coloured(stream: TextIO | None = None) -> bool:
    """Return whether ``stream`` (standard output) takes colour.

    NO_COLOR says no, FORCE_COLOR yes; otherwise a terminal that is not dumb does.
    """
    if os.environ.get("NO_COLOR"):
        return False
    forced = os.environ.get("FORCE_COLOR")
    if forced:
        return forced.lower() not in _NO_COLOUR
    if os.environ.get("TERM", "some") in ("", "dumb", "unknown"):
        return False
    return (stream or sys.stdout).isatty()


def show(lines: Iterable[str], styles: Mapping[str, str] | None = None) -> None:
    """Print ``lines`` on standard output, painted where colour is welcome.

    Lines hold no control characters (see ``report.escape``) and fit into :func:`width` already.
    The first is the page's title. ``styles`` adds patterns of one page to those of all pages.
    """
    if not coloured():
        for line in lines:
            print(line)
        return
    from rich.console import Console

    console = Console(
        force_terminal=True, color_system="standard", highlight=False, markup=False, emoji=False
    )
    for text in painted(lines, styles):
        console.print(text, soft_wrap=True)


def painted(lines: Iterable[str], styles: Mapping[str, str] | None = None) -> Iterator[Text]:
    """Yield ``lines`` with what :func:`show` paints in them."""
    from rich.text import Text

    patterns = {**STYLES, **(styles or {})}.items()
    for number, line in enumerate(lines):
        text = Text(line, style="bold" if number == 0 else "")
        for pattern, style in patterns if number else ():
            text.highlight_regex(pattern, style)
        yield text


def print_json(value: Any) -> None:
    """Print ``value`` as one line of JSON, see :func:`to_json`."""
    print(to_json(value))


def to_json(value: Any) -> str:
    """Return ``value`` as one line of JSON, ASCII alone, that any reader takes.

    Half of a surrogate pair, as a file name on Linux may bring along, is refused by strict readers:
    it becomes U+FFFD.
    """
    import json

    text = json.dumps(value)
    if "\\ud" in text:
        raw = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
        text = json.dumps(json.loads(raw.decode("utf-16", "replace")))
    return text


def columns(text: str) -> int:
    """Return the terminal columns of ``text``: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width

    return sum(
        0 if category(c) in ("Mn", "Me") else 2 if east_asian_width(c) in "WF" else 1 for c in text
    )


def cut(text: str, most: int) -> str:
    """Return ``text`` within ``most`` columns; what was cut ends in an ellipsis."""
    if columns(text) <= most:
        return text
    kept, used = [], 0
    for character in text:
        used += columns(character)
        if used > most - 1:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "…"


def wrap(text: str, most: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """Return ``text`` as lines of at most ``most`` columns; words longer than that are broken.

    The first line begins with ``indent``, the others with ``hanging`` (the same by default). A
    no-break space keeps a number with its unit, and is printed as a plain one.
    """
    # A sign of ASCII stands for it meanwhile, so that the widths of plain text stay cheap.
    text = text.replace("\xa0", _JOINT)
    lines, line, start = [], "", indent
    later = indent if hanging is None else hanging
    for word in text.split(" "):
        if line and columns(start) + columns(line) + 1 + columns(word) > most:
            lines.append(start + line)
            line, start = "", later
        room = max(most - columns(start), 1)
        while columns(word) > room:
            piece = _prefix(word, room)
            lines.append(start + piece)
            word, start = word[len(piece) :], later
            room = max(most - columns(start), 1)
        line = f"{line} {word}" if line else word
    if line or not lines:
        lines.append(start + line)
    return [line.replace(_JOINT, " ").rstrip() for line in lines]


def fold(line: str, most: int, hanging: str = "    ") -> list[str]:
    """Return ``line`` broken at spaces where it is too long; its columns keep their places."""
    if columns(line) <= most:
        return [line]
    start = line.rfind(" ", 0, most + 1)
    if start <= len(hanging):
        return [line]
    return [line[:start].rstrip(), *wrap(line[start:].strip(), most, hanging)]


def _prefix(word: str, room: int) -> str:
    used = 0
    for index, character in enumerate(word):
        used += columns(character)
        if used > room and index:
            return word[:index]
    return word


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    most: int,
    *,
    left: Sequence[int] = (0,),
    optional: Sequence[int] = (),
) -> list[str]:
    """Return the lines of a table of at most ``most`` columns of the terminal.

    Cells are harmless text already (``escape_terminal``). Columns in ``left`` hold text, the
    others numbers that align right. Where the table is too wide, columns in ``optional`` are left
    out in that order, then text is cut, and at last every row stands as lines of its own.
    """
    if not rows:
        return []
    kept = list(range(len(headers)))
    dropped = list(optional)
    grid = [headers, *rows]
    while True:
        widths = {i: max(columns(line[i]) for line in grid) for i in kept}
        over = sum(widths.values()) + len(_GAP) * (len(kept) - 1) - most
        if over <= 0:
            return [_row(line, widths, left) for line in grid]
        if not dropped:
            break
        kept.remove(dropped.pop(0))
    for i in sorted((i for i in kept if i in left), key=lambda i: -widths[i]):
        less = min(over, max(widths[i] - _LEAST_TEXT, 0))
        widths[i] -= less
        over -= less
    if over <= 0:
        return [_row(line, widths, left) for line in grid]
    return _stacked(headers, rows, kept, most)


def _row(line: Sequence[str], widths: Mapping[int, int], left: Sequence[int]) -> str:
    cells = []
    for i, size in widths.items():
        cell = cut(line[i], size)
        space = " " * (size - columns(cell))
        cells.append(cell + space if i in left else space + cell)
    return _GAP.join(cells).rstrip()


def _stacked(
    headers: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], most: int
) -> list[str]:
    """Return each row as lines ``header  cell``, an empty line between rows."""
    size = min(max(columns(headers[i]) for i in kept), most // 2)
    lines: list[str] = []
    for row in rows:
        lines += [""] * bool(lines)
        for i in kept:
            name = cut(headers[i], size)
            lines += wrap(row[i], most, name + " " * (size - columns(name)) + _GAP, _GAP)
    return lines
