"""The size of a sequence's saved state, against the engine's own answer after real decoding.

The models are those of ``data/engine_cases``, small invented ones of every kind of memory, run
with zeroed weights: what is computed is worthless, what it is kept in has its full size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict_helpers import header_bytes, named, records, shape

from localkv.predict.checks import effective_config
from localkv.predict.config import RunConfig, effective_context
from localkv.predict.server_memory import makes_checkpoints
from localkv.predict.state_size import sequence_state_bytes, window_tokens

CHILD = Path(__file__).parent / "children" / "state_sizes.py"
#: One of each way to save a state; windows are 32 tokens.
QUICK = (
    "bailingmoe3-moe",  # MLA beside recurrent state, with two-dimensional positions
    "deepseek4-moe",  # compressed caches and their states
    "dots3note-moe",  # indexer and sliding window
    "exaone4-dense",  # declares a window that no layer uses
    "gemma3-dense",  # sliding window
    "glm5-next-moe",  # recurrent, indexer
    "granitehybrid-dense",  # recurrent beside attention
    "hy_v4-moe",  # indexer, every block full
    "kimi-k3-moe",  # recurrent, K alone
    "mamba-dense",  # recurrent throughout
    "minimax-01-moe",  # recurrent state without convolution
    "minimax-m3-moe",  # indexer with V
    "nemotron_h_moe-dense",  # blocks with neither
    "openelm-dense",  # another width in every block
    "qwen2vl-dense",  # two-dimensional positions
    "qwen35-dense",
    "qwen4exp-moe",  # recurrent, indexer, history of a per-layer embedding
)
RUNS = (
    {"n_seq_max": 2},
    {"n_seq_max": 2, "kv_unified": True, "swa_full": True, "flash_attn": "off"},
    {"n_seq_max": 3, "cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"},
)
TOKENS = (1, 31, 130)


def config_of(run: dict[str, Any]) -> RunConfig:
    return RunConfig(n_ctx=512, n_batch=64, n_ubatch=64, **run)


@cache
def file_bytes() -> dict[str, int]:
    return {
        entry["name"]: entry["file_size"]
        for name in ("engine_truth", "deep_truth")
        for entry in records(name)
    }


def ask_engine(
    names: tuple[str, ...], folder: Path, runs: list[dict[str, Any]], tokens: tuple[int, ...]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the engine's answers by model and run."""
    models = {}
    for name in names:
        path = folder / f"{name}.gguf"
        path.write_bytes(header_bytes(name))
        os.truncate(path, max(file_bytes()[name], path.stat().st_size))
        models[name] = str(path)
    job = {"models": models, "runs": [{"config": run, "tokens": tokens} for run in runs]}
    done = subprocess.run(
        [sys.executable, CHILD], input=json.dumps(job), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {(answer["name"], answer["run"]): answer for answer in answers}


def compare(name: str, config: RunConfig, answer: dict[str, Any]) -> None:
    model = shape(name)
    config = effective_config(model, config)
    context = effective_context(config, model.n_ctx_train, causal=model.causal)
    for tokens, whole, partial in answer["sizes"]:
        assert sequence_state_bytes(model, config, context, tokens) == whole
        assert sequence_state_bytes(model, config, context, tokens, partial=True) == partial
    # What the server asks: can tokens be taken back, and is a window in the way?
    rolls_back = answer["takes_back"] and (config.swa_full or not answer["n_swa"])
    assert makes_checkpoints(model, config) == (not rolls_back)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    pytest.importorskip("llama_cpp.llama_cpp")
    runs = [config_of(run).to_dict() for run in RUNS]
    return ask_engine(QUICK, tmp_path_factory.mktemp("models"), runs, TOKENS)


@pytest.mark.parametrize("run", range(len(RUNS)))
@pytest.mark.parametrize("name", QUICK)
def test_the_state_is_as_large_as_the_engine_writes_it(
    name: str, run: int, answers: dict[tuple[str, int], dict[str, Any]]
) -> None:
    answer = answers[name, run]
    if "refused" in answer:
        pytest.skip(f"the engine refuses this combination: {answer['refused']}")
    compare(name, config_of(RUNS[run]), answer)


def test_the_quick_models_answer(answers: dict[tuple[str, int], dict[str, Any]]) -> None:
    """No more than a few combinations are refused, or the comparison above is empty."""
    refused = [key for key, answer in answers.items() if "refused" in answer]
    assert len(answers) == len(QUICK) * len(RUNS)
    assert len(refused) <= len(QUICK) // 2


@pytest.mark.slow
def test_every_model_that_keeps_a_cache(tmp_path: Path) -> None:
    names = tuple(
        name
        for name in named([*records("engine_truth"), *records("deep_truth")])
        if (model := shape(name)).rule == "exact"
        and (model.caches or any(layer.state_width for layer in model.layers))
    )
    assert len(names) > 100
    config = RunConfig(n_ctx=1280, n_seq_max=2, n_batch=64, n_ubatch=64)
    sliding = tuple(name for name in names if shape(name).window)
    others = tuple(name for name in names if not shape(name).window)
    for group, tokens in ((sliding, (97, 530)), (others, (97,))):
        for (name, _), answer in ask_engine(group, tmp_path, [config.to_dict()], tokens).items():
            compare(name, config, answer)


# A window in chunks of 8192 tokens takes minutes to fill with a real model.
@pytest.mark.parametrize(
    ("tokens", "seen"), [(1, 1), (8192, 8192), (8193, 1), (8200, 8), (16384, 8192)]
)
def test_a_chunked_window_begins_anew(tokens: int, seen: int) -> None:
    assert window_tokens(shape("llama4-moe"), tokens) == seen


@given(
    name=st.sampled_from(QUICK),
    tokens=st.integers(1, 4000),
    more=st.integers(0, 90),
    slots=st.integers(1, 8),
    kind=st.sampled_from(["f16", "f32", "bf16"]),
)
def test_laws(name: str, tokens: int, more: int, slots: int, kind: str) -> None:
    model = shape(name)
    config = RunConfig(n_ctx=8192 * slots, n_seq_max=slots, cache_type_k=kind, cache_type_v=kind)
    context = effective_context(config, model.n_ctx_train, causal=model.causal)

    def size(count: int, *, partial: bool = False) -> int:
        return sequence_state_bytes(model, config, context, count, partial=partial)

    assert 0 < size(tokens, partial=True) <= size(tokens) <= size(tokens + more)
    # A saved token costs what it takes in the cache, and its position in each of the caches.
    if model.architecture != "deepseek4" and tokens > (model.window or 0):
        grown = size(tokens + more) - size(tokens)
        growing = [cache for cache in model.caches if cache.cells == "context"]
        meta = 24 if model.architecture in ("bailingmoe3", "qwen2vl", "qwen35", "qwen4exp") else 12
        per_token = model.marginal_token_bytes(kind, kind) + meta * len(growing)
        assert grown == more * per_token
