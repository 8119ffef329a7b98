"""Real servers are watched: the figures are right, and the servers do not feel it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from observe_helpers import watching
from server_helpers import (
    Server,
    ollama_create,
    running_llama_server,
    running_ollama,
)

from localkv.observe import targets
from localkv.observe.behind import Predictor
from localkv.observe.recording import RECORDING_FILE, read_recording
from localkv.observe.watch import look, watch
from localkv.snapshots import Observed
from localkv.units import MIB

pytestmark = pytest.mark.server

#: One cache for all slots; without a prompt cache idle slots keep what is in them.
UNIFIED = ["-c", "8192", "-np", "4", "--kv-unified", "--cache-ram", "0"]


@contextmanager
def connected(url: str) -> Iterator[targets.Server]:
    server = targets.connect(url, {})
    try:
        yield server
    finally:
        server.close()


def looks(server: targets.Server) -> Iterator[Observed]:
    """Look whenever the next look is asked for."""
    return watch(server.source, server.process, interval=0, wait=lambda seconds: False)


def complete(server: Server, n_tokens: int, n_predict: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": list(range(100, 100 + n_tokens)), "n_predict": n_predict, "ignore_eos": True}
    answer: dict[str, Any] = server.post("/completion", {**body, **more})
    return answer


def kv_of_log(server: Server) -> str:
    """Return the MiB of KV cache that the server's log tells."""
    (size,) = re.findall(r"KV buffer size = +([\d.]+) MiB", "\n".join(server.lines()))
    return str(size)


@pytest.mark.parametrize(
    "flags",
    [
        ["-c", "8192", "-np", "4"],
        [*UNIFIED, "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"],
    ],
    ids=["split", "unified"],
)
def test_cells_and_capacity_of_llama_server_are_right(
    smollm2_path: Path, tmp_path: Path, flags: list[str]
) -> None:
    flags = [*flags, "-t", "1", "-ub", "64", "--metrics"]
    with (
        running_llama_server(tmp_path, smollm2_path, *flags) as server,
        connected(server.url) as seen,
    ):
        before = seen.source.scrape()
        told = Predictor(seen.process)(before)
        assert before.used_tokens == 0
        assert before.capacity_tokens == told["capacity_tokens"] == 8192
        assert f"{told['kv_bytes'] / MIB:.2f}" == kv_of_log(server)
        sizes = [(70, 5), (40, 3)]
        for number, (n_tokens, n_predict) in enumerate(sizes):
            complete(server, n_tokens, n_predict, id_slot=number)
        after = seen.source.scrape()
        # The last token of an answer is never put into the cache.
        assert after.used_tokens == sum(a + b - 1 for a, b in sizes)
        assert after.running == after.waiting == 0
        assert after.counters["generated_tokens"] == 8
        memory = seen.process.read()["rss_anon"].value
        assert memory is not None
        assert memory > told["context_bytes"]


@pytest.mark.parametrize("unified", [[], ["--kv-unified"]], ids=["split", "unified"])
def test_slots_cut_to_the_training_context_leave_the_cache_as_it_was_asked_for(
    smollm2_path: Path, tmp_path: Path, unified: list[str]
) -> None:
    flags = ["-c", "32768", "-np", "2", "-ctk", "q4_0", "-ctv", "q4_0", "-t", "1", "--metrics"]
    with (
        running_llama_server(tmp_path, smollm2_path, *flags, *unified) as server,
        connected(server.url) as seen,
    ):
        told = Predictor(seen.process)(seen.source.scrape())
        assert told["capacity_tokens"] == 2 * 8192
        assert f"{told['kv_bytes'] / MIB:.2f}" == kv_of_log(server)


def test_a_look_leaves_no_connection_and_a_stopped_server_is_slow(
    smollm2_path: Path, tmp_path: Path
) -> None:
    flags = ["-c", "512", "-np", "1", "-t", "1", "--metrics", "--threads-http", "1"]
    with (
        running_llama_server(tmp_path, smollm2_path, *flags) as server,
        connected(server.url) as seen,
    ):
        seen.source._client.timeout = 1.0  # type: ignore[attr-defined]
        shown = looks(seen)
        for _ in range(3):
            assert next(shown).snapshot
            complete(server, 10, 1)
        port = int(server.url.rpartition(":")[2])
        mine = psutil.Process().net_connections(kind="tcp")
        open_ones = [c for c in mine if c.raddr and c.raddr.port == port]
        assert [c for c in open_ones if c.status == psutil.CONN_ESTABLISHED] == []
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert [next(shown).error_kind for _ in range(2)] == ["slow"] * 2
        finally:
            os.kill(server.pid, signal.SIGCONT)
        again = next(shown)
        assert again.snapshot
        assert again.events == ()


def test_a_restart_is_noticed_and_what_changed_with_it(smollm2_path: Path, tmp_path: Path) -> None:
    flags = ["-t", "1", "--metrics", "-np", "2"]
    with running_llama_server(tmp_path, smollm2_path, *flags, "-c", "1024") as first:
        port = first.url.rpartition(":")[2]
        complete(first, 10, 2)
        seen = targets.connect(first.url, {})
        shown = looks(seen)
        snapshot = next(shown).snapshot
        assert snapshot
        assert snapshot.capacity_tokens == 1024
    with running_llama_server(
        tmp_path, smollm2_path, *flags, "-c", "768", "--kv-unified", "--port", port
    ) as second:
        found = next(shown)
        assert seen.process.pid == second.pid
        assert found.events[0] == "the server was restarted: another process answers"
        assert any("counters began again" in event for event in found.events)
        assert "the capacity changed from 1024 to 768 tokens" in found.events
    assert next(shown).error_kind == "unreachable"
    seen.close()


@pytest.mark.slow
def test_a_server_that_is_killed_ends_the_watch(smollm2_path: Path, tmp_path: Path) -> None:
    flags = ["-c", "512", "-np", "1", "-t", "1", "--metrics"]
    with (
        running_llama_server(tmp_path / "server", smollm2_path, *flags) as server,
        watching(server.url, "-o", tmp_path / "seen") as seen,
    ):
        info = seen.until(lambda line: line.get("kind") == "observation")
        assert info["pid"] == server.pid
        assert info["predicted"]["capacity_tokens"] == 512
        seen.answered()
        os.kill(server.pid, signal.SIGKILL)
        assert seen.wait() == 4
        assert "llama-server no longer answers" in seen.errors()
    recording = read_recording(tmp_path / "seen" / RECORDING_FILE)
    assert recording.left_out == 0
    assert recording.seen[0].snapshot
    assert recording.seen[-1].process["rss_anon"].why == "the process is gone"
    assert (tmp_path / "seen" / "report.md").exists()


@pytest.mark.slow
def test_a_watched_server_goes_to_sleep_and_is_not_woken(
    smollm2_path: Path, tmp_path: Path
) -> None:
    flags = ["-c", "512", "-np", "1", "-t", "1", "--metrics", "--sleep-idle-seconds", "2"]
    with (
        running_llama_server(tmp_path, smollm2_path, *flags) as server,
        connected(server.url) as seen,
    ):
        complete(server, 10, 1)
        asleep = None
        for asleep in watch(seen.source, seen.process, interval=0.1, duration=60):
            if "the server went to sleep" in asleep.events:
                break
        assert asleep
        assert asleep.snapshot
        assert asleep.snapshot.used_tokens is None
        for _ in range(3):
            seen.source.scrape()
        assert server.get("/props")["is_sleeping"] is True
        complete(server, 10, 1)
        woken = look(seen.source, seen.process, asleep, at=0)
        assert "the server woke up" in woken.events


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True], ids=["0.33", "0.17"])
def test_ollama_is_watched_and_nothing_changes_there(
    smollm2_path: Path, tmp_path: Path, old: bool
) -> None:
    with (
        running_ollama(tmp_path, old=old, OLLAMA_NUM_PARALLEL="2") as server,
        connected(server.url) as seen,
    ):
        ollama_create(server, "smol", smollm2_path, old=old)
        shown = looks(seen)
        predict = Predictor(seen.process)
        empty = next(shown).snapshot
        assert empty
        assert empty.loaded == ()
        assert predict(empty) == {"why": "no model is loaded"}
        options = {"num_predict": 2, "num_ctx": 512, "num_thread": 1}
        server.post(
            "/api/generate",
            {"model": "smol", "prompt": "One", "stream": False} | {"options": options},
        )
        before = server.get("/api/ps")["models"]
        found = next(shown)
        assert found.events == ("smol:latest was loaded",)
        assert found.snapshot
        (loaded,) = found.snapshot.loaded
        assert (loaded.context_length, loaded.bytes) == (512, before[0]["size"])
        told = predict(found.snapshot)
        assert told["capacity_tokens"] == 1024
        assert f"{told['kv_bytes'] / MIB:.2f}" == kv_of_log(server)
        memory = found.process["rss_anon"].value
        assert memory is not None
        assert memory > told["kv_bytes"]
        if old:
            assert "no field" in found.snapshot.unknown["used_tokens"]
        else:
            assert found.snapshot.capacity_tokens == 1024
            assert found.snapshot.used_tokens
            assert len(found.snapshot.slots) == 2
        for _ in range(3):
            next(shown)
        assert server.get("/api/ps")["models"] == before
        server.post("/api/generate", {"model": "smol", "keep_alive": 0, "stream": False})
        deadline = time.monotonic() + 60
        events = next(s.events for s in shown if s.events or time.monotonic() > deadline)
        assert events == ("smol:latest was unloaded",)
