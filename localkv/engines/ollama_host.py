"""Where Ollama listens, and its command line for that place; loads nothing that talks to it."""

from __future__ import annotations

import shlex
from urllib.parse import urlsplit

#: The port that Ollama listens at unless told otherwise.
PORT = 11434
_HERE = ("127.0.0.1", "localhost")


def ollama_url(host: str | None) -> str:
    """Return where Ollama listens by ``OLLAMA_HOST``, as its client reads it (envconfig.Host).

    Without a scheme the port is 11434; an address that means "all" is asked at this machine's own.
    """
    text = (host or "").strip().strip("\"'")
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "http", text
    default = {"http": 80, "https": 443}.get(scheme, PORT) if separator else PORT
    name, port = "", None
    try:
        parts = urlsplit(f"//{rest}")
        name = parts.hostname or "127.0.0.1"
        port = parts.port
    except ValueError:  # no address at all, or a port that is none
        name = name or "127.0.0.1"
    if name in ("0.0.0.0", "::"):
        name = "127.0.0.1"
    name = f"[{name}]" if ":" in name else name
    return f"{scheme}://{name}:{port or default}"


def ollama_command(url: str, *words: str) -> str:
    """Return the line for a shell that runs ``ollama`` with ``words`` on the server at ``url``."""
    parts = urlsplit(url)
    usual = parts.hostname in _HERE and parts.port == PORT
    host = "" if usual else f"OLLAMA_HOST={shlex.quote(url)} "
    return f"{host}ollama {shlex.join(words)}"
