"""The exporter against real servers and a real Prometheus."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from observe_helpers import fake_server
from server_helpers import (
    ollama_create,
    running_llama_server,
    running_ollama,
    running_prometheus,
)
from servers import binary

from localkv.http import Client
from localkv.observe.exporter import Exporter, Target
from localkv.observe.targets import connect

REPOSITORY = Path(__file__).resolve().parents[1]
DASHBOARD = REPOSITORY / "dashboards/localkv.json"
ALERTS = REPOSITORY / "dashboards/alerts.yml"
VLLM = (Path(__file__).parent / "data/metrics/vllm_0.32.txt").read_text(encoding="utf-8")


def dashboard_metrics() -> set[str]:
    """Return the names of the metrics in every expression of the dashboard."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    return {name for text in expressions for name in re.findall(r"\blocalkv_\w+", text)}


@contextmanager
def vllm_of_yesterday() -> Iterator[str]:
    """Serve what a real vLLM once answered."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = VLLM.encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def exporter(*targets: str) -> Iterator[str]:
    """Run ``localkv export``, yield its address, and end it as Ctrl-C does."""
    command = [sys.executable, "-m", "localkv", "export", *targets, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            found = re.search(r"http://([\d.:]+)/metrics", line)
            assert found, line
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_rules_are_rules(tmp_path: Path) -> None:
    done = subprocess.run(
        [binary("promtool"), "check", "rules", ALERTS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 rules found" in done.stdout


@pytest.mark.slow
def test_prometheus_scrapes_all_that_the_dashboard_shows(
    smollm2_path: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(
            running_llama_server(
                tmp_path / "server", smollm2_path, "-c", "2048", "-np", "2", "--metrics"
            )
        )
        ollama = stack.enter_context(running_ollama(tmp_path / "ollama"))
        ollama_create(ollama, "smol", smollm2_path)
        request = {"model": "smol", "prompt": "One", "stream": False}
        ollama.post("/api/generate", {**request, "options": {"num_predict": 2, "num_ctx": 512}})
        server.post("/completion", {"prompt": "One two three", "n_predict": 4})
        gone_later = ExitStack()
        vllm = gone_later.enter_context(vllm_of_yesterday())
        address = stack.enter_context(exporter(server.url, ollama.url, vllm))
        with Client(f"http://{address}") as client:
            text = client.get_text("/metrics", timeout=30)
        checked = subprocess.run(
            [binary("promtool"), "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
        prometheus = stack.enter_context(
            running_prometheus(tmp_path / "prometheus", [address], rules=ALERTS)
        )
        wait_for(prometheus, "localkv_up")
        assert value(prometheus, "localkv_preemptions_total", "vllm") == 17
        assert value(prometheus, "localkv_kv_cache_capacity_tokens", "llama-server") == 2048
        used = sum(slot.get("n_prompt_tokens", 0) for slot in server.get("/slots"))
        assert value(prometheus, "localkv_kv_cache_used_tokens", "llama-server") == used > 0
        gone_later.close()
        names = wait_for(prometheus, "localkv_scrape_failures_total")
        assert dashboard_metrics() <= names
        assert value(prometheus, "localkv_up", "vllm") == 0


def wait_for(prometheus: Any, name: str) -> set[str]:
    """Return the names of all series, once ``name`` is among them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        names = set(prometheus.get("/api/v1/label/__name__/values")["data"])
        if name in names:
            return names
        time.sleep(0.1)
    raise AssertionError(f"Prometheus has not seen {name}")


def value(prometheus: Any, metric: str, server: str) -> float:
    """Return the last value of ``metric`` of the target ``server``."""
    query = f'/api/v1/query?query={metric}%7Bserver%3D"{server}"%7D'
    (result,) = prometheus.get(query)["data"]["result"]
    return float(result["value"][1])


def test_two_scrapes_at_once_are_one_look_after_the_other() -> None:
    with fake_server() as server:
        found = connect(server.url, {})
        found.source._client.timeout = 1.0  # type: ignore[attr-defined]
        both = Exporter([Target(found, lambda snapshot: {"kv_bytes": 7})])
        server.answer(server.hang)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: list(both.collect()), range(2)))
        assert server.most_pending == 1
        server.restore()
        samples = {s.name: s for family in both.collect() for s in family.samples}
        found.close()
    assert samples["localkv_up"].value == 1
    assert samples["localkv_scrape_failures_total"].value == 2
    assert samples["localkv_scrape_failures_total"].labels["kind"] == "slow"
    assert samples["localkv_kv_cache_used_tokens"].value == 42
    assert samples["localkv_kv_cache_idle_bytes"].value == 0


def test_a_sleeping_server_holds_no_cache() -> None:
    with fake_server() as server:
        server.props["is_sleeping"] = True
        server.metrics["requests_processing"] = 0
        found = connect(server.url, {})
        families = list(Exporter([Target(found, lambda snapshot: {"kv_bytes": 7})]).collect())
        found.close()
    samples = {s.name: s.value for family in families for s in family.samples}
    assert samples["localkv_kv_cache_idle_bytes"] == 0
    assert "localkv_kv_cache_used_tokens" not in samples
