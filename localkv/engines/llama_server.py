"""llama-server as an engine: started for given settings, or one that runs already.

A server that localkv starts listens on this machine alone, on a port of its own, and is gone when
the context manager ends. One that runs already is asked and never restarted.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localkv.engines.log import EngineLog, parse_log
from localkv.engines.serving import Serving, serving
from localkv.errors import EngineError, UsageError
from localkv.http import Client, ServerError
from localkv.predict.config import RunConfig
from localkv.predict.flags import NO_LIMITS, Limits, llama_server_flags

PROGRAM = "llama-server"
#: The wheel that brings the same server as a library, and what starts it.
PACKAGE = "xllamacpp"
_LAUNCHER = "localkv.engines.xllamacpp_server"
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
#: Seconds for a model to be loaded, unless a caller knows better.
START = 600.0


@dataclass(frozen=True)
class LlamaServer:
    """A llama-server at ``url``; ``pid`` and ``serving`` are None where localkv did not start it.

    ``command`` are the words it was started with.
    """

    url: str
    pid: int | None = None
    command: tuple[str, ...] = ()
    serving: Serving | None = None

    def engine_log(self) -> EngineLog | None:
        """Return what the server's log says of memory; None when the log is not ours to read."""
        return parse_log(self.serving.lines()) if self.serving else None

    def props(self) -> dict[str, Any]:
        """Return ``/props``: total_slots, model_path, default_generation_settings, ...

        Raises:
            ServerError: no answer, or not this kind of server.
        """
        return _object(self.url, "/props")

    def slots(self) -> list[dict[str, Any]] | None:
        """Return ``/slots``; None when the server has them switched off.

        Raises:
            ServerError: no answer.
        """
        with Client(self.url) as client:
            try:
                answer = client.get_json("/slots")
            except ServerError as error:
                if error.kind != "status":
                    raise
                return None
        return [slot for slot in answer if isinstance(slot, dict)]

    def read_prompt(self, prompt: list[int], *, slot: int, timeout: float) -> int | None:
        """Let ``slot`` read the tokens ``prompt`` and generate one; return how many it read.

        Raises:
            ServerError: no answer within ``timeout`` seconds, or a refusal.
        """
        body = {"prompt": prompt, "n_predict": 1, "id_slot": slot, "cache_prompt": False}
        with Client(self.url) as client:
            answer = client.post_json("/completion", body, timeout=timeout)
        count = answer.get("tokens_evaluated") if isinstance(answer, dict) else None
        return count if isinstance(count, int) else None


def find_server(named: str | None = None) -> tuple[str, ...]:
    """Return the words that start llama-server: ``named``, PATH's, or the package xllamacpp's.

    Raises:
        EngineError: there is none.
    """
    if named:
        found = shutil.which(os.path.expanduser(named))
        if found is None:
            raise EngineError(f"{named} is no program", f"give the path of a {PROGRAM} binary")
        return (found,)
    if (found := shutil.which(PROGRAM)) is not None:
        return (found,)
    if importlib.util.find_spec(PACKAGE) is not None:
        return (sys.executable, "-m", _LAUNCHER)
    raise EngineError(
        f"no {PROGRAM} on PATH",
        f"give --server-bin, or run: python -m pip install {PACKAGE}",
    )


def server_arguments(
    config: RunConfig, model: str | Path, *, n_threads: int = 0, limits: Limits = NO_LIMITS
) -> tuple[str, ...]:
    """Return the arguments under which llama-server does exactly what ``config`` says.

    Beside the flags to paste, those that keep the server from deciding by itself: it would move
    layers to a GPU, and fit them to the memory that is free. ``n_threads`` 0 leaves its choice.

    Raises:
        UsageError: llama-server has no flag for a setting.
    """
    if config.n_outputs_max not in (0, config.n_seq_max):
        raise UsageError(
            f"{PROGRAM} keeps logits for one token per slot, not for {config.n_outputs_max}",
            "leave n_outputs_max away",
        )
    flags = {
        "n_gpu_layers": ("-ngl", "0"),
        **llama_server_flags(config, config.n_ctx, limits),
        "fit": ("--fit", "off"),
        "load_mode": () if config.mmap else ("--load-mode", "none"),
        "threads": ("-t", str(n_threads)) if n_threads else (),
        # Below this the log says nothing of memory.
        "verbosity": ("-lv", "4"),
        "address": ("--host", "127.0.0.1", "--port", "0", "--offline"),
    }
    return ("-m", str(model), *(word for words in flags.values() for word in words))


@contextmanager
def started(
    config: RunConfig,
    model: str | Path,
    *,
    log: Path,
    server_bin: str | None = None,
    n_threads: int = 0,
    limits: Limits = NO_LIMITS,
    timeout: float = START,
) -> Iterator[LlamaServer]:
    """Start llama-server on ``model`` with ``config`` and give it when the model is loaded.

    ``log`` is the file for its output. Metrics and slots are switched on.

    Raises:
        EngineError: there is no such program, or it failed; with the end of its log.
        UsageError: llama-server has no flag for a setting.
    """
    command = (
        *find_server(server_bin),
        *server_arguments(config, model, n_threads=n_threads, limits=limits),
        *("--metrics", "--slots"),
    )
    with serving(
        command, name=PROGRAM, log=log, listening=_LISTENING, ready=is_ready, timeout=timeout
    ) as running:
        yield LlamaServer(running.url, running.pid, command, running)


def attached(url: str) -> LlamaServer:
    """Return the llama-server that runs at ``url``.

    Raises:
        ServerError: nobody answers there, or another program does.
    """
    server = LlamaServer(url)
    if "total_slots" not in server.props():
        raise ServerError(f"{url} is no {PROGRAM}", "give the URL of one", "answer")
    return server


def is_ready(url: str) -> bool:
    """Return whether the server at ``url`` has its model loaded."""
    with Client(url) as client:
        try:
            client.request("GET", "/health")
        except ServerError:
            return False
    return True


def _object(url: str, path: str) -> dict[str, Any]:
    with Client(url) as client:
        answer = client.get_json(path)
    if not isinstance(answer, dict):
        raise ServerError(f"{url}{path} answered no object", f"is it a {PROGRAM}?", "answer")
    return answer
