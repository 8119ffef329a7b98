"""The paged plan is vLLM's: every figure of every plan that vLLM 0.32 made is met exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.errors import UsageError
from localkv.model.hf_config import shape_from_hf_config
from localkv.predict.kv_table import kv_bytes_per_token, kv_table
from localkv.predict.paged import CPU, PagedPlan, Serving, paged_plan
from localkv.units import GIB, KIB

DATA = Path(__file__).parent / "data"
KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "sliding",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "recurrent",
}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def handed(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / "hf_configs" / name / "config.json").read_text())
    return loaded


def cases() -> list[Any]:
    """Return (config, what vLLM planned) for the handed truth and for our own runs of vLLM.

    vllm_more.jsonl was planned by vLLM 0.32's CPU build itself, in process, with AVX512-BF16
    reported, from transformers 5.19's own config files (fields that no planner reads left out).
    """
    found = [
        pytest.param(
            handed(truth["name"]),
            {**truth, "asked_block_size": 32},
            id=f"{truth['name']}-{truth['kv_cache_dtype']}",
        )
        for truth in lines("vllm_truth.jsonl")
    ]
    for row in lines("vllm_more.jsonl"):
        for plan in row["plans"]:
            label = "{asked_block_size}-{kv_cache_dtype}-{dtype}-{max_model_len}".format(**plan)
            found.append(pytest.param(row["config"], plan, id=f"more-{row['name']}-{label}"))
    return found


def planned(config: dict[str, Any], truth: dict[str, Any]) -> PagedPlan:
    return paged_plan(
        config,
        truth["space_bytes"],
        truth["max_model_len"],
        truth["asked_block_size"],
        truth["kv_cache_dtype"],
        truth["dtype"],
    )


@pytest.mark.parametrize(("config", "truth"), cases())
def test_plan_is_vllms(config: dict[str, Any], truth: dict[str, Any]) -> None:
    plan = planned(config, truth).to_dict()
    assert plan["block_size"] == truth["block_size"]
    assert plan["num_blocks"] == truth["num_blocks"]
    assert plan["tokens"] == truth["kv_cache_size_tokens"]
    assert plan["max_concurrency"] == truth["kv_cache_max_concurrency"]
    assert plan["groups"] == [
        {
            "kind": KINDS[group["spec"]],
            "layers": group["layers"],
            "page_bytes": group["page_size_bytes"],
            "window": group["sliding_window"] or group["attention_chunk_size"],
        }
        for group in truth["groups"]
    ]


def test_the_json_has_the_agreed_fields() -> None:
    plan = paged_plan(handed("gpt_oss"), GIB, 4096, 32).to_dict()
    assert list(plan) == [
        "block_size",
        "num_blocks",
        "tokens",
        "max_concurrency",
        "bytes_per_token",
        "groups",
    ]
    assert list(plan["groups"][0]) == ["kind", "layers", "page_bytes", "window"]
    assert json.loads(json.dumps(plan)) == plan


@pytest.mark.parametrize("truth", lines("vllm_truth.jsonl"), ids=lambda t: t["name"])
def test_the_pool_is_what_vllm_allocates(truth: dict[str, Any]) -> None:
    """vLLM lists the pool once per group: its tensors together are groups x pool."""
    plan = planned(handed(truth["name"]), {**truth, "asked_block_size": 32})
    assert plan.block_bytes * plan.num_blocks * len(plan.groups) == truth["tensor_bytes"]
    assert plan.block_bytes * plan.num_blocks <= truth["space_bytes"]
    assert plan.block_bytes * (plan.num_blocks + 1) > truth["space_bytes"]


def test_bytes_per_token_of_plain_attention() -> None:
    plan = paged_plan(handed("llama"), GIB, 4096, 32)
    assert plan.bytes_per_token == 8 * 4 * 32 * 2 * 2
    assert plan.groups[0].page_bytes * 8 == plan.bytes_per_token * 32


def test_recurrent_state_raises_the_block_size() -> None:
    plan = paged_plan(handed("qwen3_next"), GIB, 4096, 32)
    assert plan.block_size == 96
    assert {group.page_bytes for group in plan.groups} == {96 * 512}
    # A state in the model's own type is smaller, and so is the block that covers it.
    smaller = paged_plan(handed("qwen3_next"), GIB, 4096, 32, serving=Serving(ssm_dtype="auto"))
    assert smaller.block_size == 64


def test_without_prefix_caching_a_request_holds_one_state() -> None:
    with_ = paged_plan(handed("qwen3_next"), GIB, 4096, 32)
    without = paged_plan(handed("qwen3_next"), GIB, 4096, 32, serving=Serving(prefix_caching=False))
    assert with_.blocks_per_request - without.blocks_per_request == 3


def test_smaller_steps_keep_less_beside_a_window() -> None:
    config = handed("gpt_oss")
    small = paged_plan(config, GIB, 32768, 32, serving=Serving(max_batched_tokens=512))
    assert small.blocks_per_request == 32768 // 32 + -(-(128 - 1 + 512) // 32) + 1
    assert small.max_concurrency > paged_plan(config, GIB, 32768, 32).max_concurrency


def test_scales_of_per_token_head_types_are_in_the_page() -> None:
    """vLLM: one f32 per head for K and one for V, in every token's slot."""
    plain = paged_plan(handed("llama"), GIB, 4096, 32, "fp8")
    scaled = paged_plan(handed("llama"), GIB, 4096, 32, "int8_per_token_head")
    assert scaled.bytes_per_token - plain.bytes_per_token == 8 * 4 * 2 * 4


def test_auto_is_the_models_own_type() -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        plan = paged_plan(handed("llama"), GIB, 4096, 32, "auto", dtype)
        assert plan.bytes_per_token == 8 * 4 * 32 * 2 * size
    half = paged_plan({**handed("llama"), "torch_dtype": "float32"}, GIB, 4096, 32, dtype="auto")
    assert half.bytes_per_token == 8 * 4 * 32 * 2 * 2


def test_what_does_not_fit_is_said() -> None:
    plan = paged_plan(handed("llama"), 16 << 20, 4096, 32)
    assert plan.num_blocks > 0
    assert not plan.fits
    assert any("refuses to start" in note for note in plan.notes)
    # 128 blocks of 128 KiB fill the request; the null block is one more.
    assert paged_plan(handed("llama"), 129 * 131072, 4096, 32).fits
    assert not paged_plan(handed("llama"), 129 * 131072 - 1, 4096, 32).fits


def test_an_encoder_has_nothing_to_page() -> None:
    plan = paged_plan({"model_type": "bert", "num_hidden_layers": 2}, GIB, 512)
    assert plan.groups == ()
    assert any("no KV cache" in note for note in plan.notes)


def test_the_rules_note_reaches_the_plan() -> None:
    plan = paged_plan({**handed("llama"), "model_type": "brand_new"}, GIB, 4096)
    assert any("brand_new" in note for note in plan.notes)


def test_a_path_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(handed("llama")))
    expected = paged_plan(handed("llama"), GIB, 4096).to_dict()
    assert paged_plan(tmp_path, GIB, 4096).to_dict() == expected
    assert paged_plan(str(tmp_path / "config.json"), GIB, 4096).to_dict() == expected


@pytest.mark.engine
def test_a_gguf_file_is_planned_too(smollm2_path: Path) -> None:
    plan = paged_plan(smollm2_path, GIB, 2048, 16)
    # 30 layers, 3 KV heads of 64: 45 KiB a token in 16 bit.
    assert plan.bytes_per_token == 30 * 3 * 64 * 2 * 2
    assert plan.num_blocks == GIB // (plan.bytes_per_token * 16)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kv_memory": 0},
        {"max_model_len": 0},
        {"block_size": -1},
        {"kv_dtype": "q3"},
        {"dtype": "int3"},
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any]) -> None:
    asked = {"kv_memory": GIB, "max_model_len": 4096, **arguments}
    with pytest.raises(UsageError):
        paged_plan(handed("llama"), **asked)


NAMES = sorted(path.parent.name for path in (DATA / "hf_configs").glob("*/config.json"))


@given(
    st.sampled_from(NAMES),
    st.integers(1, 1 << 34),
    st.integers(0, 1 << 34),
    st.integers(1, 1 << 17),
    st.sampled_from([16, 32, 48, 64, 128]),
    st.sampled_from(["auto", "fp8"]),
)
def test_laws(name: str, memory: int, more: int, length: int, block: int, kv_dtype: str) -> None:
    small = paged_plan(handed(name), memory, length, block, kv_dtype)
    large = paged_plan(handed(name), memory + more, length, block, kv_dtype)
    assert small.num_blocks <= large.num_blocks
    assert small.tokens <= large.tokens
    assert small.block_bytes * small.num_blocks <= memory
    assert sum(g.layers for g in small.groups) == shape_from_hf_config(handed(name)).n_layer
    assert small.block_size >= (16 if name == "deepseek_v2" else block if block % 32 == 0 else 16)
    assert not small.fits or small.max_concurrency >= 1
    assert paged_plan(handed(name), memory, length, block).tokens <= (
        paged_plan(handed(name), memory, length, block, "fp8").tokens
    )


# --- the arithmetic ------------------------------------------------------------------------


def llama(layers: int, heads: int, kv_heads: int) -> Any:
    return shape_from_hf_config(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": heads * 128,
            "torch_dtype": "float16",
        }
    )


def test_8b_with_gqa() -> None:
    shape = llama(32, 32, 8)
    assert kv_bytes_per_token(shape, "f16") == 128 * KIB
    assert kv_table(shape, [8192], [8]).rows == ((8 * GIB,),)


def test_8b_with_every_head() -> None:
    shape = llama(32, 32, 32)
    assert kv_bytes_per_token(shape) == 512 * KIB
    assert kv_table(shape, [4096], [1, 10]).rows == ((2 * GIB, 20 * GIB),)


def test_70b_with_gqa() -> None:
    shape = llama(80, 64, 8)
    assert kv_bytes_per_token(shape) == 320 * KIB
    assert kv_table(shape, [4096, 8192], [1, 4]).rows == (
        (1280 << 20, 5 * GIB),
        (2560 << 20, 10 * GIB),
    )


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_"),
    [
        ("f32", 256 * KIB),
        ("f16", 128 * KIB),
        ("bf16", 128 * KIB),
        ("bfloat16", 128 * KIB),
        ("fp8", 64 * KIB),
        ("int8", 64 * KIB),
        ("int8_per_token_head", 64 * KIB + 32 * 8 * 2 * 4),
        ("q8_0", 64 * KIB * 34 // 32),
        ("q4_0", 64 * KIB * 18 // 32),
        ("auto", 128 * KIB),
    ],
)
def test_types(kv_dtype: str, bytes_: int) -> None:
    assert kv_bytes_per_token(llama(32, 32, 8), kv_dtype) == bytes_


def test_tokens_are_rounded_up_to_blocks() -> None:
    shape = llama(32, 32, 8)
    assert kv_table(shape, [1000], [1], block_size=16).rows == ((1008 * 128 * KIB,),)
    assert kv_table(shape, [1008], [1], block_size=16).rows == ((1008 * 128 * KIB,),)


def test_a_window_bounds_its_layers() -> None:
    shape = shape_from_hf_config(handed("gpt_oss"))
    token = 2 * 64 * 2 * 2
    table = kv_table(shape, [64, 4096], [1])
    assert table.rows == ((12 * token * 64,), (6 * token * 4096 + 6 * token * 128,))
    assert table.bytes_per_token == 12 * token


@pytest.mark.parametrize(
    ("contexts", "batches", "block"), [([0], [1], 1), ([1], [0], 1), ([1], [1], 0)]
)
def test_the_table_refuses_nothing_of_something(
    contexts: list[int], batches: list[int], block: int
) -> None:
    with pytest.raises(UsageError):
        kv_table(llama(2, 2, 2), contexts, batches, block_size=block)


def test_the_default_serving_is_the_cpu_build() -> None:
    assert Serving() == CPU
