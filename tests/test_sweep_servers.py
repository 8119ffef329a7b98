"""Sweeps of real servers: predicted, measured and what they say of themselves; nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_helpers import LOCALKV, localkv
from conftest import Run
from server_helpers import (
    Server,
    alive,
    family_of,
    ollama_create,
    running_llama_server,
    running_ollama,
)
from servers import binary
from sweep_helpers import run as run_session
from sweep_helpers import wait_until

from localkv.analysis import analyse, points
from localkv.analysis.samples import growth_samples
from localkv.engines import ollama
from localkv.engines.check import printed_slack
from localkv.probes.runner import ollama_runners
from localkv.records import PointRecord
from localkv.report.markdown import render_report
from localkv.report.page import Page
from localkv.sweep.plan import SweepPlan
from localkv.sweep.runner import Progress
from localkv.sweep.session import Session, make_session
from localkv.sweep.store import RunStore

pytestmark = [pytest.mark.server, pytest.mark.slow]

#: Few tokens are decoded: the memory of the context is there before the first.
QUICK: dict[str, Any] = {"ubatch_size": (4,), "threads": 1}


class Swept:
    """A sweep that was run: its session, records and directory."""

    def __init__(self, directory: Path, **plan: Any) -> None:
        self.session: Session = make_session(SweepPlan(**{**QUICK, **plan}))
        self.directory = directory
        #: GOGC of each runner of the older Ollama.
        self.collecting: list[str | None] = []
        before = {p.pid for p in psutil.Process().children(recursive=True)}
        self.records = run_session(self.session, directory, self._look)
        self.left = [
            p for p in psutil.Process().children(recursive=True) if p.pid not in before and alive(p)
        ]

    def _look(self, progress: Progress) -> None:
        if progress.phase == "context":
            family = psutil.Process().children(recursive=True)
            runners = [p for p in family if p.cmdline()[1:2] == ["runner"]]
            self.collecting += [p.environ().get("GOGC") for p in runners]

    def report(self) -> str:
        info = self.session.info(["localkv", "sweep"], "2026-01-01T00:00:00+0000")
        return render_report(Page(info, tuple(self.records), analyse(info, self.records)))


@pytest.fixture(scope="module", params=["ollama", "ollama-old"])
def of_ollama(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Swept:
    return Swept(
        tmp_path_factory.mktemp(request.param),
        model=str(smollm2_path),
        backend="ollama",
        server_bin=str(binary(request.param)),
        ctx_size=(2048, 4096),
        parallel=(1, 2, 4),
    )


@pytest.fixture(scope="module")
def of_llama_server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    return Swept(
        tmp_path_factory.mktemp("llama-server"),
        model=str(smollm2_path),
        backend="llama-server",
        server_bin=str(binary("llama-server")),
        ctx_size=(2048, 4096, 8192),
        parallel=(2,),
    )


def agrees(swept: Swept) -> None:
    """Assert that log, prediction and measured growth of every point are the same, within 2 %."""
    for record in swept.records:
        assert (record.outcome, record.reason) == ("ok", None)
        told, expected = record.engine["kv_bytes"], points.predicted(record, "kv")
        assert expected is not None
        assert abs(told - expected) <= printed_slack(told)
        assert [p.name for p in record.phases] == ["baseline", "context", "decode", "closed"]
        assert record.engine["n_ctx"] == record.prediction["config"]["n_ctx"]
        closed = record.phase("closed")
        assert closed is not None
        assert closed.value("rss_anon") == 0
    samples = growth_samples(swept.records).samples
    for slots in {s.slots for s in samples}:
        first, *more = [s for s in samples if s.slots == slots]
        for sample in more:
            grown = sample.measured - first.measured
            expected = sample.expected - first.expected
            assert grown == pytest.approx(expected, rel=0.02)
    least, *_, most = sorted(samples, key=lambda s: s.expected)
    whole = most.expected - least.expected
    assert most.measured - least.measured == pytest.approx(whole, rel=0.02)


def nothing_left(swept: Swept) -> None:
    assert swept.left == []
    assert {p.name for p in swept.directory.iterdir()} == {"results.jsonl"}


def test_ollama_needs_what_was_predicted(of_ollama: Swept) -> None:
    contexts = {(r.config["n_ctx"], r.config["n_seq_max"]) for r in of_ollama.records}
    assert contexts == {(c * n, n) for c in (2048, 4096) for n in (1, 2, 4)}
    agrees(of_ollama)
    nothing_left(of_ollama)


def test_only_the_older_runner_is_told_to_keep_its_heap_steady(of_ollama: Swept) -> None:
    old = of_ollama.directory.name.startswith("ollama-old")
    assert of_ollama.collecting == ["off"] * (6 if old else 0)
    heap = of_ollama.session.environment["engine"].get("heap", [])
    assert ("GOGC=off" in heap) == old
    assert ("engine heap, keep that steady" in of_ollama.report()) == old


def test_what_ollama_says_of_itself_was_foretold(of_ollama: Swept) -> None:
    for record in of_ollama.records:
        told = record.server
        # Its log rounds each buffer; the compute buffers are an estimate.
        slack = printed_slack(told["ps_bytes"], 4) + 64 * 1024
        assert told["ps_bytes"] == pytest.approx(told["ps_predicted"], abs=slack)
        assert told["context_length"] * record.config["n_seq_max"] == record.config["n_ctx"]
        assert len(told["read_tokens"]) == record.config["n_seq_max"]
        assert min(told["read_tokens"]) >= 4
        serve = record.phases[1].value("serve_rss_anon")
        assert serve is not None
        assert serve > 0


def test_the_report_sets_the_server_beside_the_others(of_ollama: Swept) -> None:
    text = of_ollama.report()
    section = text[text.index("## What the server itself says") :]
    assert "started for this sweep" in section
    assert "| /api/ps foretold | /api/ps |" in section
    assert "the phase model is not told apart" in text
    assert "Weights are read into memory" in text
    assert "/proc/PID/" in text


def test_llama_server_needs_what_was_predicted(of_llama_server: Swept) -> None:
    agrees(of_llama_server)
    nothing_left(of_llama_server)
    slope = analyse(of_llama_server.session.info([], ""), of_llama_server.records).fit.slope
    assert slope is not None
    assert slope.value == pytest.approx(1, abs=0.01)
    assert "Measured in llama-server" in of_llama_server.report()


def test_a_server_that_dies_is_a_row_and_the_sweep_goes_on(
    smollm2_path: Path, tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill_once(progress: Progress) -> None:
        if progress.phase == "context" and not killed:
            (server,) = (
                p
                for p in psutil.Process().children(recursive=True)
                if "llama-server" in p.name() or "llama-server" in " ".join(p.cmdline()[:1])
            )
            killed.append(server.pid)
            server.kill()

    plan = SweepPlan(
        **QUICK,
        model=str(smollm2_path),
        backend="llama-server",
        server_bin=str(binary("llama-server")),
        ctx_size=(512, 1024),
        parallel=(1,),
    )
    first, second = run_session(make_session(plan), tmp_path, kill_once)
    assert (first.outcome, second.outcome) == ("crashed", "ok")
    assert "the server died during: decode" in (first.reason or "")
    assert first.log_tail


# -- servers that run already ----------------------------------------------------------------


def sweep_json(run: Run, out: Path, *arguments: object) -> list[PointRecord]:
    code, _, err = run("sweep", *arguments, "-ub", 4, "-t", 1, "--json", "-o", out)
    assert code == 0, err
    return RunStore(out).read_records()


@pytest.fixture(scope="module")
def llama(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("attached")
    flags = ("-c", 2048, "-np", 2, "-t", 1, "-ctk", "q8_0", "-ub", 4, "--slots")
    with running_llama_server(folder, smollm2_path, *flags) as server:
        yield server


def test_a_llama_server_that_runs_is_one_point(llama: Server, run: Run, tmp_path: Path) -> None:
    attach = ("--backend", "llama-server", "--server-url", llama.url)
    before = family_of(llama.pid)
    (record,) = sweep_json(run, tmp_path / "run", *attach)
    assert record.config["n_ctx"] == 2048
    assert (record.config["n_seq_max"], record.config["cache_type_k"]) == (2, "q8_0")
    assert record.server["attached"] is True
    assert [p.name for p in record.phases] == ["baseline", "context", "decode"]
    assert family_of(llama.pid) == before
    # Now its slots hold something, which nobody may put out.
    (record,) = sweep_json(run, tmp_path / "again", *attach)
    assert "hold conversations" in record.server["not_decoded"]
    assert family_of(llama.pid) == before
    report = (tmp_path / "again" / "report.md").read_text(encoding="utf-8")
    assert "ran already and was left as it was" in report
    assert "No prompt was read" in report


@pytest.mark.parametrize(
    ("option", "word"),
    [
        (("-c", "4096"), "ctx_size 2048"),
        (("-np", "4"), "parallel 2"),
        (("-ctk", "f16"), "cache_type_k q8_0"),
        (("--kv-unified",), "kv_unified False"),
        (("-m", "demo-swa"), "has loaded"),
    ],
)
def test_what_contradicts_a_running_llama_server_is_refused(
    llama: Server, run: Run, option: tuple[str, ...], word: str
) -> None:
    attach = ("--backend", "llama-server", "--server-url", llama.url)
    code, out, err = run("sweep", *attach, *option)
    assert (code, out) == (2, "")
    assert word in err
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def theirs(gemma_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An Ollama with two slots that somebody uses: the model ``mine`` is loaded."""
    with running_ollama(tmp_path_factory.mktemp("theirs"), OLLAMA_NUM_PARALLEL="2") as server:
        ollama_create(server, "mine", gemma_path)
        server.post("/api/generate", {"model": "mine", "options": {"num_ctx": 512}})
        yield server


def state(server: Server) -> tuple[Any, ...]:
    """Return what must stay as it is: the models, what is loaded until when, the processes."""
    return (
        server.get("/api/tags"),
        server.get("/api/ps"),
        set(ollama_runners(server.pid)),
        [p.pid for p in family_of(server.pid)],
    )


def test_an_ollama_that_runs_is_left_as_it_was(
    theirs: Server, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(theirs)
    monkeypatch.setenv("OLLAMA_HOST", theirs.url)
    backend = ("--backend", "ollama")
    records = sweep_json(run, tmp_path / "run", *backend, "-c", 512, "-np", "1,2")
    by_slots = {r.config["n_seq_max"]: r for r in records}
    assert by_slots[2].outcome == "ok"
    assert by_slots[2].server["attached"] is True
    assert by_slots[2].server["ps_bytes"] > 0
    assert by_slots[1].outcome == "skipped"
    assert "OLLAMA_NUM_PARALLEL=2, not 1" in (by_slots[1].reason or "")
    wait_until(lambda: state(theirs) == before)
    # The model that they have loaded would have to be loaded anew.
    code, _, err = run("sweep", *backend, "-m", "ollama:mine", "-c", 256, "-o", tmp_path / "mine")
    assert code == 4
    assert "loaded from the same file" in err
    assert state(theirs) == before


def test_a_model_is_measured_under_its_name(smollm2_path: Path, run: Run, tmp_path: Path) -> None:
    with running_ollama(tmp_path / "server") as server:
        ollama_create(server, "small:1", smollm2_path)
        # As a sweep leaves it that was killed.
        left = f"{ollama.TEMPORARY}0badcafe"
        server.post("/api/copy", {"source": "small:1", "destination": left}, timeout=60)
        before = state(server)
        attach = ("--backend", "ollama", "--server-url", server.url)
        small = ("-m", "ollama:small:1", "-c", 512, "-ub", 4, "-t", 1)
        code, _, err = run("sweep", *attach, *small, "-o", tmp_path / "run")
        assert code == 0, err
        (record,) = RunStore(tmp_path / "run").read_records()
        assert record.outcome == "ok"
        (note,) = [line for line in err.splitlines() if left in line]
        assert note.endswith(f"OLLAMA_HOST={server.url} ollama rm {left}")
        assert record.config["n_ctx"] == 512
        wait_until(lambda: state(server) == before)


@pytest.mark.parametrize(
    ("owned", "sent"), [(False, signal.SIGTERM), (True, signal.SIGINT)], ids=["theirs", "owned"]
)
def test_a_signal_leaves_nothing_behind(
    theirs: Server, smollm2_path: Path, tmp_path: Path, owned: bool, sent: signal.Signals
) -> None:
    before = state(theirs)
    which = ("--server-bin", binary("ollama")) if owned else ("--server-url", theirs.url)
    command = ["sweep", "--backend", "ollama", *which, "-m", smollm2_path, "-c", "512,1024"]
    out = tmp_path / "run"
    sweep = subprocess.Popen(
        [*LOCALKV, *map(str, command), "-np", "2", "-t", "1", "-o", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        family: list[psutil.Process] = []

        def at_work() -> bool:
            assert sweep.poll() is None, sweep.communicate()
            family[:] = family_of(sweep.pid)
            if not owned:
                # A child with the model's file: it is being imported, or loaded.
                return len(ollama_runners(theirs.pid)) > len(before[2])
            return any("--model" in p.cmdline() for p in family if alive(p))

        wait_until(at_work)
        sweep.send_signal(sent)
        _, err = sweep.communicate(timeout=120)
    finally:
        sweep.kill()
    assert sweep.returncode == 130, err
    assert "--resume" in err
    assert not any(alive(process) for process in family)
    assert not [path for path in out.iterdir() if path.name.startswith(".server")]
    wait_until(lambda: state(theirs) == before)
    assert not [m for m in before[0]["models"] if ollama.TEMPORARY in m["name"]]


def test_nobody_at_the_address_is_one_line(tmp_path: Path) -> None:
    done = localkv(
        *("sweep", "--backend", "ollama", "-o", tmp_path / "run"),
        env={"OLLAMA_HOST": "127.0.0.1:9"},
    )
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert json.dumps(done.stdout) == '""'
