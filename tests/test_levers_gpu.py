"""Levers of models on GPUs: what moves to the host and back, expert weights among it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import Run
from lever_helpers import none, one
from predict_helpers import header_bytes, named, records, shape

from localkv.gguf import read_header
from localkv.model import read_model
from localkv.predict.config import RunConfig
from localkv.predict.defaults import run_config
from localkv.predict.levers import find_levers
from localkv.predict.predict import estimate
from localkv.units import MIB

HEADERS = sorted({*named(records("engine_truth"))})
# paddleocr's file is called so, and has none.
MOE = {name for name in HEADERS if name.endswith("-moe")} - {"paddleocr-moe"}
ENGINES_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")  # common/common.h


@pytest.mark.parametrize("name", sorted(MOE))
def test_expert_bytes_are_those_of_the_engines_pattern(name: str) -> None:
    from io import BytesIO

    tensors = read_header(BytesIO(header_bytes(name))).tensors
    found = {layer.index: layer.expert_bytes for layer in shape(name).layers}
    for index, size in found.items():
        assert size == sum(
            t.nbytes
            for t in tensors
            if ENGINES_EXPERTS.search(t.name) and t.name.startswith(f"blk.{index}.")
        )
    assert sum(found.values()) > 0
    assert {"gpt-oss-moe", "deepseek4-moe", "grovemoe-moe"} <= MOE


def test_experts_on_the_host_leave_the_gpu_by_their_bytes() -> None:
    model = shape("qwen3moe-moe")
    config = RunConfig(n_ctx=4096, n_gpu_layers=-1)
    sizes = [layer.expert_bytes for layer in model.layers]
    for count, moved in ((1, sizes[0]), (-1, sum(sizes)), (99, sum(sizes))):
        before, after = (
            {d.name: d.weights for d in estimate(model, c).devices}
            for c in (config, config.with_(n_cpu_moe=count))
        )
        assert before["gpu0"] - after["gpu0"] == moved
        assert after["host"] - before["host"] == moved
    # Blocks that are on the host already have nothing to move.
    first = RunConfig(n_ctx=4096, n_gpu_layers=len(sizes))
    assert (
        estimate(model, first.with_(n_cpu_moe=1)).devices
        == estimate(model, first.with_(n_cpu_moe=0)).devices
    )


def test_experts_that_the_host_repacks_are_held_twice() -> None:
    model = shape("qwen3moe-moe")
    tensors = [group for group in model.matrices if group.experts]
    assert tensors
    as_q4 = tuple(group._replace(type="q4_0", rows=16) for group in tensors)
    model = model._replace(matrices=as_q4)
    config = RunConfig(n_ctx=4096, n_gpu_layers=-1, n_cpu_moe=-1, cpu_features=("avx2",))
    plain, packed = (estimate(model, c).devices[0] for c in (config.with_(repack=False), config))
    assert packed.weights - plain.weights == sum(group.nbytes for group in as_q4)


def test_levers_of_gpus_save_gpu_memory() -> None:
    model = shape("gpt-oss-moe")
    config = run_config("llama-server", model, n_ctx=32768, n_seq_max=4, n_gpu_layers=-1)
    levers = find_levers(model, config)
    experts, off = one(levers, "expert"), one(levers, "KV cache on the host")
    assert experts.memory == off.memory == "gpu"
    assert experts.devices["host"] < 0
    assert experts.flags == {"llama-server": "--cpu-moe"}
    assert off.flags["llama-cpp-python"] == "context_params.offload_kqv = False"
    assert "ollama" not in off.flags
    fewer = one(levers, "fewer layers")
    assert fewer.flags["llama-server"] == "-ngl 2"
    assert fewer.flags["ollama"] == "PARAMETER num_gpu 2"


def test_more_layers_are_offered_where_a_gpu_is_known_to_have_room(smollm2_path: Path) -> None:
    smollm2 = read_model(str(smollm2_path))
    config = run_config("llama-server", smollm2, n_ctx=8192, n_gpu_layers=10)
    lever = one(find_levers(smollm2, config), "all 31 layers")
    assert lever.memory == "host"
    assert lever.flags["llama-server"] == "-ngl all"
    tight = config.with_(device_free=(100 * MIB,))
    assert none(find_levers(smollm2, tight), "all 31 layers")
    assert none(find_levers(smollm2, config.with_(n_gpu_layers=0)), "all 31")
    assert none(find_levers(smollm2, config.with_(n_gpu_layers=0)), "KV cache on the host")


def test_the_expert_lever_can_be_predicted_by_name(run: Run) -> None:
    header = Path(__file__).parent / "data" / "headers" / "gpt-oss-moe.gguf"
    moved = sum(layer.expert_bytes for layer in read_model(str(header)).layers)
    held = []
    for experts in ((), ("-ncmoe", -1)):
        code, out, _ = run("predict", header, "-c", 4096, "-ngl", "all", *experts, "--json")
        assert code == 0
        held.append(json.loads(out)["devices"][1]["weights"])
    assert held[0] - held[1] == moved > 0
