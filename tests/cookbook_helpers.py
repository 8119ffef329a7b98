"""The models of docs/cookbook.md: round numbers that the field's worked examples use.

``python tests/cookbook_helpers.py`` writes them to docs/models; a test fails when they differ.
There are no weights: two small JSON files each, and a GGUF file that ends where its header does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf_helpers import STR, U32, Builder

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "docs" / "models"
GGUF = "llama-8b-q4.gguf"

#: Name -> (layers, hidden size, heads, KV heads, feed-forward, bytes of weights); head_dim is 128.
CONFIGS: dict[str, tuple[int, int, int, int, int, int]] = {
    "llama-8b": (32, 4096, 32, 8, 14336, 16_000_000_000),
    "mha-8b": (32, 4096, 32, 32, 11008, 16_000_000_000),
    "llama-70b": (80, 8192, 64, 8, 28672, 140_000_000_000),
}
HEAD_DIM, VOCABULARY, TRAINED = 128, 128_256, 131_072

F32, Q4_K, Q6_K = 0, 12, 14
#: Bytes of a block, elements in it.
_BLOCKS = {F32: (4, 1), Q4_K: (144, 256), Q6_K: (210, 256)}


def config(name: str) -> dict[str, Any]:
    """Return the config.json of a model."""
    layers, hidden, heads, kv_heads, feed_forward, _ = CONFIGS[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": feed_forward,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": TRAINED,
        "tie_word_embeddings": False,
    }


def index(name: str) -> dict[str, Any]:
    """Return the index of a model's weights, with their sum alone."""
    return {"metadata": {"total_size": CONFIGS[name][-1]}, "weight_map": {}}


def tensors() -> list[tuple[str, tuple[int, ...], int]]:
    """Return name, dimensions and type of every tensor of an 8B model in 4 bits."""
    layers, hidden, _, kv_heads, wide, _ = CONFIGS["llama-8b"]
    kv = kv_heads * HEAD_DIM
    found: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd.weight", (hidden, VOCABULARY), Q4_K)
    ]
    for block in range(layers):
        found += [
            (f"blk.{block}.{part}.weight", shape, kind)
            for part, shape, kind in (
                ("attn_norm", (hidden,), F32),
                ("attn_q", (hidden, hidden), Q4_K),
                ("attn_k", (hidden, kv), Q4_K),
                ("attn_v", (hidden, kv), Q6_K),
                ("attn_output", (hidden, hidden), Q4_K),
                ("ffn_norm", (hidden,), F32),
                ("ffn_gate", (hidden, wide), Q4_K),
                ("ffn_up", (hidden, wide), Q4_K),
                ("ffn_down", (wide, hidden), Q6_K),
            )
        ]
    return [
        *found,
        ("output_norm.weight", (hidden,), F32),
        ("output.weight", (hidden, VOCABULARY), Q6_K),
    ]


def size(shape: tuple[int, ...], kind: int) -> int:
    """Return the bytes of a tensor."""
    count = 1
    for dimension in shape:
        count *= dimension
    held, elements = _BLOCKS[kind]
    return count // elements * held


def header() -> bytes:
    """Return the GGUF header of the 8B model."""
    layers, hidden, heads, kv_heads, wide, _ = CONFIGS["llama-8b"]
    build = Builder()
    numbers = {
        "block_count": layers,
        "context_length": TRAINED,
        "embedding_length": hidden,
        "feed_forward_length": wide,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
        "vocab_size": VOCABULARY,
    }
    keys = [
        build.key("general.architecture", STR, "llama"),
        build.key("general.name", STR, "Llama 8B in 4 bits"),
        *(build.key(f"llama.{name}", U32, value) for name, value in numbers.items()),
        build.key("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
    ]
    infos, offset = [], 0
    for name, shape, kind in tensors():
        infos.append(build.tensor(name, shape, kind, offset))
        offset += -(-size(shape, kind) // 32) * 32
    return build.header(keys, infos)


def files() -> dict[Path, bytes]:
    """Return every file of docs/models with its content."""
    found = {MODELS / GGUF: header()}
    for name in CONFIGS:
        for file, content in (
            ("config.json", config(name)),
            ("model.safetensors.index.json", index(name)),
        ):
            found[MODELS / name / file] = (json.dumps(content, indent=1) + "\n").encode()
    return found


if __name__ == "__main__":
    for path, content in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
