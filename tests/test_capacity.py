"""How many requests fit: exact against the predictor, for every model and every setting."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import predict_helpers as truth
import predict_zoo
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import localkv
from localkv.errors import LocalkvError, UsageError
from localkv.model import ModelShape, shape_from_header
from localkv.model.architectures import RULES
from localkv.predict.budget import Memory, Planner
from localkv.predict.capacity import Capacity, capacity_of, kv_capacity, parts
from localkv.predict.config import MAX_SEQ, RunConfig
from localkv.predict.contexts import largest_contexts, needed
from localkv.predict.defaults import OLLAMA_SINGLE, run_config
from localkv.predict.predict import predict
from localkv.predict.search import largest
from localkv.units import GIB, MIB

ENCODER = "bert"


@cache
def invented(architecture: str, seed: int = 0, n_layer: int = 5) -> ModelShape:
    return shape_from_header(predict_zoo.metadata(architecture, seed=seed, n_layer=n_layer), ())


@cache
def handed(name: str) -> ModelShape:
    return truth.shape(name)


models = st.one_of(
    st.builds(
        invented,
        st.sampled_from(sorted(RULES.keys() - {"clip", "gptj", "dots3note"})),
        st.integers(0, 3),
        st.sampled_from((5, 12)),
    ),
    st.builds(
        handed, st.sampled_from(sorted({entry["name"] for entry in truth.records("engine_truth")}))
    ),
)
run_settings = st.fixed_dictionaries(
    {
        "n_ubatch": st.sampled_from((32, 512, 2048)),
        "kv_unified": st.booleans(),
        "swa_full": st.booleans(),
        "flash_attn": st.sampled_from(("auto", "off")),
        "cache_type_k": st.sampled_from(("f16", "f32")),
    }
)
programs = st.sampled_from(("llama-server", "ollama", "llama-cpp-python"))


def used(shape: ModelShape, program: str, slots: int, ctx: int, **more: Any) -> int:
    """Return what the predictor says, by the road that a person would take."""
    n_ctx = ctx if program == "ollama" else ctx * slots
    return predict(
        shape, run_config(program, shape, n_ctx=n_ctx, n_seq_max=slots, **more)
    ).total_bytes


def between(shape: ModelShape, data: st.DataObject, total: Any) -> int:
    """Draw a memory near what some number of slots needs, its edges included."""
    slots = data.draw(st.integers(1, 300))
    size = total(min(slots, MAX_SEQ))
    return max(1, size + data.draw(st.sampled_from((-1, 0, 1, size // 7))))


@given(models, run_settings, programs, st.integers(1, 9000), st.data())
@settings(max_examples=150)
def test_capacity_fits_and_one_more_does_not(
    shape: ModelShape, more: dict[str, Any], program: str, ctx: int, data: st.DataObject
) -> None:
    one = program == "llama-cpp-python"

    def total(slots: int) -> int:
        return used(shape, program, 1 if one else slots, ctx, **more)

    try:
        memory = between(shape, data, total)
        found = kv_capacity(shape, memory, ctx, program=program, **more)
    except UsageError:
        assume(False)
    assert found.fits == (found.max_slots > 0)
    if found.fits:
        assert found.total_bytes_at_max == total(found.max_slots) <= memory
        assert found.config.n_seq_max == found.max_slots
        assert predict(shape, found.config).total_bytes == found.total_bytes_at_max
    else:
        assert found.total_bytes_at_max is None
    if found.limit == "engine":
        assert found.next_bytes is None
    elif found.limit == "memory":
        assert found.next_bytes == total(found.max_slots + 1) > memory


@pytest.mark.parametrize("name", ["qwen2-dense", "gemma3-dense", "mamba-dense"])
@pytest.mark.parametrize("ctx", [256, 1500])
def test_no_larger_number_fits_either(name: str, ctx: int) -> None:
    shape = handed(name)
    totals = {slots: used(shape, "llama-server", slots, ctx) for slots in range(1, MAX_SEQ + 1)}
    for slots in (1, 2, 3, 10, 36, 37, 100, 255):
        for memory in (totals[slots], totals[slots] - 1):
            fitting = [count for count, size in totals.items() if size <= memory]
            found = kv_capacity(shape, memory, ctx)
            assert found.max_slots == max(fitting, default=0)


def test_buffers_that_shrink_with_a_slot_more_do_not_deceive_it() -> None:
    """An encoder keeps nothing per slot, and its buffers go up and down with the rounding."""
    shape = invented(ENCODER)
    totals = {slots: used(shape, "llama-server", slots, 256) for slots in range(1, MAX_SEQ + 1)}
    falls = [slots for slots in range(1, MAX_SEQ) if totals[slots + 1] < totals[slots]]
    assert falls, "the predictor is monotone now: this test has nothing left to show"
    for slots in falls[:: max(1, len(falls) // 12)]:
        memory = totals[slots + 1]
        expected = max(count for count, size in totals.items() if size <= memory)
        assert kv_capacity(shape, memory, 256).max_slots == expected


def test_a_model_without_a_cache_is_limited_by_the_engine() -> None:
    found = kv_capacity(invented(ENCODER), "64G", 256)
    assert (found.max_slots, found.limit) == (MAX_SEQ, "engine")
    assert "256" in found.why


@pytest.mark.parametrize("architecture", sorted(OLLAMA_SINGLE & RULES.keys()))
def test_ollama_runs_some_architectures_with_one_request(architecture: str) -> None:
    found = kv_capacity(invented(architecture), "64G", 256, program="ollama")
    assert (found.max_slots, found.limit) == (1, "engine")
    assert architecture in found.why
    assert kv_capacity(invented(architecture), "64G", 256).max_slots > 1


def test_ollama_runs_an_embedding_model_with_one_request() -> None:
    found = kv_capacity(invented(ENCODER), "64G", 256, program="ollama")
    assert (found.max_slots, found.limit) == (1, "engine")


def test_the_class_of_llama_cpp_python_has_one_slot() -> None:
    found = kv_capacity(handed("qwen2-dense"), "64G", 512, program="llama-cpp-python")
    assert (found.max_slots, found.limit, found.config.n_seq_max) == (1, "engine", 1)
    assert found.config.swa_full


def test_tokens_are_counted_in_32_bits() -> None:
    shape = handed("qwen2-dense")
    ctx = (1 << 30) + 5
    found = kv_capacity(shape, 1 << 62, ctx)
    assert 0 < found.max_slots <= 3
    assert found.config.n_ctx < 1 << 32
    assert "32 bits" in found.why or found.limit == "training context"


# -- the training context ----------------------------------------------------------------------


@pytest.mark.parametrize("program", ["llama-server", "ollama"])
def test_a_context_beyond_the_training_is_cut_and_said(program: str) -> None:
    shape = handed("qwen2-dense")
    ctx = 2 * shape.n_ctx_train
    found = kv_capacity(shape, "64G", ctx, program=program)
    assert found.limit == "training context"
    assert (found.ctx_per_slot, found.ctx_usable) == (ctx, shape.n_ctx_train)
    assert str(shape.n_ctx_train) in found.why
    cut = kv_capacity(shape, "64G", shape.n_ctx_train, program=program)
    assert cut.limit != "training context"
    # Ollama cuts before it allocates, llama-server afterwards.
    same = found.total_bytes_at_max == cut.total_bytes_at_max
    assert same == (program == "ollama")


def test_too_little_memory_is_told_before_the_training_context() -> None:
    shape = handed("qwen2-dense")
    assert kv_capacity(shape, 1, 2 * shape.n_ctx_train).limit == "memory"


# -- memories ----------------------------------------------------------------------------------


def test_a_size_may_be_a_text() -> None:
    shape = handed("qwen2-dense")
    assert kv_capacity(shape, "1G", 2048).to_dict() == kv_capacity(shape, GIB, 2048).to_dict()


def test_the_reserve_stays_free() -> None:
    shape = handed("qwen2-dense")
    whole = kv_capacity(shape, 64 * MIB, 2048)
    held = kv_capacity(shape, 64 * MIB + 5 * MIB, 2048, reserve=5 * MIB)
    assert held.max_slots == whole.max_slots
    assert (held.memory_bytes, held.reserved_bytes) == (69 * MIB, 5 * MIB)
    kinds = parts(held)
    assert sum(kinds.values()) == held.memory_bytes
    assert kinds["reserve"] == 5 * MIB
    assert kinds["free"] >= 0


def gpus(found: Capacity) -> dict[str, int]:
    return {device.name: device.total for device in found.estimate.devices}


@given(
    st.sampled_from(("qwen2-dense", "gemma3-dense", "llama-moe")),
    st.lists(st.integers(8, 80), min_size=1, max_size=3),
    st.sampled_from((None, -1, 1, 2, 3)),
    st.sampled_from((300, 4096)),
    st.integers(0, 3),
)
@settings(max_examples=80)
def test_every_gpu_holds_its_part(
    name: str, sizes: list[int], layers: int | None, ctx: int, reserve: int
) -> None:
    shape = handed(name)
    memory = [size * MIB for size in sizes]
    found = kv_capacity(shape, memory, ctx, reserve=reserve * MIB, n_gpu_layers=layers)
    assert found.config.n_devices == len(sizes)
    assert found.config.n_gpu_layers == (-1 if layers is None else layers)

    def fits(slots: int) -> bool:
        config = run_config(
            "llama-server",
            shape,
            n_ctx=ctx * slots,
            n_seq_max=slots,
            n_devices=len(sizes),
            n_gpu_layers=-1 if layers is None else layers,
            device_free=tuple(memory),
        )
        held = {device.name: device.total for device in predict(shape, config).devices}
        return all(held[f"gpu{index}"] + reserve * MIB <= size for index, size in enumerate(memory))

    if found.fits:
        assert fits(found.max_slots)
        assert found.total_bytes_at_max == sum(gpus(found).values()) - gpus(found)["host"]
        assert found.host_bytes == gpus(found)["host"]
    if found.limit == "memory":
        assert not fits(found.max_slots + 1)


def test_one_memory_with_layers_on_it_is_one_gpu() -> None:
    shape = handed("qwen2-dense")
    pool, gpu = (kv_capacity(shape, "40M", 4096, n_gpu_layers=layers) for layers in (None, -1))
    assert [device["name"] for device in pool.to_dict()["devices"]] == ["all"]
    assert [device["name"] for device in gpu.to_dict()["devices"]] == ["gpu0"]
    assert pool.host_bytes == 0 < gpu.host_bytes
    assert gpu.max_slots == kv_capacity(shape, ["40M"], 4096).max_slots
    assert kv_capacity(shape, "40M", 4096, n_gpu_layers=0).to_dict() == pool.to_dict()


def test_gpus_of_different_sizes_share_by_their_size() -> None:
    shape = handed("qwen2-dense")
    found = kv_capacity(shape, "60M,20M", 4096)
    assert found.config.device_free == (60 * MIB, 20 * MIB)
    asked = kv_capacity(shape, "60M,20M", 4096, tensor_split=(1, 1))
    assert asked.config.device_free is None
    assert gpus(asked) != gpus(found)


@pytest.mark.parametrize(
    ("memory", "ctx", "more", "message"),
    [
        ("lots", 4096, {}, "not a size"),
        (0, 4096, {}, "no bytes"),
        ((), 4096, {}, "no bytes"),
        ("1G", 0, {}, "tokens per slot"),
        ("1G", 4096, {"reserve": -1}, "reserve"),
        ("1G", 4096, {"n_seq_max": 3}, "what is asked for"),
        ("1G", 4096, {"slots": 3}, "not a setting"),
        ("1G,1G", 4096, {"n_gpu_layers": 0}, "no layer on them"),
        ("1G", 4096, {"program": "vim"}, "no defaults"),
        ("1G", 4096, {"cache_type_v": "q8_0", "flash_attn": "off"}, "quantized V cache"),
    ],
)
def test_what_makes_no_sense_is_refused(
    memory: Memory, ctx: int, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        kv_capacity(handed("qwen2-dense"), memory, ctx, **more)


def test_an_unknown_architecture_is_refused_with_the_way_out() -> None:
    shape = invented("brand-new")
    with pytest.raises(LocalkvError, match=r"no rule for the architecture brand-new.*--engine"):
        kv_capacity(shape, "1G", 4096)


def test_the_engine_s_own_figures_are_used_when_asked_for(smollm2_path: Path) -> None:
    found = kv_capacity(str(smollm2_path), "300M", 2048, engine=True)

    assert found.estimate.compute.source == "engine"
    assert found.estimate.compute.low == found.estimate.compute.high
    assert found.total_bytes_at_max is not None
    assert found.next_bytes is not None
    assert found.total_bytes_at_max <= 300 * MIB < found.next_bytes


def test_it_is_there_by_its_public_name() -> None:
    assert localkv.kv_capacity is kv_capacity
    assert "kv_capacity" in localkv.__all__


# -- a configuration instead of the defaults -----------------------------------------------------


def test_a_config_replaces_the_defaults() -> None:
    shape = handed("gemma3-dense")
    config = RunConfig(n_ctx=1, n_seq_max=7, kv_unified=True, n_ubatch=64, cache_type_k="q8_0")
    found = kv_capacity(shape, "40M", 2048, config=config)
    kept = ("kv_unified", "n_ubatch", "cache_type_k", "n_outputs_max")
    assert all(getattr(found.config, name) == getattr(config, name) for name in kept)
    assert found.config.n_ctx == 2048 * found.max_slots
    assert kv_capacity(shape, "40M", 2048, config=config, n_ubatch=32).config.n_ubatch == 32


def test_outputs_follow_the_slots_where_they_did() -> None:
    shape = handed("gemma3-dense")
    found = kv_capacity(shape, "40M", 2048, config=RunConfig(n_seq_max=4, n_outputs_max=4))
    assert found.config.n_outputs_max == found.max_slots != 4
    assert found.max_slots == kv_capacity(shape, "40M", 2048).max_slots
    fixed = kv_capacity(shape, "40M", 2048, config=RunConfig(n_outputs_max=9))
    assert fixed.config.n_outputs_max == 9


def test_a_config_without_layers_on_gpus_gets_them_from_a_list() -> None:
    shape = handed("gemma3-dense")
    found = kv_capacity(shape, "40M,40M", 2048, config=RunConfig(n_ubatch=64))
    assert (found.config.n_gpu_layers, found.config.n_devices) == (-1, 2)
    assert found.config.device_free == (40 * MIB, 40 * MIB)


# -- contexts and the inverse --------------------------------------------------------------------


@given(models, st.integers(1, 9), st.sampled_from(("llama-server", "ollama")), st.data())
@settings(max_examples=60)
def test_the_largest_context_fits_and_one_step_more_does_not(
    shape: ModelShape, slots: int, program: str, data: st.DataObject
) -> None:
    trained = shape.n_ctx_train
    if not trained:
        return
    slots = min(slots, Planner(shape, 1, program=program).engine_slots(256)[0])
    ctx = data.draw(st.integers(1, trained))
    memory = used(shape, program, slots, ctx) + data.draw(st.sampled_from((-1, 0, 1)))
    planner = Planner(shape, memory, program=program)
    (row,) = largest_contexts(planner, (slots,), ("f16",))
    found = row.ctx_per_slot
    assert found is not None
    if found:
        assert row.total_bytes == used(shape, program, slots, found) <= memory
    assert found % 256 == 0 or found == trained
    if row.limit == "training context":
        assert found == trained
    else:
        after = min((found // 256 + 1) * 256, trained)
        assert used(shape, program, slots, after) > memory


def test_a_training_context_that_is_no_multiple_of_256_is_not_exceeded() -> None:
    keys = predict_zoo.metadata("llama") | {"llama.context_length": 1000}
    (row,) = largest_contexts(Planner(shape_from_header(keys, ()), "1G"), (2,), ("f16",))
    assert (row.ctx_per_slot, row.limit) == (1000, "training context")


def test_types_that_cannot_be_are_told_with_the_reason() -> None:
    planner = Planner(handed("qwen2-dense"), "1G", flash_attn="off")
    rows = {row.cache_type: row for row in largest_contexts(planner, (1,))}
    assert rows["f16"].ctx_per_slot
    assert rows["q8_0"].ctx_per_slot is None
    assert "flash_attn" in rows["q8_0"].why
    one = Planner(handed("qwen2-dense"), "1G", program="llama-cpp-python")
    assert [row.ctx_per_slot is None for row in largest_contexts(one, (1, 2), ("f16",))] == [
        False,
        True,
    ]


def test_memory_needed_is_memory_enough() -> None:
    shape = handed("gemma3-dense")
    planner = Planner(shape, "1M", reserve=3 * MIB)
    asked = needed(planner, 5, 3000)
    assert not asked.fits
    (size,) = asked.memory_bytes
    assert size == used(shape, "llama-server", 5, 3000) + 3 * MIB
    assert kv_capacity(shape, size, 3000, reserve=3 * MIB).max_slots >= 5
    assert kv_capacity(shape, size - 1, 3000, reserve=3 * MIB).max_slots < 5


def test_more_users_than_slots_is_refused() -> None:
    with pytest.raises(UsageError, match="300 users"):
        needed(Planner(handed("qwen2-dense"), "1G"), 300, 256)


# -- the search itself ---------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(0, 10**9), st.integers(1, 10**6), st.integers(0, 10**9))
def test_the_search_finds_the_edge_of_a_line(high: int, fixed: int, each: int, have: int) -> None:
    def margin(x: int) -> int:
        return have - fixed - each * x

    assert largest(margin, high) == max(0, min(high, (have - fixed) // each))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=400), st.integers(0, 3000))
def test_the_search_ends_at_an_edge_of_any_curve(steps: list[int], have: int) -> None:
    totals = [sum(steps[: i + 1]) for i in range(len(steps))]
    found = largest(lambda x: have - totals[x - 1], len(totals))
    assert found == sum(total <= have for total in totals)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=400),
    st.integers(0, 3000),
    st.integers(1, 400),
    st.integers(0, 200),
)
def test_a_rough_start_leads_to_the_same_edge(
    steps: list[int], have: int, low: int, less: int
) -> None:
    totals = [sum(steps[: i + 1]) + less for i in range(len(steps))]
    low = min(low, len(totals))
    found = largest(
        lambda x: have - totals[x - 1],
        len(totals),
        low,
        lambda x: have - totals[x - 1] + less,
    )
    fitting = sum(total <= have for total in totals)
    assert found == (fitting if fitting >= low else 0)


def test_a_rough_start_saves_questions() -> None:
    asked = []

    def margin(slots: int) -> int:
        asked.append(slots)
        return 10_000 - 4_000 - 77 * slots

    assert largest(margin, 256, rough=lambda slots: 10_000 - 77 * slots) == 6_000 // 77
    assert len(asked) <= 3


def test_the_search_asks_a_few_times_only() -> None:
    asked = []

    def margin(slots: int) -> int:
        asked.append(slots)
        return 10_000 - 130 - 77 * slots

    assert largest(margin, 256) == (10_000 - 130) // 77
    assert len(asked) <= 5


def test_the_whole_answer_is_a_few_predictions() -> None:
    """Start-up is part of the answer: no search may walk through the numbers one by one."""
    planner = Planner(handed("gemma3-dense"), "200M")
    calls = []
    ask = planner.estimate

    def counted(slots: int, ctx: int) -> Any:
        calls.append((slots, ctx))
        return ask(slots, ctx)

    planner.estimate = counted  # type: ignore[method-assign]
    capacity_of(planner, 4096)
    assert len(set(calls)) <= 12
