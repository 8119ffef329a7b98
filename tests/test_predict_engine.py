"""The formula against the installed engine, on invented models of every architecture.

The engine loads a header without tensors (no_alloc), in a child process; the models differ from
the handed ones in depth, widths and patterns.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import predict_zoo
import pytest

from localkv.engines.dryrun import dry_run
from localkv.errors import UsageError
from localkv.model import read_model
from localkv.model.architectures import RULES
from localkv.predict.config import RunConfig
from localkv.predict.predict import predict

pytestmark = pytest.mark.engine

CONFIGS = (
    RunConfig(n_ctx=5000),
    RunConfig(n_ctx=8192, n_seq_max=4, kv_unified=True),
    RunConfig(n_ctx=8192, n_seq_max=2, swa_full=True, flash_attn="on", n_ubatch=256),
    RunConfig(n_ctx=4096, n_seq_max=4, flash_attn="off"),
    RunConfig(n_ctx=4096, n_seq_max=2, cache_type_k="q8_0", cache_type_v="q8_0"),
    RunConfig(n_ctx=4096, cache_type_k="q4_0", flash_attn="off"),
)
#: One of every kind: each memory, each pattern, each state.
KINDS = (
    "deepseek2",
    "deepseek4",
    "falcon-h1",
    "gemma3n",
    "gemma4",
    "glm-dsa",
    "hy_v4",
    "jamba",
    "kimi-linear",
    "lfm2",
    "llama4",
    "mamba2",
    "minimax-m3",
    "nanbeige",
    "openelm",
    "qwen4exp",
    "rwkv7",
    "smallthinker",
)
#: What the engine does not load from a header alone, or not alone at all.
NOT_ALONE = {
    "clip": "not a language model",
    "gptj": "the engine has only its name",
    "gemma4-assistant": "drafts for another model",
    "eagle3": "drafts for another model",
    "plm": "the invented widths do not fit its graph",
    "rwkv6": "the invented widths do not fit its graph",
    "rwkv6qwen2": "the invented widths do not fit its graph",
}
#: The engine's log has two decimals of a MiB.
PRINTED = 10_600


def compare(path: Path) -> None:
    shape = read_model(str(path))
    assert shape.rule == "exact", shape.notes
    compared = 0
    for config, plan in zip(CONFIGS, dry_run(path, CONFIGS).plans, strict=True):
        if plan.engine is None:
            if "GGML_ASSERT" in (plan.refused or ""):
                continue  # its graph does not fit these slots: nothing said about the cache
            with pytest.raises(UsageError):
                predict(shape, config)
            continue
        compared += 1
        estimate = predict(shape, config)
        caches = [cache for cache in estimate.caches if cache.kind != "state"]
        told = plan.engine["caches"]
        assert [(c.cells, c.streams, c.layers) for c in caches] == [
            (c["cells"], c["streams"], c["layers"]) for c in told
        ], config
        for cache, entry in zip(caches, told, strict=True):
            assert abs(cache.k_bytes - entry["k_bytes"]) < PRINTED, (config, cache, entry)
            assert abs(cache.v_bytes - entry["v_bytes"]) < PRINTED, (config, cache, entry)
        assert_state(estimate.to_dict()["recurrent"], plan.engine["recurrent"])
        assert abs(estimate.output_bytes - plan.engine["output_bytes"]) < PRINTED
        assert estimate.config["n_ctx"] == plan.engine["n_ctx"]
    assert compared >= 3


def assert_state(ours: dict[str, Any], told: list[dict[str, Any]]) -> None:
    for key in ("r_bytes", "s_bytes"):
        assert abs(ours[key] - sum(entry[key] for entry in told)) < PRINTED, (ours, told)


@pytest.mark.parametrize("architecture", KINDS)
def test_the_engine_agrees_on_one_model_of_every_kind(architecture: str, tmp_path: Path) -> None:
    keys = predict_zoo.metadata(architecture, seed=7, n_layer=16)
    compare(predict_zoo.write_header(tmp_path / "model.gguf", keys))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(RULES.keys() - NOT_ALONE.keys()))
def test_the_engine_agrees_on_every_architecture(architecture: str, tmp_path: Path) -> None:
    keys = predict_zoo.metadata(architecture, seed=11, n_layer=12)
    compare(predict_zoo.write_header(tmp_path / "model.gguf", keys))


def test_python_still_finds_the_package_of_a_loaded_engine() -> None:
    """Other libraries ask so whether it is installed; a bare package made that an exception."""
    program = (
        "from importlib.util import find_spec\n"
        "from localkv.engines.llamacpp import load_api\n"
        "before = find_spec('llama_cpp')\nload_api()\n"
        "print(find_spec('llama_cpp').origin == before.origin)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("True\n", "")
