"""To a live server from its name: what observe and export begin with. Changes nothing there."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass

from localkv.model import ModelShape, read_model
from localkv.observe.behind import Predictor
from localkv.observe.sources import LlamaServer
from localkv.observe.targets import Server, connect
from localkv.snapshots import Snapshot


@dataclass(frozen=True)
class Attached:
    """A server that answers, its first answer, and what tells what localkv makes of one."""

    server: Server
    snapshot: Snapshot
    predict: Predictor


def attach(
    stack: ExitStack,
    target: str,
    *,
    model: str | None,
    kv_unified: bool | None,
    loads: bool = False,
) -> Attached:
    """Return the server that ``target`` names; ``stack`` closes what was opened for it.

    ``model`` names the model where the server's own path is not readable; ``kv_unified`` says what
    no answer of llama-server does, None to read it from its process. A server that is to be loaded
    (``loads``) may be the only one that has the model ``ollama:NAME``.

    Raises:
        ModelError: the model that was named cannot be read.
        UsageError: no such target.
        EngineError: nobody answers there, or nothing that localkv knows.
    """
    behind: ModelShape | str | None = model
    if model is not None and not (loads and model.startswith("ollama:")):
        behind = read_model(model)
    server, predict = reach(stack, target, model=behind, kv_unified=kv_unified)
    return Attached(server, server.source.scrape(), predict)


def reach(
    stack: ExitStack, target: str, *, model: ModelShape | str | None, kv_unified: bool | None
) -> tuple[Server, Predictor]:
    """Return the server that ``target`` names, not looked at yet; all else as :func:`attach`."""
    server = connect(target, os.environ)
    stack.callback(server.close)
    if isinstance(server.source, LlamaServer):
        server.source.kv_unified = kv_unified
    return server, Predictor(server.process, model)
