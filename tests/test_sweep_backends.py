"""What a plan becomes for a server, and what becomes of its errors: no server needed."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import url_helpers
from analysis_helpers import grid as record_grid
from analysis_helpers import run_info

from localkv.analysis import analyse, points
from localkv.analysis.samples import growth_samples
from localkv.cli.backend import with_server
from localkv.engines import ollama
from localkv.engines.serving import ServerEnded
from localkv.errors import EngineError, LocalkvError, UsageError
from localkv.http import ServerError
from localkv.model import ModelShape, read_model
from localkv.predict.config import RunConfig
from localkv.predict.defaults import OLLAMA_SINGLE, ollama_batch, ollama_before_030
from localkv.predict.ollama_plan import Gpu
from localkv.probes.nvidia import Unknown
from localkv.records import PointRecord
from localkv.report.markdown import render_report
from localkv.report.page import Page
from localkv.sweep.measure import Job
from localkv.sweep.ollama import Attached, OllamaBackend
from localkv.sweep.ollama_settings import (
    has_engine_inside,
    ollama_points,
    options_of,
    refused_by,
    serve_settings,
)
from localkv.sweep.plan import Point, SweepPlan, read_plan
from localkv.sweep.served import ServedPoint, WouldDisturbError, at_once, measured
from localkv.units import GIB, MIB

HEADERS = Path(__file__).parent / "data" / "headers"


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return read_model(str(HEADERS / "qwen2-dense.gguf"))._replace(n_ctx_train=32768)


def configs(
    shape: ModelShape, *gpus: Gpu, engine_inside: bool = False, **plan: Any
) -> list[RunConfig]:
    asked = SweepPlan(backend="ollama", **plan)
    return [p.config for p in ollama_points(asked, shape, gpus, engine_inside=engine_inside)]


# -- points ----------------------------------------------------------------------------------


def test_contexts_of_ollama_are_per_request(shape: ModelShape) -> None:
    for option in ("ctx_size", "ctx_per_slot"):
        found = configs(shape, **{option: (2048, 4096)}, parallel=(1, 4))
        assert {(c.n_ctx, c.n_seq_max) for c in found} == {
            (2048, 1), (4096, 1), (8192, 4), (16384, 4),
        }  # fmt: skip
    assert {c.n_ctx for c in configs(shape, ctx_size=(0, 1 << 20), parallel=(1,))} == {32768}


def test_ollama_sets_batches_by_the_whole_context_and_reads_the_file(shape: ModelShape) -> None:
    for config in configs(shape, ctx_size=(2048, 8192), parallel=(1, 4)):
        assert config.n_batch == config.n_ubatch == ollama_batch(config.n_ctx)
        assert config.n_outputs_max == config.n_seq_max
        assert not config.mmap
        assert config.n_gpu_layers == 0
    (asked,) = configs(shape, ctx_size=(8192,), parallel=(1,), batch_size=(256,))
    assert (asked.n_batch, asked.n_ubatch) == (256, 256)


def test_the_line_before_030_has_the_engine_inside(shape: ModelShape) -> None:
    (config,) = configs(shape, ctx_size=(8192,), parallel=(4,), engine_inside=True)
    assert (config.n_ctx, config.n_batch, config.n_ubatch) == (32768, 2048, 512)
    assert config.n_outputs_max == 0
    assert not config.swa_full
    (asked,) = configs(shape, ctx_size=(512,), parallel=(2,), ubatch_size=(64,), engine_inside=True)
    assert (asked.n_batch, asked.n_ubatch) == (128, 64)
    windowed = read_model(str(HEADERS / "gemma3-dense.gguf"))
    assert ollama_before_030(windowed, RunConfig()).swa_full


def test_a_model_that_gets_one_slot_is_one_point(shape: ModelShape) -> None:
    alone = shape._replace(architecture=sorted(OLLAMA_SINGLE)[0])
    assert [c.n_seq_max for c in configs(alone, ctx_size=(1024,), parallel=(1, 2, 4))] == [1]


def test_layers_on_a_gpu_are_those_that_ollama_would_put_there(shape: ModelShape) -> None:
    big = Gpu(80 * GIB, 78 * GIB)
    (config,) = configs(shape, big, ctx_size=(1024,), parallel=(1,))
    assert config.n_gpu_layers == shape.n_layer + 1
    assert config.mmap
    (asked,) = configs(shape, big, ctx_size=(1024,), parallel=(1,), gpu_layers=(1,))
    assert asked.n_gpu_layers == 1


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        ({"kv_unified": (True,)}, "--kv-unified"),
        ({"swa_full": (True,)}, "--swa-full"),
        ({"cache_type_k": ("q8_0",)}, "one type for K and V"),
        ({"cache_type": ("q5_0",)}, "one type for K and V"),
        ({"batch_size": (512,), "ubatch_size": (256,)}, "num_batch"),
        ({"n_outputs_max": 1}, "n_outputs_max"),
        ({"ctx_size": (512,), "ctx_per_slot": (512,)}, "per request"),
    ],
)
def test_what_ollama_cannot_be_told_is_refused(
    shape: ModelShape, plan: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        configs(shape, **plan)


def test_a_quantised_cache_turns_flash_attention_on(shape: ModelShape) -> None:
    found = configs(shape, ctx_size=(512,), cache_type=("f16", "q8_0"), parallel=(1,))
    assert [c.flash_attn for c in found] == ["auto", "on"]


def test_the_options_of_a_request_say_what_was_asked_for_and_no_more(shape: ModelShape) -> None:
    asked = {"backend": "ollama", "ctx_size": (2048,), "parallel": (2,)}
    (point,) = ollama_points(SweepPlan(**asked), shape, (), engine_inside=False)
    assert options_of(point.config, SweepPlan(**asked)) == {"num_ctx": 2048}
    plan = SweepPlan(**asked, ubatch_size=(64,), gpu_layers=(3,), threads=2)
    (point,) = ollama_points(plan, shape, [Gpu(GIB, GIB)], engine_inside=False)
    told = options_of(point.config, plan)
    assert told == {"num_ctx": 2048, "num_batch": 64, "num_gpu": 3, "num_thread": 2}


# -- a server that runs ----------------------------------------------------------------------


def test_the_settings_of_a_running_ollama_come_from_its_environment() -> None:
    serve = serve_settings({"OLLAMA_NUM_PARALLEL": "4", "OLLAMA_KV_CACHE_TYPE": "q8_0"}, 2)
    assert (serve.num_parallel, serve.cache_type, serve.max_loaded, serve.why) == (4, "q8_0", 6, "")
    config = RunConfig(n_ctx=1024, n_seq_max=4, cache_type_k="q8_0", cache_type_v="q8_0")
    assert refused_by(serve, config) is None
    assert "OLLAMA_NUM_PARALLEL=4, not 2" in str(refused_by(serve, config.with_(n_seq_max=2)))
    assert "OLLAMA_KV_CACHE_TYPE=q8_0, not f16" in str(
        refused_by(serve, config.with_(cache_type_k="f16"))
    )
    unread = serve_settings({}, 0)
    assert (unread.num_parallel, unread.max_loaded, unread.flash_attn) == (1, 3, "auto")
    assert "cannot be read" in str(refused_by(unread, config))


def test_the_generation_is_told_by_version_or_by_what_lies_beside(tmp_path: Path) -> None:
    assert has_engine_inside("0.17.4", None)
    assert not has_engine_inside("0.30.0", None)
    assert not has_engine_inside("1.2", None)
    assert not has_engine_inside("0.0.0", None)
    program = tmp_path / "bin" / "ollama"
    program.parent.mkdir()
    program.touch()
    assert has_engine_inside("0.0.0", str(program))
    beside = tmp_path / "lib" / "ollama" / "llama-server"
    beside.parent.mkdir(parents=True)
    beside.touch()
    assert not has_engine_inside("0.0.0", str(program))


def test_the_server_is_found_by_options_and_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = SweepPlan()
    assert with_server(plain, model_named=False) == plain
    with pytest.raises(UsageError, match="--server-bin and --server-url"):
        with_server(SweepPlan(server_bin="ollama"), model_named=False)
    theirs = SweepPlan(backend="llama-server", server_url="http://127.0.0.1:9")
    assert with_server(theirs, model_named=False).model == ""
    assert with_server(theirs, model_named=True) == theirs
    monkeypatch.setenv("OLLAMA_HOST", "0.0.0.0:9")
    of_ollama = SweepPlan(backend="ollama")
    assert with_server(of_ollama, model_named=False).server_url == "http://127.0.0.1:9"
    named = SweepPlan(backend="ollama", server_bin="ollama")
    assert with_server(named, model_named=False) == named


def test_a_plan_file_may_name_the_back_end(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('backend = "ollama"\nserver-bin = "ollama"\n')
    assert SweepPlan(**read_plan(path)).backend == "ollama"
    path.write_text('backend = "vllm"\n')
    with pytest.raises(UsageError, match="is no back end"):
        read_plan(path)


# -- how a point ends ------------------------------------------------------------------------


def ended(error: LocalkvError | None, *, tail: tuple[str, ...] = (), timeout: float = 60) -> Any:
    config = RunConfig(n_ctx=512)
    job = Job(Path("m.gguf"), Point(config, "k"), 0, 1, timeout)
    point = ServedPoint(job, Unknown("none"), lambda _: None, "ollama")

    def work(point: ServedPoint) -> None:
        point.phase("baseline", None)
        point.log_tail = tail
        with point.timed("load"):
            if error:
                raise error

    return measured(point, work)


@pytest.mark.parametrize(
    ("error", "tail", "outcome", "stage"),
    [
        (None, (), "ok", None),
        (EngineError("it will not", "x"), (), "failed", "weights"),
        (EngineError("no", "x"), ("failed to allocate buffer for kv cache",), "oom", "kv"),
        (EngineError("model requires more system memory", "x"), (), "oom", "weights"),
        (ServerEnded("gone", "x", 137), (), "crashed", "weights"),
        (ServerEnded("gone", "x", 1), (), "failed", "weights"),
        (EngineError("llama runner process has terminated", "x"), (), "crashed", "weights"),
        (ServerError("u did not answer", "x", "slow"), (), "timeout", "weights"),
        (ServerError("gone", "x", "unreachable"), (), "crashed", "weights"),
        (ServerError("no", "x", "status", status=500), (), "failed", "weights"),
        (WouldDisturbError("not now", "x"), (), "skipped", "preflight"),
    ],
)
def test_every_end_is_a_record(
    error: LocalkvError | None, tail: tuple[str, ...], outcome: str, stage: str | None
) -> None:
    record = ended(error, tail=tail)
    assert (record.outcome, record.stage) == (outcome, stage)
    assert (record.reason is None) is (outcome == "ok")
    assert PointRecord.from_dict(record.to_dict()) == record


def test_a_point_out_of_time_says_what_it_was_busy_with() -> None:
    record = ended(EngineError("it was not ready within 0 s", "x"), timeout=0)
    assert record.outcome == "timeout"
    assert "busy with: load" in record.reason


def test_the_first_of_many_answers_that_fails_is_told() -> None:
    assert at_once([lambda: 1, lambda: 2], 60) == [1, 2]

    def no() -> None:
        raise EngineError("no", "x")

    with pytest.raises(EngineError, match="no"):
        at_once([no, lambda: 2], 60)
    released = threading.Event()
    with pytest.raises(ServerError) as caught:
        at_once([released.wait], 0.05)
    released.set()
    assert caught.value.kind == "slow"


# -- analysis --------------------------------------------------------------------------------


def as_served(record: PointRecord, *, mmap: bool, program: str = "ollama") -> PointRecord:
    """Turn a record of the engine into one of a server: nothing before, all in one go."""
    context, decode = record.phase("context"), record.phase("decode")
    assert context is not None
    assert decode is not None
    nothing = {key: type(r)(0, source="none") for key, r in context.readings.items()}
    baseline = type(context)("baseline", 0.0, nothing)
    data = record.to_dict()
    data["phases"] = [p.to_dict() for p in (baseline, context, decode)]
    data["config"]["mmap"] = mmap
    data["server"] = {"program": program, "attached": False, "version": "1.0", "ps_bytes": MIB}
    return PointRecord.from_dict(data)


@pytest.mark.parametrize("mmap", [True, False])
def test_what_is_loaded_at_once_is_compared_at_once(mmap: bool) -> None:
    plain = record_grid()
    served = [as_served(record, mmap=mmap) for record in plain]
    before, after = growth_samples(plain).samples, growth_samples(served).samples
    weights = 0 if mmap else points.predicted(plain[0], "weights")
    for one, other in zip(before, after, strict=True):
        assert other.expected - one.expected == weights
        assert other.formula_bytes == one.formula_bytes
    found = analyse(run_info(points=len(served)), served)
    assert found.fit.slope is not None
    assert found.fit.slope.value == pytest.approx(1, abs=0.005)
    (note,) = [w for w in found.warnings if w.code == "intercept"]
    assert "the server holds" in note.text


def test_the_report_of_a_server_says_how_it_was_measured() -> None:
    served = [as_served(record, mmap=True, program="llama-server") for record in record_grid()]
    info = run_info(points=len(served))
    text = render_report(Page(info, tuple(served), analyse(info, served)))
    assert "the phase model is not told apart" in text
    assert "Its prompt cache and checkpoints" in text
    assert "/api/ps foretold" not in text
    plain = record_grid()
    text = render_report(Page(info, tuple(plain), analyse(info, plain)))
    assert "What the server itself says" not in text
    assert "interpreter and engine library" in text


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"runner": "llama-server", "attached": True}, None),
        ({"runner": "Ollama's own process", "attached": True}, "is chance, a MiB or more"),
        ({"runner": "Ollama's own process", "heap": ["GOGC=off"]}, "engine heap, keep that steady"),
    ],
)
def test_the_report_says_what_became_of_a_heap_of_go(
    engine: dict[str, Any], said: str | None
) -> None:
    served = [as_served(record, mmap=True) for record in record_grid()]
    info = run_info(points=len(served))
    info = replace(info, environment={**info.environment, "engine": engine})
    text = render_report(Page(info, tuple(served), analyse(info, served)))
    assert ("How much freed memory its runner holds" in text) == (said is not None)
    assert (said or "") in text
    assert ("| engine heap | GOGC=off |" in text) == ("heap" in engine)


# -- models of somebody else -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("loaded", "file_bytes", "word"),
    [
        (("theirs",), MIB, None),
        ((), 1 << 60, None),
        (("theirs",), 1 << 60, "put out theirs"),
        (("a", "b", "c"), MIB, "as many models as it may"),
    ],
)
def test_nobody_elses_model_is_put_out(
    shape: ModelShape, loaded: tuple[str, ...], file_bytes: int, word: str | None
) -> None:
    with url_helpers.serving() as site:
        site.add("/api/version", url_helpers.status(200, b'{"version": "0.33.1"}'))
        models = json.dumps({"models": [{"name": name} for name in loaded]})
        site.add("/api/ps", url_helpers.status(200, models.encode()))
        running = ollama.attached(site.url)
        serve = Attached(running, None, serve_settings({}, 0), "mine")
        config = RunConfig(n_ctx=1024)
        with pytest.raises(WouldDisturbError, match=word) if word else nullcontext():
            serve.refuse_to_disturb(shape._replace(file_bytes=file_bytes), config)


def test_models_that_a_killed_sweep_left_are_named_with_what_removes_them() -> None:
    left = f"{ollama.TEMPORARY}0badcafe"
    names = ["mine:latest", f"{left}:latest", f"{ollama.TEMPORARY}x; rm -r ~", f"x/{left}:latest"]
    with url_helpers.serving() as site:
        site.add("/api/version", url_helpers.status(200, b'{"version": "0.33.1"}'))
        listed = json.dumps({"models": [{"name": name} for name in names]})
        site.add("/api/tags", url_helpers.status(200, listed.encode()))
        backend = OllamaBackend(SweepPlan(backend="ollama", server_url=site.url), [])
        (note,) = backend.notes()
        assert note.endswith(f"OLLAMA_HOST={site.url} ollama rm {left}")
        assert "holds 1 model of a localkv that was killed, or is measuring now" in note
        site.add("/api/tags", url_helpers.status(200, b'{"models": null}'))
        assert backend.notes() == []
