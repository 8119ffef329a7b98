"""Makes strings from a model file, an engine or a server harmless where they are shown.

A model's name may hold control characters, terminal sequences, HTML, Markdown or marks that turn
the direction of writing; none of it may act on the page, the terminal or the file system.
"""

from __future__ import annotations

import re
import unicodedata

#: Longer strings are cut: a name is no place for a novel.
MAX_LENGTH = 200
# Windows does not take these as file names, with any extension.
_RESERVED = re.compile(r"^(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)
# Signs that begin or end a construct of Markdown inside a line or a table cell.
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$^])")
# What would make a heading, a list, a rule or a numbered list at the start of a line.
_LINE_START = re.compile(r"^(\d*)([#+=-]|[.)](?=\s|$))")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def plain(text: object, limit: int = MAX_LENGTH) -> str:
    """Return ``text`` on one line without control, format or unassigned characters.

    Those include ANSI escapes, bidirectional marks and zero-width characters. Runs of white space
    become one space; what is longer than ``limit`` characters ends in an ellipsis.
    """
    cleaned = "".join(
        " " if c.isspace() else c if _visible(c) else _REPLACEMENT for c in str(text)[: 4 * limit]
    )
    cleaned = " ".join(cleaned.split())
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def _visible(character: str) -> bool:
    return unicodedata.category(character)[0] != "C"


def escape_terminal(text: object, limit: int = MAX_LENGTH) -> str:
    """Return ``text`` safe to print: one line, nothing that a terminal would act on."""
    return plain(text, limit)


def escape_markdown(text: object, limit: int = MAX_LENGTH) -> str:
    """Return ``text`` as Markdown that shows exactly these characters, in a line or a table cell.

    HTML is written as entities, Markdown's signs with backslashes; no link, image, mention or
    heading can come of it.
    """
    safe = plain(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = _MARKDOWN.sub(r"\\\1", safe)
    match = _LINE_START.match(safe)
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
    control characters other than tabs are replaced.
    """
    safe = [
        "".join(c if c == "\t" or _visible(c) else _REPLACEMENT for c in line) for line in lines
    ]
    longest = max((len(run) for line in safe for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *safe, fence]


def safe_filename(text: object, fallback: str = "model") -> str:
    """Return ``text`` as the name of a file or folder that any system takes.

    ASCII letters, digits, dot, dash and underscore are kept, everything else becomes a dash; no
    leading dot, no name reserved by Windows, at most 80 characters.
    """
    folded = unicodedata.normalize("NFKD", plain(text, 4 * MAX_LENGTH))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folded)
    name = re.sub(r"-{2,}|\.{2,}", "-", name).strip("-._ ")[:80].rstrip("-._ ")
    if not name:
        return fallback
    return f"{fallback}-{name}" if _RESERVED.match(name) else name
