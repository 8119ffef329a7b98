"""The page about a model: its figures against the predictor's, and its lines at any width."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from gguf_helpers import STR, U32, Builder
from hypothesis import given
from hypothesis import strategies as st
from predict_helpers import header_bytes, records, shape
from predict_zoo import metadata, write_header
from sweep_helpers import patched

from localkv.cli.inspect_page import page
from localkv.cli.terminal import columns
from localkv.model import ModelShape, read_model, shape_from_header
from localkv.model.hf_config import shape_from_hf_config
from localkv.predict.inspection import inspect_model
from localkv.predict.layer_pattern import SIGNS, pattern
from localkv.predict.predict import predict

DATA = Path(__file__).parent / "data"
CONFIGS = DATA / "hf_configs"
SIZE = re.compile(r"\d+\.\d\d [KMGT]iB|\d+ B")
NAMES = sorted(record["name"] for record in records("deep_truth"))


def told(run: Run, *args: object, code: int = 0) -> Any:
    ended, out, err = run("inspect", *args, "--json")
    assert ended == code, err
    return json.loads(out)


def caches_of(model: ModelShape, ctx_per_slot: int, slots: int = 1, **settings: Any) -> int:
    """Return KV and state as the predictor has them, without their breakdown."""
    answer = predict(
        model, n_ctx=ctx_per_slot * slots, n_seq_max=slots, kv_unified=False, **settings
    ).to_dict()
    return int(answer["kv"]["bytes"] + answer["recurrent"]["bytes"])


def experts(path: Path, **keys: int) -> Path:
    """Write a llama with 8 experts of 64 x 32 elements in each of two blocks."""
    b = Builder()
    numbers = {
        "block_count": 2, "context_length": 1024, "embedding_length": 64, "feed_forward_length": 32,
        "attention.head_count": 4, "attention.head_count_kv": 2, **keys,
    }  # fmt: skip
    head = [b.key("general.architecture", STR, "llama")]
    head += [b.key(f"llama.{name}", U32, value) for name, value in numbers.items()]
    head.append(b.array("tokenizer.ggml.tokens", STR, ["a", "b"]))
    tensors, offset = [], 0
    for name, dims in (
        ("token_embd.weight", (64, 2)),
        ("blk.0.ffn_up_exps.weight", (64, 32, 8)),
        ("blk.1.ffn_up_exps.weight", (64, 32, 8)),
    ):
        tensors.append(b.tensor(name, dims, offset=offset))
        size = 4
        for n in dims:
            size *= n
        offset += size
    content = b.header(head, tensors)
    path.write_bytes(content + bytes(-len(content) % 32) + bytes(offset))
    return path


# -- the figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_the_predictors(name: str) -> None:
    model = shape(name)
    facts = inspect_model(model, contexts=(300, 4096, 65536), slots=(1, 3))

    assert len(facts["kv_table"]) in (0, 6)
    for row in facts["kv_table"]:
        expected = caches_of(model, row["ctx_per_slot"], row["slots"])
        assert row["bytes"] == expected
        assert row["of_weights"] == expected / model.weights_bytes
        assert row["n_ctx_per_slot"] == 512 if row["ctx_per_slot"] == 300 else True
    nothing = caches_of(model, 4096) == 0
    assert (facts["cache"] == "none") == nothing
    assert (facts["kv_table"] == []) == nothing


def test_cache_types_reach_the_table(smollm2_path: Path) -> None:
    model = read_model(str(smollm2_path))
    facts = inspect_model(model, "q8_0", "q4_0", contexts=(2048,), slots=(2,))

    expected = caches_of(model, 2048, 2, cache_type_k="q8_0", cache_type_v="q4_0")
    assert facts["kv_table"][0]["bytes"] == expected


@pytest.mark.parametrize("name", ["gemma3-dense-d1", "gpt-oss-moe-d1", "llama4-moe-d1"])
def test_windows_save_what_full_layers_would_take(name: str) -> None:
    model = shape(name)
    saving = inspect_model(model, contexts=(8192, 32768))["sliding"]

    assert saving["ctx_per_slot"] == 32768
    assert saving["bytes"] == caches_of(model, 32768)
    assert saving["all_full_bytes"] == caches_of(model, 32768, swa_full=True)
    assert saving["ratio"] == saving["all_full_bytes"] / saving["bytes"]


def test_gqa_saves_against_the_same_model_with_a_kv_head_per_head(tmp_path: Path) -> None:
    source = tmp_path / "gqa.gguf"
    source.write_bytes(header_bytes("gpt-oss-moe-d1"))
    model = read_model(str(source))
    layer = model.layers[0]
    assert layer.n_head > layer.n_head_kv
    key = "gpt-oss.attention.head_count_kv"
    multi = read_model(str(patched(source, tmp_path / "mha.gguf", key, layer.n_head)))

    saving = inspect_model(model, contexts=(4096,))["gqa"]

    assert saving["ratio"] == layer.n_head / layer.n_head_kv
    assert saving["bytes"] == caches_of(model, 4096)
    assert saving["multi_head_bytes"] == caches_of(multi, 4096)
    assert saving["multi_head_bytes_per_token"] == multi.first_token_bytes()
    assert inspect_model(multi)["gqa"]["ratio"] == 1


def test_mla_saves_against_k_and_v_of_every_head() -> None:
    config = json.loads((CONFIGS / "deepseek_v2" / "config.json").read_text())
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    widths = config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]

    facts = inspect_model(shape_from_hf_config(config))
    saving = facts["mla"]

    assert facts["gqa"] is None
    assert saving["per_head_bytes_per_token"] == heads * widths * layers * 2
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert saving["bytes_per_token"] == latent * layers * 2
    assert saving["per_head_bytes"] == saving["per_head_bytes_per_token"] * saving["ctx_per_slot"]


def test_mla_without_the_widths_of_a_head_is_unknown() -> None:
    facts = inspect_model(shape("deepseek4-moe-d1"))

    assert facts["mla"] is None
    assert facts["uses_mla"]
    assert "how wide" in facts["unknown"]["mla"]
    assert any("how wide" in line for line in page(facts, 200))


def test_only_the_experts_that_are_used_are_active(tmp_path: Path) -> None:
    model = experts(tmp_path / "moe.gguf", expert_count=8, expert_used_count=2)
    facts = inspect_model(read_model(str(model)))

    assert facts["n_params"] == 64 * 2 + 2 * 64 * 32 * 8
    assert facts["n_params_active"] == 64 * 2 + 2 * 64 * 32 * 2


@pytest.mark.parametrize("keys", [{"expert_count": 8}, {"expert_count": 8, "expert_used_count": 9}])
def test_active_parameters_that_cannot_be_told_have_a_reason(
    tmp_path: Path, keys: dict[str, int]
) -> None:
    facts = inspect_model(read_model(str(experts(tmp_path / "moe.gguf", **keys))))

    assert facts["n_params_active"] is None
    assert facts["unknown"]["n_params_active"]
    assert any("8 experts" in line for line in page(facts, 200))


def test_weights_that_a_config_does_not_tell_are_unknown(run: Run) -> None:
    facts = told(run, CONFIGS / "llama")

    assert facts["weights_bytes"] is facts["n_params"] is None
    assert "safetensors" in facts["unknown"]["weights_bytes"]
    assert {row["of_weights"] for row in facts["kv_table"]} == {None}
    assert facts["exceeds_weights"] == []
    assert not re.search(r"[B%]\*", run("inspect", CONFIGS / "llama")[1])


def test_the_crossing_is_the_first_marked_cell_of_each_column(smollm2_path: Path) -> None:
    facts = inspect_model(read_model(str(smollm2_path)))

    for cell in facts["exceeds_weights"]:
        column = [row for row in facts["kv_table"] if row["slots"] == cell["slots"]]
        over = [row["ctx_per_slot"] for row in column if row["bytes"] > facts["weights_bytes"]]
        assert cell["ctx_per_slot"] == min(over)
    assert facts["exceeds_weights"]


# -- the layers ----------------------------------------------------------------------------------


def spelled_out(folded: str) -> str:
    """Return what a folded pattern stands for."""

    def runs(text: str) -> str:
        return "".join(sign * int(n) for n, sign in re.findall(r"(\d+) (\S)(?:, |$)", text))

    text = re.sub(r"\(([^)]*)\) x (\d+)", lambda m: f"<{runs(m[1]) * int(m[2])}>", folded)
    return "".join(
        part[1:-1] if part.startswith("<") else runs(part)
        for part in re.findall(r"<.*?>|[^<]+", text)
    )


@given(st.text(alphabet="".join(SIGNS), max_size=80))
def test_a_pattern_stands_for_its_layers(signs: str) -> None:
    assert spelled_out(pattern(signs)) == signs


@pytest.mark.parametrize(
    ("signs", "folded"),
    [
        ("F" * 80, "80 F"),
        ("sssssF" * 8, "(5 s, 1 F) x 8"),
        ("sssssF" * 4 + "ss", "(5 s, 1 F) x 4, 2 s"),
        ("sF" * 12, "(1 s, 1 F) x 12"),
        ("FFFRRF", "3 F, 2 R, 1 F"),
        ("ssssF" * 2 + "=" * 5, "(4 s, 1 F) x 2, 5 ="),
        ("", ""),
    ],
)
def test_patterns_by_example(signs: str, folded: str) -> None:
    assert pattern(signs) == folded


def test_shared_layers_are_marked() -> None:
    model = shape_from_header(metadata("gemma4", n_layer=13), ())
    shared = [layer.shared_with is not None for layer in model.layers]
    facts = inspect_model(model)

    assert any(shared)
    assert [sign == "=" for sign in facts["layer_signs"]] == shared
    assert any("= reads an earlier layer's cache" in line for line in page(facts, 120))


# -- the page ------------------------------------------------------------------------------------


@cache
def zoo_facts() -> tuple[dict[str, Any], ...]:
    return tuple(inspect_model(shape(name)) for name in NAMES)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_every_page_fits_and_shows_every_cell(width: int) -> None:
    for facts in zoo_facts():
        lines = page(facts, width)
        assert max(map(columns, lines)) <= width
        assert lines == page(json.loads(json.dumps(facts)), width)
        start = next((i for i, line in enumerate(lines) if line.startswith("tokens ")), None)
        if start is None:
            assert facts["kv_table"] == []
            continue
        cells = SIZE.findall(
            "\n".join(line for line in lines[start:] if line[:7].strip("0123456789, ") == "")
        )
        assert len(cells) == len(facts["kv_table"])


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_cells_above_the_weights_are_marked_by_a_sign(smollm2_path: Path, width: int) -> None:
    facts = inspect_model(read_model(str(smollm2_path)))
    over = sum(row["of_weights"] > 1 for row in facts["kv_table"])
    text = "\n".join(page(facts, width))

    assert over
    # Sizes and percentages side by side share a mark; apart, each has one.
    marks = len(re.findall(r"[%B]\*", text))
    assert marks == over * (1 if width >= 80 else 2)
    assert len(re.findall(r"[2-9]\d\d%\*|\d{4}%\*|1[0-9]\d%\*", text)) == over


def test_the_page_says_the_crossing_in_words(run: Run, smollm2_path: Path) -> None:
    _, out, _ = run("inspect", smollm2_path)

    said = " ".join(out.split())
    assert "From 1 slot x 8,192 tokens, 2 x 4,096 or 4 x 2,048 on (*) the cache is larger" in said
    small = run("inspect", smollm2_path, "--ctx-per-slot", 256, "-np", 1)[1]
    assert "In none of these is the cache larger than the weights." in small


def test_rows_and_columns_are_chosen(run: Run, smollm2_path: Path) -> None:
    facts = told(run, smollm2_path, "--ctx-per-slot", "1024-4096*2", "-np", "1,3", "-ctk", "q8_0")

    assert [(r["ctx_per_slot"], r["slots"]) for r in facts["kv_table"]] == [
        (1024, 1), (1024, 3), (2048, 1), (2048, 3), (4096, 1), (4096, 3),
    ]  # fmt: skip
    assert (facts["cache_type_k"], facts["cache_type_v"]) == ("q8_0", "f16")


def test_what_was_rounded_or_is_beyond_the_training_is_said(run: Run, smollm2_path: Path) -> None:
    notes = told(run, smollm2_path, "--ctx-per-slot", "1000,100000")["notes"]

    assert any("1,000 become 1,024" in note for note in notes)
    assert any("training context of 8,192" in note for note in notes)


@pytest.mark.parametrize(
    "options",
    [
        ("--ctx-per-slot", "0"), ("--ctx-per-slot", "x"), ("-np", "0"), ("-np", "257"),
        ("-np", "256", "--ctx-per-slot", "4294967295"), ("-ctk", "q9_9"),
        ("--ctx-per-slot", "1-9999", "-np", "1-2"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_is_refused(
    run: Run, smollm2_path: Path, options: tuple[str, ...]
) -> None:
    code, out, err = run("inspect", smollm2_path, *options)

    assert (code, out) == (2, "")
    assert "unexpected" not in err


def test_an_architecture_without_a_rule_is_said_with_what_to_do(run: Run, tmp_path: Path) -> None:
    keys = {name.replace("llama.", "never-seen."): v for name, v in metadata("llama").items()}
    path = write_header(tmp_path / "m.gguf", {**keys, "general.architecture": "never-seen"})

    code, out, _ = run("inspect", path)
    facts = told(run, path, code=1)

    assert code == 1
    assert "no rule for this architecture" in " ".join(out.split())
    assert "localkv predict MODEL --engine" in out
    assert facts["rule"] == "none"
    assert facts["kv_per_token"] is facts["gqa"] is facts["layer_signs"] is None
    assert facts["unknown"]["kv_per_token"]
    assert facts["kv_table"] == []


def test_a_file_that_the_engine_gives_up_on_is_not_sent_to_it(run: Run, tmp_path: Path) -> None:
    keys = metadata("llama")
    del keys["llama.context_length"]
    code, out, _ = run("inspect", write_header(tmp_path / "m.gguf", keys))

    assert code == 1
    assert "gives up" in out
    assert "--engine" not in out


def test_an_encoder_keeps_nothing(run: Run, tmp_path: Path) -> None:
    path = write_header(tmp_path / "m.gguf", metadata("bert"))
    code, out, _ = run("inspect", path)
    facts = told(run, path)

    assert code == 0
    assert facts["cache"] == "none"
    assert facts["kv_table"] == []
    assert "keeps nothing from one token to the next" in " ".join(out.split())


def test_a_recurrent_model_has_a_state_per_slot(run: Run) -> None:
    path = DATA / "headers" / "mamba-dense.gguf"
    facts = told(run, path)
    _, out, _ = run("inspect", path)

    answer = predict(str(path), n_ctx=512, n_seq_max=1).to_dict()
    assert facts["cache"] == "state"
    assert facts["state_bytes_per_slot"] == answer["recurrent"]["bytes"]
    assert "all recurrent state" in out
    assert "whatever the context" in out


def test_a_split_model_is_one(run: Run, tmp_path: Path) -> None:
    b = Builder()
    whole = experts(tmp_path / "whole.gguf", expert_count=8, expert_used_count=2)
    known = read_model(str(whole))
    numbers = {
        "block_count": 2, "context_length": 1024, "embedding_length": 64, "feed_forward_length": 32,
        "attention.head_count": 4, "attention.head_count_kv": 2, "expert_count": 8,
        "expert_used_count": 2,
    }  # fmt: skip
    tensors = [("token_embd.weight", (64, 2)), ("blk.0.ffn_up_exps.weight", (64, 32, 8)),
               ("blk.1.ffn_up_exps.weight", (64, 32, 8))]  # fmt: skip
    for number, (name, dims) in enumerate(tensors):
        keys = [b.key("general.architecture", STR, "llama")] if number == 0 else []
        if number == 0:
            keys += [b.key(f"llama.{key}", U32, value) for key, value in numbers.items()]
            keys.append(b.array("tokenizer.ggml.tokens", STR, ["a", "b"]))
        for key, kind, value in (("no", 2, number), ("count", 2, 3), ("tensors.count", 5, 3)):
            keys.append(b.key(f"split.{key}", kind, value))
        content = b.header(keys, [b.tensor(name, dims)])
        size = 4 * dims[0] * dims[1] * (dims[2] if len(dims) > 2 else 1)
        shard = tmp_path / f"m-0000{number + 1}-of-00003.gguf"
        shard.write_bytes(content + bytes(-len(content) % 32) + bytes(size))

    facts = told(run, tmp_path / "m-00002-of-00003.gguf")

    assert facts["weights_bytes"] == known.weights_bytes
    assert facts["n_params_active"] == inspect_model(known)["n_params_active"]
    assert len(facts["paths"]) == 3
    assert "in 3 files" in run("inspect", tmp_path / "m-00001-of-00003.gguf")[1]


def test_colour_changes_nothing_but_colour(
    run: Run, gemma_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "72")
    plain = run("inspect", gemma_path)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    painted = run("inspect", gemma_path)[1]

    assert "\x1b[" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("inspect", gemma_path)[1] == plain
