"""Makes strings from a model file, an engine or a server harmless where they are shown.

A model's name may hold control characters, terminal sequences, HTML, Markdown or marks that turn
the direction of writing; none of it may act on the page, the terminal or the file system.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Longer strings are cut: a name is no place for a novel.
MAX_LENGTH = 200
#: Accents and vowel signs that one letter may carry; more of them climb into the lines around.
MAX_MARKS = 3
# Windows does not take these as file names, with any extension.
_RESERVED = r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)"
# Signs that begin or end a construct of Markdown inside a line or a table cell.
_MARKDOWN = r"([\\`*_\[\]|~$^])"
# What would make a heading, a list, a rule, a table or a numbered list at the start of a line.
_LINE_START = r"(\d*)([#+=:-]|[.)](?=\s|$))"
_REPLACEMENT = "\ufffd"
# Letters and symbols that leave no mark on the page: Hangul fillers and the empty Braille pattern.
_BLANK = "\u115f\u1160\u3164\uffa0\u2800"
# Marks that show nothing by themselves: joiners and selectors of a glyph's variant.
_SELECTORS = (
    ("\u034f", "\u034f"),
    ("\u17b4", "\u17b5"),
    ("\u180b", "\u180f"),
    ("\ufe00", "\ufe0f"),
    ("\U000e0100", "\U000e01ef"),
)
# Categories of characters that may not even stand in text to be pasted.
_NOT_PASTED = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def plain(text: object, limit: int = MAX_LENGTH) -> str:
    """Return ``text`` on one line with nothing in it that cannot be seen.

    Control, format, private and unassigned characters are replaced: ANSI escapes, bidirectional
    marks, zero-width characters, halves of surrogate pairs. A letter keeps its first few accents.
    Runs of white space become one space; what is longer than ``limit`` characters ends in an
    ellipsis.
    """
    cleaned = str(text)[: 4 * limit]
    if not (cleaned.isascii() and cleaned.isprintable()):
        cleaned = "".join(_visible(cleaned))
    cleaned = " ".join(cleaned.split())
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def _visible(text: str) -> Iterator[str]:
    """Yield the characters of ``text`` that may be shown, and what stands for the others."""
    from unicodedata import category

    marks = MAX_MARKS  # nothing that the first could be an accent of
    for character in text:
        kind = category(character)
        if kind in ("Mn", "Me"):
            marks += not _is_selector(character)
            if marks <= MAX_MARKS and not _is_selector(character):
                yield character
            continue
        marks = 0
        if character.isspace():
            marks = MAX_MARKS
            yield " "
        elif kind[0] == "C" or character in _BLANK:
            yield _REPLACEMENT
        else:
            yield character


def _is_selector(mark: str) -> bool:
    return any(first <= mark <= last for first, last in _SELECTORS)


def escape_terminal(text: object, limit: int = MAX_LENGTH) -> str:
    """Return ``text`` safe to print: one line, nothing that a terminal would act on."""
    return plain(text, limit)


def escape_markdown(text: object, limit: int = MAX_LENGTH) -> str:
    """Return ``text`` as Markdown that shows exactly these characters, in a line or a table cell.

    HTML is written as entities, Markdown's signs with backslashes; no link, image, table or
    heading can come of it.
    """
    safe = plain(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = re.sub(_MARKDOWN, r"\\\1", safe)
    match = re.match(_LINE_START, safe)
    if match and (not match[1] or match[2] in ".)"):
        safe = f"{match[1]}\\{safe[match.start(2) :]}"
    # Neither of these becomes a link by itself.
    return safe.replace("://", "&#58;//").replace("www.", "www&#46;")


def escape_xml(text: object, limit: int = MAX_LENGTH) -> str:
    """Return ``text`` for the content or a quoted attribute of an SVG element."""
    safe = plain(text, limit)
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        safe = safe.replace(sign, entity)
    return safe


def code_span(text: object, limit: int = MAX_LENGTH) -> str:
    """Return ``text`` as inline code: fenced with one backtick more than it holds in a row.

    A bar is written so that it does not end a table cell.
    """
    safe = plain(text, limit)
    if not safe:
        return "` `"
    longest = max((len(run) for run in re.findall(r"`+", safe)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if safe.startswith("`") or safe.endswith("`") else ""
    return f"{fence}{pad}{safe}{pad}{fence}".replace("|", "\\|")


def code_block(lines: list[str], language: str = "") -> list[str]:
    """Return the lines of a fenced block; the fence is longer than any run of backticks within.

    Unlike the others this keeps characters as they are, since the text is there to be pasted;
    control characters other than tabs are replaced, and so are those that end a line or turn it.
    """
    from unicodedata import category

    safe = [
        "".join(_REPLACEMENT if c != "\t" and category(c) in _NOT_PASTED else c for c in line)
        for line in lines
    ]
    longest = max((len(run) for line in safe for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *safe, fence]


def safe_filename(text: object, fallback: str = "model") -> str:
    """Return ``text`` as the name of a file or folder that any system takes.

    ASCII letters, digits, dot, dash and underscore are kept, everything else becomes a dash; no
    leading dot, no name reserved by Windows, at most 80 characters.
    """
    from unicodedata import normalize

    folded = normalize("NFKD", plain(text, 4 * MAX_LENGTH))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folded)
    name = re.sub(r"-{2,}|\.{2,}", "-", name).strip("-._ ")[:80].rstrip("-._ ")
    if not name:
        return fallback
    return f"{fallback}-{name}" if re.match(_RESERVED, name) else name
