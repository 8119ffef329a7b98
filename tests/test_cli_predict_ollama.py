"""``localkv predict`` for Ollama: whose settings count, and what Ollama will think of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import url_helpers
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
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:9")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
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
    left = plan["n_layers"] - plan["gpu_layers"]
    assert f"the CPU keeps {left} of {plan['n_layers']} layers" in out
    assert "ollama ps shows" in out


# -- an older line -----------------------------------------------------------------------------


def older(run: Run, model: object = "ollama:tiny") -> list[str]:
    """Return the notes about the version of the Ollama that is there."""
    settings = told(run, model, "--defaults", "ollama")["ollama"]["settings"]
    return [note for note in settings if "0.33 line" in note]


@pytest.mark.parametrize(
    ("version", "noted"),
    [("0.17.4", True), ("0.32.9-rc1", True), ("0.33.0", False), ("1.0.0", False), ("0.0.0", False)],
)
def test_an_older_ollama_that_runs_is_said_to_be_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, version: str, noted: bool
) -> None:
    with url_helpers.serving() as site:
        monkeypatch.setenv("OLLAMA_HOST", site.url)
        body = json.dumps({"version": version}).encode()
        site.add("/api/version", url_helpers.status(200, body))
        notes = older(run)
        assert len(notes) == noted
        assert all(note.startswith(f"Ollama {version} answers at {site.url}:") for note in notes)
        _, out, _ = run("predict", "ollama:tiny")
        assert out.count(f"note: Ollama {version} answers") == noted
        # Only a model of Ollama's own depends on it.
        site.asked.clear()
        assert older(run, PLAIN) == []
        assert site.asked == []


@pytest.mark.parametrize(
    ("code", "body"), [(500, b""), (200, b"<html>"), (200, b"[]"), (200, b'{"version": 3}')]
)
def test_what_does_not_say_its_version_is_no_trouble(
    run: Run, monkeypatch: pytest.MonkeyPatch, code: int, body: bytes
) -> None:
    with url_helpers.serving() as site:
        monkeypatch.setenv("OLLAMA_HOST", site.url)
        site.add("/api/version", url_helpers.status(code, body))
        assert older(run) == []


@pytest.mark.parametrize("host", ["127.0.0.1:9", "http://[::1", "box .invalid", "x" * 80])
@pytest.mark.parametrize("there", [False, True])
def test_where_none_runs_the_one_on_path_counts(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, there: bool
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", host)
    if there:
        program = tmp_path / "bin" / "ollama"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\necho Warning: client version is 0.17.4\n", encoding="ascii")
        program.chmod(0o755)
    notes = older(run)
    assert len(notes) == there
    assert all(note.startswith("Ollama 0.17.4 is on PATH:") for note in notes)
