"""Laws that hold for every model and every setting."""

from __future__ import annotations

from functools import cache
from typing import Any

import predict_zoo
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from localkv.errors import LocalkvError, UsageError
from localkv.model import ModelShape, shape_from_header
from localkv.model.architectures import RULES
from localkv.predict.config import CTX_PAD, RunConfig
from localkv.predict.estimate import Estimate
from localkv.predict.predict import predict

#: From the most bits to the fewest.
BY_BITS = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_0")


@cache
def invented(architecture: str, seed: int, n_layer: int) -> ModelShape:
    return shape_from_header(predict_zoo.metadata(architecture, seed=seed, n_layer=n_layer), ())


models = st.builds(
    invented,
    st.sampled_from(sorted(RULES.keys() - {"clip", "gptj", "dots3note"})),
    st.integers(0, 3),
    st.sampled_from((5, 12, 30)),
)
configs = st.fixed_dictionaries(
    {
        "n_ctx": st.integers(1, 200_000),
        "n_seq_max": st.integers(1, 64),
        "n_ubatch": st.sampled_from((32, 512, 2048)),
        "kv_unified": st.booleans(),
        "swa_full": st.booleans(),
        "flash_attn": st.sampled_from(("auto", "on", "off")),
    }
).map(lambda settings: RunConfig(**settings))


def sizes(estimate: Estimate) -> tuple[int, int]:
    return estimate.kv_bytes + estimate.recurrent_bytes, estimate.output_bytes


@given(models, configs, st.integers(0, 100_000))
def test_more_context_never_needs_less(shape: ModelShape, config: RunConfig, more: int) -> None:
    less = predict(shape, config)
    larger = predict(shape, config, n_ctx=config.n_ctx + more)
    assert sizes(larger)[0] >= sizes(less)[0]
    assert larger.config["n_ctx"] >= less.config["n_ctx"]


@given(models, configs, st.integers(1, 64))
def test_more_slots_of_the_same_size_never_need_less(
    shape: ModelShape, config: RunConfig, more: int
) -> None:
    each = config.n_ctx
    slots = min(config.n_seq_max + more, 256)
    few = predict(shape, config, n_ctx=each * config.n_seq_max)
    many = predict(shape, config, n_ctx=each * slots, n_seq_max=slots)
    assert sizes(many)[0] >= sizes(few)[0]
    assert many.output_bytes >= few.output_bytes


@given(models, configs, st.sampled_from(range(len(BY_BITS) - 1)), st.data())
def test_fewer_bits_never_need_more(
    shape: ModelShape, config: RunConfig, wide: int, data: st.DataObject
) -> None:
    narrow = data.draw(st.integers(wide + 1, len(BY_BITS) - 1))
    kinds = [BY_BITS[wide], BY_BITS[narrow]]
    try:
        more, less = (
            predict(shape, config.with_(cache_type_k=kind, cache_type_v=kind, flash_attn="auto"))
            for kind in kinds
        )
    except UsageError:
        assume(False)
    assert less.k_bytes <= more.k_bytes
    assert less.v_bytes <= more.v_bytes


@given(models, configs)
def test_one_slot_is_the_same_unified_or_not(shape: ModelShape, config: RunConfig) -> None:
    alone = config.with_(n_seq_max=1)
    split, unified = (predict(shape, alone, kv_unified=flag) for flag in (False, True))
    assert split.caches == unified.caches
    assert split.total_bytes == unified.total_bytes


@given(models, configs)
def test_full_size_sliding_caches_are_at_least_as_large(
    shape: ModelShape, config: RunConfig
) -> None:
    full, cut = (predict(shape, config, swa_full=flag) for flag in (True, False))
    assert full.kv_bytes >= cut.kv_bytes
    assert full.recurrent_bytes == cut.recurrent_bytes


devices = st.fixed_dictionaries(
    {
        "n_devices": st.integers(0, 4),
        "n_gpu_layers": st.integers(-1, 40),
        "split_mode": st.sampled_from(("layer", "none")),
        "no_kv_offload": st.booleans(),
        "device_free": st.none() | st.just((3 << 30,)),
    }
)


@given(models, configs, devices)
def test_a_total_is_the_sum_of_its_terms_and_of_its_devices(
    shape: ModelShape, config: RunConfig, where: dict[str, Any]
) -> None:
    if where["device_free"] and where["n_devices"] == 0:
        where["device_free"] = None
    estimate = predict(shape, config, **where)
    terms = sum(term.bytes for term in estimate.terms)
    parts = (
        estimate.weights_bytes
        + estimate.kv_bytes
        + estimate.recurrent_bytes
        + estimate.output_bytes
        + estimate.compute.bytes
    )
    assert estimate.total_bytes == terms == parts
    assert sum(device.total for device in estimate.devices) == terms
    assert sum(device.kv for device in estimate.devices) == estimate.kv_bytes
    assert estimate.compute.low <= estimate.compute.bytes <= estimate.compute.high
    assert all(device.total >= 0 for device in estimate.devices)


@given(models, configs)
def test_context_is_a_multiple_of_256_and_never_less_than_asked_for(
    shape: ModelShape, config: RunConfig
) -> None:
    made = predict(shape, config).config
    assert made["n_ctx_per_slot"] % CTX_PAD == 0
    assert made["n_ctx"] >= made["n_ctx_requested"]
    slots = 1 if config.kv_unified else config.n_seq_max
    assert made["n_ctx"] == made["n_ctx_per_slot"] * slots


@given(models, configs)
def test_the_settings_survive_their_own_json(shape: ModelShape, config: RunConfig) -> None:
    assert RunConfig.from_dict(config.to_dict()) == config
    written = predict(shape, config).to_dict()
    assert written["total_bytes"] == sum(term["bytes"] for term in written["terms"])


odd = (
    st.none()
    | st.integers(-3, 70_000)
    | st.just(2**40)
    | st.floats(allow_nan=True)
    | st.booleans()
    | st.text(max_size=3)
    | st.lists(st.integers(0, 9), max_size=20).map(tuple)
    | st.lists(st.floats() | st.text(max_size=2), max_size=6).map(tuple)
)


@given(
    st.sampled_from([*sorted(RULES.keys() - {"clip"}), "brand-new"]),
    st.integers(0, 2),
    st.lists(st.tuples(st.floats(0, 1), odd), max_size=4),
)
def test_odd_headers_end_in_an_answer_or_in_one_line(
    architecture: str, seed: int, changes: list[tuple[float, Any]]
) -> None:
    keys = predict_zoo.metadata(architecture, seed=seed, n_layer=5)
    names = sorted(keys.keys() - {"general.architecture"})
    for where, value in changes:
        keys[names[int(where * (len(names) - 1))]] = value
    keys = {name: value for name, value in keys.items() if value is not None}
    try:
        shape = shape_from_header(keys, ())
        estimate = predict(shape, n_ctx=4096, n_seq_max=2)
    except LocalkvError:
        return
    assert estimate.known == (shape.rule == "exact")
    assert estimate.kv_bytes >= 0


def test_a_header_that_claims_endless_blocks_takes_no_memory_for_them() -> None:
    keys = {"general.architecture": "llama", "llama.block_count": 2**32 - 1}
    shape = shape_from_header(keys, ())
    assert shape.rule == "none"
    assert shape.n_layer <= 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_seq_max": 0}, "0 slots"),
        ({"n_seq_max": 300}, "300 slots"),
        ({"n_ctx": -1}, "n_ctx must not be negative"),
        ({"cache_type_k": "q3_K"}, "not a cache type"),
        ({"flash_attn": "maybe"}, "flash_attn"),
        ({"split_mode": "row"}, "split_mode"),
        ({"n_contexts": 4}, "n_contexts is not a setting"),
        ({"cache_type_v": "q8_0", "flash_attn": "off"}, "quantized V cache requires flash_attn"),
        ({"n_gpu_layers": 1, "split_mode": "none", "main_gpu": 3}, "invalid value for main_gpu"),
        ({"n_gpu_layers": 1, "tensor_split": (1.0, 2.0)}, "tensor_split names 2 devices"),
    ],
)
def test_what_the_engine_refuses_is_refused_in_its_words(
    change: dict[str, Any], message: str
) -> None:
    shape = invented("llama", 0, 5)
    settings = {"n_ctx": 1024, **change}
    with pytest.raises(UsageError, match=message) as error:
        predict(shape, **settings)
    assert error.value.exit_code == 2


def test_a_block_size_that_does_not_divide_a_head_is_refused() -> None:
    keys = predict_zoo.metadata("qwen3") | {
        "qwen3.attention.key_length": 48,
        "qwen3.attention.value_length": 48,
    }
    shape = shape_from_header(keys, ())
    with pytest.raises(UsageError, match="block size 32 does not divide n_embd_head_k=48"):
        predict(shape, n_ctx=1024, cache_type_k="q8_0")


def test_cache_types_are_read_in_any_case() -> None:
    shape = invented("llama", 0, 5)
    upper, lower = (predict(shape, n_ctx=512, cache_type_k=name) for name in ("Q8_0", "q8_0"))
    assert upper.caches == lower.caches


def test_rounding_is_said_in_words() -> None:
    notes = predict(invented("llama", 0, 5), n_ctx=4096, n_seq_max=3).notes
    assert any("4096 over 3 slots gives 4608" in note for note in notes)
    assert not any("gives" in note for note in predict(invented("llama", 0, 5), n_ctx=4096).notes)


def test_a_context_beyond_the_training_is_noted() -> None:
    shape = invented("llama", 0, 5)
    notes = predict(shape, n_ctx=shape.n_ctx_train * 2).notes
    assert any("trained for" in note for note in notes)
