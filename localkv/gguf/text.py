"""Text from files that nobody vouches for, made fit for one line of a message."""

from __future__ import annotations


def shown(text: str, limit: int = 120) -> str:
    """Return ``text`` with control and other unprintable characters escaped, cut to ``limit``.

    File names, metadata keys and tensor names go through this before they reach a terminal. The
    end is kept, since that is where the name of a long path is.
    """
    short = text if len(text) <= limit else "..." + text[-limit:]
    if short.isprintable():
        return short
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in short
    )
