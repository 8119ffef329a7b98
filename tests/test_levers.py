"""Levers save what the predictor says, cost what they say, and are offered where they exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import predict_zoo
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lever_helpers import invented, none, one
from predict_helpers import named, records, shape

from localkv.errors import LocalkvError
from localkv.model import ModelShape, read_model, shape_from_header
from localkv.model.architectures import RULES
from localkv.predict.capacity import kv_capacity
from localkv.predict.config import RunConfig
from localkv.predict.defaults import PROGRAMS, run_config
from localkv.predict.estimate import Estimate
from localkv.predict.flags import Limits
from localkv.predict.levers import find_levers
from localkv.predict.predict import estimate
from localkv.predict.server_memory import CACHE_RAM, server_memory
from localkv.units import GIB, MIB

#: Models with tensors: what moves to a device has a size.
HEADERS = sorted({*named(records("engine_truth"))})


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> ModelShape:
    return read_model(str(smollm2_path))


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> ModelShape:
    return read_model(str(gemma_path))


def held(found: Estimate) -> dict[str, int]:
    return {device.name: device.total for device in found.devices}


MODELS = st.one_of(
    st.sampled_from(HEADERS).map(shape),
    st.builds(
        invented, st.sampled_from(sorted(RULES.keys() - {"clip", "gptj"})), st.integers(0, 3)
    ),
)
ASKED = st.fixed_dictionaries(
    {
        "n_ctx": st.integers(1, 100_000),
        "n_seq_max": st.integers(1, 20),
        "kv_unified": st.booleans(),
        "swa_full": st.booleans(),
        "flash_attn": st.sampled_from(("auto", "on", "off")),
        "cache_type_k": st.sampled_from(("f16", "q8_0")),
        "n_gpu_layers": st.sampled_from((0, 0, 1, 2, -1)),
        "no_kv_offload": st.booleans(),
        "n_devices": st.integers(1, 3),
    }
)
PROGRAM = st.sampled_from(sorted(PROGRAMS))


@settings(max_examples=40)
@given(MODELS, ASKED, PROGRAM)
def test_every_lever_saves_the_difference_of_two_predictions(
    model: ModelShape, asked: dict[str, Any], program: str
) -> None:
    config = run_config(program, model, **asked)
    try:
        before = held(estimate(model, config))
        levers = find_levers(model, config, program=program)
    except LocalkvError:
        return
    for lever in levers:
        assert lever.saves_bytes > 0
        if lever.config is None or lever.bound:
            continue
        after = estimate(model, lever.config)  # the engine takes it
        now = held(after)
        names = before.keys() | now.keys()
        gone = {name: before.get(name, 0) - now.get(name, 0) for name in names}
        assert {name: size for name, size in gone.items() if size} == lever.devices
        assert sum(before.values()) - after.total_bytes == sum(lever.devices.values())
        counted = {name for name in names if (name == "host") == (lever.memory == "host")}
        assert lever.saves_bytes == sum(gone[name] for name in counted)


@settings(max_examples=40)
@given(MODELS, ASKED, PROGRAM)
def test_a_lever_is_offered_where_the_program_has_it(
    model: ModelShape, asked: dict[str, Any], program: str
) -> None:
    config = run_config(program, model, **asked)
    try:
        levers = find_levers(model, config, program=program)
    except LocalkvError:
        return
    for lever in levers:
        if lever.config is None:
            assert lever.flags == {}
            continue
        assert lever.flags[program]
        changed = {k for k, v in config._asdict().items() if getattr(lever.config, k) != v}
        if "ollama" in lever.flags:
            assert not changed & {"kv_unified", "swa_full", "no_kv_offload", "n_cpu_moe"}
            assert not changed & {"cache_type_k", "cache_type_v"} or (
                lever.config.cache_type_k == lever.config.cache_type_v
            )
        if "llama-cpp-python" in lever.flags:
            assert "n_cpu_moe" not in changed
            assert not lever.bound
        assert "vllm" not in lever.flags


def test_the_engine_takes_every_lever_and_agrees(smollm2: ModelShape, gemma: ModelShape) -> None:
    from localkv.engines.dryrun import dry_run

    for model in (smollm2, gemma):
        base = run_config("llama-server", model, n_ctx=8192, n_seq_max=4, swa_full=True)
        levers = [x for x in find_levers(model, base) if x.config is not None and not x.bound]
        assert len(levers) >= 5
        configs = [lever.config for lever in levers if lever.config is not None]
        for config, plan in zip(configs, dry_run(Path(model.path), configs).plans, strict=True):
            assert plan.engine is not None, plan.refused
            told = sum(cache["bytes"] for cache in plan.engine["caches"])
            assert abs(told - estimate(model, config).kv_bytes) < 0.02 * MIB


def test_the_order_is_bytes_against_cost(smollm2: ModelShape) -> None:
    config = run_config("llama-server", smollm2, n_ctx=32768, n_seq_max=4)
    levers = find_levers(smollm2, config)
    changes = [lever.change for lever in levers]
    eight, four = (next(i for i, c in enumerate(changes) if c.startswith(f"KV cache in {t}"))
                   for t in ("q8_0", "q4_0"))  # fmt: skip
    assert levers[four].saves_bytes > levers[eight].saves_bytes
    assert eight < four
    assert changes[0].startswith("together")
    assert [lever.bound for lever in levers] == sorted(lever.bound for lever in levers)


def test_the_combination_is_predicted_anew(gemma: ModelShape) -> None:
    config = run_config("llama-server", gemma, n_ctx=32768, n_seq_max=4, swa_full=True)
    levers = find_levers(gemma, config)
    together = one(levers, "together")
    parts = [x for x in levers if x.change in together.change and x is not together]
    assert len(parts) >= 3
    assert together.config is not None
    assert together.config.cache_type_k == "q8_0"
    assert not together.config.swa_full
    assert together.saves_bytes > max(x.saves_bytes for x in parts)
    assert together.saves_bytes < sum(x.saves_bytes for x in parts)
    for part in parts:
        for word in part.flags["llama-server"].split():
            assert word in together.flags["llama-server"]


def test_flags_say_what_to_type_in_each_program(smollm2: ModelShape) -> None:
    config = run_config("llama-server", smollm2, n_ctx=8192, n_seq_max=4)
    levers = find_levers(smollm2, config)
    assert one(levers, "half the context").flags == {
        "llama-server": "-c 4096",
        "llama-cpp-python": "context_params.n_ctx = 4096",
        "ollama": "PARAMETER num_ctx 1024",
    }
    assert one(levers, "KV cache in q8_0").flags == {
        "llama-server": "-ctk q8_0 -ctv q8_0",
        "llama-cpp-python": "context_params.type_k = 8; context_params.type_v = 8",
        "ollama": "OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_FLASH_ATTENTION=1",
    }
    assert one(levers, "fewer slots").flags["llama-server"] == "-c 4096 -np 2"
    single = run_config("llama-cpp-python", smollm2, n_ctx=8192)
    assert one(find_levers(smollm2, single), "half").flags["llama-cpp-python"] == "n_ctx=4096"


def test_sliding_layers_can_be_cut_to_their_window(gemma: ModelShape) -> None:
    config = run_config("llama-cpp-python", gemma, n_ctx=16384)
    assert config.swa_full
    lever = one(find_levers(gemma, config, program="llama-cpp-python"), "sliding")
    assert lever.flags["llama-cpp-python"] == "swa_full=False"
    assert lever.flags["llama-server"] == "without --swa-full"
    assert "ollama" not in lever.flags
    served = run_config("llama-server", gemma, n_ctx=16384)
    assert none(find_levers(gemma, served), "sliding")


def test_one_cache_for_all_slots_where_it_saves(gemma: ModelShape, smollm2: ModelShape) -> None:
    config = run_config("llama-server", gemma, n_ctx=65536, n_seq_max=16, n_ubatch=2048)
    assert one(find_levers(gemma, config), "one cache").flags["llama-server"] == "--kv-unified"
    # Full layers take the same cells either way, and the masks of a shared cache are larger.
    plain = run_config("llama-server", smollm2, n_ctx=65536, n_seq_max=16)
    assert none(find_levers(smollm2, plain), "one cache")


def test_without_flash_attention_k_alone_is_quantised(smollm2: ModelShape) -> None:
    grok = invented("grok", 0)
    assert not grok.flash_attn
    grok = grok._replace(n_ctx_train=8192)
    lever = one(
        find_levers(grok, run_config("llama-server", grok, n_ctx=8192)), "K cache alone in q8_0"
    )
    assert lever.config is not None
    assert (lever.config.cache_type_k, lever.config.cache_type_v) == ("q8_0", "f16")
    assert "ollama" not in lever.flags
    off = run_config("llama-cpp-python", smollm2, n_ctx=8192)
    flags = one(find_levers(smollm2, off), "KV cache in q8_0").flags
    assert "flash_attn=True" in flags["llama-cpp-python"]
    assert "-fa on" in flags["llama-server"]


def test_types_whose_block_does_not_divide_are_not_offered(smollm2: ModelShape) -> None:
    layers = tuple(layer._replace(k_head=80, v_head=80) for layer in smollm2.layers)
    odd = smollm2._replace(layers=layers)
    config = run_config("llama-server", odd, n_ctx=8192)
    assert none(find_levers(odd, config), "KV cache in")
    assert none(find_levers(odd, config), "K cache")


def test_mla_keeps_one_type_for_k_and_v() -> None:
    model = shape("kimi-k3-moe")
    assert model.mla
    found = find_levers(model, run_config("llama-server", model, n_ctx=8192))
    for lever in found:
        if lever.config is not None:
            assert lever.config.cache_type_k == lever.config.cache_type_v
    assert none(found, "a model with fewer")


def test_a_model_without_kv_has_no_cache_type_to_change() -> None:
    model = shape("mamba-dense")
    found = find_levers(model, run_config("llama-server", model, n_ctx=8192, n_seq_max=4))
    assert none(found, "KV cache")
    assert none(found, "half the context")
    assert one(found, "fewer slots").saves_bytes > 0


def test_an_architecture_without_a_rule_has_no_levers() -> None:
    header = predict_zoo.metadata("llama")
    header = {k.replace("llama.", "newone."): v for k, v in header.items()}
    header["general.architecture"] = "newone"
    model = shape_from_header(header, ())
    assert find_levers(model, RunConfig(n_ctx=4096)) == ()


def test_ollama_follows_the_context_with_its_batch(gemma: ModelShape) -> None:
    config = run_config("ollama", gemma, n_ctx=4096, n_seq_max=2)
    assert config.n_ubatch == 1024
    lever = one(find_levers(gemma, config, program="ollama"), "half the context")
    assert lever.config == run_config("ollama", gemma, n_ctx=2048, n_seq_max=2)
    assert lever.flags["ollama"] == "PARAMETER num_ctx 2048"
    # The others keep their batch.
    assert lever.flags["llama-server"] == "-c 4096"


def test_ollama_runs_some_models_with_one_request_only() -> None:
    model = shape("qwen3next-moe")
    config = run_config("ollama", model, n_ctx=4096, n_seq_max=4)
    assert none(find_levers(model, config, program="ollama"), "fewer slots")


def test_a_model_with_fewer_heads_is_told_where_there_are_many() -> None:
    dense = next(x for x in (invented("gptneox", i) for i in range(9)) if x.layers[0].n_head > 2)
    layer = dense.layers[0]
    assert layer.n_head == layer.n_head_kv >= 4
    lever = one(find_levers(dense, run_config("llama-server", dense, n_ctx=8192)), "a model with")
    kv = estimate(dense, run_config("llama-server", dense, n_ctx=8192)).kv_bytes
    assert lever.saves_bytes == kv - kv * (layer.n_head // 4) // layer.n_head_kv
    assert lever.flags == {}
    assert lever.config is None


# -- the server's own memory -----------------------------------------------------------------


def test_the_servers_host_memory_is_bounded_by_its_flags(gemma: ModelShape) -> None:
    config = run_config("llama-server", gemma, n_ctx=32768, n_seq_max=4)
    levers = find_levers(gemma, config)
    cache, points = one(levers, "no prompt cache"), one(levers, "4 context checkpoints")
    assert cache.saves_bytes == CACHE_RAM
    assert cache.flags == {"llama-server": "--cache-ram 0", "ollama": "LLAMA_ARG_CACHE_RAM=0"}
    full, few = (server_memory(gemma, config, ctx_checkpoints=n).slots_bytes for n in (32, 4))
    assert full is not None
    assert few is not None
    assert points.saves_bytes == full - few
    assert points.flags["llama-server"] == "--ctx-checkpoints 4"
    assert cache.bound
    assert points.bound
    assert cache.devices == {}


def test_what_the_server_has_already_given_up_is_not_offered(
    gemma: ModelShape, smollm2: ModelShape
) -> None:
    config = run_config("llama-server", gemma, n_ctx=32768, n_seq_max=4)
    levers = find_levers(gemma, config, limits=Limits(cache_ram=0, ctx_checkpoints=4))
    assert none(levers, "no prompt cache")
    assert none(levers, "4 context")
    half = find_levers(gemma, config, limits=Limits(cache_ram=GIB))
    assert one(half, "no prompt cache").saves_bytes == GIB
    # Limits that are not the subject stay as they are.
    assert one(half, "half the context").flags["llama-server"] == "-c 16384"
    # Full attention can be rolled back: the server makes no checkpoints of it.
    plain = run_config("llama-server", smollm2, n_ctx=32768, n_seq_max=4)
    assert none(find_levers(smollm2, plain), "4 context")
    python = run_config("llama-cpp-python", gemma, n_ctx=32768)
    assert none(find_levers(gemma, python, program="llama-cpp-python"), "no prompt cache")


# -- how many then fit -----------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["2G", "1G,1G"])
def test_the_slots_of_a_lever_are_the_capacity_of_its_settings(
    smollm2: ModelShape, gemma: ModelShape, memory: str
) -> None:
    for model in (smollm2, gemma):
        base = kv_capacity(model, memory, 8192)
        config = base.config
        for lever in find_levers(model, config, memory=memory, ctx_per_slot=8192):
            if lever.config is None:
                assert lever.max_slots is None
                continue
            each = 4096 if "half the context" in lever.change else 8192
            found = kv_capacity(model, memory, each, config=lever.config)
            assert lever.max_slots == found.max_slots
            if "slots" not in lever.change:
                assert lever.max_slots >= base.max_slots


def test_a_reserve_leaves_room_for_fewer(smollm2: ModelShape) -> None:
    config = run_config("llama-server", smollm2, n_ctx=8192, n_seq_max=4)
    free, kept = (
        one(find_levers(smollm2, config, memory=2 * GIB, reserve=r), "KV cache in q8_0").max_slots
        for r in (0, GIB)
    )
    assert free is not None
    assert kept is not None
    assert kept < free


def test_a_lever_is_plain_json(gemma: ModelShape) -> None:
    import json

    config = run_config("llama-server", gemma, n_ctx=32768, n_seq_max=4)
    rows = [x.to_dict() for x in find_levers(gemma, config, memory="2G")]
    assert json.loads(json.dumps(rows)) == rows
    assert {"change", "max_slots", "saves_bytes"} <= rows[0].keys()


# -- in a run --------------------------------------------------------------------------------


def test_a_sweep_stores_the_levers_of_its_largest_point(smollm2_path: Path) -> None:
    import json

    from sweep_helpers import small_session

    from localkv.records import RunInfo

    session = small_session(smollm2_path, parallel=(1, 2))
    stored = RunInfo.from_dict(json.loads(json.dumps(session.info([], "").to_dict()))).levers
    totals = {key: found.total_bytes for key, found in session.estimates.items()}
    assert totals[stored["key"]] == max(totals.values())
    (config,) = [point.config for point in session.points if point.key == stored["key"]]
    memory = session.environment["memory"]["available"]
    found = find_levers(session.shape, config, memory=memory)
    assert stored["table"] == [lever.to_dict() for lever in found]
    assert found
