"""``localkv export``: the figures of live servers as Prometheus metrics."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.observe.exporter import Target

DEFAULT_LISTEN = "127.0.0.1:9469"


@click.command("export", epilog="Example: localkv export llama-server ollama")
@click.argument("targets", nargs=-1, required=True)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Where /metrics is served; port 0: any.",
)
@click.option(
    "--model", metavar="MODEL", help="The server's model, where its file cannot be read from here."
)
@click.option(
    "--kv-unified/--no-kv-unified",
    default=None,
    help="llama-server: whether the slots share one cache.  [default: as it was started]",
)
def command(
    targets: tuple[str, ...], listen: str, model: str | None, kv_unified: bool | None
) -> None:
    """Serve Prometheus metrics about live servers, until Ctrl-C; TARGETS as for observe.

    Used and total tokens of the KV cache, bytes predicted and measured, requests, idle memory:
    what llama-server and Ollama do not export themselves. One scrape is one look at each server.
    The folder dashboards holds a Grafana dashboard and alert rules.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import start_http_server

    from localkv.observe.exporter import Exporter

    host, port = _address(listen)
    with ExitStack() as stack:
        registry = CollectorRegistry()
        registry.register(Exporter([_target(stack, t, model, kv_unified) for t in targets]))
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {listen}: {error.strerror}", "give another --listen HOST:PORT"
            ) from None
        bound = server.server_address[1]
        print(f"localkv: metrics at http://{host}:{bound}/metrics", file=sys.stderr, flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            server.shutdown()
            thread.join()


def _target(stack: ExitStack, name: str, model: str | None, kv_unified: bool | None) -> Target:
    from localkv.cli.attach import attach
    from localkv.observe.exporter import Target

    found = attach(stack, name, model=model, kv_unified=kv_unified)
    return Target(found.server, found.predict)


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{listen!r} is no address to listen on", f"give {DEFAULT_LISTEN}")
    return host.strip("[]") or "127.0.0.1", int(port)
