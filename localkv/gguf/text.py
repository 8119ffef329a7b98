"""Text from files that nobody vouches for, made fit for one line of a message."""

from __future__ import annotations

#: Accents that one letter may carry; more of them climb into the lines around.
_MOST_MARKS = 3


def shown(text: str, limit: int = 120) -> str:
    """Return ``text`` with control and other unprintable characters escaped, cut to ``limit``.

    File names, metadata keys and tensor names go through this before they reach a terminal. The
    end is kept, since that is where the name of a long path is.
    """
    short = text if len(text) <= limit else "..." + text[-limit:]
    if short.isascii() and short.isprintable():
        return short
    from unicodedata import category

    parts, marks = [], 0
    for c in short:
        marks = marks + 1 if category(c) in ("Mn", "Me") else 0
        plain = c.isprintable() and marks <= _MOST_MARKS
        parts.append(c if plain else c.encode("unicode_escape", "surrogatepass").decode("ascii"))
    return "".join(parts)
