"""``localkv predict`` on a Hugging Face config.json: KV per token, the table, the paged plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import told
from conftest import Run

from localkv import paged_plan, read_model

DATA = Path(__file__).parent / "data"
PLAIN = DATA / "headers" / "qwen2-dense.gguf"
CONFIGS = DATA / "hf_configs"


def test_a_config_is_read_by_folder_by_file_and_by_option(run: Run) -> None:
    folder = CONFIGS / "llama"
    answers = [
        told(run, *how) for how in ((folder,), (folder / "config.json",), ("--config", folder))
    ]

    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["schema"] == 1
    assert read_model(str(folder)).path.endswith("config.json")


def test_kv_per_token_and_the_table_are_the_labs_arithmetic(run: Run) -> None:
    folder = CONFIGS / "llama"
    config = json.loads((folder / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 2

    table = told(run, folder, "-c", 1000, "-np", 8)["kv_table"]
    half = told(run, folder, "-c", 1000, "-np", 8, "--kv-dtype", "fp8", "--block-size", 64)
    _, out, _ = run("predict", folder)

    assert table["bytes_per_token"] == per_token
    assert table["rows"] == [[per_token * 1008 * 8]]  # whole blocks of 16
    assert half["kv_table"]["rows"] == [[per_token // 2 * 1024 * 8]]
    assert f"{per_token / 1024:.2f} KiB" in out
    assert f"{config['max_position_embeddings']:,}" in out
    assert "batch 64" in out


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.iterdir()))
def test_every_config_has_an_estimate_beside_its_table(run: Run, name: str) -> None:
    answer = told(run, CONFIGS / name, "-c", 2048)

    assert answer["model"]["rule"] == "exact"
    assert answer["kv_table"]["bytes_per_token"] > 0
    assert answer["total_bytes"] == sum(device["total"] for device in answer["devices"])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v2", "qwen3_next"])
def test_the_paged_plan_is_the_librarys(run: Run, name: str) -> None:
    folder = CONFIGS / name
    options = ("--memory", "1G", "--max-model-len", 2048, "--block-size", 32)

    code, out, _ = run("predict", folder, *options)

    plan = paged_plan(read_model(str(folder)), 1 << 30, 2048, 32, "auto", "auto")
    assert code == 0
    assert f"{plan.num_blocks:,} blocks" in out
    assert f"{plan.tokens:,} tokens" in out
    assert f"2,048 tokens per request: {plan.max_concurrency:.2f}x" in out
    assert out.count("group:") == len(plan.groups)


@pytest.mark.parametrize("command", ["predict", "capacity"])
@pytest.mark.parametrize(
    ("name", "block", "refused"),
    [
        ("llama", 7, True),
        ("llama", 48, False),
        ("gemma3_text", 40, True),
        ("deepseek_v2", 7, False),  # MLA has kernels that take any
        ("qwen3_next", 7, False),  # raised until a page holds the recurrent state
    ],
)
def test_a_block_size_that_vllm_never_takes_is_refused(
    run: Run, command: str, name: str, block: int, refused: bool
) -> None:
    weights = ("--weights", "1G") if command == "capacity" else ()

    code, out, err = run(
        command, CONFIGS / name, "--memory", "24G", "--block-size", block, *weights
    )

    if refused:
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"blocks of {block} tokens: its attention kernels take multiples of 16" in err
    else:
        assert code == 0, err


def test_the_paged_plan_stands_beside_the_estimate(run: Run) -> None:
    folder = CONFIGS / "llama"

    answer = told(run, folder, "--memory", "24G", "--max-model-len", 4096)

    expected = paged_plan(str(folder), 24 << 30, 4096, dtype="auto").to_dict()
    assert answer["paged"] == expected
    assert answer["total_bytes"] > 0
    assert "paged" not in told(run, PLAIN, "-c", 1024)


def test_weights_beside_a_config_lie_on_a_device(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CONFIGS / "llama" / "config.json").read_bytes())
    index = {"metadata": {"total_size": 123_456}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    answer = told(run, tmp_path, "-c", 1024)

    assert answer["weights"]["bytes"] == 123_456
    assert sum(device["total"] for device in answer["devices"]) == answer["total_bytes"]


@pytest.mark.parametrize("option", [("--engine",), ("--check",), ("-ngl", "3")])
def test_a_config_cannot_be_given_to_the_engine(run: Run, option: tuple[str, ...]) -> None:
    code, _, err = run("predict", CONFIGS / "llama", *option)

    assert code == 2
    assert ".gguf" in err


def test_a_paged_plan_needs_its_memory(run: Run) -> None:
    code, _, err = run("predict", CONFIGS / "llama", "--max-model-len", 100)

    assert code == 2
    assert "--memory" in err
