"""From an attached server to one that can be loaded: how it is asked, and the room it has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from localkv.errors import EngineError, UsageError
from localkv.http import Client, ServerError
from localkv.observe.load import Bench
from localkv.observe.load_plan import limits_of
from localkv.observe.ollama_speaker import OllamaSpeaker, read_count, request, runner_count
from localkv.observe.speakers import LlamaServerSpeaker, SglangSpeaker, Speaker, VllmSpeaker
from localkv.observe.streams import json_lines
from localkv.observe.targets import Server
from localkv.snapshots import LoadLimits, Snapshot

#: Seconds that Ollama may take to load a model.
_LOADING = 300.0
_OLLAMA = "ollama:"


def local_only(url: str, allowed: bool) -> None:
    """Refuse to load a server on another machine unless that is ``allowed``.

    Raises:
        UsageError: it is one.
    """
    with Client(url) as client:
        if not client.is_local and not allowed:
            raise UsageError(
                f"{client.base_url} is not on this machine, and a load may slow down its users",
                "--yes-remote loads it all the same",
            )


def model_to_load(snapshot: Snapshot, named: str | None) -> str:
    """Return the model that Ollama is to run: ``ollama:NAME``, or the one that it holds.

    Raises:
        UsageError: it holds none, and none is named.
    """
    if named and named.startswith(_OLLAMA):
        return named[len(_OLLAMA) :]
    if snapshot.loaded:
        return snapshot.loaded[0].name
    raise UsageError("Ollama holds no model", "name one: --model ollama:NAME")


def load_model(url: str, model: str) -> None:
    """Have Ollama load ``model``, as any first request does.

    Raises:
        ServerError: it has no such model, or cannot load it.
    """
    with Client(url) as client:
        for _ in json_lines(client, "/api/generate", request(model, "", 0, None), _LOADING):
            pass


def bench_for(
    stack: ExitStack, server: Server, snapshot: Snapshot, *, model: str | None, seed: int
) -> tuple[Bench, LoadLimits]:
    """Return how to load ``server``, and its room; ``stack`` closes what is opened for it.

    For Ollama the model must be loaded; ``model`` names it. ``seed`` makes the prompts of a run
    its own, so that none of them is in a cache already.

    Raises:
        EngineError: the server does not say what a load has to know.
    """
    client = stack.enter_context(Client(server.url))
    kind = snapshot.server
    per_request = None
    speaker: Speaker
    if kind == "llama-server":
        speaker = LlamaServerSpeaker(client, seed)
    elif kind == "ollama":
        speaker, per_request = _ollama(stack, client, server, snapshot, model, seed)
    elif kind == "vllm":
        name, per_request = _served(client, snapshot.model)
        speaker = VllmSpeaker(client, name, seed)
    elif kind == "sglang":
        speaker = SglangSpeaker(seed)
    else:
        raise EngineError(f"{kind} cannot be loaded", "observe it without --load")
    bench = Bench(server.url, speaker, server.source, server.process)
    return bench, limits_of(snapshot, per_request)


def _ollama(
    stack: ExitStack,
    client: Client,
    server: Server,
    snapshot: Snapshot,
    model: str | None,
    seed: int,
) -> tuple[Speaker, int | None]:
    name = model_to_load(snapshot, model)
    held = next((each for each in snapshot.loaded if each.name in (name, f"{name}:latest")), None)
    # Another num_ctx than that of the loaded one would load the model anew.
    n_ctx = held.context_length if held else None
    port = _runner_port(server.process.runners())
    if port is None:
        count = read_count(client, name, n_ctx, _LOADING)
    else:
        count = runner_count(stack.enter_context(Client(f"http://127.0.0.1:{port}")))
    return OllamaSpeaker(name, count, n_ctx, seed), n_ctx


def _runner_port(runners: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Return the port of the only runner: which of several has the model is not told."""
    ports = [int(told["port"]) for told in runners.values()]
    return ports[0] if len(ports) == 1 else None


def _served(client: Client, model: str) -> tuple[str, int | None]:
    """Return the name and the longest request of the model that an OpenAI-style server serves."""
    try:
        listed = client.get_json("/v1/models")
    except ServerError:
        listed = None
    entries = listed.get("data") if isinstance(listed, Mapping) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and model in ("", entry.get("id")):
            longest = entry.get("max_model_len")
            name = str(entry.get("id") or model)
            return name, longest if isinstance(longest, int) and longest > 0 else None
    return model, None
