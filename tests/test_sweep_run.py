"""Sweeps of the real model by the real engine, undisturbed and disturbed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from cli_helpers import LOCALKV, localkv
from nvml_stub import CONTEXT, build_nvml_stub
from sweep_helpers import SMALL, patched, run, small_session, wait_until, worker_of

from localkv.analysis import analyse
from localkv.cli.progress import planning_progress
from localkv.errors import UsageError
from localkv.records import PointRecord, RunInfo
from localkv.report.markdown import render_report
from localkv.report.page import Page
from localkv.sweep.plan import SweepPlan
from localkv.sweep.runner import Progress
from localkv.sweep.session import make_session
from localkv.sweep.store import RunStore
from localkv.units import GIB, MIB

pytestmark = pytest.mark.engine

HEADERS = Path(__file__).parent / "data" / "headers"


def records_of(directory: Path) -> list[PointRecord]:
    return RunStore(directory).read_records()


def test_a_sweep_measures_what_it_predicts(smollm2_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    done = localkv("sweep", "-m", smollm2_path, *SMALL, "--json", "-o", out)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == 1
    assert result["run"] == str(out)
    assert Path(result["report"]).read_text(encoding="utf-8").startswith("# ")
    assert result["points"] == {
        "ok": 6,
        "skipped": 0,
        "failed": 0,
        "oom": 0,
        "crashed": 0,
        "timeout": 0,
    }
    fit = result["fit"]
    assert fit["slope_low"] <= fit["slope"] <= fit["slope_high"]
    assert fit["slope"] == pytest.approx(1, abs=0.005)
    assert fit["held_out_error"] < 0.01
    assert result["peak_error"] < 0.02
    for record in records_of(out):
        assert record.engine["kv_bytes"] == record.prediction["kv"]["bytes"]
        assert record.prediction["compute"]["source"] == "engine"
        assert [p.name for p in record.phases] == [
            "baseline",
            "model",
            "context",
            "decode",
            "closed",
        ]


def test_the_fallback_to_ram_is_said_once_with_its_reason(
    smollm2_path: Path, tmp_path: Path
) -> None:
    done = localkv(
        "sweep", "-m", smollm2_path, "-c", 512, "-np", "1,2", "-ub", 32, "-o", tmp_path / "run"
    )

    said = [line for line in done.stderr.splitlines() if "No GPU takes part" in line]
    assert len(said) == 1
    assert "without GPU support" in said[0]


def test_a_whole_sweep_reads_device_memory_through_the_real_client(
    smollm2_path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"

    done = localkv(
        "sweep", "-m", smollm2_path, *SMALL, "--json", "-o", out, env=build_nvml_stub(tmp_path)
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fit"]["slope"] == pytest.approx(1, abs=0.005)
    for record in records_of(out):
        context = record.phase("context")
        assert context is not None
        vram, anonymous = context.value("vram_process"), context.value("rss_anon")
        assert vram is not None
        assert anonymous is not None
        # The stub holds what the process holds, and the CUDA context on top.
        assert vram - CONTEXT == pytest.approx(anonymous, abs=4 * MIB)
        peak = record.peak["vram_process"].value
        assert peak is not None
        assert peak >= vram
    gpu = RunStore(out).read_info().environment["gpu"]
    assert gpu["available"]
    assert "VRAM" in Path(json.loads(done.stdout)["report"]).read_text(encoding="utf-8")


class Interfere:
    """An observer that does ``action`` to the child of the first point once ``phase`` is over."""

    def __init__(self, phase: str, action: object) -> None:
        self.phase = phase
        self.action = action

    def __call__(self, progress: Progress) -> None:
        if progress.index == 0 and progress.phase == self.phase:
            self.action(worker_of())  # type: ignore[operator]


def test_a_killed_child_is_a_row_and_the_sweep_goes_on(smollm2_path: Path, tmp_path: Path) -> None:
    session = small_session(smollm2_path)

    first, second = run(session, tmp_path, Interfere("model", psutil.Process.kill))

    assert (first.outcome, second.outcome) == ("crashed", "ok")
    assert first.reason is not None
    assert "SIGKILL" in first.reason
    assert [p.name for p in first.phases][:2] == ["baseline", "model"]


def test_a_child_that_hangs_is_ended_at_the_time_limit(smollm2_path: Path, tmp_path: Path) -> None:
    session = small_session(smollm2_path, timeout=8.0)
    stopped: list[psutil.Process] = []

    def stop(child: psutil.Process) -> None:
        stopped.append(child)
        child.suspend()

    first, second = run(session, tmp_path, Interfere("model", stop))

    assert (first.outcome, second.outcome) == ("timeout", "ok")
    assert not stopped[0].is_running()


def aborting_model(directory: Path) -> Path:
    """Return a model that trips an assertion of the engine: experts in use, but none there."""
    path = patched(HEADERS / "llama-moe.gguf", directory / "aborts.gguf", "llama.expert_count", 0)
    os.truncate(path, 64 * MIB)  # zeros for weights; the engine gets no further than the header
    return path


def test_an_engine_that_aborts_is_a_row(tmp_path: Path) -> None:
    session = small_session(aborting_model(tmp_path))

    records = run(session, tmp_path / "run", lambda _: None)

    assert [r.outcome for r in records] == ["crashed", "crashed"]
    assert all("SIGABRT" in (r.reason or "") for r in records)
    assert any("GGML_ASSERT" in line for line in records[0].log_tail)


def test_a_point_that_does_not_fit_is_skipped_with_what_it_needs(
    smollm2_path: Path, tmp_path: Path
) -> None:
    cells = psutil.virtual_memory().total // (22 * 1024) // 256 * 256
    session = small_session(smollm2_path, ctx_size=(512, cells))

    records = run(session, tmp_path, lambda _: None)

    by_context = {r.config["n_ctx"]: r for r in records}
    assert by_context[512].outcome == "ok"
    skipped = by_context[cells]
    assert skipped.outcome == "skipped"
    assert skipped.reason is not None
    assert skipped.reason.startswith("needs ")
    assert skipped.reason.endswith(" available")


def test_settings_that_the_engine_never_takes_are_skipped_with_its_rule(
    smollm2_path: Path, tmp_path: Path
) -> None:
    told: list[tuple[int, float]] = []
    plan = SweepPlan(
        model=str(smollm2_path),
        ctx_size=(512,),
        parallel=(1,),
        ubatch_size=(64,),
        cache_type_v=("f16", "q8_0"),
        flash_attn=("on", "off"),
    )
    session = make_session(plan, planned_share=lambda *share: told.append(share))

    records = run(session, tmp_path, lambda _: None, force=True)

    ends = {(r.config["cache_type_v"], r.config["flash_attn"]): r for r in records}
    skipped = ends.pop(("q8_0", "off"))
    assert [r.outcome for r in ends.values()] == ["ok"] * 3
    assert (skipped.outcome, skipped.stage) == ("skipped", "settings")
    assert skipped.reason == "quantized V cache requires flash_attn to be enabled"
    page = render_report(Page(session.info((), ""), tuple(records), analyse(RunInfo(), records)))
    # It is no question of memory.
    assert "**Everything that was tried fits.**" in page
    assert "quantized V cache requires" in page
    # Three points are planned; of the fourth there is nothing to ask the engine.
    shares = [share for points, share in told if points == 4]
    assert len(shares) == len(told)
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] < 1


def test_a_cache_type_that_there_is_not_refuses_the_whole_grid(smollm2_path: Path) -> None:
    with pytest.raises(UsageError, match="q9_9"):
        small_session(smollm2_path, cache_type=("f16", "q9_9"))
    with pytest.raises(UsageError, match="quantized V cache requires"):
        small_session(smollm2_path, cache_type_v=("q8_0", "q4_0"), flash_attn=("off",))


def test_a_long_planning_says_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([0, 1, 2, 10, 11, 20, 21])
    monkeypatch.setattr("localkv.cli.progress.time.monotonic", lambda: next(seconds))
    tell = planning_progress()
    for share in (0.1, 0.2, 0.5, 0.6, 0.8, 1.0):
        tell(2000, share)
    assert capsys.readouterr().err.splitlines() == [
        "planning 2,000 points: 50%, about 10 s left",
        "planning 2,000 points: 80%, about 5 s left",
    ]


def test_a_cache_that_cannot_be_allocated_is_an_oom_row(smollm2_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    limit = 2 * GIB

    done = subprocess.run(
        [
            *LOCALKV,
            "sweep",
            "-m",
            smollm2_path,
            "-c",
            "512,131072",
            "-np",
            "1",
            "-ub",
            "32",
            "--force",
            "-o",
            out,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )

    by_context = {r.config["n_ctx"]: r for r in records_of(out)}
    assert by_context[512].outcome == "ok", done.stderr
    assert by_context[131072].outcome == "oom"
    assert by_context[131072].stage == "kv"


def start(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LOCALKV, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_records(process: subprocess.Popen[str], directory: Path, count: int) -> None:
    results = directory / "results.jsonl"

    def there() -> bool:
        assert process.poll() is None, process.communicate()
        return results.exists() and results.read_bytes().count(b"\n") >= count

    wait_until(there)


def has_worker(pid: int) -> bool:
    try:
        worker_of(pid)
    except (StopIteration, psutil.NoSuchProcess):
        return False
    return True


def test_a_killed_sweep_leaves_no_child_and_is_resumed(smollm2_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start("sweep", "-m", smollm2_path, *SMALL, "-o", out)
    wait_for_records(process, out, 2)
    wait_until(lambda: has_worker(process.pid))
    child = worker_of(process.pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    # What a kill in the middle of a write leaves behind.
    with (out / "results.jsonl").open("ab") as file:
        file.write(b'{"schema":1,"key":"c51')
    before = {r.key for r in records_of(out)}

    done = localkv("sweep", "--resume", "-o", out)

    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    keys = [line["key"] for line in lines]
    assert len(keys) == len(set(keys)) == 6
    assert f"{6 - len(before)} runs of" in done.stderr
    assert (out / "report.md").exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_keeps_what_is_done_and_names_the_command_that_goes_on(
    smollm2_path: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    out = tmp_path / "a run"
    process = start("sweep", "-m", smollm2_path, *SMALL, "-o", out)
    wait_for_records(process, out, 1)
    wait_until(lambda: has_worker(process.pid))
    child = worker_of(process.pid)

    process.send_signal(sent)
    _, said = process.communicate(timeout=30)

    assert process.returncode == 130
    wait_until(lambda: not child.is_running())
    last = said.splitlines()[-1]
    assert f"localkv sweep --resume -o '{out}'" in last
    assert records_of(out)


def test_a_finished_run_is_not_overwritten(smollm2_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ("sweep", "-m", smollm2_path, "-c", 512, "-np", 1, "-ub", 32, "-o", out)
    assert localkv(*args).returncode == 0

    again = localkv(*args)

    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert len(records_of(out)) == 1


@pytest.mark.parametrize("options", [(), ("--resume",)])
def test_two_sweeps_into_one_directory_are_kept_apart(
    smollm2_path: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    args = ("-m", smollm2_path, "-c", 512, "-np", 1, "-ub", 32)
    if options:
        assert localkv("sweep", *args, "-o", out).returncode == 0
        args = ()
    with RunStore(out).alone():
        second = localkv("sweep", *args, *options, "-o", out)

    assert second.returncode == 2
    assert "another localkv is sweeping into" in second.stderr
    assert len(records_of(out)) == len(options)


def test_a_run_is_not_taken_up_with_another_model(
    smollm2_path: Path, gemma_path: Path, tmp_path: Path
) -> None:
    out, model = tmp_path / "run", tmp_path / "m.gguf"
    model.symlink_to(smollm2_path)
    assert localkv("sweep", "-m", model, "-c", 512, "-np", 1, "-ub", 32, "-o", out).returncode == 0
    before = (out / "results.jsonl").read_bytes()
    model.unlink()
    model.symlink_to(gemma_path)

    again = localkv("sweep", "--resume", "-o", out)

    assert again.returncode == 2
    assert "the model has changed" in again.stderr
    assert (out / "results.jsonl").read_bytes() == before


def test_results_without_their_run_are_not_taken_over(smollm2_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ("sweep", "-m", smollm2_path, "-c", 512, "-np", 1, "-ub", 32, "-o", out)
    assert localkv(*args).returncode == 0
    (out / "run.json").unlink()

    assert localkv(*args).returncode == 2


@pytest.mark.parametrize(
    ("options", "code"),
    [(("--timeout", "0.2"), 1), (("-c", "2000000000"), 1)],
)
def test_nothing_measured_is_not_a_success(
    smollm2_path: Path, tmp_path: Path, options: tuple[str, ...], code: int
) -> None:
    done = localkv(
        "sweep", "-m", smollm2_path, "-c", 512, "-np", 1, *options, "-o", tmp_path / "run"
    )

    assert done.returncode == code
    assert "no point could be measured" in done.stderr
    assert "Traceback" not in done.stderr
