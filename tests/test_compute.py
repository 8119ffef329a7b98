"""The compute buffer's estimate against the engine, and the laws that it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import compute_cases as cases
import predict_helpers as truth
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.model import ModelShape, read_model, shape_from_header
from localkv.model.architectures import RULES
from localkv.predict import compute_families
from localkv.predict.checks import effective_config
from localkv.predict.compute import estimate_compute
from localkv.predict.compute_alloc import ALIGNMENT, Allocator, compiled
from localkv.predict.config import RunConfig
from localkv.predict.devices import place
from localkv.predict.estimate import ComputeEstimate
from localkv.predict.predict import predict
from localkv.units import MIB

#: The log prints MiB with two decimals.
PRINTED = int(0.005 * MIB) + 1
MEDIAN, COVERAGE = 0.10, 0.95


def estimated(shape: ModelShape, config: RunConfig, *, devices: bool = False) -> ComputeEstimate:
    config = effective_config(shape, config)
    return estimate_compute(shape, config, place(shape, config) if devices else None)


def assert_holds(pairs: list[tuple[ComputeEstimate, float]], within: float = MEDIAN) -> None:
    """The median error is below ``within``, and bands, none of them idle, hold 95 of 100."""
    errors = [abs(estimate.bytes / size - 1) for estimate, size in pairs]
    held = [e.low - PRINTED <= size <= e.high + PRINTED for e, size in pairs]
    assert median(errors) < within
    assert sum(held) >= COVERAGE * len(pairs)
    assert median(e.high / e.low for e, _ in pairs) < 1.3


# The engine lays out the same blocks in the same order, so half of all figures are exact; a
# hundredth leaves room for an engine of another version without hiding a lost tensor.
@pytest.mark.parametrize("name", ["engine_truth", "deep_truth"])
def test_handed_truth_lies_in_the_band(name: str) -> None:
    pairs = []
    for model in truth.records(name):
        shape = truth.shape(model["name"])
        for config in model["configs"]:
            if config.get("ok"):
                # As many outputs as slots: what these records were made with.
                asked = truth.settings(config) | {"n_outputs_max": config["n_seq_max"]}
                size = sum(float(mib) for _, mib in config["compute"]) * MIB
                pairs.append((estimated(shape, RunConfig(**asked)), size))
    assert len(pairs) > 700
    assert_holds(pairs, 0.01)


def answers() -> dict[str, list[int | None]]:
    loaded: dict[str, list[int | None]] = json.loads(cases.TRUTH.read_text())
    return loaded


def test_models_of_real_sizes_and_every_architecture_lie_in_the_band() -> None:
    real, invented = [], []
    for name, sizes in answers().items():
        shape = shape_from_header(cases.metadata(name), ())
        for config, size in zip(cases.CONFIGS, sizes, strict=True):
            if size is not None:
                pair = estimated(shape, config), float(size)
                (real if name in cases.REAL else invented).append(pair)
    assert len(real) > 100
    assert len(invented) > 1000
    assert_holds(real, 0.01)
    assert_holds(invented, 0.01)


def test_every_architecture_gets_a_positive_figure_with_a_band_around_it() -> None:
    for architecture in RULES:
        if architecture in ("clip", "gptj"):
            continue  # no language models to the engine
        shape = shape_from_header(cases.metadata(architecture), ())
        for config in (RunConfig(n_ctx=512), RunConfig(n_ctx=512, n_seq_max=3, flash_attn="off")):
            estimate = estimated(shape, config)
            assert 0 < estimate.low < estimate.bytes < estimate.high, architecture


def test_the_traits_name_architectures_alone() -> None:
    traits = [value for name, value in vars(compute_families).items() if name.isupper()]
    traits += [value for name, value in vars(compute_families).items() if name[1:].isupper()]
    lists = [text for value in traits if isinstance(value, dict) for text in value.values()]
    lists += [value for value in traits if isinstance(value, str)]
    assert len(lists) > 20
    unknown = {name for text in lists for name in text.split()} - set(RULES)
    assert not unknown


def test_an_unknown_architecture_gets_a_wide_band() -> None:
    header = cases.metadata("llama-3-8b") | {"general.architecture": "unheard-of"}
    estimate = estimated(shape_from_header(header, ()), RunConfig(n_ctx=512))
    assert estimate.high >= 4 * estimate.low


DEVICE_MODELS = ("afmoe-moe-d1", "gpt-oss-moe-d1", "qwen35-dense-d1")


def device_pairs(name: str, shape: ModelShape) -> list[tuple[ComputeEstimate, dict[str, Any]]]:
    keys = (
        *("n_ctx", "n_seq_max", "kv_unified", "swa_full", "n_ubatch", "n_batch", "n_devices"),
        *("n_gpu_layers", "split_mode", "no_kv_offload", "tensor_split"),
    )
    return [
        (
            estimated(shape, RunConfig.from_dict({key: record[key] for key in keys}), devices=True),
            record["compute"],
        )
        for record in truth.records("device_truth")
        if record["name"] == name and record["ok"]
    ]


@pytest.mark.parametrize("name", DEVICE_MODELS)
def test_device_truth_lies_in_the_band(name: str) -> None:
    pairs = device_pairs(name, truth.shape(name))
    assert len(pairs) == 51
    assert_holds([(estimate, sum(sizes.values()) * MIB) for estimate, sizes in pairs])
    names = {"CPU": "host", "RPC0": "gpu0", "RPC1": "gpu1"}
    for estimate, sizes in pairs:
        assert dict(estimate.devices).keys() == {names[device] for device in sizes}
        assert sum(size for _, size in estimate.devices) == estimate.bytes


def test_the_devices_of_an_estimate_hold_its_compute_buffers() -> None:
    shape = truth.shape("gpt-oss-moe-d1")
    estimate = predict(shape, n_ctx=8192, n_devices=2, n_gpu_layers=-1)
    assert sum(device.compute for device in estimate.devices) == estimate.compute.bytes
    assert all(device.compute for device in estimate.devices)


SHAPES = (
    "qwen2-dense",
    "gemma3-dense",
    "llama-moe",
    "qwen3next-moe",
    "mistral4-moe",
    "mamba-dense",
)


@given(
    name=st.sampled_from(SHAPES),
    grown=st.sampled_from(["n_ctx", "n_ubatch", "n_outputs_max"]),
    n_ctx=st.sampled_from([512, 3000, 8192]),
    n_seq_max=st.sampled_from([1, 2, 3, 8]),
    n_ubatch=st.sampled_from([32, 128, 512]),
    n_outputs_max=st.sampled_from([8, 100]),
    flash_attn=st.sampled_from(["auto", "off"]),
    kv_unified=st.booleans(),
)
def test_more_of_anything_never_needs_much_less(name: str, grown: str, **settings: Any) -> None:
    # Best fit leaves holes of its own, so that a larger graph may pack a little better.
    config = RunConfig(**settings)
    larger = config.with_(**{grown: 4 * settings[grown]})
    shape = truth.shape(name)
    assert estimated(shape, larger).bytes >= 0.9 * estimated(shape, config).bytes


def test_logits_of_the_whole_batch_are_in_the_buffer() -> None:
    shape = shape_from_header(cases.metadata("llama-3-8b"), ())
    whole, one = RunConfig(n_ctx=4096), RunConfig(n_ctx=4096, n_outputs_max=1)
    logits = shape.n_vocab * 512 * 4
    assert logits < estimated(shape, whole).bytes < logits + 32 * MIB
    assert estimated(shape, one).bytes < logits


def test_an_allocator_takes_the_best_fitting_hole() -> None:
    memory = Allocator()
    blocks = [memory.take(size * ALIGNMENT) for size in (4, 1, 2, 1, 3, 1)]
    for index in (0, 2, 4):
        memory.free(blocks[index])
    assert memory.take(2 * ALIGNMENT)[0] == blocks[2][0]
    assert memory.take(3 * ALIGNMENT - 1)[0] == blocks[4][0]
    assert memory.take(5 * ALIGNMENT)[0] == 12 * ALIGNMENT
    assert memory.peak == 17 * ALIGNMENT


def test_an_allocator_joins_holes() -> None:
    memory = Allocator()
    first, second, third = (memory.take(ALIGNMENT) for _ in range(3))
    memory.take(ALIGNMENT)
    for block in (first, third, second):
        memory.free(block)
    assert memory.take(3 * ALIGNMENT)[0] == 0
    assert memory.peak == 4 * ALIGNMENT


def test_a_recipe_frees_what_is_read_for_the_last_time() -> None:
    memory = Allocator()
    sizes = {"A": ALIGNMENT, "B": 2 * ALIGNMENT}
    stream = memory.take(ALIGNMENT)
    program = compiled("a A: x; b B: a; a A: b; -: a x; =: a")
    offset, size = program.run(memory, sizes, sizes, stream)
    # x, the first a and b lie side by side; the second a takes the first one's place.
    assert (offset, size) == (ALIGNMENT, ALIGNMENT)
    assert memory.peak == 4 * ALIGNMENT
    memory.free((offset, size))
    assert memory.take(100 * ALIGNMENT)[0] == 0


def test_only_output_rows_leave_the_last_block() -> None:
    full, rows = {"E": 10 * ALIGNMENT}, {"E": ALIGNMENT}
    recipe = "a E: x; |: a x; -: a x; =: a"
    for last, size in ((False, 10 * ALIGNMENT), (True, ALIGNMENT)):
        memory = Allocator()
        stream = memory.take(full["E"])
        assert compiled(recipe, last=last).run(memory, full, rows, stream)[1] == size


@pytest.fixture(params=["smollm2_path", "gemma_path"])
def demo(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


DEMO_CONFIGS = [
    RunConfig(
        n_ctx=n_ctx,
        n_seq_max=slots,
        n_ubatch=n_ubatch,
        n_outputs_max=outputs * slots,
        flash_attn=flash_attn,
        kv_unified=unified,
        swa_full=full,
        cache_type_k=cache_type,
        cache_type_v="f16" if flash_attn == "off" and cache_type == "q8_0" else cache_type,
    )
    for n_ctx in (512, 5000, 32768)
    for slots in (1, 3, 8)
    for n_ubatch in (32, 512, 2048)
    for outputs in (0, 1)
    for flash_attn in ("auto", "on", "off")
    for unified, full, cache_type in (
        (False, False, "f16"),
        (True, False, "q8_0"),
        (True, True, "f32"),
        (False, True, "bf16"),
    )
]


@pytest.mark.engine
def test_demo_models_are_within_a_tenth_in_every_configuration(demo: Path) -> None:
    from localkv.engines.dryrun import dry_run

    shape = read_model(str(demo))
    compared = 0
    for config, plan in zip(DEMO_CONFIGS, dry_run(demo, DEMO_CONFIGS).plans, strict=True):
        if plan.engine is not None:
            size = plan.engine["compute_bytes"]
            estimate = estimated(shape, config)
            assert abs(estimate.bytes / size - 1) < 0.10, config
            assert estimate.low - PRINTED <= size <= estimate.high + PRINTED, config
            compared += 1
    assert compared > 500


@pytest.mark.engine
@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b"])
def test_the_installed_engine_agrees_on_real_sizes(name: str, tmp_path: Path) -> None:
    from localkv.engines.dryrun import dry_run

    path = cases.predict_zoo.write_header(tmp_path / f"{name}.gguf", cases.metadata(name))
    shape = read_model(str(path))
    plans = dry_run(path, cases.CONFIGS).plans
    assert_holds(
        [
            (estimated(shape, config), float(plan.engine["compute_bytes"]))
            for config, plan in zip(cases.CONFIGS, plans, strict=True)
            if plan.engine is not None
        ],
        0.02,
    )


@pytest.mark.engine
def test_device_truth_of_the_demo_models_is_within_a_tenth(
    smollm2_path: Path, gemma_path: Path
) -> None:
    for name, path in (("smollm2-135m", smollm2_path), ("gemma-3-270m", gemma_path)):
        for estimate, sizes in device_pairs(name, read_model(str(path))):
            assert abs(estimate.bytes / (sum(sizes.values()) * MIB) - 1) < 0.10
