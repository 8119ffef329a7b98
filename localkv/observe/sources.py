"""A thin client for each server: which endpoints to ask, and which of them are off.

Looking changes nothing on a server: no question wakes it, keeps it awake, or loads a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from localkv.engines.ollama_host import PORT as OLLAMA_PORT
from localkv.errors import EngineError
from localkv.http import Client, ServerError
from localkv.observe import llama_server, ollama, sglang, vllm
from localkv.observe.command_line import is_sleeper, is_unified
from localkv.observe.metrics import Metrics, parse_metrics
from localkv.snapshots import Snapshot

#: Endpoints that answer so are switched off or not built in; asking again would not help.
_OFF = (404, 405, 501)
#: Where servers listen unless they are told otherwise, in the order in which they are asked.
USUAL_PORTS = {"llama-server": 8080, "ollama": OLLAMA_PORT, "vllm": 8000, "sglang": 30000}
#: Bytes of metrics: a busy vLLM gives some hundred KiB. Reading more would take seconds.
MOST_METRICS = 4 << 20
_SHOWN = 40

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


class Process(Protocol):
    """What is known of a server's process on this machine."""

    def settings(self) -> Settings | None:
        """Return what the llama-server was told; None for another program, or another machine."""

    def runners(self) -> Mapping[int, Settings]:
        """Return the settings of the llama-servers that it started, by process id."""


class LlamaServer:
    """llama-server. ``kv_unified`` says what no answer tells; None: as its process was started.

    From the middle of 2025 on the server can unload its model when idle. ``/slots`` wakes it, and
    puts its sleep off; ``/metrics`` and ``/props`` do not. So ``/slots`` is asked while there is
    work, and once after it.
    """

    server = llama_server.SERVER

    def __init__(
        self, client: Client, process: Process | Settings, kv_unified: bool | None = None
    ) -> None:
        """Ask through ``client``; ``process`` is the server's, or its settings themselves."""
        self._client = client
        self._process = process
        self.kv_unified = kv_unified
        self.forget()

    def forget(self) -> None:
        """Ask everything anew, and whether endpoints are on."""
        self._off: dict[str, ServerError] = {}
        self._answered: set[str] = set()
        self._settings: Settings | None = None
        self._props: Mapping[str, Any] | None = None
        self._slots: list[Any] | None = None
        self._done: tuple[float | None, ...] | None = None

    def scrape(self) -> Snapshot:
        """Return what ``/metrics``, ``/slots`` and ``/props`` say, as far as it asks them."""
        if not self._answered:
            told = self._process
            self._settings = told if isinstance(told, Mapping) else told.settings()
        sleeps = is_sleeper(self._settings)
        text = self._ask("/metrics")
        metrics = None if text is None else _parsed(self._client, text)
        if self._props is None or (sleeps is not False and "is_sleeping" in self._props):
            props = self._ask("/props")
            self._props = props if isinstance(props, Mapping) else None
        self._look_at_slots(metrics, sleeps)
        if len(self._off) == 3:
            raise next(iter(self._off.values()))
        unified = is_unified(self._settings) if self.kv_unified is None else self.kv_unified
        return llama_server.snapshot(
            metrics, self._slots, self._props, unified=unified, sleeps=sleeps
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _look_at_slots(self, metrics: Metrics | None, sleeps: bool | None) -> None:
        """Ask for the slots, unless they are as they were or asking would be felt."""
        if llama_server.is_asleep(self._props or {}) or (metrics is None and sleeps):
            self._slots = self._done = None
            return
        done = llama_server.work_done(metrics)
        if done is None or done != self._done:
            slots = self._ask("/slots")
            self._slots = slots if isinstance(slots, list) else None
            self._done = done

    def _ask(self, path: str) -> Any:
        """Return the answer; None for an endpoint that never answered, because it is off."""
        if path in self._off:
            return None
        try:
            if path == "/metrics":
                answer: Any = self._client.get_text(path, max_body=MOST_METRICS)
            else:
                answer = self._client.get_json(path)
        except ServerError as error:
            if error.status not in _OFF or path in self._answered:
                raise
            self._off[path] = error
            return None
        self._answered.add(path)
        return answer


class FromMetrics:
    """vLLM or SGLang: all that they say is in ``/metrics``."""

    def __init__(self, client: Client, server: str) -> None:
        self._client = client
        self.server = server

    def scrape(self) -> Snapshot:
        """Return what ``/metrics`` say."""
        text = self._client.get_text("/metrics", max_body=MOST_METRICS)
        return _READERS[self.server](_parsed(self._client, text))

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

    def __init__(self, client: Client, process: Process) -> None:
        """Ask through ``client``; ``process`` knows the runners on this machine."""
        self._client = client
        self._process = process
        self._behind: dict[int, LlamaServer] = {}
        self._version: str | None = None

    def scrape(self) -> Snapshot:
        """Return what ``/api/ps`` says, and what its runners do; ``/api/version`` is asked once."""
        if self._version is None:
            answer = self._client.get_json("/api/version")
            self._version = str(answer.get("version", "")) if isinstance(answer, Mapping) else ""
        ps = self._client.get_json("/api/ps")
        told = ollama.snapshot(ps if isinstance(ps, Mapping) else None, self._version)
        return self._with_runners(told) if told.loaded else told

    def forget(self) -> None:
        """Ask the version anew."""
        self._version = None

    def close(self) -> None:
        """Close the connections to the runners."""
        for source in self._behind.values():
            source.close()
        self._behind.clear()
        self._client.close()

    def _with_runners(self, told: Snapshot) -> Snapshot:
        """Return ``told`` with what its runners say; one that loads or ends says nothing."""
        found: dict[int, Snapshot] = {}
        silent = ""
        running = self._process.runners()
        for pid in [pid for pid in self._behind if pid not in running]:
            self._behind.pop(pid).close()
        for pid, settings in running.items():
            if pid not in self._behind:
                client = Client(f"http://127.0.0.1:{settings['port']}")
                self._behind[pid] = LlamaServer(client, settings)
            try:
                found[pid] = self._behind[pid].scrape()
            except ServerError as error:
                silent = f"its runner: {error}"
        return ollama.with_runners(told, found, silent)


_READERS = {vllm.SERVER: vllm.snapshot, sglang.SERVER: sglang.snapshot}
_PREFIXES = {
    vllm.PREFIX: vllm.SERVER,
    sglang.PREFIX: sglang.SERVER,
    llama_server.PREFIX: llama_server.SERVER,
}


def detect(client: Client, process: Process) -> Source:
    """Return the client for whatever server answers, told by what it answers.

    Raises:
        EngineError: nobody answers, or nothing that localkv knows.
    """
    metrics = _metrics(client)
    server = next((name for p, name in _PREFIXES.items() if metrics.has_prefix(p)), None)
    if server is not None and server in _READERS:
        return FromMetrics(client, server)
    if server or _has(client, "/props", "default_generation_settings"):
        return LlamaServer(client, process)
    if _has(client, "/api/version", "version"):
        return Ollama(client, process)
    raise EngineError(
        f"{client.base_url} answers, but not as llama-server, Ollama, vLLM or SGLang do",
        "vLLM and SGLang tell all in /metrics (SGLang: --enable-metrics)",
    )


def _metrics(client: Client) -> Metrics:
    try:
        return parse_metrics(client.get_text("/metrics", max_body=MOST_METRICS))
    except ServerError as error:
        if error.kind not in ("status", "answer") or error.status in (401, 403):
            raise
        return Metrics(())


def _parsed(client: Client, text: str) -> Metrics:
    """Return the metrics in ``text``.

    Raises:
        ServerError: there are none in it, as in a page of HTML.
    """
    metrics = parse_metrics(text)
    if metrics or not text.strip():
        return metrics
    raise ServerError(
        f"{client.base_url}/metrics answered no metrics but {text.strip()[:_SHOWN]!r}",
        "is this the server that you mean?",
        "answer",
    )


def _has(client: Client, path: str, key: str) -> bool:
    try:
        answer = client.get_json(path)
    except ServerError as error:
        if error.kind == "answer" or error.status in _OFF:
            return False
        raise
    return isinstance(answer, Mapping) and key in answer
