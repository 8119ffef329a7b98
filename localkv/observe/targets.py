"""From what a person types to a server that answers: a URL, a server's name, or ``auto``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from localkv.engines.ollama_host import ollama_url
from localkv.errors import EngineError, UsageError
from localkv.http import TIMEOUT, Client, ServerError
from localkv.observe.process import ServerProcess
from localkv.observe.sources import USUAL_PORTS, Source, detect

#: Seconds that a port of this machine may take to answer while looking around.
_GLANCE = 2.0


def urls(target: str, variables: Mapping[str, str]) -> list[str]:
    """Return the addresses that ``target`` may mean.

    ``auto`` is every usual port of this machine, a server's name its own; ``variables`` may hold
    OLLAMA_HOST. Anything else is an address.
    """
    usual = {name: f"http://127.0.0.1:{port}" for name, port in USUAL_PORTS.items()}
    if host := variables.get("OLLAMA_HOST", "").strip():
        usual["ollama"] = ollama_url(host)
    if target == "auto":
        return list(usual.values())
    return [usual.get(target, target)]


@dataclass(frozen=True)
class Server:
    """A server that answers: how to ask it, where it is, and its process on this machine."""

    source: Source
    url: str
    process: ServerProcess

    def close(self) -> None:
        """Let go of its connections and its process."""
        self.source.close()
        self.process.close()


def connect(target: str, variables: Mapping[str, str]) -> Server:
    """Return the one server that ``target`` means; ``variables`` may hold OLLAMA_HOST.

    Raises:
        UsageError: several servers answer, or the address is none.
        EngineError: nobody answers, or nothing that localkv knows.
    """
    places = urls(target, variables)
    if len(places) == 1:
        return _open(places[0])
    found = [server for place in places if (server := _glance(place))]
    if len(found) == 1:
        return found[0]
    for server in found:
        server.close()
    if found:
        named = ", ".join(f"{server.source.server} at {server.url}" for server in found)
        raise UsageError(f"several servers answer: {named}", "name one of these addresses")
    raise ServerError(
        f"no server answers at {', '.join(places)}", "start one, or give its address", "unreachable"
    )


def _open(place: str, timeout: float = TIMEOUT) -> Server:
    client = Client(place, timeout=timeout)
    process = ServerProcess(local_port(client), "the server is on another machine")
    try:
        return Server(detect(client, process), client.base_url, process)
    except BaseException:
        process.close()
        client.close()
        raise


def _glance(place: str) -> Server | None:
    try:
        return _open(place, _GLANCE)
    except EngineError:
        return None


def local_port(client: Client) -> int | None:
    """Return the port of a server on this machine, None for another machine's."""
    if not client.is_local:
        return None
    parts = urlsplit(client.base_url)
    return parts.port or (443 if parts.scheme == "https" else 80)
