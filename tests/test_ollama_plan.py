"""What Ollama believes, against its own rules; and the consequences in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localkv.errors import UsageError
from localkv.model import ModelShape, read_model
from localkv.predict.defaults import OLLAMA_SINGLE, run_config
from localkv.predict.ollama_plan import Gpu, OllamaPlan, believed_kv, num_ctx_by_vram, ollama_plan
from localkv.predict.predict import estimate
from localkv.units import GIB, MIB

HEADERS = Path(__file__).parent / "data" / "headers"
BIG = Gpu(80 * GIB, 78 * GIB)


@pytest.fixture(scope="module")
def dense() -> ModelShape:
    """A model of a GiB, as far as Ollama knows: it looks at the file's size alone."""
    shape = read_model(str(HEADERS / "qwen2-dense.gguf"))
    return shape._replace(n_ctx_train=32768, file_bytes=GIB)


def said(plan: OllamaPlan, words: str) -> bool:
    return any(words in note for note in plan.notes)


@pytest.mark.engine
def test_the_smollm2_that_was_measured(smollm2_path: Path) -> None:
    """What Ollama 0.33.1 itself reported for 4096 x 2 and 2048 x 2 (docs: ENGINE_FACTS)."""
    shape = read_model(str(smollm2_path))
    for num_ctx, size in ((4096, 322437118), (2048, 207607560)):
        plan = ollama_plan(shape, num_ctx=num_ctx, parallel=2)
        # Its log rounds four lines to 0.01 MiB; the compute buffer is an estimate with a band.
        band = plan.true.compute.high - plan.true.compute.low
        assert plan.ps_bytes is not None
        assert abs(plan.ps_bytes - size) <= 4 * MIB // 200 + band
        assert plan.belief.weights == shape.file_bytes
        # Full attention whose head width is n_embd / heads: here the belief is the truth.
        assert plan.belief.kv == plan.true.kv_bytes
        assert not plan.mmap


@pytest.mark.engine
def test_windows_and_head_widths_are_not_seen(gemma_path: Path) -> None:
    shape = read_model(str(gemma_path))
    plan = ollama_plan(shape, num_ctx=8192, parallel=4)
    heads = max(layer.n_head for layer in shape.layers)
    expected = 2 * 2 * shape.n_layer * (shape.n_embd // heads) * 8192 * 4
    assert plan.belief.kv == expected
    assert said(plan, "scheduler expects")
    assert plan.ps_bytes is not None
    assert plan.true.total_bytes - plan.ps_bytes == plan.true.caches[0].bytes


def with_numbers(shape: ModelShape, **numbers: Any) -> ModelShape:
    named = {key.replace("__", "."): value for key, value in numbers.items()}
    return shape._replace(numbers={**shape.numbers, **named})


@pytest.mark.parametrize(
    ("numbers", "heads"),
    [
        ({"attention__head_count_kv": 8}, 8),
        ({"attention__head_count_kv": (8, 2, 4)}, 2),
        ({"attention__head_count_kv": (8, 0, 4)}, 1),
    ],
)
def test_the_fewest_heads_count(dense: ModelShape, numbers: dict[str, Any], heads: int) -> None:
    told = {"block_count": 10, "embedding_length": 1000, "attention__head_count": (7, 12)}
    shape = with_numbers(dense, **told, **numbers)
    assert believed_kv(shape, 100) == 2 * 10 * heads * (1000 // 12) * 100 * 2


def test_a_header_without_heads_counts_one(dense: ModelShape) -> None:
    shape = dense._replace(numbers={"block_count": 3, "embedding_length": 64})
    assert believed_kv(shape, 10) == 2 * 3 * 1 * 64 * 10 * 2


def test_the_context_goes_by_vram() -> None:
    assert num_ctx_by_vram(0) == 4096
    assert num_ctx_by_vram(23 * GIB - 1) == 4096
    assert num_ctx_by_vram(23 * GIB) == 32768
    assert num_ctx_by_vram(47 * GIB) == 262144


def test_what_nobody_set_is_said_and_what_is_too_long_is_cut(dense: ModelShape) -> None:
    plan = ollama_plan(dense, gpus=[BIG])
    assert plan.num_ctx == min(262144, dense.n_ctx_train)
    assert said(plan, "num_ctx is not set: Ollama takes 262144")
    assert said(plan, f"num_ctx is cut to {dense.n_ctx_train}")
    assert not said(ollama_plan(dense, num_ctx=1024), "num_ctx")


@pytest.mark.parametrize("architecture", sorted(OLLAMA_SINGLE))
def test_one_request_at_a_time(dense: ModelShape, architecture: str) -> None:
    shape = dense._replace(architecture=architecture)
    plan = ollama_plan(shape, num_ctx=1024, parallel=4)
    assert plan.parallel == 1
    assert said(plan, f"OLLAMA_NUM_PARALLEL=4 counts as 1: Ollama gives {architecture}")


def test_as_many_as_asked_otherwise(dense: ModelShape) -> None:
    plan = ollama_plan(dense, num_ctx=1024, parallel=4)
    assert (plan.parallel, plan.true.config["n_ctx"]) == (4, 4096)
    assert not said(plan, "NUM_PARALLEL")
    with pytest.raises(UsageError):
        ollama_plan(dense, parallel=0)


def test_all_on_one_gpu_where_the_belief_fits(dense: ModelShape) -> None:
    plan = ollama_plan(dense, num_ctx=2048, gpus=[Gpu(80 * GIB, 40 * GIB), BIG])
    assert plan.gpus_used == 1
    assert plan.gpu_layers == plan.n_layers == dense.n_layer + 1
    assert plan.mmap
    assert plan.evicts is False
    told = run_config("ollama", dense, n_ctx=2048, n_seq_max=1, n_gpu_layers=-1)
    assert plan.true.kv_bytes == estimate(dense, told).kv_bytes


def test_spread_where_only_the_belief_does_not_fit(dense: ModelShape) -> None:
    believed = ollama_plan(dense, num_ctx=2048).belief.total
    # Four fifths of what is free must hold the belief; the model itself needs less.
    size = believed * 10 // 8 - MIB
    plan = ollama_plan(dense, num_ctx=2048, gpus=[Gpu(size, size), Gpu(size, size)])
    assert plan.gpus_used == 2
    assert plan.true.total_bytes <= size
    assert said(plan, "spread over 2 GPUs, although one would hold it")
    more = size + 2 * MIB
    assert ollama_plan(dense, num_ctx=2048, gpus=[Gpu(more, more)] * 2).gpus_used == 1


def test_layers_stay_behind_where_the_truth_does_not_fit(dense: ModelShape) -> None:
    need = ollama_plan(dense, num_ctx=2048).true.total_bytes
    small = Gpu(24 * GIB, need // 2 + GIB)
    plan = ollama_plan(dense, num_ctx=2048, gpus=[small])
    assert plan.gpu_layers is not None
    assert 0 < plan.gpu_layers < plan.n_layers
    left = plan.n_layers - plan.gpu_layers
    assert said(plan, f"the CPU keeps {left} of {plan.n_layers} layers")
    assert plan.ps_bytes is None
    assert plan.ps_why
    assert plan.to_dict()["ps_why"] == plan.ps_why


def test_batches_shrink_where_memory_seems_short(dense: ModelShape) -> None:
    shape = dense._replace(file_bytes=64 * GIB, n_ctx_train=1 << 20)
    need = shape.file_bytes + believed_kv(shape, 65536)

    def batch(free: int) -> int:
        return ollama_plan(shape, num_ctx=65536, gpus=[Gpu(free, free)]).n_batch

    assert batch(10 * need) == 2048
    # The belief may be 60 % of the free memory for the largest batch, 75 % for the next.
    for percent, roomy, tight in ((60, 2048, 1024), (75, 1024, 512)):
        assert batch(need * 100 // percent + MIB) == roomy
        assert batch(need * 100 // percent - MIB) == tight
    # Of a small model the batch itself is what has to fit, into four fifths of what is free.
    small = dense._replace(file_bytes=MIB, n_ctx_train=1 << 20)
    room = (MIB + believed_kv(small, 65536) + 2 * GIB) * 10 // 8
    for free, size in ((room + MIB, 2048), (room - MIB, 1024)):
        assert ollama_plan(small, num_ctx=65536, gpus=[Gpu(free, free)]).n_batch == size
    plan = ollama_plan(shape, num_ctx=65536, gpus=[Gpu(need, need)])
    assert plan.evicts
    assert said(plan, "batches are 512 tokens instead of 2048")


def test_the_plan_as_json(dense: ModelShape) -> None:
    told = ollama_plan(dense, num_ctx=2048, parallel=2).to_dict()
    believed = told["believed"]
    assert believed["total"] == sum(believed[k] for k in ("weights", "kv", "surcharge"))
    assert told["true"]["total"] == ollama_plan(dense, num_ctx=2048, parallel=2).true.total_bytes
    assert (told["gpu_layers"], told["evicts"], told["ps_why"]) == (None, None, None)
