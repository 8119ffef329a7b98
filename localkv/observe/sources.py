"""A thin client for each server: which endpoints to ask, and which of them are off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from localkv.errors import EngineError
from localkv.http import Client, ServerError
from localkv.observe import llama_server, ollama, sglang, vllm
from localkv.observe.command_line import is_unified
from localkv.observe.metrics import Metrics, parse_metrics
from localkv.snapshots import Snapshot

#: Endpoints that answer so are switched off or not built in; asking again would not help.
_OFF = (404, 405, 501)
#: Where servers listen unless they are told otherwise, in the order in which they are asked.
USUAL_PORTS = {"llama-server": 8080, "ollama": 11434, "vllm": 8000, "sglang": 30000}


#: The settings of a llama-server, as ``command_line.server_settings`` reads them.
Settings = Mapping[str, Any]


class Source(Protocol):
    """A server that can be asked again and again."""

    server: str

    def scrape(self) -> Snapshot:
        """Return what it says now.

        Raises:
            ServerError: it does not answer, or not as it should.
        """

    def forget(self) -> None:
        """Ask everything anew: another server may have taken the place of this one."""

    def close(self) -> None:
        """Close the connections."""


class LlamaServer:
    """llama-server; ``unified`` as for :func:`localkv.observe.llama_server.snapshot`."""

    server = llama_server.SERVER

    def __init__(self, client: Client, unified: bool | None = None) -> None:
        self._client = client
        self.unified = unified
        self._off: set[str] = set()
        self._props: Mapping[str, Any] | None = None

    def scrape(self) -> Snapshot:
        """Return what ``/slots`` and ``/metrics`` say; ``/props`` is asked once."""
        if self._props is None:
            self._props = self._ask("/props")
        slots = self._ask("/slots")
        text = self._ask("/metrics")
        return llama_server.snapshot(
            parse_metrics(text) if isinstance(text, str) else None,
            slots if isinstance(slots, list) else None,
            self._props,
            unified=self.unified,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def forget(self) -> None:
        """Ask ``/props`` anew, and whether endpoints are on."""
        self._off.clear()
        self._props = None

    def _ask(self, path: str) -> Any:
        if path in self._off:
            return None
        try:
            if path == "/metrics":
                return self._client.get_text(path)
            return self._client.get_json(path)
        except ServerError as error:
            if error.status not in _OFF:
                raise
            self._off.add(path)
            return None


class FromMetrics:
    """vLLM or SGLang: all that they say is in ``/metrics``."""

    def __init__(self, client: Client, server: str) -> None:
        self._client = client
        self.server = server

    def scrape(self) -> Snapshot:
        """Return what ``/metrics`` say."""
        return _READERS[self.server](parse_metrics(self._client.get_text("/metrics")))

    def forget(self) -> None:
        """Do nothing: nothing is remembered."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class Ollama:
    """Ollama's own API, and behind it the ``/slots`` of the runners on this machine.

    From version 0.30 a loaded model is a llama-server of its own, a child of ``ollama serve``;
    what is in its cache is asked there, since Ollama's API has no field for it.
    """

    server = ollama.SERVER

    def __init__(self, client: Client, runners: Callable[[], Mapping[int, Settings]]) -> None:
        """Ask through ``client``; ``runners`` gives the settings of its llama-servers by pid."""
        self._client = client
        self._runners = runners
        self._behind: dict[int, LlamaServer] = {}
        self._version: str | None = None

    def scrape(self) -> Snapshot:
        """Return what ``/api/ps`` says, and what its runners do; ``/api/version`` is asked once."""
        if self._version is None:
            answer = self._client.get_json("/api/version")
            self._version = str(answer.get("version", "")) if isinstance(answer, Mapping) else ""
        ps = self._client.get_json("/api/ps")
        told = ollama.snapshot(ps if isinstance(ps, Mapping) else None, self._version)
        return ollama.with_runners(told, self._ask_runners() if told.loaded else [])

    def forget(self) -> None:
        """Ask the version anew."""
        self._version = None

    def close(self) -> None:
        """Close the connections to the runners."""
        for source in self._behind.values():
            source.close()
        self._behind.clear()
        self._client.close()

    def _ask_runners(self) -> list[Snapshot]:
        """Return what the runners say; one that is loading or ending says nothing."""
        found = []
        running = self._runners()
        for pid in [pid for pid in self._behind if pid not in running]:
            self._behind.pop(pid).close()
        for pid, settings in running.items():
            if pid not in self._behind:
                client = Client(f"http://127.0.0.1:{settings['port']}")
                self._behind[pid] = LlamaServer(client, is_unified(settings))
            with suppress(ServerError):
                found.append(self._behind[pid].scrape())
        return found


_READERS = {vllm.SERVER: vllm.snapshot, sglang.SERVER: sglang.snapshot}
_PREFIXES = {
    vllm.PREFIX: vllm.SERVER,
    sglang.PREFIX: sglang.SERVER,
    llama_server.PREFIX: llama_server.SERVER,
}


def detect(client: Client, runners: Callable[[], Mapping[int, Settings]] = dict) -> Source:
    """Return the client for whatever server answers, told by what it answers.

    ``runners`` as for :class:`Ollama`.

    Raises:
        EngineError: nobody answers, or nothing that localkv knows.
    """
    metrics = _metrics(client)
    server = next((name for p, name in _PREFIXES.items() if metrics.has_prefix(p)), None)
    if server is not None and server in _READERS:
        return FromMetrics(client, server)
    if server or _has(client, "/props", "default_generation_settings"):
        return LlamaServer(client)
    if _has(client, "/api/version", "version"):
        return Ollama(client, runners)
    raise EngineError(
        f"{client.base_url} answers, but not as llama-server, Ollama, vLLM or SGLang do",
        "vLLM and SGLang tell all in /metrics (SGLang: --enable-metrics)",
    )


def _metrics(client: Client) -> Metrics:
    try:
        return parse_metrics(client.get_text("/metrics"))
    except ServerError as error:
        if error.kind != "status" or error.status in (401, 403):
            raise
        return Metrics(())


def _has(client: Client, path: str, key: str) -> bool:
    try:
        answer = client.get_json(path)
    except ServerError as error:
        if error.kind == "answer" or error.status in _OFF:
            return False
        raise
    return isinstance(answer, Mapping) and key in answer
