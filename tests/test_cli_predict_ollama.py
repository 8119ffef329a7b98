"""``localkv predict`` for Ollama: whose settings count, and what Ollama will think of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import told
from conftest import Run
from store_helpers import ollama_model

HEADERS = Path(__file__).parent / "data" / "headers"
PLAIN = HEADERS / "qwen2-dense.gguf"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An Ollama store of its own, and no setting of Ollama in the environment."""
    for name in ("CONTEXT_LENGTH", "NUM_PARALLEL", "KV_CACHE_TYPE", "FLASH_ATTENTION"):
        monkeypatch.delenv(f"OLLAMA_{name}", raising=False)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    params = {"num_ctx": 64, "num_batch": 32, "stop": ["x"]}
    ollama_model(tmp_path, content=PLAIN.read_bytes(), params=params)
    ollama_model(
        tmp_path, "registry.ollama.ai/library/bare/latest", content=PLAIN.read_bytes(), params={}
    )
    return tmp_path


def test_a_name_of_ollama_means_ollamas_defaults(run: Run) -> None:
    config = told(run, "ollama:tiny")["config"]
    assert (config["n_ctx_requested"], config["n_seq_max"]) == (64, 1)
    assert config["n_batch"] <= 32
    assert "ollama" in told(run, "ollama:tiny")
    other = told(run, "ollama:tiny", "--defaults", "llama-server")
    assert other["config"]["n_seq_max"] == 4
    assert "ollama" not in other
    assert "ollama" not in told(run, PLAIN)


def test_an_option_beats_the_model_and_the_model_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_CONTEXT_LENGTH", "96")
    monkeypatch.setenv("OLLAMA_NUM_PARALLEL", "2")
    assert told(run, "ollama:tiny", "-c", 32)["ollama"]["num_ctx"] == 32
    assert told(run, "ollama:tiny")["ollama"]["num_ctx"] == 64
    found = told(run, "ollama:bare")["ollama"]
    assert (found["num_ctx"], found["parallel"]) == (96, 2)
    assert any("OLLAMA_CONTEXT_LENGTH=96" in note for note in found["settings"])
    assert told(run, "ollama:bare", "-np", 3)["ollama"]["parallel"] == 3


def test_cache_types_come_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_KV_CACHE_TYPE", "q8_0")
    monkeypatch.setenv("OLLAMA_FLASH_ATTENTION", "1")
    config = told(run, PLAIN, "--defaults", "ollama")["config"]
    assert (config["cache_type_k"], config["cache_type_v"], config["flash_attn"]) == (
        "q8_0", "q8_0", "on",
    )  # fmt: skip
    kept = told(run, PLAIN, "--defaults", "ollama", "-ctk", "f16", "-ctv", "f16")["config"]
    assert kept["cache_type_k"] == "f16"


def test_the_context_goes_by_vram_where_nobody_names_one(run: Run) -> None:
    found = told(run, "ollama:bare", "--device-free", "24G")
    assert any("num_ctx is not set: Ollama takes 32768" in n for n in found["ollama"]["notes"])
    # ... and is cut to what the model was trained for.
    assert found["config"]["n_ctx_requested"] == found["ollama"]["num_ctx"]
    assert found["ollama"]["num_ctx"] == found["model"]["n_ctx_train"]


def test_its_belief_stands_beside_the_truth(run: Run, gemma_path: Path) -> None:
    asked = ("--defaults", "ollama", "-c", 8192, "-np", 2, "--devices", 0)
    code, out, _ = run("predict", gemma_path, *asked)
    assert code == 0
    plan = told(run, gemma_path, *asked)["ollama"]
    section = out[out.index("what Ollama will think") :]
    for word in ("it expects", "it will be", "ollama ps shows", "will not count the full layers"):
        assert word in section
    assert plan["believed"]["kv"] > plan["true"]["kv"]
    assert plan["ps_bytes"] < plan["true"]["total"]


def test_layers_left_on_the_cpu_are_said(run: Run, gemma_path: Path) -> None:
    asked = ("--defaults", "ollama", "-c", 32768, "-np", 2, "--device-free", "1.3G")
    _, out, _ = run("predict", gemma_path, *asked)
    plan = told(run, gemma_path, *asked)["ollama"]
    assert 0 <= plan["gpu_layers"] < plan["n_layers"]
    assert f"{plan['gpu_layers']} of {plan['n_layers']} layers on 1 GPU" in out
    assert "stay on the CPU" in out
    assert "ollama ps shows" in out
