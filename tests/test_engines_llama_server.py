"""llama-server started for a configuration: exactly that one, by its own log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import url_helpers
from server_helpers import alive, family_of, running_llama_server
from servers import binary

from localkv.engines import llama_server
from localkv.engines.check import printed_slack
from localkv.engines.llama_server import LlamaServer, find_server, server_arguments
from localkv.errors import EngineError, UsageError
from localkv.http import ServerError
from localkv.model import read_model
from localkv.predict.config import RunConfig
from localkv.predict.defaults import run_config
from localkv.predict.predict import estimate

CASES: dict[str, dict[str, Any]] = {
    "two slots apart": {"n_ctx": 4096, "n_seq_max": 2},
    "three slots, rounded up": {"n_ctx": 4096, "n_seq_max": 3},
    "as it comes: four share": {"n_ctx": 2048},
    "quantised, a small ubatch": {
        "n_ctx": 2048,
        "n_seq_max": 1,
        "cache_type_k": "q8_0",
        "cache_type_v": "q4_0",
        "n_ubatch": 128,
        "flash_attn": "on",
    },
    "windows in full, read into memory": {
        "n_ctx": 2048,
        "n_seq_max": 2,
        "swa_full": True,
        "mmap": False,
    },
}


@contextmanager
def started(model: Path, config: RunConfig, folder: Path, **how: Any) -> Iterator[LlamaServer]:
    told = {"server_bin": str(binary("llama-server")), "n_threads": 1, **how}
    with llama_server.started(config, model, log=folder / "server.log", **told) as server:
        yield server


def same_context(server: LlamaServer, model: Path, config: RunConfig) -> None:
    """Assert that the server's log and its /props say what was predicted."""
    log = server.engine_log()
    assert log is not None
    expected = estimate(read_model(str(model)), config)
    assert len(log.caches) == len(expected.caches)
    for told, predicted in zip(log.caches, expected.caches, strict=True):
        assert (told.cells, told.streams) == (predicted.cells, predicted.streams)
        assert abs(told.bytes - predicted.bytes) <= printed_slack(told.bytes, 1)
    context = dict(log.context)
    assert context["n_ctx"] == expected.config["n_ctx"]
    assert context["n_seq_max"] == config.n_seq_max
    assert context["n_ubatch"] == expected.config["n_ubatch"]
    assert abs(log.sum("output") - expected.output_bytes) <= printed_slack(log.sum("output"), 1)
    mapped = any(b.device == "CPU_Mapped" for b in log.buffers)
    assert mapped is config.mmap
    props = server.props()
    assert props["total_slots"] == config.n_seq_max
    assert props["default_generation_settings"]["n_ctx"] == expected.config["n_ctx_per_slot"]


@pytest.mark.server
@pytest.mark.parametrize("case", CASES)
def test_it_runs_what_was_asked_for(gemma_path: Path, tmp_path: Path, case: str) -> None:
    config = run_config("llama-server", read_model(str(gemma_path)), **CASES[case])
    with started(gemma_path, config, tmp_path) as server:
        same_context(server, gemma_path, config)
        family = family_of(server.pid or 0)
        assert len(family) == 1
    assert not any(alive(p) for p in family)


@pytest.mark.server
def test_the_environment_of_other_servers_does_not_count(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CACHE_TYPE_K", "q8_0"), ("KV_UNIFIED", "1"), ("UBATCH", "64")):
        monkeypatch.setenv(f"LLAMA_ARG_{name}", value)
    config = run_config("llama-server", read_model(str(smollm2_path)), n_ctx=8192, n_seq_max=4)
    with started(smollm2_path, config, tmp_path) as server:
        same_context(server, smollm2_path, config)


@pytest.mark.server
def test_a_running_server_is_asked_and_left_alone(smollm2_path: Path, tmp_path: Path) -> None:
    with running_llama_server(tmp_path, smollm2_path, "-c", 1024, "-np", 2, "-t", 1) as running:
        server = llama_server.attached(running.url)
        assert server.props()["total_slots"] == 2
        assert (server.pid, server.engine_log()) == (None, None)
        assert alive(family_of(running.pid)[0])


@pytest.mark.server
def test_the_servers_reason_comes_through(tmp_path: Path, smollm2_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2_path.read_bytes()[:4096])
    with (
        pytest.raises(EngineError, match="llama-server ended before it was ready"),
        started(broken, RunConfig(n_ctx=512), tmp_path),
    ):
        pass


@pytest.mark.server
def test_the_package_stands_in_for_the_binary(smollm2_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp brings the server as a library")
    config = run_config(
        "llama-server", read_model(str(smollm2_path)), n_ctx=2048, n_seq_max=2, cache_type_k="q8_0"
    )
    log = tmp_path / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert find_server()[0] == sys.executable
        with llama_server.started(config, smollm2_path, log=log, n_threads=1) as server:
            same_context(server, smollm2_path, config)


def test_the_flags_leave_nothing_to_the_server() -> None:
    words = server_arguments(RunConfig(n_ctx=4096, n_seq_max=2), "m.gguf", n_threads=2)
    for pair in (("-ngl", "0"), ("--fit", "off"), ("-c", "4096"), ("-np", "2"), ("-t", "2")):
        assert pair in pairwise(words)
    every = server_arguments(RunConfig(n_ctx=4096, n_gpu_layers=-1), "m.gguf")
    assert every[every.index("-ngl") + 1] == "all"


def test_logits_for_a_whole_batch_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="one token per slot"):
        server_arguments(RunConfig(n_ctx=4096, n_seq_max=2, n_outputs_max=512), "m.gguf")


def test_where_there_is_none_the_hint_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="pip install xllamacpp"):
        find_server()
    with pytest.raises(EngineError, match="is no program"):
        find_server(str(tmp_path / "nothing"))


def test_another_program_is_no_llama_server() -> None:
    with url_helpers.serving() as site:
        site.add("/props", url_helpers.status(200, b'{"models": []}'))
        with pytest.raises(ServerError, match="is no llama-server"):
            llama_server.attached(site.url)
