"""An answer that comes in pieces, cut into its parts: server-sent events, or a JSON per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from localkv.http import Client, ServerError

_DONE = b"[DONE]"
_SHOWN = 200

#: What the last piece of an answer counts, as far as the server says it.
COUNTS = ("prompt_tokens", "cached_tokens", "generated_tokens")


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer: ``tokens`` new ones, and what the last part counts."""

    tokens: int = 0
    counts: Mapping[str, Any] = field(default_factory=dict)


def events(
    client: Client, path: str, body: Mapping[str, Any], timeout: float
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events.

    Raises:
        ServerError: the server refused, broke off, or told an error in between.
    """
    for line in _raw_lines(client, path, body, timeout):
        name, _, data = line.partition(b":")
        data = data.strip()
        if name == b"error":
            raise _broken(client, path, data)
        if name == b"data" and data != _DONE:
            yield _object(client, path, data)


def json_lines(
    client: Client, path: str, body: Mapping[str, Any], timeout: float
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of one JSON object per line; raises as :func:`events`."""
    for line in _raw_lines(client, path, body, timeout):
        yield _object(client, path, line)


def _raw_lines(
    client: Client, path: str, body: Mapping[str, Any], timeout: float
) -> Iterator[bytes]:
    with client.stream("POST", path, body=body, timeout=timeout) as pieces:
        yield from split_lines(pieces)


def split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream that comes in pieces; empty ones are left out."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.strip() for line in whole if line.strip())
    if rest.strip():
        yield rest.strip()


def _object(client: Client, path: str, data: bytes) -> dict[str, Any]:
    """Return the object that ``data`` is; one that tells an error is raised."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("error"):
        raise _broken(client, path, data)
    return found


def _broken(client: Client, path: str, data: bytes) -> ServerError:
    """Return the error that ``data`` tells: llama-server's, OpenAI's or Ollama's form, or none."""
    text = data.decode("utf-8", "replace")
    failed = ServerError(
        f"{client.base_url}{path} broke off", "see the server's log", "answer", body=text
    )
    told = failed.json()
    inner = told.get("error", told) if isinstance(told, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else inner
    code = inner.get("code") if isinstance(inner, dict) else None
    if isinstance(code, int):
        failed.status = code
    if isinstance(message, str) and message:
        failed.message += f": {message[:_SHOWN]}"
    return failed
