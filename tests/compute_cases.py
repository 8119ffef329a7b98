"""Models of real sizes and of every architecture, and what the engine's dry run gives for them.

``data/compute_truth.json`` holds the compute buffers in bytes, by model, one per configuration;
null where the engine refuses. ``python tests/compute_cases.py`` asks the engine again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import predict_zoo

from localkv.model.architectures import RULES
from localkv.predict.config import RunConfig

TRUTH = Path(__file__).parent / "data" / "compute_truth.json"

CONFIGS = (
    RunConfig(n_ctx=4096),
    RunConfig(n_ctx=4096, n_outputs_max=1),
    RunConfig(n_ctx=8192, n_seq_max=4, n_outputs_max=4),
    RunConfig(n_ctx=5000, n_seq_max=3),
    RunConfig(n_ctx=8192, n_seq_max=2, flash_attn="off"),
    RunConfig(n_ctx=32768, n_outputs_max=1, flash_attn="off"),
    RunConfig(n_ctx=32768, n_seq_max=4, n_outputs_max=4, n_ubatch=2048, kv_unified=True),
    RunConfig(
        n_ctx=16384,
        n_seq_max=2,
        n_outputs_max=2,
        n_ubatch=128,
        swa_full=True,
        cache_type_k="q8_0",
        cache_type_v="q8_0",
    ),
    RunConfig(n_ctx=2048, n_ubatch=32),
)

LFM2_HEADS = [8 if block in (2, 5, 8, 10, 12, 14) else 0 for block in range(16)]
GRANITE_HEADS = [4 if block % 10 == 5 else 0 for block in range(40)]
SSM = {"conv_kernel": 4, "inner_size": 4096, "state_size": 128, "time_step_rank": 32}


def _keys(
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int | list[int],
    n_ff: int,
    n_vocab: int,
    head: int = 0,
    **others: Any,
) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": n_layer,
        "embedding_length": n_embd,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "feed_forward_length": n_ff,
        "context_length": 32768,
        "vocab_size": n_vocab,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
    }
    if head:
        names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        keys |= dict.fromkeys(names, head)
    return keys | {name.replace("__", "."): value for name, value in others.items()}


#: The sizes of models that people run: (architecture, keys).
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("llama", _keys(32, 4096, 32, 8, 14336, 128256)),
    "llama-3-70b": ("llama", _keys(80, 8192, 64, 8, 28672, 128256)),
    "qwen2.5-7b": ("qwen2", _keys(28, 3584, 28, 4, 18944, 152064)),
    "mixtral-8x7b": (
        "llama",
        _keys(32, 4096, 32, 8, 14336, 32000, expert_count=8, expert_used_count=2),
    ),
    "qwen3-30b-a3b": (
        "qwen3moe",
        _keys(
            *(48, 2048, 32, 4, 6144, 151936, 128),
            expert_count=128,
            expert_used_count=8,
            expert_feed_forward_length=768,
        ),
    ),
    "gemma-3-27b": (
        "gemma3",
        _keys(62, 5376, 32, 16, 21504, 262208, 128, attention__sliding_window=1024),
    ),
    "gpt-oss-20b": (
        "gpt-oss",
        _keys(
            *(24, 2880, 64, 8, 2880, 201088, 64),
            attention__sliding_window=128,
            expert_count=32,
            expert_used_count=4,
            expert_feed_forward_length=2880,
        ),
    ),
    "deepseek-v2-lite": (
        "deepseek2",
        _keys(
            *(27, 2048, 16, 1, 10944, 102400),
            attention__key_length=576,
            attention__value_length=512,
            attention__key_length_mla=192,
            attention__value_length_mla=128,
            attention__kv_lora_rank=512,
            rope__dimension_count=64,
            leading_dense_block_count=1,
            expert_count=64,
            expert_used_count=6,
            expert_shared_count=2,
            expert_feed_forward_length=1408,
            expert_weights_scale=1.0,
        ),
    ),
    "phi-3-mini": (
        "phi3",
        _keys(32, 3072, 32, 32, 8192, 32064, rope__scaling__original_context_length=4096),
    ),
    "qwen3-next-80b": (
        "qwen3next",
        _keys(
            *(48, 2048, 16, 2, 5120, 151936, 256),
            **{f"ssm__{name}": value for name, value in SSM.items()},
            ssm__group_count=16,
            expert_count=512,
            expert_used_count=10,
            expert_feed_forward_length=512,
            expert_shared_feed_forward_length=512,
        ),
    ),
    "mamba-2.8b": (
        "mamba",
        _keys(
            *(64, 2560, 0, 0, 0, 50280),
            ssm__conv_kernel=4,
            ssm__inner_size=5120,
            ssm__state_size=16,
            ssm__time_step_rank=160,
        ),
    ),
    "lfm2-1.2b": ("lfm2", _keys(16, 2048, 32, LFM2_HEADS, 8192, 65536, shortconv__l_cache=3)),
    "granite-4-h": (
        "granitehybrid",
        _keys(
            *(40, 1536, 12, GRANITE_HEADS, 512, 100352, 128),
            ssm__conv_kernel=4,
            ssm__inner_size=3072,
            ssm__state_size=128,
            ssm__time_step_rank=48,
            ssm__group_count=1,
            expert_count=64,
            expert_used_count=6,
            expert_shared_feed_forward_length=1024,
        ),
    ),
    "starcoder2-15b": ("starcoder2", _keys(32, 4608, 36, 4, 18432, 49152)),
}


def metadata(name: str) -> dict[str, Any]:
    """Return the metadata of a model of ``REAL``, or of an invented one of that architecture."""
    if name not in REAL:
        return predict_zoo.metadata(name, seed=1, n_layer=13)
    architecture, keys = REAL[name]
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        "tokenizer.ggml.model": "no_vocab",
    }


def _ask(name: str, folder: Path) -> list[int | None]:
    from localkv.engines.dryrun import dry_run

    path = predict_zoo.write_header(folder / f"{name}.gguf", metadata(name))
    plans = dry_run(path, CONFIGS).plans
    return [plan.engine["compute_bytes"] if plan.engine else None for plan in plans]


def main() -> None:
    """Ask the engine for every model and write its answers down."""
    from localkv.errors import LocalkvError

    answers: dict[str, list[int | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*REAL, *sorted(RULES)):
            try:
                answers[name] = _ask(name, Path(folder))
            except LocalkvError as error:
                print(f"{name}: {error.message}", file=sys.stderr)
    lines = [f"{json.dumps(name)}: {json.dumps(sizes)}" for name, sizes in answers.items()]
    TRUTH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
