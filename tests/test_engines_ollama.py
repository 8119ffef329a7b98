"""Ollama of both generations: what it allocates is what was predicted, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import url_helpers
from server_helpers import alive, family_of, ollama_create, running_ollama
from servers import binary
from sweep_helpers import wait_until

from localkv.engines import ollama
from localkv.engines.check import printed_slack
from localkv.engines.ollama import Ollama
from localkv.engines.ollama_log import parse_ollama_log
from localkv.errors import EngineError
from localkv.http import ServerError
from localkv.model import read_model
from localkv.predict.defaults import run_config
from localkv.predict.ollama_plan import ollama_plan
from localkv.predict.predict import estimate
from localkv.probes.process import read_process
from localkv.probes.runner import ollama_runners
from localkv.sweep.heap import STEADY_GO_HEAP
from localkv.units import MIB

GENERATIONS = ("ollama", "ollama-old")


@contextmanager
def started(generation: str, folder: Path, **how: Any) -> Iterator[Ollama]:
    """Start ``ollama serve``; everything of it must be gone in the end."""
    with ollama.started(folder, program=str(binary(generation)), **how) as server:
        yield server
        family = family_of(server.pid or 0)
    assert family != []
    assert not any(alive(process) for process in family)


def runner_of(server: Ollama) -> psutil.Process:
    """Return the one process that holds a model."""
    assert server.pid is not None
    (pid,) = ollama_runners(server.pid)
    return psutil.Process(pid)


def anonymous(process: psutil.Process) -> int:
    value = read_process(process.pid)["rss_anon"].value
    assert isinstance(value, int)
    return value


@pytest.mark.server
@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_what_it_allocates_was_predicted(
    smollm2_path: Path, tmp_path: Path, generation: str, parallel: int
) -> None:
    shape = read_model(str(smollm2_path))
    held = {}
    env = STEADY_GO_HEAP if generation == "ollama-old" else {}
    with (
        started(generation, tmp_path, num_parallel=parallel, env=env) as server,
        server.temporary_model(smollm2_path) as name,
    ):
        for num_ctx in (2048, 4096):
            entry = server.load(name, num_ctx=num_ctx)
            runner = runner_of(server)
            config = run_config("ollama", shape, n_ctx=num_ctx, n_seq_max=parallel)
            expected = estimate(shape, config)
            log = server.engine_log()
            assert log is not None
            assert dict(log.context)["n_ctx"] == num_ctx * parallel
            assert len(log.caches) == 1
            assert abs(log.kv_bytes - expected.kv_bytes) <= printed_slack(log.kv_bytes)
            assert entry["context_length"] == num_ctx
            held[num_ctx] = anonymous(runner), expected.kv_bytes
            server.unload(name)
            wait_until(lambda runner=runner: not alive(runner))
    measured, predicted = (held[4096][i] - held[2048][i] for i in (0, 1))
    assert abs(measured - predicted) <= 0.02 * predicted


@pytest.mark.server
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_model_is_removed_and_its_memory_given_back(
    smollm2_path: Path, tmp_path: Path, generation: str
) -> None:
    with started(generation, tmp_path) as server:
        with server.temporary_model(smollm2_path) as name:
            server.load(name, num_ctx=512)
            runner = runner_of(server)
            assert server.show(name)["model_info"]["general.architecture"] == "llama"
        wait_until(lambda: not alive(runner))
        assert ollama_runners(server.pid or 0) == {}
        assert server.loaded() == []
        with pytest.raises(ServerError) as caught:
            server.show(name)
        assert caught.value.status == 404
    assert not [path for path in (tmp_path / "models").rglob("*") if path.stat().st_size > MIB]


@pytest.mark.server
def test_a_running_ollama_is_left_as_it_was(
    smollm2_path: Path, gemma_path: Path, tmp_path: Path
) -> None:
    with running_ollama(tmp_path) as running:
        ollama_create(running, "mine", gemma_path)
        running.post("/api/generate", {"model": "mine", "options": {"num_ctx": 512}})
        before = running.get("/api/tags"), set(ollama_runners(running.pid))
        server = ollama.attached(running.url)
        assert (server.pid, server.engine_log()) == (None, None)
        with server.temporary_model(smollm2_path) as name:
            assert name.startswith(ollama.TEMPORARY)
            assert server.load(name, num_ctx=1024)["context_length"] == 1024
        assert running.get("/api/tags") == before[0]
        assert [model["name"] for model in server.loaded()] == ["mine:latest"]
        wait_until(lambda: set(ollama_runners(running.pid)) == before[1])
        # The same file under another name would be the same process.
        with (
            pytest.raises(ServerError, match="mine:latest is loaded from the same file"),
            server.temporary_model(gemma_path) as name,
        ):
            server.load(name, num_ctx=1024)
        assert set(ollama_runners(running.pid)) == before[1]


@pytest.mark.server
def test_its_belief_and_its_own_sum(gemma_path: Path, tmp_path: Path) -> None:
    """A model with sliding windows: what Ollama reports is short of one cache, as foretold."""
    shape = read_model(str(gemma_path))
    with (
        started("ollama", tmp_path, num_parallel=2) as server,
        server.temporary_model(gemma_path) as name,
    ):
        entry = server.load(name, num_ctx=2048)
        log = server.engine_log()
        assert log is not None
        repacked = sum(b.bytes for b in log.buffers if b.device == "CPU_REPACK")
    plan = ollama_plan(shape, num_ctx=2048, parallel=2)
    assert abs(log.kv_bytes - plan.true.kv_bytes) <= printed_slack(log.kv_bytes, 2)
    assert plan.ps_bytes is not None
    lost = plan.true.caches[0].bytes
    assert any("will not count the full layers' cache" in note for note in plan.notes)
    # What this CPU repacks, and the compute buffers' band, are another test's business.
    mine = plan.ps_bytes - plan.true.compute.bytes + log.sum("compute")
    slack = printed_slack(entry["size"], len(log.buffers))
    host_weights = log.sum("model") - plan.true.weights_bytes
    assert abs(entry["size"] - (mine + host_weights)) <= slack
    assert repacked >= 0
    whole = log.sum("model") + log.kv_bytes + log.sum("output") + log.sum("compute")
    assert abs(whole - entry["size"] - lost) <= slack


@pytest.mark.server
def test_the_old_generations_own_engine(gemma_path: Path, tmp_path: Path) -> None:
    """It plans windows its own way and rounds to a tenth of a MiB; still nothing is unknown."""
    with (
        started("ollama-old", tmp_path, num_parallel=2) as server,
        server.temporary_model(gemma_path) as name,
    ):
        entry = server.load(name, num_ctx=2048)
        log = server.engine_log()
        assert log is not None
    assert log.caches == ()
    assert dict(log.context) == {"n_ctx": 4096, "n_seq_max": 2, "n_ubatch": 512}
    assert log.flash_attn is True
    told = log.sum("model") + log.kv_bytes + log.sum("compute")
    assert abs(told - entry["size"]) <= len(log.buffers) * MIB // 10


@pytest.mark.server
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_broken_file_is_refused_and_leaves_nothing(tmp_path: Path, generation: str) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 1000)
    with started(generation, tmp_path) as server:
        # The old generation finds out when it loads.
        with pytest.raises(ServerError), server.temporary_model(broken) as name:
            server.load(name, num_ctx=512)
        assert server.loaded() == []
    assert not [path for path in (tmp_path / "models" / "manifests").rglob("*") if path.is_file()]


@pytest.mark.server
def test_quantised_caches_are_passed_on(smollm2_path: Path, tmp_path: Path) -> None:
    shape = read_model(str(smollm2_path))
    with (
        started("ollama", tmp_path, cache_type="q8_0", flash_attn="on") as server,
        server.temporary_model(smollm2_path) as name,
    ):
        server.load(name, num_ctx=2048)
        log = server.engine_log()
    assert log is not None
    told = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"}
    expected = estimate(shape, run_config("ollama", shape, n_ctx=2048, n_seq_max=1, **told))
    assert abs(log.kv_bytes - expected.kv_bytes) <= printed_slack(log.kv_bytes)
    assert log.flash_attn is True


# -- without a server ------------------------------------------------------------------------

_OLD_LOG = """
time=2026 level=INFO source=server.go:431 msg="starting runner" cmd="/b/ollama runner --port 4"
time=2026 level=INFO msg="starting runner" cmd="/b/ollama runner --ollama-engine --model /s/1"
time=2026 level=INFO msg="model weights" device=CUDA1 size="9.9 GiB"
time=2026 level=INFO msg="starting runner" cmd="/b/ollama runner --ollama-engine --model /s/2"
time=2026 level=INFO msg="model weights" device=CUDA0 size="1.5 GiB"
time=2026 level=INFO msg="model weights" device=CPU size="100.0 MiB"
time=2026 level=INFO msg="kv cache" device=CUDA0 size="64.0 MiB"
time=2026 level=INFO msg="kv cache" device=CUDA0 size="38,2 MiB"
time=2026 level=INFO msg="compute graph" device=CPU size="512 B"
time=2026 level=INFO msg="compute graph" device=CUDA0 size="7 XiB"
time=2026 level=INFO msg=load request="{Operation:commit LoraPath:[] Parallel:2 BatchSize:512 \
FlashAttention:Disabled KvSize:4096 KvCacheType: NumThreads:2 GPULayers:[] UseMmap:false}"
time=2026 level=INFO source=ggml.go:494 msg="offloaded 17/19 layers to GPU"
""".splitlines()


def test_the_last_load_counts_and_the_last_word_on_a_buffer() -> None:
    log = parse_ollama_log(_OLD_LOG)
    assert {(b.device, b.kind): b.bytes for b in log.buffers} == {
        ("CUDA0", "model"): 3 << 29,
        ("CPU", "model"): 100 * MIB,
        ("CUDA0", "KV"): round(38.2 * MIB),
        ("CPU", "compute"): 512,
    }
    assert log.kv_bytes == round(38.2 * MIB)
    assert dict(log.context) == {"n_ctx": 4096, "n_seq_max": 2, "n_ubatch": 512}
    assert log.flash_attn is False
    assert log.layers_offloaded == (17, 19)


def test_before_any_load_nothing_is_known() -> None:
    log = parse_ollama_log(_OLD_LOG[:2])
    assert (log.buffers, log.caches, log.context) == ((), (), ())


def test_another_program_is_no_ollama() -> None:
    with url_helpers.serving() as site:
        site.add("/api/version", url_helpers.status(200, b'{"build": 1}'))
        with pytest.raises(ServerError, match="is no Ollama"):
            ollama.attached(site.url)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match="no-such-ollama is no program"),
        ollama.started(tmp_path, program="no-such-ollama"),
    ):
        pass


def test_a_name_gets_the_tag_that_ollama_lists() -> None:
    assert ollama.tagged("m") == "m:latest"
    assert ollama.tagged("m:1b") == "m:1b"
    assert ollama.tagged("host:80/library/m") == "host:80/library/m:latest"
