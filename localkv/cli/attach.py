"""To a live server from its name: what observe and export begin with. Changes nothing there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from localkv.observe.behind import predicted
from localkv.observe.command_line import is_unified
from localkv.observe.process import settings_of
from localkv.observe.sources import LlamaServer, Ollama
from localkv.observe.targets import Server, connect
from localkv.snapshots import Snapshot


@dataclass(frozen=True)
class Attached:
    """A server that answers, its first answer, and what localkv makes of its model.

    ``settings`` are those that its process was started with (for Ollama, its runner's), None where
    they are not readable.
    """

    server: Server
    snapshot: Snapshot
    settings: Mapping[str, Any] | None
    predicted: Mapping[str, Any]


def attach(
    stack: ExitStack, target: str, *, model: str | None, kv_unified: bool | None
) -> Attached:
    """Return the server that ``target`` names; ``stack`` closes what was opened for it.

    ``model`` names the model where the server's own path is not readable; ``kv_unified`` says what
    no answer of llama-server does, None to read it from its process.

    Raises:
        UsageError: no such target.
        EngineError: nobody answers there, or nothing that localkv knows.
    """
    server = connect(target, os.environ)
    stack.callback(server.close)
    settings = settings_of(server.process.pid)
    if isinstance(server.source, LlamaServer):
        server.source.unified = is_unified(settings) if kv_unified is None else kv_unified
    if isinstance(server.source, Ollama):
        settings = next(iter(server.process.runners().values()), None)
    snapshot = server.source.scrape()
    told = predicted(snapshot, settings, model)
    return Attached(server, snapshot, settings, told)
