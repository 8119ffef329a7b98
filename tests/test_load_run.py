"""A load from end to end against a server of a few lines: what stops it, and what is kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import Run
from load_helpers import (
    FULL,
    LONG,
    always,
    completion,
    llama_site,
    longer_than,
    look,
    request,
    step,
)
from url_helpers import Handler, Site, status

from localkv.analysis.loaded import PARTS
from localkv.cli.observe import command as observe
from localkv.http import Client
from localkv.observe.load import Bench, Task, run_step
from localkv.observe.load_plan import concurrency, context, limits_of, prefix, scenarios
from localkv.observe.load_recording import LOAD_FILE, read_load
from localkv.observe.load_run import Budget, LoadRun
from localkv.observe.process import ServerProcess
from localkv.observe.sources import detect
from localkv.observe.speakers import LlamaServerSpeaker
from localkv.report.load import LOAD_REPORT, write_load
from localkv.snapshots import LoadLimits, LoadStep, RecordingInfo, Slot, Snapshot

SPLIT = LoadLimits(slots=4, per_request=2048, capacity=8192, unified=False)
UNIFIED = LoadLimits(slots=4, per_request=1024, capacity=1024, unified=True)
BLOCKS = LoadLimits(per_request=512, capacity=640, block_size=32)


def bench(site: Site, client: Client) -> Bench:
    process = ServerProcess(None, "no process of its own")
    return Bench(site.url, LlamaServerSpeaker(client, 1), detect(client, process))


def test_a_step_counts_what_the_server_counted() -> None:
    with llama_site() as site, Client(site.url) as client:
        done = run_step(bench(site, client), Task("context", "x", 3, 50, 5), started=1.5)
    assert [r.prompt_tokens for r in done.requests] == [50] * 3
    assert [r.generated for r in done.requests] == [5] * 3
    assert all(r.first_token is not None and r.first_token <= r.seconds for r in done.requests)
    assert done.looks[-1].snapshot is not None
    assert done.started == 1.5


def test_a_request_that_hangs_is_stopped_in_time() -> None:
    def hang(handler: Handler, asked: object) -> None:
        handler.site.closing.wait(60)

    with llama_site(hang) as site, Client(site.url) as client:
        done = run_step(bench(site, client), Task("context", "x", 2, 50, 5), timeout=0.3)
    assert {r.error_kind for r in done.requests} == {"stopped"}
    assert {r.first_token for r in done.requests} == {None}


def test_the_plan_follows_the_room_of_the_server() -> None:
    assert [(t.requests, t.prompt_tokens) for t in scenarios(8)] == [(1, 100), (1, 3000), (10, 100)]
    assert [t.requests for t in concurrency(SPLIT, 8)] == [1, 4, 5, 8]
    assert [t.requests for t in concurrency(BLOCKS, 8)][:5] == [1, 2, 3, 4, 6]
    # Slots of their own are filled one by one, a shared cache by all slots together.
    assert {t.requests for t in context(SPLIT, 8)} == {1}
    assert {t.requests for t in context(UNIFIED, 8)} == {4}
    for limits in (SPLIT, UNIFIED, BLOCKS):
        filled = [t.requests * (t.prompt_tokens + 8) for t in context(limits, 8)]
        room = limits.per_request if limits is SPLIT else limits.capacity
        assert room is not None
        assert filled == sorted(filled)
        assert filled[2] == room
        assert filled[-1] > room
    # A request of a ramp over blocks is never longer than the server takes.
    wide = LoadLimits(per_request=512, capacity=10_000, block_size=16)
    assert all(t.prompt_tokens + 8 <= 512 for t in context(wide, 8))
    assert not list(context(LoadLimits(), 8))


def test_a_prefix_is_shorter_where_a_request_has_less_room() -> None:
    assert [t.shared for t in prefix(LoadLimits(), 32)] == [2000, 2000]
    for task in prefix(UNIFIED, 32):
        assert task.shared < 2000
        assert task.prompt_tokens + 32 <= 1024
    assert not list(prefix(LoadLimits(per_request=100), 32))


def test_limits_are_those_that_the_server_tells() -> None:
    slots = (Slot(0, 2048, False, 0), Slot(1, 2048, False, 0))
    told = Snapshot("llama-server", capacity_tokens=4096, slots=slots, facts={"kv_unified": False})
    assert limits_of(told) == LoadLimits(2, 2048, 4096, False, None)
    paged = Snapshot("vllm", capacity_tokens=640, facts={"block_size": 32})
    assert limits_of(paged, 512) == LoadLimits(None, 512, 640, None, 32)
    pages = Snapshot("sglang", capacity_tokens=900, facts={"page_size": 1, "context_length": 256})
    assert limits_of(pages) == LoadLimits(None, 256, 900, None, 1)


def load(site: Site, limits: LoadLimits, budget: Budget, parts: Any = PARTS) -> Any:
    with Client(site.url) as client:
        run = LoadRun(bench(site, client), limits, budget, 4, parts)
        return list(run.steps()), run.ended


def test_a_ramp_stops_at_the_first_giving_up() -> None:
    full = longer_than(200, always(status(500, json.dumps(FULL).encode())))
    with llama_site(full, slots=4) as site:
        steps, ended = load(site, UNIFIED, Budget(300, 60), ("context",))
    assert [s.prompt_tokens for s in steps] == [124, 188, 252]
    assert ended == "the server gave up"


def test_a_prompt_that_is_too_long_is_an_answer() -> None:
    long = longer_than(2044, always(status(400, json.dumps(LONG).encode())))
    with llama_site(long) as site:
        steps, ended = load(site, SPLIT, Budget(300, 60), ("scenarios", "context"))
    assert [s.prompt_tokens for s in steps] == [100, 3000, 100, 1020, 1532, 2044, 2146]
    assert steps[1].requests[0].status == steps[-1].requests[0].status == 400
    assert ended == "all steps done"


def test_a_load_keeps_within_its_requests_and_its_time() -> None:
    with llama_site() as site:
        steps, ended = load(site, SPLIT, Budget(11, 60))
        assert sum(s.concurrency for s in steps) == 2
        assert "--max-requests" in ended
        steps, ended = load(site, SPLIT, Budget(300, 0.5))
    assert steps == []
    assert "--max-seconds" in ended


def test_no_prompt_is_sent_twice() -> None:
    seen: list[tuple[int, ...]] = []

    def remember(handler: Handler, asked: dict[str, list[int]]) -> None:
        seen.append(tuple(asked["prompt"][-50:]))
        completion(handler, asked)

    with llama_site(remember) as site:
        load(site, SPLIT, Budget(300, 60), ("prefix", "concurrency"))
    assert len(seen) == 2 + 1 + 4 + 5 + 8
    assert len(set(seen)) == len(seen)


def command(url: str, *more: object) -> list[str]:
    words = [sys.executable, "-m", "localkv", "observe", url, "--load", "--generate", "4"]
    return [*words, *map(str, more)]


def test_the_command_says_what_it_measured(run: Run, tmp_path: Path) -> None:
    with llama_site(n_ctx=512) as site:
        code, out, err = run(
            "observe", site.url, "--load", "--no-kv-unified", "--generate", 4, "--json",
            "--price", 3, "-o", tmp_path / "kept",
        )  # fmt: skip
        assert code == 0, err
    found = json.loads(out)
    assert {s["part"] for s in found["steps"]} == set(PARTS)
    assert found["prefix"]["cached_tokens"] == 3
    assert found["prefix"]["saved_per_1000"] == pytest.approx(3 / 1e6 * 3 * 0.9 * 1000)
    assert found["predicted"]["slots"] == 2
    kept = read_load(tmp_path / "kept" / LOAD_FILE)
    assert len(kept.steps) == len(found["steps"])
    assert kept.ended == found["ended"] == "all steps done"
    report = (tmp_path / "kept" / LOAD_REPORT).read_text(encoding="utf-8")
    code, out, err = run("report", tmp_path / "kept")
    assert code == 0, err
    assert "100-token prompt" in out
    assert (tmp_path / "kept" / LOAD_REPORT).read_text(encoding="utf-8") == report


def test_every_part_can_be_asked_for() -> None:
    option = next(each for each in observe.params if each.name == "only")
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == PARTS


def test_one_part_can_be_asked_for(run: Run) -> None:
    with llama_site() as site:
        code, out, _ = run(
            "observe", site.url, "--load", "--only", "prefix", "--generate", 4, "--no-kv-unified"
        )
    assert code == 0
    assert "prefix cached" in out
    assert "100-token" not in out
    assert "exhausted" not in out


def test_a_server_elsewhere_is_not_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localkv.http.is_loopback", lambda host: False)
    with llama_site() as site:
        code, out, err = run("observe", site.url, "--load", "--generate", 4)
        assert code == 2
        assert "--yes-remote" in err
        assert not out
        assert "/completion" not in [path for path, _ in site.asked]
        code, _, err = run(
            "observe", site.url, "--load", "--only", "prefix", "--yes-remote", "--generate", 4
        )
        assert code == 0, err


def test_a_server_that_dies_leaves_what_was_measured(tmp_path: Path) -> None:
    def drop(handler: Handler) -> None:
        handler.close_connection = True
        handler.connection.close()

    def die(handler: Handler, asked: object) -> None:
        # Gone in the middle of an answer, and nobody takes its place.
        for path in ("/slots", "/props", "/metrics"):
            handler.site.add(path, drop)
        handler.head(200, Transfer_Encoding="chunked")
        handler.put(b"5\r\ndata:\r\n")
        drop(handler)

    with llama_site(longer_than(1000, die)) as site:
        done = subprocess.run(
            command(site.url, "-o", tmp_path / "kept", "--no-kv-unified"),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 4, done.stderr
    assert "stopped answering" in done.stderr.splitlines()[-1]
    kept = read_load(tmp_path / "kept" / LOAD_FILE)
    assert [s.prompt_tokens for s in kept.steps] == [100, 3000]
    assert "stopped answering" in kept.ended
    assert "100-token prompt" in done.stdout


def test_a_server_that_will_not_generate_ends_it(run: Run) -> None:
    with llama_site(always(status(401))) as site:
        code, _, err = run("observe", site.url, "--load", "--generate", 4)
    assert code == 4
    assert "401" in err


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    begun = threading.Event()

    def endless(handler: Handler, asked: object) -> None:
        handler.head(200, Transfer_Encoding="chunked")
        while not handler.site.closing.wait(0.05):
            handler.put(b"%x\r\n%s\r\n" % (22, b'data: {"tokens": [1]}\n'))
            begun.set()

    with llama_site(longer_than(1000, endless)) as site:
        running = subprocess.Popen(
            command(site.url, "-o", tmp_path / "kept", "--no-kv-unified"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert begun.wait(60)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert err.splitlines()[-1].startswith("localkv: interrupted")
    assert "100-token prompt" in out
    assert [s.prompt_tokens for s in read_load(tmp_path / "kept" / LOAD_FILE).steps] == [100]
    assert (tmp_path / "kept" / LOAD_REPORT).exists()


def test_a_torn_recording_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    info = RecordingInfo(kind="load", server="vllm")
    lines = [json.dumps(each.to_dict()) for each in (info, step([request()]))]
    (tmp_path / LOAD_FILE).write_text("\n".join([*lines, lines[1][:40]]), encoding="utf-8")
    found = read_load(tmp_path / LOAD_FILE)
    assert (len(found.steps), found.left_out, found.ended) == (1, 1, "it was broken off")


def test_the_report_shows_who_ran_and_waited_and_escapes_the_rest(tmp_path: Path) -> None:
    looks = [
        look(t, running=r, waiting=w, counters={"preemptions": p}, used_tokens=100 * r)
        for t, r, w, p in ((0.0, 0, 0, 3), (0.4, 4, 6, 3), (0.8, 4, 6, 3), (1.2, 1, 9, 5))
    ]
    steps: list[LoadStep] = [
        step([request()] * n, looks, name=f"{n} <b>|at once", started=float(n)) for n in (1, 2)
    ]
    report = write_load(tmp_path, RecordingInfo(kind="load", server="vllm"), steps, "done")
    text = report.read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "| 1.2 | 1 | 9 | 5 | 100 |" in text
    assert "| 0.8 |" not in text  # nothing changed there
    for name in ("load-cache.svg", "load-requests.svg", "load-first-token.svg"):
        assert f"]({name})" in text
        assert (tmp_path / name).read_text(encoding="utf-8").startswith("<svg")
