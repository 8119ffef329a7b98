"""Steps of a load made by hand, and a llama-server of a few lines whose answers a test decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import url_helpers
from url_helpers import Handler, Site, chunked, status

from localkv.snapshots import LoadRequest, LoadStep, Observed, Snapshot

FULL = {"error": {"code": 500, "message": "Context size has been exceeded."}}
LONG = {"error": {"code": 400, "message": "request (9 tokens) exceeds the available context size"}}


def request(**told: Any) -> LoadRequest:
    """Return a request that was answered, but for what is ``told``."""
    usual = LoadRequest(0.0, 0.5, 1.0, 8, 14.0, prompt_tokens=100)
    return replace(usual, **told)


def look(seconds: float, server: str = "vllm", **told: Any) -> Observed:
    """Return a look with an answer."""
    return Observed(seconds, 0.001, Snapshot(server, **told))


def step(requests: Sequence[LoadRequest], looks: Sequence[Observed] = (), **told: Any) -> LoadStep:
    """Return a step of ``requests`` and ``looks``."""
    usual = {
        "part": "concurrency",
        "name": "some at once",
        "concurrency": len(requests),
        "prompt_tokens": 100,
        "n_predict": 8,
        "shared": 0,
        "started": 0.0,
        "seconds": 2.0,
    }
    return LoadStep(requests=tuple(requests), looks=tuple(looks), **{**usual, **told})


def sse(*events: object) -> list[bytes]:
    """Return events as a stream of server-sent events."""
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]


def body_of(handler: Handler) -> Any:
    """Return the JSON that was sent."""
    return json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))


Generate = Callable[[Handler, Any], None]


def completion(handler: Handler, asked: Any) -> None:
    """Answer as llama-server's ``/completion`` does: a token an event, and counts at the end."""
    events: list[dict[str, Any]] = [
        {"content": "x", "tokens": [7], "stop": False} for _ in range(asked["n_predict"])
    ]
    read = len(asked["prompt"])
    timings = {"prompt_n": read - 3, "cache_n": 3, "predicted_n": asked["n_predict"]}
    events.append({"content": "", "tokens": [], "stop": True, "timings": timings})
    chunked(sse(*events))(handler)


def longer_than(tokens: int, how: Generate) -> Generate:
    """Answer prompts of up to ``tokens``; ``how`` answers longer ones."""

    def generate(handler: Handler, asked: Any) -> None:
        (how if len(asked["prompt"]) > tokens else completion)(handler, asked)

    return generate


def always(reply: Callable[[Handler], None]) -> Generate:
    """Answer every request by ``reply``."""
    return lambda handler, asked: reply(handler)


@contextmanager
def llama_site(
    generate: Generate = completion, *, slots: int = 2, n_ctx: int = 2048
) -> Iterator[Site]:
    """Run something that answers as a llama-server with ``slots`` idle slots."""
    told = [{"id": i, "n_ctx": n_ctx, "is_processing": False} for i in range(slots)]
    props = {"default_generation_settings": {"n_ctx": n_ctx}, "total_slots": slots}

    def tokenize(handler: Handler) -> None:
        words = body_of(handler)["content"].split()
        handler.answer(200, json.dumps({"tokens": list(range(5, 5 + len(words)))}).encode())

    with url_helpers.serving() as site:
        site.add("/props", status(200, json.dumps(props).encode()))
        site.add("/slots", status(200, json.dumps(told).encode()))
        site.add("/metrics", status(501))
        site.add("/tokenize", tokenize)
        site.add("/completion", lambda handler: generate(handler, body_of(handler)))
        yield site
