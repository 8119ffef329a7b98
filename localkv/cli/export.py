"""``localkv export``: the figures of live servers as Prometheus metrics."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from localkv.cli.options import behind_options
from localkv.cli.signals import sigterm_interrupts
from localkv.errors import EngineError, UsageError

if TYPE_CHECKING:
    from localkv.observe.exporter import Predict, Target
    from localkv.observe.targets import Server

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
@behind_options
@sigterm_interrupts()
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
    from localkv.report.escape import escape_terminal

    host, port = _address(listen)
    with ExitStack() as stack:
        registry = CollectorRegistry()
        silent: list[EngineError] = []
        exported = [_target(stack, silent, t, model, kv_unified) for t in targets]
        registry.register(Exporter(exported))
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {listen}: {error.strerror}", "give another --listen HOST:PORT"
            ) from None
        bound = server.server_address[1]
        print(f"localkv: metrics at http://{host}:{bound}/metrics", file=sys.stderr, flush=True)
        for said in silent:
            text = f"localkv: {escape_terminal(said.message)}; every scrape tries again"
            print(text, file=sys.stderr, flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            server.shutdown()
            thread.join()


def _target(
    stack: ExitStack,
    silent: list[EngineError],
    name: str,
    model: str | None,
    kv_unified: bool | None,
) -> Target:
    """Return what ``name`` means, connected if it answers; else ``silent`` gets what it said."""
    from localkv.cli.attach import reach
    from localkv.http import checked_url
    from localkv.observe.exporter import Awaited, Target
    from localkv.observe.sources import USUAL_PORTS
    from localkv.observe.targets import urls

    def connect() -> tuple[Server, Predict]:
        return reach(stack, name, model=model, kv_unified=kv_unified)

    try:
        return Target(*connect())
    except EngineError as error:
        silent.append(error)
    # As it will be called once it answers, so that its series go on; auto is no address yet.
    url = "auto" if name == "auto" else checked_url(urls(name, os.environ)[0])
    return Target(Awaited(name if name in USUAL_PORTS else "unknown", url, connect))


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{listen!r} is no address to listen on", f"give {DEFAULT_LISTEN}")
    return host.strip("[]") or "127.0.0.1", int(port)
