"""A Hugging Face config.json becomes the same ModelShape as a GGUF header."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.errors import ModelError
from localkv.model.hf_config import read_hf_model, shape_from_hf_config
from localkv.model.hf_fields import ALIASES
from localkv.model.hf_rules import ENCODERS, RULES
from localkv.predict import RunConfig
from localkv.predict.predict import predict

DATA = Path(__file__).parent / "data"
HANDED = sorted(path.parent.name for path in (DATA / "hf_configs").glob("*/config.json"))


def config(name: str, **changes: Any) -> dict[str, Any]:
    """Return a handed configuration with ``changes``; a change to ... leaves the field out."""
    loaded = json.loads((DATA / "hf_configs" / name / "config.json").read_text())
    return {k: v for k, v in {**loaded, **changes}.items() if v is not ...}


def kinds(shape: Any) -> str:
    return "".join(layer.kind[0] for layer in shape.layers)


@pytest.mark.parametrize("name", HANDED)
def test_every_handed_config_is_read_by_its_own_rule(name: str) -> None:
    shape = shape_from_hf_config(config(name))
    raw = config(name)
    assert shape.rule == "exact"
    assert shape.architecture == raw["model_type"]
    assert shape.n_layer == raw.get("num_hidden_layers", raw.get("n_layer"))
    assert shape.n_ctx_train == raw.get("max_position_embeddings", raw.get("n_positions"))
    assert shape.dtype == "bf16"
    assert shape.assumed == ()


@pytest.mark.parametrize(
    "name", [n for n in HANDED if isinstance(config(n).get("layer_types"), list)]
)
def test_files_without_layer_types_get_what_the_class_would_compute(name: str) -> None:
    """transformers wrote layer_types itself, so its list is the truth for the older files."""
    written = shape_from_hf_config(config(name))
    older = shape_from_hf_config(config(name, layer_types=...))
    assert older.layers == written.layers


def test_grouped_query_attention_counts_kv_heads() -> None:
    layer = shape_from_hf_config(config("llama")).layers[0]
    assert (layer.n_head, layer.n_head_kv, layer.k_head) == (8, 4, 32)
    assert layer.k_width == layer.v_width == 4 * 32


def test_head_dim_wins_over_hidden_size_by_heads() -> None:
    raw = config("qwen3")
    assert raw["hidden_size"] // raw["num_attention_heads"] != raw["head_dim"]
    assert shape_from_hf_config(raw).layers[0].k_head == raw["head_dim"]
    assert shape_from_hf_config(config("qwen3", head_dim=None)).layers[0].k_head == 32


def test_no_kv_heads_named_means_as_many_as_heads() -> None:
    shape = shape_from_hf_config(config("llama", num_key_value_heads=...))
    assert shape.layers[0].n_head_kv == 8


def test_mla_keeps_the_latent_and_no_v() -> None:
    shape = shape_from_hf_config(config("deepseek_v2"))
    assert shape.mla
    assert {(layer.k_width, layer.v_width) for layer in shape.layers} == {(512 + 64, 0)}


@pytest.mark.parametrize(
    ("name", "pattern", "window"),
    [
        ("gpt_oss", "sf" * 6, 128),
        ("gemma2", "sf" * 4, 512),
        ("gemma3_text", "sssssfsssssfs", 512),
        ("mistral", "s" * 8, 1024),
        ("qwen2", "f" * 8, 0),
    ],
)
def test_sliding_layers(name: str, pattern: str, window: int) -> None:
    shape = shape_from_hf_config(config(name))
    assert kinds(shape) == pattern
    assert shape.window == window
    assert {layer.window for layer in shape.layers if layer.kind == "sliding"} <= {window}


def test_a_window_of_null_is_no_window() -> None:
    assert kinds(shape_from_hf_config(config("mistral", sliding_window=None))) == "f" * 8


def test_qwen2_slides_only_when_told_and_from_a_layer_on() -> None:
    changes = {"sliding_window": 512, "max_window_layers": 5, "layer_types": ...}
    assert kinds(shape_from_hf_config(config("qwen2", **changes))) == "f" * 8
    sliding = config("qwen2", use_sliding_window=True, **changes)
    assert kinds(shape_from_hf_config(sliding)) == "fffffsss"


def test_gemma3_pattern_is_read_from_the_file() -> None:
    raw = config("gemma3_text", layer_types=..., sliding_window_pattern=4)
    assert kinds(shape_from_hf_config(raw)) == "sssfsssfsssfs"


def test_hybrid_layers_hold_state_instead_of_keys() -> None:
    shape = shape_from_hf_config(config("qwen3_next"))
    assert kinds(shape) == "rrrfrrrf"
    recurrent = shape.layers[0]
    # q and k of 4 heads x 32, v of 8 x 32, three steps of convolution; 8 matrices of 32 x 32.
    assert recurrent.r_width == 3 * (2 * 4 * 32 + 8 * 32)
    assert recurrent.s_width == 8 * 32 * 32
    assert recurrent.k_width == 0
    assert shape.layers[3].state_width == 0


def test_jamba_counts_from_period_and_offset() -> None:
    raw = {
        "model_type": "jamba",
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "attn_layer_period": 8,
        "attn_layer_offset": 3,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }
    shape = shape_from_hf_config(raw)
    assert [layer.index for layer in shape.layers if layer.kind == "full"] == [3, 11]
    assert shape.layers[0].r_width == 3 * 512
    assert shape.layers[0].s_width == 512 * 16


def test_a_parallel_hybrid_has_both_in_every_layer() -> None:
    raw = {
        "model_type": "falcon_h1",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "head_dim": 64,
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }
    layer = shape_from_hf_config(raw).layers[0]
    assert layer.kind == "full"
    assert layer.k_width == 128
    assert (layer.r_width, layer.s_width) == (3 * (512 + 128), 8 * 64 * 64)


def test_nemotron_h_reads_its_letters() -> None:
    raw = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*E*",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256,
    }
    assert kinds(shape_from_hf_config(raw)) == "rnrfnf"


def test_old_names() -> None:
    layer = shape_from_hf_config(config("gpt2")).layers[0]
    assert (layer.n_head, layer.n_head_kv, layer.k_head) == (4, 4, 64)


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"multi_query": True, "new_decoder_architecture": False}, 1),
        ({"multi_query": False, "new_decoder_architecture": False}, 4),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    ],
)
def test_falcon_says_its_kv_heads_in_three_ways(changes: dict[str, Any], heads: int) -> None:
    assert shape_from_hf_config(config("falcon", **changes)).layers[0].n_head_kv == heads


def test_lists_by_layer_are_used_whole() -> None:
    raw = config("llama", num_key_value_heads=[4, 2, 2, 1, 1, 1, 1, 8])
    assert [x.n_head_kv for x in shape_from_hf_config(raw).layers] == [4, 2, 2, 1, 1, 1, 1, 8]


def test_per_layer_config_overrides_single_layers() -> None:
    raw = config(
        "llama", per_layer_config={"02": {"num_key_value_heads": 1}, "5": {"head_dim": 64}}
    )
    widths = [layer.k_width for layer in shape_from_hf_config(raw).layers]
    assert widths == [128, 128, 32, 128, 128, 256, 128, 128]


def test_shared_layers_hold_nothing_and_name_the_owner() -> None:
    raw = {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 4,
    }
    shape = shape_from_hf_config(raw)
    assert kinds(shape) == "ssssfssssf"
    assert [layer.shared_with for layer in shape.layers[6:]] == [5, 5, 5, 4]
    assert [layer.index for layer in shape.layers if layer.k_width] == [0, 1, 2, 3, 4, 5]


def test_what_the_class_fills_in_is_said() -> None:
    raw = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    shape = shape_from_hf_config(raw)
    assert shape.layers[0].k_width == 4 * 256
    assert shape.window == 4096
    for fact in ("num_key_value_heads = 4", "head_dim = 256", "sliding_window = 4096"):
        assert any(fact in line and "gemma3_text" in line for line in shape.assumed), fact


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_language_model_inside_a_multimodal_config(key: str) -> None:
    inner = config("gemma3_text", model_type=..., torch_dtype=...)
    outer = {"model_type": "gemma3", key: inner, "vision_config": {}, "torch_dtype": "float16"}
    shape = shape_from_hf_config(outer)
    assert shape.architecture == "gemma3_text"
    assert shape.dtype == "f16"
    assert shape.layers == shape_from_hf_config(config("gemma3_text")).layers


def test_encoders_keep_nothing() -> None:
    raw = {"model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768}
    shape = shape_from_hf_config(raw)
    assert not shape.causal
    assert shape.caches == ()
    assert any("encoder" in note for note in shape.notes)


def test_encoder_decoder_counts_the_decoder_and_says_so() -> None:
    raw = {
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": 384,
        "encoder_layers": 6,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "vocab_size": 51865,
    }
    shape = shape_from_hf_config(raw)
    assert shape.n_layer == 4
    assert shape.layers[0].k_width == 384
    assert any("cross-attention" in note for note in shape.notes)


def test_an_unknown_type_is_never_answered_in_silence() -> None:
    raw = config("llama", model_type="brand_new")
    shape = shape_from_hf_config(raw)
    assert shape.rule == "generic"
    assert any("brand_new" in note for note in shape.notes)
    assert shape.layers == shape_from_hf_config(config("llama")).layers


def test_an_unknown_type_with_layer_types_is_read_by_them() -> None:
    shape = shape_from_hf_config(config("gemma2", model_type="brand_new"))
    assert kinds(shape) == "sf" * 4
    assert shape.rule == "generic"


def test_an_unknown_type_with_a_window_but_no_pattern_says_how_it_was_counted() -> None:
    shape = shape_from_hf_config(config("mistral", model_type="brand_new"))
    assert kinds(shape) == "f" * 8
    assert any("counted as full" in note for note in shape.notes)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ({}, "model_type"),
        ({"model_type": "brand_new"}, "num_hidden_layers"),
        ({"model_type": "brand_new", "num_hidden_layers": 4}, "num_attention_heads"),
        ({"model_type": "llama", "num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"model_type": "llama", "num_hidden_layers": True}, "num_hidden_layers"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "layers"),
        ({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": -1}, "hidden_size"),
        ({"model_type": "llama", "num_hidden_layers": 2, "layer_types": ["x"] * 2}, "'x'"),
        (
            {"model_type": "llama", "num_hidden_layers": 2, "layer_types": ["full"]},
            "1 entry for 2 layers",
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?"}, "hybrid_override_pattern"),
        ({"model_type": "llama", "layer_types": ["mamba"] * 32}, "recurrent"),
    ],
)
def test_hopeless_configs_are_one_line(raw: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError) as caught:
        shape_from_hf_config(raw, path="some/config.json")
    text = str(caught.value)
    assert word in text
    assert "some/config.json" in text
    assert "\n" not in text
    assert caught.value.exit_code == 3
    assert caught.value.hint


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(0, 9),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 9), st.none(), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3),
)
NAMES = sorted(
    {name for names in ALIASES.values() for name in names}
    | {"layer_types", "layers_block_type", "hybrid_override_pattern", "text_config", "dtype"}
    | {"per_layer_config", "attn_config", "kv_lora_rank", "num_kv_shared_layers", "block_types"}
    | {"attn_layer_period", "full_attention_interval", "attn_type_list", "is_encoder_decoder"}
    | {"sliding_window_pattern", "no_rope_layers", "linear_attn_config", "mamba_n_heads"}
)


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(RULES) + sorted(ENCODERS)[:3] + ["brand_new"]),
    st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=8),
)
def test_junk_is_a_shape_or_a_model_error(model_type: str, fields: dict[str, Any]) -> None:
    try:
        shape = shape_from_hf_config({"model_type": model_type, **fields})
    except ModelError as error:
        message = str(error)
    else:
        message = ""
        assert len(shape.layers) <= 20_000
        assert all(layer.k_width >= 0 for layer in shape.layers)
    assert "\n" not in message


def test_predict_takes_the_shape() -> None:
    """llama.cpp's rules over a config.json: 8 layers x 4096 cells x (K + V of 128) in f16."""
    estimate = predict(shape_from_hf_config(config("llama")), RunConfig(n_ctx=4096))
    assert estimate.kv_bytes == 8 * 4096 * 2 * 128 * 2


def test_predict_sees_the_windows() -> None:
    shape = shape_from_hf_config(config("gpt_oss"))
    estimate = predict(shape, RunConfig(n_ctx=4096, n_ubatch=512))
    cells = Counter({c.kind: c.cells for c in estimate.caches})
    assert cells == Counter({"sliding": 768, "full": 4096})


# --- weights -------------------------------------------------------------------------------


def safetensors(path: Path, tensors: dict[str, int], *, length: int | None = None) -> None:
    """Write a safetensors file whose tensors have the given sizes; ``length`` lies about it."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, size in tensors.items():
        header[name] = {  # type: ignore[assignment]
            "dtype": "BF16",
            "shape": [size // 2],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    size_field = struct.pack("<Q", len(text) if length is None else length)
    path.write_bytes(size_field + text + bytes(offset))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config("llama")))
    return tmp_path


def test_weights_are_summed_from_headers(folder: Path) -> None:
    safetensors(folder / "model-00001-of-00002.safetensors", {"a": 1000, "b": 24})
    safetensors(folder / "model-00002-of-00002.safetensors", {"c": 500})
    shape = read_hf_model(str(folder))
    assert shape.weights_bytes == 1524
    assert shape.file_bytes > shape.weights_bytes
    assert not any("unknown" in note for note in shape.notes)
    assert shape.name == folder.name


def test_the_index_is_believed_before_the_shards_are_there(folder: Path) -> None:
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_hf_model(str(folder / "config.json")).weights_bytes == 16_060_522_496


def test_no_weights_is_unknown_with_a_reason(folder: Path) -> None:
    shape = read_hf_model(str(folder))
    assert shape.weights_bytes == 0
    assert any("weights unknown" in note and "safetensors" in note for note in shape.notes)


def test_a_missing_shard_is_named(folder: Path) -> None:
    safetensors(folder / "model-00001-of-00003.safetensors", {"a": 10})
    safetensors(folder / "model-00003-of-00003.safetensors", {"a": 10})
    shape = read_hf_model(str(folder))
    assert shape.weights_bytes == 0
    assert any("model-00002-of-00003.safetensors" in note for note in shape.notes)


@pytest.mark.parametrize("length", [0, 10**8 + 1, 2**64 - 1, 5])
def test_a_lying_header_length_is_refused(folder: Path, length: int) -> None:
    safetensors(folder / "model.safetensors", {"a": 10}, length=length)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_hf_model(str(folder))


def test_a_tensor_outside_of_the_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    safetensors(file, {"a": 1000})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="outside of the file"):
        read_hf_model(str(folder))


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": ' * 100_000, "\x00"])
def test_a_config_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError) as caught:
        read_hf_model(str(file))
    assert "\n" not in str(caught.value)


def test_no_config_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"folder with a config\.json"):
        read_hf_model(str(tmp_path))
