"""The table of architectures and what the header's keys, missing or odd, make of it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import predict_zoo
import pytest

from localkv.errors import ModelError, UsageError
from localkv.gguf import ArrayRef
from localkv.model import ModelShape, shape_from_header
from localkv.model.architectures import RULES
from localkv.model.caches import MEMORIES
from localkv.predict.predict import predict
from localkv.units import MIB


@dataclass(frozen=True)
class Info:
    """A tensor of a header."""

    name: str
    type: str = "f16"
    shape: tuple[int, ...] = (64, 64)
    nbytes: int = 8192


def llama(architecture: str = "llama", tensors: tuple[Info, ...] = (), **keys: Any) -> ModelShape:
    """Return a small model of ``architecture``; dots in keys are written as double underscores."""
    facts: dict[str, Any] = {
        "block_count": 4,
        "context_length": 4096,
        "embedding_length": 256,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
        **keys,
    }
    metadata = {
        f"{architecture}.{key.replace('__', '.')}": value
        for key, value in facts.items()
        if value is not None
    }
    metadata["general.architecture"] = architecture
    return shape_from_header(metadata, tensors)


def engine_libraries() -> list[bytes]:
    """Return the engine libraries that are installed, the one with the architectures among them."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        pytest.skip("llama-cpp-python is not installed")
    folder = Path(spec.origin).parent / "lib"
    return [path.read_bytes() for path in sorted(folder.glob("*llama.*")) if path.is_file()]


def names_in_the_engine() -> set[str]:
    """Return the architecture names that stand in the installed engine library, in their table."""
    for raw in engine_libraries():
        table = re.search(rb"\0clip\0llama\0(.*?)\0\(unknown\)\0", raw, re.DOTALL)
        if table:
            return {"clip", "llama", *table.group(1).decode("ascii").split("\0")}
    pytest.skip("this platform's library does not keep the names together")


def test_every_architecture_of_the_installed_engine_has_a_row() -> None:
    names = names_in_the_engine()
    assert len(names) > 140
    assert names - RULES.keys() == set()


def test_no_row_is_made_up() -> None:
    # A name that ends another one shares its bytes: "bert" stands in "modern-bert".
    raw = b"".join(engine_libraries())
    assert {name for name in RULES if name.encode() + b"\0" not in raw} == set()


def test_every_row_names_its_source_and_a_memory_that_exists() -> None:
    for name, rule in RULES.items():
        assert rule.memory in MEMORIES, name
        assert rule.file.endswith(".cpp") or rule.memory == "unsupported", name


def test_an_unknown_architecture_is_never_plain_attention() -> None:
    shape = llama("brand-new")
    estimate = predict(shape, n_ctx=4096)
    assert shape.rule == "none"
    assert not estimate.known
    assert estimate.to_dict()["kv"]["bytes"] is None
    assert estimate.to_dict()["total_bytes"] is None
    assert any("no rule" in note for note in estimate.notes)


def test_an_unknown_architecture_with_a_window_is_between_all_sliding_and_all_full() -> None:
    shape = llama("brand-new", attention__sliding_window=128)
    estimate = predict(shape, n_ctx=4096, n_ubatch=128)
    full = predict(llama(), n_ctx=4096, n_ubatch=128).kv_bytes
    assert estimate.kv_bounds == (full * 256 // 4096, full)
    assert estimate.to_dict()["kv"]["low"] == full * 256 // 4096


def test_a_key_that_the_engine_demands_is_missed_aloud() -> None:
    shape = llama("gemma3n")
    assert shape.rule == "none"
    assert "key not found in model: gemma3n.attention.sliding_window" in shape.refused
    assert any("gives up" in note for note in predict(shape, n_ctx=512).notes)


def test_defaults_of_the_engine_are_shown_as_assumed() -> None:
    shape = llama(attention__head_count_kv=None)
    assert [layer.n_head_kv for layer in shape.layers] == [4, 4, 4, 4]
    assert any("head_count_kv" in fact for fact in shape.assumed)
    assert any("key_length" in fact for fact in shape.assumed)
    given = llama(attention__key_length=32, attention__value_length=32, rope__dimension_count=32)
    assert given.assumed == ()
    assert given.layers[0].k_width == 64


def test_a_list_per_block_is_used_whole() -> None:
    shape = llama("deci", attention__head_count_kv=(0, 2, 4, 0))
    assert [layer.k_width for layer in shape.layers] == [0, 128, 256, 0]
    assert predict(shape, n_ctx=256).kv_bytes == 256 * (128 + 256) * 2 * 2


def test_a_list_of_the_wrong_length_is_what_the_engine_refuses() -> None:
    shape = llama("deci", attention__head_count_kv=(0, 2))
    assert shape.refused.endswith("expected 4, got 2")


def test_lfm2_counts_the_blocks_of_its_list_though_the_first_entry_is_0() -> None:
    heads = (0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0)
    shape = llama(
        "lfm2",
        block_count=16,
        embedding_length=2048,
        attention__head_count=32,
        attention__head_count_kv=heads,
        shortconv__l_cache=3,
    )
    estimate = predict(shape, n_ctx=32768)
    assert estimate.kv_bytes == 384 * MIB
    assert estimate.caches[0].layers == 6
    assert estimate.recurrent_bytes == 10 * 2048 * 2 * 4


def test_gpt_oss_slides_in_every_other_of_24_blocks() -> None:
    shape = llama(
        "gpt-oss",
        block_count=24,
        embedding_length=2880,
        attention__head_count=64,
        attention__head_count_kv=8,
        attention__key_length=64,
        attention__value_length=64,
        attention__sliding_window=128,
    )
    estimate = predict(shape, n_ctx=131072, n_seq_max=4, kv_unified=True)
    assert [(c.kind, c.cells, c.layers) for c in estimate.caches] == [
        ("full", 131072, 12),
        ("sliding", 1024, 12),
    ]
    assert estimate.kv_bytes == (3072 + 24) * MIB


MLA_KEYS: dict[str, Any] = {
    "block_count": 3,
    "attention__head_count": 16,
    "attention__kv_lora_rank": 512,
}


def test_mla_with_its_key_lengths_caches_k_alone() -> None:
    shape = llama(
        "deepseek2",
        **MLA_KEYS,
        attention__head_count_kv=1,
        attention__key_length=576,
        attention__value_length=512,
        attention__key_length_mla=192,
        attention__value_length_mla=128,
    )
    estimate = predict(shape, n_ctx=1024)
    assert (estimate.k_bytes, estimate.v_bytes) == (3 * 576 * 1024 * 2, 0)
    with pytest.raises(UsageError, match=r"different K \(q8_0\) and V \(f16\)"):
        predict(shape, n_ctx=1024, cache_type_k="q8_0")


def test_mla_without_them_caches_every_head() -> None:
    shape = llama(
        "deepseek2",
        **MLA_KEYS,
        attention__head_count_kv=16,
        attention__key_length=192,
        attention__value_length=128,
    )
    estimate = predict(shape, n_ctx=1024)
    assert estimate.k_bytes == 3 * 16 * 192 * 1024 * 2
    assert estimate.v_bytes == 3 * 16 * 128 * 1024 * 2


def test_v_is_padded_to_the_widest_without_flash_attention() -> None:
    shape = llama("deci", attention__head_count_kv=(1, 2, 4, 1))
    on = predict(shape, n_ctx=256, flash_attn="on")
    off = predict(shape, n_ctx=256, flash_attn="off")
    assert off.k_bytes == on.k_bytes
    assert off.v_bytes == 4 * 256 * 256 * 2 > on.v_bytes


def test_shared_caches_are_counted_once_and_named() -> None:
    shape = llama(
        "gemma4",
        block_count=6,
        attention__sliding_window=64,
        attention__sliding_window_pattern=(True, True, False, True, True, False),
        attention__shared_kv_layers=3,
        attention__key_length_swa=32,
        attention__value_length_swa=32,
    )
    assert [layer.shared_with for layer in shape.layers] == [None, None, None, 1, 1, 2]
    assert [cache.layers for cache in predict(shape, n_ctx=512).caches] == [1, 2]


def test_a_window_that_the_engine_sets_aside_is_said() -> None:
    shape = llama("phi3", attention__sliding_window=2047)
    assert predict(shape, n_ctx=4096).kv_bytes == predict(llama(), n_ctx=4096).kv_bytes
    assert any("does not use it" in note for note in shape.notes)


@pytest.mark.parametrize(("declared", "slides"), [(None, True), (8192, True), (0, False)])
def test_llama4_is_chunked_unless_its_header_says_0(declared: int | None, slides: bool) -> None:
    shape = llama("llama4", attention__sliding_window=declared)
    assert [layer.kind for layer in shape.layers] == (
        ["sliding", "sliding", "sliding", "full"] if slides else ["full"] * 4
    )


def test_nextn_blocks_keep_no_cache_in_the_main_context() -> None:
    shape = llama("glm4moe", block_count=5, nextn_predict_layers=1)
    assert predict(shape, n_ctx=256).caches[0].layers == 4
    assert [layer.loaded for layer in shape.layers] == [True] * 4 + [False]
    assert any("NextN" in note for note in predict(shape, n_ctx=256).notes)


def test_grok_cannot_quantise_v_since_the_engine_turns_flash_attention_off() -> None:
    shape = llama("grok")
    with pytest.raises(UsageError, match="quantized V cache requires flash_attn to be enabled"):
        predict(shape, n_ctx=256, cache_type_v="q8_0")
    assert any("turns flash attention off" in note for note in predict(shape, n_ctx=256).notes)


@pytest.mark.parametrize("architecture", ["bert", "modern-bert", "llada", "dream", "rnd1"])
def test_encoders_and_diffusion_models_keep_nothing(architecture: str) -> None:
    shape = llama(architecture)
    estimate = predict(shape, n_ctx=4096)
    assert shape.rule == "exact"
    assert estimate.kv_bytes == estimate.recurrent_bytes == 0
    assert any("keeps no cache" in note for note in estimate.notes)


def test_a_draft_model_says_that_it_does_not_run_alone() -> None:
    shape = llama(
        "gemma4-assistant",
        attention__sliding_window=64,
        attention__sliding_window_pattern=(1, 0, 1, 0),
    )
    assert "will not run it alone" in shape.refused


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"general.architecture": "clip"}, "projector"),
        ({"general.architecture": "llama", "general.type": "mmproj"}, "projector"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "LoRA adapter"),
        ({"general.architecture": "llama", "general.type": "imatrix"}, "importance matrix"),
        ({}, "general.architecture is missing"),
    ],
)
def test_companions_are_recognised_as_what_they_are(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what) as error:
        shape_from_header(keys, (), path="x.gguf")
    assert error.value.exit_code == 3


def test_tensors_that_contradict_the_metadata_are_said_aloud() -> None:
    keys = {
        "attention__head_count_kv": (0, 2, 0, 2),
        "ssm__conv_kernel": 4,
        "ssm__inner_size": 512,
        "ssm__state_size": 16,
        "ssm__time_step_rank": 8,
    }
    honest = (
        Info("blk.0.ssm_in.weight"),
        Info("blk.1.attn_k.weight", shape=(256, 128)),
        Info("blk.2.ssm_in.weight"),
        Info("blk.3.attn_k.weight", shape=(256, 128)),
    )
    assert llama("jamba", honest, **keys).notes == ()
    swapped = (
        Info("blk.0.attn_k.weight", shape=(256, 128)),
        Info("blk.1.ssm_in.weight"),
        *honest[2:],
    )
    notes = " ".join(llama("jamba", swapped, **keys).notes)
    assert "block 0 has attention tensors" in notes
    assert "block 1 has recurrent tensors" in notes


def test_head_counts_that_do_not_fit_the_tensors_are_said_aloud() -> None:
    shape = llama("llama", (Info("blk.2.attn_k.weight", shape=(256, 256)),))
    assert any("block 2 makes 256 elements of K, not 128" in note for note in shape.notes)


def test_more_blocks_than_the_header_counts_are_said_aloud() -> None:
    shape = llama("llama", tuple(Info(f"blk.{i}.ffn_up_exps.weight") for i in range(6)))
    assert any("6 blocks, but block_count says 4" in note for note in shape.notes)
    assert llama("llama", (Info("blk.0.ffn_gate_inp.weight"),)).notes == ()


def test_textbook_first_and_marginal_bytes_per_token() -> None:
    shape = llama("gpt-oss", attention__sliding_window=128)
    row = 2 * 64 * 2 * 2  # KV heads x head_dim x (K and V) x 2 bytes
    assert shape.kv_bytes_per_token() == 4 * row
    assert shape.first_token_bytes() == 4 * row
    assert shape.marginal_token_bytes() == 2 * row
    assert shape.kv_bytes_per_token("q8_0", "q8_0") == 4 * row * 34 // 64


def test_tied_embeddings_and_places_of_the_weights() -> None:
    tensors = (
        Info("token_embd.weight", nbytes=1000),
        Info("output_norm.weight", "f32", (256,), nbytes=10),
        Info("rope_freqs.weight", "f32", (32,), nbytes=5),
        Info("blk.0.attn_q.weight", nbytes=100),
        Info("blk.3.attn_q.weight", nbytes=300),
    )
    shape = llama("llama", tensors)
    assert shape.tied_embeddings
    assert (shape.input_bytes, shape.output_bytes, shape.weights_bytes) == (1000, 10, 1415)
    assert [layer.weight_bytes for layer in shape.layers] == [100, 0, 0, 300]
    assert predict(shape, n_ctx=256).weights_bytes == 1415
    offloaded = predict(shape, n_ctx=256, n_gpu_layers=2)
    assert {d.name: d.weights for d in offloaded.devices} == {
        "host": 1000 + 100 + 5,
        "gpu0": 1000 + 10 + 300 + 5,
    }
    untied = llama("llama", (*tensors, Info("output.weight", nbytes=900)))
    assert not untied.tied_embeddings
    assert untied.output_bytes == 910


def test_a_vocabulary_that_stays_in_the_file_is_counted() -> None:
    keys = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 1,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ArrayRef("str", 5000, 0, "little"),
    }
    assert shape_from_header(keys, ()).n_vocab == 5000
    none = keys | {"tokenizer.ggml.model": "none", "llama.vocab_size": 77}
    assert shape_from_header(none, ()).n_vocab == 77


@pytest.mark.parametrize("architecture", sorted(RULES))
def test_every_row_reads_an_invented_model(architecture: str) -> None:
    keys = predict_zoo.metadata(architecture, n_layer=12)
    if architecture == "clip":
        with pytest.raises(ModelError, match="projector"):
            shape_from_header(keys, ())
        return
    shape = shape_from_header(keys, ())
    if architecture == "gptj":
        assert shape.refused == "unsupported model architecture"
        return
    assert shape.rule == "exact", shape.refused
    estimate = predict(shape, n_ctx=2048, n_seq_max=3)
    assert estimate.total_bytes == sum(device.total for device in estimate.devices)
