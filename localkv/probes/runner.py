"""The process in which Ollama holds a model: a descendant of ``ollama serve``."""

from __future__ import annotations

import re

from localkv.probes.listening import command_line, family

# Both generations name the model's file in the store: ".../lib/ollama/llama-server --model BLOB"
# from 0.30 on, "ollama runner --model BLOB" before.
_BLOB = re.compile(r"[/\\]blobs[/\\]sha256-([0-9a-f]{64})")


def ollama_runners(serve: int) -> dict[int, str]:
    """Return the runners among the descendants of ``serve``: process id -> the blob's digest.

    Empty when no model is loaded, or when ``serve`` is gone or another user's.
    """
    found = {}
    for pid in family(serve)[1:]:
        words = (_BLOB.search(word) for word in command_line(pid))
        if blob := next(filter(None, words), None):
            found[pid] = blob[1]
    return found
