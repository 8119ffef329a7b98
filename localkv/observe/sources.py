"""A thin client for each server: which endpoints to ask, and which of them are off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from localkv.errors import EngineError
from localkv.http import Client, ServerError
from localkv.observe import llama_server, ollama, sglang, vllm
from localkv.observe.metrics import Metrics, parse_metrics
from localkv.snapshots import Snapshot

#: Endpoints that answer so are switched off or not built in; asking again would not help.
_OFF = (404, 405, 501)
#: Where servers listen unless they are told otherwise, in the order in which they are asked.
USUAL_PORTS = {"llama-server": 8080, "ollama": 11434, "vllm": 8000, "sglang": 30000}


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


class Ollama:
    """Ollama's own API: which models are loaded."""

    server = ollama.SERVER

    def __init__(self, client: Client) -> None:
        self._client = client
        self._version: str | None = None

    def scrape(self) -> Snapshot:
        """Return what ``/api/ps`` says; ``/api/version`` is asked once."""
        if self._version is None:
            answer = self._client.get_json("/api/version")
            self._version = str(answer.get("version", "")) if isinstance(answer, Mapping) else ""
        ps = self._client.get_json("/api/ps")
        return ollama.snapshot(ps if isinstance(ps, Mapping) else None, self._version)

    def forget(self) -> None:
        """Ask the version anew."""
        self._version = None


_READERS = {vllm.SERVER: vllm.snapshot, sglang.SERVER: sglang.snapshot}
_PREFIXES = {
    vllm.PREFIX: vllm.SERVER,
    sglang.PREFIX: sglang.SERVER,
    llama_server.PREFIX: llama_server.SERVER,
}


def detect(client: Client, *, unified: bool | None = None) -> Source:
    """Return the client for whatever server answers, told by what it answers.

    Raises:
        EngineError: nobody answers, or nothing that localkv knows.
    """
    metrics = _metrics(client)
    server = next((name for p, name in _PREFIXES.items() if metrics.has_prefix(p)), None)
    if server is not None and server in _READERS:
        return FromMetrics(client, server)
    if server or _has(client, "/props", "default_generation_settings"):
        return LlamaServer(client, unified)
    if _has(client, "/api/version", "version"):
        return Ollama(client)
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
