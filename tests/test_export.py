"""The exporter against real servers and a real Prometheus."""

from __future__ import annotations

import json
import re
import signal
import socket
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
from click.testing import CliRunner
from observe_helpers import FakeServer, fake_server, html
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import (
    ollama_create,
    running_llama_server,
    running_ollama,
    running_prometheus,
)
from servers import binary
from url_helpers import Handler, Server, Site, serving

from localkv.cli.app import cli
from localkv.errors import UsageError
from localkv.http import Client
from localkv.observe.exporter import Awaited, Exporter, Target
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


def samples_at(address: str) -> dict[str, dict[tuple[str, str, str], float]]:
    """Return what a scrape says: metric -> (server, instance_url, kind or "") -> value."""
    with Client(f"http://{address}") as client:
        text = client.get_text("/metrics", timeout=30)
    found: dict[str, dict[tuple[str, str, str], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            key = labels["server"], labels["instance_url"], labels.get("kind", "")
            found.setdefault(sample.name, {})[key] = sample.value
    return found


@contextmanager
def listening_at(port: int) -> Iterator[FakeServer]:
    """Run a server that answers as llama-server on ``port``."""
    site = Site(port, "http")
    with Server(("127.0.0.1", port), type("Bound", (Handler,), {"site": site})) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield FakeServer(site)
        finally:
            server.shutdown()
            thread.join(10)


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_starts_later_is_connected_at_a_later_scrape() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with fake_server() as there, exporter(there.url, f"{url}/") as address:
        for scrapes in (1, 2):
            before = samples_at(address)
            assert before["localkv_up"] == {
                ("llama-server", there.url, ""): 1,
                ("unknown", url, ""): 0,
            }
            failures = before["localkv_scrape_failures_total"]
            assert failures == {("unknown", url, "unreachable"): scrapes}
        with listening_at(port) as late:
            after = samples_at(address)
            assert late.asked("/slots") == 1
        gone = samples_at(address)
    connected = ("llama-server", url, "")
    assert after["localkv_up"] == {("llama-server", there.url, ""): 1, connected: 1}
    assert after["localkv_kv_cache_used_tokens"][connected] == 42
    assert after["localkv_scrape_failures_total"] == {("llama-server", url, "unreachable"): 2}
    assert gone["localkv_up"][connected] == 0
    assert gone["localkv_scrape_failures_total"] == {("llama-server", url, "unreachable"): 3}


def test_a_name_is_the_label_before_anybody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{port}")
    with exporter("ollama") as address:
        assert samples_at(address)["localkv_up"] == {("ollama", f"http://127.0.0.1:{port}", ""): 0}


def test_a_page_is_a_failed_answer_and_a_loading_server_is_loading() -> None:
    with serving() as page, fake_server() as loading:
        for path in ("/metrics", "/props", "/api/version"):
            page.add(path, html())
        loading.answer(html(503))
        with exporter(page.url, loading.url) as address:
            said = samples_at(address)
            assert said["localkv_up"] == {
                ("unknown", page.url, ""): 0,
                ("unknown", loading.url, ""): 0,
            }
            assert said["localkv_scrape_failures_total"] == {
                ("unknown", page.url, "answer"): 1,
                ("unknown", loading.url, "loading"): 1,
            }
            loading.restore()
            after = samples_at(address)["localkv_up"]
            assert after[("llama-server", loading.url, "")] == 1


def test_two_scrapes_at_once_connect_once() -> None:
    with fake_server() as server:
        reached = []

        def reach() -> tuple[Any, Any]:
            reached.append(connect(server.url, {}))
            return reached[-1], lambda snapshot: {}

        both = Exporter([Target(Awaited("unknown", server.url, reach))])
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: list(both.collect()), range(2)))
        assert len(reached) == 1
        reached[0].close()


@pytest.mark.parametrize("target", ["ftp://host", "http://user:secret@127.0.0.1:1", "http://a:b"])
def test_what_is_no_address_is_an_error_at_the_start(target: str) -> None:
    done = run_export(target)
    assert done.returncode == 2, done.stderr
    assert "URL" in done.stderr
    assert "secret" not in done.stderr


def test_several_servers_for_auto_are_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_server() as one, fake_server() as two:
        usual = {name: url.rsplit(":", 1)[1] for name, url in (("vllm", one.url), ("x", two.url))}
        monkeypatch.setattr("localkv.observe.targets.USUAL_PORTS", {"ollama": 11434, **usual})
        monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{free_port()}")
        done = CliRunner().invoke(cli, ["export", "auto", "--listen", "127.0.0.1:0"])
    assert isinstance(done.exception, UsageError)
    assert "several servers answer" in str(done.exception)


def run_export(*targets: str) -> subprocess.CompletedProcess[str]:
    """Run ``localkv export`` that is expected to end by itself."""
    command = [sys.executable, "-m", "localkv", "export", *targets, "--listen", "127.0.0.1:0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
