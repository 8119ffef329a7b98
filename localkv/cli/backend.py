"""Which server a sweep measures: by its options, and by what runs on this machine."""

from __future__ import annotations

import os
from dataclasses import replace

from localkv.cli import say
from localkv.errors import EngineError, UsageError
from localkv.sweep.plan import BACKENDS, SweepPlan


def with_server(plan: SweepPlan, *, model_named: bool) -> SweepPlan:
    """Return ``plan`` with its server settled; an attached llama-server also brings its model.

    Raises:
        UsageError: a server was named for the back end that has none.
    """
    if plan.backend == BACKENDS[0]:
        if plan.server_bin or plan.server_url:
            raise UsageError(
                f"--server-bin and --server-url are not for {BACKENDS[0]}",
                f"add --backend {BACKENDS[1]} or {BACKENDS[2]}",
            )
        return plan
    if plan.backend == "ollama" and not (plan.server_bin or plan.server_url):
        return replace(plan, server_url=_running_ollama())
    if plan.server_url and not model_named:
        return replace(plan, model="")
    return plan


def _running_ollama() -> str:
    """Return the URL of the Ollama that OLLAMA_HOST names or that runs here; "" for neither."""
    from localkv.engines import ollama
    from localkv.engines.ollama_host import ollama_url

    host = os.environ.get("OLLAMA_HOST", "").strip()
    url = ollama_url(host)
    if host:
        return url
    try:
        ollama.attached(url)
    except EngineError:
        return ""
    say(f"the Ollama at {url} is measured; --server-bin ollama starts one of its own")
    return url
