"""Invented models of every architecture: headers that the engine loads without any tensor.

A header holds every key that any architecture asks for, since the engine reads those it knows;
``OVERRIDES`` are the few that must differ. Depths and widths are parameters, so that patterns show.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10

ZERO_HEADS = {
    "plamo2",
    "jamba",
    "nemotron_h",
    "nemotron_h_moe",
    "granitehybrid",
    "lfm2",
    "lfm2moe",
    "kimi-linear",
    "bailingmoe3",
    "kimi-k3",
    "glm5-next",
}
MLA = {
    "deepseek2",
    "deepseek32",
    "glm-dsa",
    "dots3note",
    "kimi-linear",
    "bailingmoe3",
    "kimi-k3",
    "glm5-next",
    "hy_v4",
    "mistral4",
}
LISTED = {
    "cohere2moe",
    "mimo2",
    "step35",
    "spark2_5",
    "muse-glimmer",
    "granite_swa",
    "dots3note",
    "maple",
    "gemma4",
    "gemma4-assistant",
    "dflash",
}
#: As many KV heads as heads.
EVEN_HEADS = {
    "bloom",
    "deepseek2-ocr",
    "dots1",
    "gptneox",
    "jina-bert-v2",
    "minicpm3",
    "olmoe",
    "plm",
    "t5",
    "t5encoder",
}


class U64s(list[int]):
    """A list of 64-bit integers."""


class Booleans(list[bool]):
    """A list of truth values."""


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def encode(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    head = struct.pack("<I", ARRAY)
    if isinstance(value, U64s):
        return head + struct.pack(f"<IQ{len(value)}Q", U64, len(value), *value)
    if isinstance(value, Booleans):
        return head + struct.pack(f"<IQ{len(value)}B", BOOL, len(value), *value)
    if value and isinstance(value[0], str):
        return head + struct.pack("<IQ", STRING, len(value)) + b"".join(map(text, value))
    if value and isinstance(value[0], float):
        return head + struct.pack(f"<IQ{len(value)}f", F32, len(value), *value)
    return head + struct.pack(f"<IQ{len(value)}I", U32, len(value), *value)


def write_header(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file of these keys and no tensor."""
    body = b"".join(text(key) + encode(value) for key, value in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + body)
    return path


def metadata(
    architecture: str, *, seed: int = 0, n_layer: int = 13, nextn: int = 0
) -> dict[str, Any]:
    """Return the metadata of an invented model, different for every ``seed``.

    ``nextn`` of the ``n_layer`` blocks are NextN/MTP blocks.
    """
    dice = random.Random(f"{architecture} {seed}")
    keys = _common(architecture, dice, n_layer)
    keys.update(_attention(architecture, dice, keys))
    keys.update(_special(architecture, dice, keys))
    if nextn:
        keys["nextn_predict_layers"] = nextn
        types = keys.get("attention.indexer.types")
        if types:
            keys["attention.indexer.types"] = types[:-nextn]
    result: dict[str, Any] = {"general.architecture": architecture}
    result.update({f"{architecture}.{key}": value for key, value in keys.items()})
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        result[f"xielu.{name}"] = 0.5
    n_vocab = keys["vocab_size"]
    result["tokenizer.ggml.token_type_count"] = 2
    result["tokenizer.ggml.model"] = "test"
    result["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(n_vocab)]
    result["tokenizer.ggml.scores"] = [0.0] * n_vocab
    return result


def _common(architecture: str, dice: random.Random, n_layer: int) -> dict[str, Any]:
    n_head = dice.choice((2, 4, 8))
    n_embd = n_head * (64 if "rwkv" in architecture else dice.choice((32, 64, 96)))
    n_vocab = 3072 if architecture == "qwen3tts" else dice.choice((128, 500))
    if architecture == "chameleon":
        n_vocab = 10240
    return {
        "vocab_size": n_vocab,
        "context_length": dice.choice((256, 4096)),
        "embedding_length": n_embd,
        "attention.head_count": n_head,
        "features_length": n_embd,
        "block_count": n_layer,
        "leading_dense_block_count": 1,
        "feed_forward_length": 384,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "time_mix_extra_dim": 64,
        "time_decay_extra_dim": 128,
        "full_attention_interval": dice.choice((2, 3, 4)),
        "expert_feed_forward_length": 384,
        "expert_shared_feed_forward_length": 192,
        "expert_latent_length": 384,
        "interleave_moe_layer_step": 2,
        "expert_count": 2,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_group_scale": 1.0,
        "experts_per_group": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "moe_every_n_layers": 2,
        "posnet.embedding_length": n_embd,
        "posnet.block_count": 6,
        "convnext.embedding_length": n_embd,
        "convnext.block_count": n_layer,
        "swiglu_clamp_exp": 7.0,
        "residual_scale": 3.5,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "target_layers": [1, 2, 3],
        "target_hidden_size": n_embd,
        "adapters.count": 1,
        "adapters.lora_rank": 8,
        "adapters.token_ids_activate": [3],
        "adapters.token_ids_substitute": [4],
    }


def _attention(architecture: str, dice: random.Random, common: dict[str, Any]) -> dict[str, Any]:
    n_layer, n_embd = common["block_count"], common["embedding_length"]
    n_head = common["attention.head_count"]
    n_head_kv = n_head if architecture in EVEN_HEADS else dice.choice((1, 2))
    keys: dict[str, Any] = {
        "attention.head_count_kv": n_head_kv,
        "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": 1.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.group_norm_epsilon": 1e-5,
        "attention.group_norm_groups": 8,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 512,
        "attention.relative_buckets_count": 8,
        "attention.sliding_window": dice.choice((32, 100, 512)),
        "attention.decay_lora_rank": 32,
        "attention.iclr_lora_rank": 32,
        "attention.value_residual_mix_lora_rank": 32,
        "attention.gate_lora_rank": 32,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
        "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.local_blocks": 1,
        "rope.dimension_sections": [n_embd // n_head // 4] * 4,
        "ssm.inner_size": 2 * n_embd,
        "ssm.conv_kernel": 4,
        "ssm.state_size": dice.choice((64, 128)),
        "ssm.time_step_rank": n_head,
        "ssm.group_count": 0 if architecture == "plamo2" else 2,
        "kda.head_dim": 128,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "wkv.head_size": n_embd // n_head,
        "shortconv.l_cache": dice.choice((3, 4)),
    }
    if architecture in ZERO_HEADS:
        heads = [n_head if il == 0 or dice.random() < 0.5 else 0 for il in range(n_layer)]
        heads[1] = 0
        keys["attention.head_count_kv"] = heads
        keys["attention.head_count"] = n_head if architecture == "glm5-next" else heads
    if architecture in LISTED:
        pattern = [dice.randint(0, 1) for _ in range(n_layer)]
        pattern[:2] = [0, 1]
        keys["attention.sliding_window_pattern"] = pattern
    elif dice.random() < 0.4:
        keys["attention.sliding_window_pattern"] = dice.choice((2, 3))
    return keys


def _special(architecture: str, dice: random.Random, keys: dict[str, Any]) -> dict[str, Any]:
    n_layer, n_embd = keys["block_count"], keys["embedding_length"]
    changed: dict[str, Any] = {}
    if architecture in MLA:
        rank = 512
        changed |= {
            "attention.key_length": rank if architecture == "glm5-next" else rank + 64,
            "attention.value_length": rank,
            "rope.dimension_count": 0 if architecture == "glm5-next" else 64,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
        }
        if architecture not in ZERO_HEADS:
            changed["attention.head_count_kv"] = 1
        else:
            changed["attention.head_count_kv"] = [
                min(n, 1) for n in keys["attention.head_count_kv"]
            ]
    if architecture in ("bailingmoe3", "kimi-k3", "kimi-linear", "glm5-next"):
        n_head = (
            max(keys["attention.head_count"])
            if isinstance(keys["attention.head_count"], list)
            else keys["attention.head_count"]
        )
        changed["attention.head_count"] = n_head
    if architecture == "bailingmoe3":
        changed["rope.dimension_sections"] = [8, 12, 12, 0]
        changed["swiglu_clamp_exp"] = [0.0] * n_layer
        changed["swiglu_clamp_shexp"] = [0.0] * n_layer
    if architecture == "dots3note":
        changed |= {
            "attention.kv_lora_rank_swa": 256,
            "attention.key_length_swa": 256 + 64,
            "attention.value_length_swa": 256,
            "attention.key_length_mla_swa": 192,
            "attention.value_length_mla_swa": 128,
            "rope.freq_base_swa": 10000.0,
            "attention.indexer.types": [
                int(not s) for s in keys["attention.sliding_window_pattern"]
            ],
        }
    if architecture == "hy_v4":
        types = [dice.randint(0, 1) for _ in range(n_layer)]
        changed["attention.indexer.types"] = [1, *types[1:]]
        changed |= {
            "hyper_connection.count": 4,
            "hyper_connection.epsilon": 1e-6,
            "hyper_connection.magnitude": 2.0,
        }
    if architecture == "glm-dsa":
        if dice.random() < 0.5:
            changed["context_length"] = 1048576
        else:
            types = [dice.randint(0, 1) for _ in range(n_layer)]
            changed["attention.indexer.types"] = [1, *types[1:]]
    if architecture == "minimax-m3":
        changed["rope.dimension_count"] = 32
        changed["attention.indexer.head_count"] = keys["attention.head_count_kv"]
        changed["leading_dense_block_count"] = 3
    if architecture in ("qwen4exp", "glm5-next"):
        changed |= {
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hyper_connection.low_rank": 8,
            "attention.compress_ratios": [4] * n_layer,
            "ple.layers": [0],
            "ple.ngram_size": 3,
            "ple.heads_per_ngram": 2,
            "ple.conv_kernel": 4,
            "ple.eos_token_id": 0,
            "embedding_length_per_layer_input": n_embd // 4,
            "ple.layer_multipliers": U64s([1, 3, 5]),
            "ple.head_offsets": U64s([i * keys["vocab_size"] for i in range(4)]),
            "ple.head_vocab_sizes": U64s([keys["vocab_size"]] * 4),
        }
    if architecture == "qwen4exp":
        changed["attention.indexer.key_length"] = n_embd // keys["attention.head_count"]
    if architecture in ("qwen3next", "qwen35", "qwen35moe", "qwen4exp"):
        changed["ssm.state_size"] = 128
        changed["ssm.inner_size"] = 256
        changed["ssm.time_step_rank"] = 2
        changed["ssm.group_count"] = 2
    if architecture == "deepseek4":
        changed |= {
            "embedding_length": 512,
            "feed_forward_length": 1024,
            "attention.head_count": 8,
            "attention.head_count_kv": 1,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.dimension_count": 32,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": [(0, 4, 128)[dice.randrange(3)] for _ in range(n_layer)],
            "attention.compress_rope_freq_base": 160000.0,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hash_layer_count": 0,
            "expert_gating_func": 4,
        }
    if architecture == "hrm_text":
        changed |= {
            "block_count": 12,
            "hrm.layers_per_stack": 2,
            "hrm.h_cycles": 2,
            "hrm.l_cycles": 2,
        }
    if architecture == "gemma3n":
        changed["block_count"] = 25
        changed["attention.sliding_window_pattern"] = 5
    if architecture in ("gemma4", "gemma4-assistant"):
        pattern = [int(il % 5 != 4) for il in range(n_layer)]
        shared = n_layer - 10 if n_layer >= 10 else 0
        changed |= {
            "embedding_length_per_layer_input": n_embd // 2,
            "attention.shared_kv_layers": shared,
            "attention.key_length_swa": 64,
            "attention.value_length_swa": 64,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "rope.freq_base_swa": 10000.0,
            "attention.sliding_window_pattern": Booleans(bool(p) for p in pattern),
        }
    if architecture in ("nemotron_h", "nemotron_h_moe"):
        heads = keys["attention.head_count_kv"]
        changed["feed_forward_length"] = [0 if n or dice.random() < 0.5 else 384 for n in heads]
        changed["feed_forward_length"][0:3] = [0, 0, 384]
        changed["attention.head_count_kv"] = [*heads[:2], 0, *heads[3:]]
        changed["attention.head_count"] = changed["attention.head_count_kv"]
    if architecture in ("arwkv7", "rwkv6qwen2"):
        changed["token_shift_count"] = 1
    if architecture in ("minicpm3", "plm"):
        changed |= {
            "attention.key_length": 96,
            "attention.value_length": 64,
            "rope.dimension_count": 32,
            "attention.kv_lora_rank": 128,
        }
    if architecture == "nanbeige":
        changed["num_loops"] = 2
    if architecture == "openelm":
        changed["attention.head_count"] = [4 + 4 * (il % 3) for il in range(n_layer)]
        changed["attention.head_count_kv"] = [1 + il % 3 for il in range(n_layer)]
        changed["attention.key_length"] = 64
        changed["attention.value_length"] = 64
        changed["feed_forward_length"] = [384 + 32 * (il % 4) for il in range(n_layer)]
    if architecture == "deci":
        changed["attention.head_count_kv"] = [il % 3 for il in range(n_layer)]
    if architecture == "step35":
        changed["rope.dimension_count"] = 32
    if architecture == "llama4":
        changed["block_count"] = 12
    return changed
