"""The rule of every architecture that the engine knows: one row each.

A row follows ``load_arch_hparams`` in the named file below src/models of llama.cpp, its ``memory``
the branch of llama_model::create_memory in src/llama-model.cpp. What holds for every architecture
(KV heads, head widths, NextN blocks) is llama_model_base::load_hparams, carried out by
``hparams``. To check a row, open the file, look for ``swa``, ``recr``, ``mla`` and ``indexer``
in that function, and for the architecture's name in create_memory.

Rows are those of llama.cpp 0c1e57098 (bundled by llama-cpp-python 0.3.36); the names are
LLM_ARCH_NAMES in src/llama-arch.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from localkv.model.rules import Indexer, Recurrent, Rule, Sliding

#: The engine whose sources the table follows.
ENGINE = "llama.cpp 0c1e57098"

#: Attention in every block over all tokens, K and V, nothing else: architecture -> file.
_PLAIN = {
    "apertus": "apertus.cpp",
    "arcee": "arcee.cpp",
    "arctic": "arctic.cpp",
    "baichuan": "baichuan.cpp",
    "bailingmoe": "bailingmoe.cpp",
    "bailingmoe2": "bailingmoe2.cpp",
    "bloom": "bloom.cpp",
    "chameleon": "chameleon.cpp",
    "chatglm": "chatglm.cpp",
    "codeshell": "codeshell.cpp",
    "cogvlm": "cogvlm.cpp",
    "command-r": "command-r.cpp",
    "dbrx": "dbrx.cpp",
    "deepseek": "deepseek.cpp",
    "deepseek2-ocr": "deepseek2ocr.cpp",
    "dots1": "dots1.cpp",
    "ernie4_5": "ernie4-5.cpp",
    "ernie4_5-moe": "ernie4-5.cpp",
    "exaone": "exaone.cpp",
    "gemma": "gemma.cpp",
    "glm4": "glm4.cpp",
    "glm4moe": "glm4-moe.cpp",
    "gpt2": "gpt2.cpp",
    "gptneox": "gptneox.cpp",
    "granite": "granite.cpp",
    "granitemoe": "granite-moe.cpp",
    "grovemoe": "grovemoe.cpp",
    "hrm_text": "hrm-text.cpp",
    "hunyuan-dense": "hunyuan-vl.cpp",
    "hunyuan-moe": "hunyuan-moe.cpp",
    "hunyuan_vl": "hunyuan-vl.cpp",
    "hy_v3": "hy-v3.cpp",
    "internlm2": "internlm2.cpp",
    "jais": "jais.cpp",
    "jais2": "jais2.cpp",
    "maincoder": "maincoder.cpp",
    "minicpm": "minicpm.cpp",
    "minicpm3": "minicpm3.cpp",
    "minimax-m2": "minimax-m2.cpp",
    "mistral3": "mistral3.cpp",
    "mpt": "mpt.cpp",
    "nemotron": "nemotron.cpp",
    "olmo": "olmo.cpp",
    "olmoe": "olmoe.cpp",
    "openelm": "openelm.cpp",
    "orion": "orion.cpp",
    "paddleocr": "ernie4-5.cpp",
    "pangu-embedded": "pangu-embed.cpp",
    "phi2": "phi2.cpp",
    "phi3": "phi3.cpp",  # a declared window is set aside: swa_type NONE
    "phimoe": "phimoe.cpp",
    "plamo": "plamo.cpp",
    "plm": "plm.cpp",
    "pockettts": "pockettts.cpp",
    "qwen": "qwen.cpp",
    "qwen2": "qwen2.cpp",
    "qwen2moe": "qwen2moe.cpp",
    "qwen2vl": "qwen2vl.cpp",
    "qwen3": "qwen3.cpp",
    "qwen3moe": "qwen3moe.cpp",
    "qwen3tts": "qwen3vl.cpp",
    "qwen3vl": "qwen3vl.cpp",
    "qwen3vlmoe": "qwen3vlmoe.cpp",
    "refact": "refact.cpp",
    "seed_oss": "seed-oss.cpp",
    "smollm3": "smollm3.cpp",
    "stablelm": "stablelm.cpp",
    "starcoder": "starcoder.cpp",
    "starcoder2": "starcoder2.cpp",
    "t5": "t5.cpp",
    "t5encoder": "t5encoder.cpp",
    "talkie": "talkie.cpp",
    "xverse": "xverse.cpp",
}

#: No cache at all (encoders; diffusion models): create_memory returns nullptr.
_NO_CACHE = {
    "bert": "bert.cpp",
    "eurobert": "eurobert.cpp",
    "jina-bert-v2": "jina-bert-v2.cpp",
    "jina-bert-v3": "jina-bert-v3.cpp",
    "modern-bert": "modern-bert.cpp",
    "neo-bert": "neo-bert.cpp",
    "nomic-bert": "nomic-bert.cpp",
    "nomic-bert-moe": "nomic-bert-moe.cpp",
}

_LISTED = Sliding()  # the header lists the sliding blocks and gives the window
_ZERO_HEADS = "no kv heads"

_ROWS = {
    # One attention cache, with something to know about it.
    "bitnet": Rule("bitnet.cpp", ties=False),
    "deci": Rule("deci.cpp", rot_is_head=True),
    "falcon": Rule("falcon.cpp", rot_is_head=True),
    "gptj": Rule("", memory="unsupported"),
    "graniteswitch": Rule("granite-switch.cpp", router=True),
    "grok": Rule("grok.cpp", flash_attn=False),
    "llama": Rule("llama.cpp", rot_is_head=True),
    "llama-embed": Rule("llama.cpp", rot_is_head=True),
    "nanbeige": Rule("nanbeige.cpp", repeat_key="num_loops"),
    "eagle3": Rule("eagle3.cpp", companion="embeddings"),
    # K alone (MLA).
    "deepseek2": Rule("deepseek2.cpp", mla="optional"),
    "mistral4": Rule("deepseek2.cpp", mla="optional"),
    # Sliding windows.
    "afmoe": Rule("afmoe.cpp", sliding=Sliding(4, window="optional")),
    "cohere2": Rule("cohere2.cpp", sliding=Sliding(4)),
    "cohere2moe": Rule("cohere2moe.cpp", sliding=Sliding(4, full_first=True)),
    "exaone-moe": Rule("exaone-moe.cpp", sliding=Sliding(4)),
    "exaone4": Rule(
        "exaone4.cpp", sliding=Sliding(4, window="default", width=4096, only_n_layer=64)
    ),
    "gemma2": Rule("gemma2.cpp", sliding=Sliding(2, window="default", width=4096)),
    "gemma3": Rule("gemma3.cpp", sliding=Sliding(6, window="optional")),
    "gemma3n": Rule("gemma3n.cpp", sliding=Sliding(5), kv_from_start=20),
    "gemma4": Rule("gemma4.cpp", sliding=_LISTED, shared_key="attention.shared_kv_layers"),
    "gemma4-assistant": Rule("gemma4-assistant.cpp", sliding=_LISTED, companion="always"),
    "gpt-oss": Rule("openai-moe.cpp", sliding=Sliding(2)),
    "granite_swa": Rule("granite-swa.cpp", sliding=_LISTED),
    "laguna": Rule("laguna.cpp", sliding=Sliding(4, full_first=True, window="optional")),
    "llama4": Rule("llama4.cpp", sliding=Sliding(4, window="unless zero", fixed=8192)),
    "maple": Rule("maple.cpp", sliding=_LISTED),
    "mellum": Rule("mellum.cpp", sliding=Sliding(4, window="optional")),
    "mimo2": Rule("mimo2.cpp", sliding=_LISTED),
    "muse-glimmer": Rule("muse-glimmer.cpp", sliding=Sliding(4)),
    "olmo2": Rule("olmo2.cpp", sliding=Sliding(4, window="optional")),
    "plamo3": Rule("plamo3.cpp", sliding=Sliding(8, window="optional")),
    "smallthinker": Rule(
        "smallthinker.cpp", sliding=Sliding(4, full_first=True, window="optional", fixed=4096)
    ),
    "spark2_5": Rule("spark2-5.cpp", sliding=_LISTED),
    "step35": Rule("step35.cpp", sliding=_LISTED),
    "dflash": Rule(
        "dflash.cpp",
        sliding=Sliding(window="optional"),
        companion="embeddings",
        where=(  # drafts for DeepSeek V4
            "hyper_connection.count",
            Rule(
                "dflash.cpp",
                memory="kv all blocks",
                sliding=Sliding(0, listed=False),
                companion="embeddings",
            ),
        ),
    ),
    # No cache, and more to say than that.
    "dream": Rule("dream.cpp", memory="none", causal=False),
    "gemma-embedding": Rule("gemma-embedding.cpp", memory="none", causal=False),
    "llada": Rule("llada.cpp", memory="none", causal=False),
    "llada-moe": Rule("llada-moe.cpp", memory="none", causal=False),
    "rnd1": Rule("rnd1.cpp", memory="none", causal=False),
    "wavtokenizer-dec": Rule(
        "wavtokenizer-dec.cpp",
        memory="none",
        embd_keys=("features_length", "embedding_length"),
        ties=False,
    ),
    # Recurrent throughout.
    "arwkv7": Rule("arwkv7.cpp", memory="recurrent", recurrent=Recurrent("all", "wkv")),
    "mamba": Rule("mamba.cpp", memory="recurrent", recurrent=Recurrent("all", "ssm1")),
    "mamba2": Rule("mamba2.cpp", memory="recurrent", recurrent=Recurrent("all", "ssm")),
    "rwkv6": Rule("rwkv6.cpp", memory="recurrent", recurrent=Recurrent("all", "wkv")),
    "rwkv6qwen2": Rule("rwkv6qwen2.cpp", memory="recurrent", recurrent=Recurrent("all", "wkv")),
    "rwkv7": Rule("rwkv7.cpp", memory="recurrent", recurrent=Recurrent("all", "wkv")),
    # Attention in some blocks, state in the others.
    "bailingmoe3": Rule(
        "bailingmoe3.cpp", memory="hybrid", recurrent=Recurrent(_ZERO_HEADS, "kda"), mla="required"
    ),
    "granitehybrid": Rule(
        "granite-hybrid.cpp", memory="hybrid", recurrent=Recurrent(_ZERO_HEADS, "ssm")
    ),
    "jamba": Rule("jamba.cpp", memory="hybrid", recurrent=Recurrent(_ZERO_HEADS, "ssm1")),
    "kimi-k3": Rule(
        "kimi-k3.cpp",
        memory="hybrid",
        recurrent=Recurrent(_ZERO_HEADS, "kda"),
        mla="required",
        v_head_key="attention.kv_lora_rank",
    ),
    "kimi-linear": Rule(
        "kimi-linear.cpp", memory="hybrid", recurrent=Recurrent(_ZERO_HEADS, "kda"), mla="required"
    ),
    "lfm2": Rule(
        "lfm2.cpp",
        memory="hybrid",
        recurrent=Recurrent(_ZERO_HEADS, "shortconv"),
        sliding=Sliding(window="optional", attention_only=True),
        norm_of_output=True,
    ),
    "lfm2moe": Rule(
        "lfm2moe.cpp",
        memory="hybrid",
        recurrent=Recurrent(_ZERO_HEADS, "shortconv"),
        norm_of_output=True,
    ),
    "minimax-01": Rule(
        "minimax-01.cpp", memory="hybrid trunk", recurrent=Recurrent("interval", "lightning", 8)
    ),
    "nemotron_h": Rule(
        "nemotron-h.cpp",
        memory="hybrid no ff",
        recurrent=Recurrent("no kv heads, no ff", "ssm"),
    ),
    "nemotron_h_moe": Rule(
        "nemotron-h.cpp",
        memory="hybrid no ff",
        recurrent=Recurrent("no kv heads, no ff", "ssm"),
    ),
    "plamo2": Rule(
        "plamo2.cpp",
        memory="hybrid",
        recurrent=Recurrent(_ZERO_HEADS, "ssm"),
        head_keys_always=True,
    ),
    "qwen3next": Rule(
        "qwen3next.cpp", memory="hybrid trunk", recurrent=Recurrent("interval", "ssm", 4)
    ),
    "qwen35": Rule("qwen35.cpp", memory="hybrid trunk", recurrent=Recurrent("interval", "ssm", 4)),
    "qwen35moe": Rule(
        "qwen35moe.cpp", memory="hybrid trunk", recurrent=Recurrent("interval", "ssm", 4)
    ),
    # Attention and state side by side in every block.
    "falcon-h1": Rule("falcon-h1.cpp", memory="hybrid beside", recurrent=Recurrent("all", "ssm")),
    # Sparse attention: an indexer's cache beside the main one.
    "deepseek32": Rule("deepseek32.cpp", memory="dsa", mla="optional", indexer=Indexer()),
    "dots3note": Rule(
        "dots3note.cpp",
        memory="dsa iswa",
        sliding=_LISTED,
        mla="required",
        indexer=Indexer("typed"),
    ),
    "glm-dsa": Rule(
        "glm-dsa.cpp", memory="dsa", mla="optional", indexer=Indexer("typed", "glm 5.2")
    ),
    "glm5-next": Rule(
        "glm5-next.cpp",
        memory="hybrid indexer",
        recurrent=Recurrent(_ZERO_HEADS, "kda"),
        mla="required",
        v_head_key="attention.kv_lora_rank",
        indexer=Indexer("typed", "all", pool_key="attention.indexer.kpool"),
    ),
    "hy_v4": Rule(
        "hy-v4.cpp",
        memory="kv all blocks",
        mla="required",
        where=(
            "attention.indexer.top_k",
            Rule("hy-v4.cpp", memory="dsa all blocks", mla="required", indexer=Indexer("typed")),
        ),
    ),
    "minimax-m3": Rule("minimax-m3.cpp", memory="msa", indexer=Indexer("after dense lead")),
    "qwen4exp": Rule(
        "qwen4exp.cpp",
        memory="hybrid indexer",
        recurrent=Recurrent("interval", "ssm", 4),
        indexer=Indexer(),
        embd_out_key="hyper_connection.count",
        per_layer_embedding=True,
    ),
    # Compressed caches with states of their own.
    "deepseek4": Rule(
        "deepseek4.cpp",
        memory="dsv4",
        sliding=Sliding(0, listed=False),
        indexer=Indexer(),
        nextn_probe="nextn.eh_proj.weight",
        embd_out_key="hyper_connection.count",
    ),
    # Not a language model: the projector of a vision or audio model.
    "clip": Rule("clip.cpp", memory="unsupported", companion="projector"),
}

#: Files whose load_arch_tensors skips the NextN/MTP blocks (TENSOR_SKIP) unless MTP is asked for.
_NEXTN_LEFT_OUT = frozenset(
    {
        "bailingmoe2.cpp",
        "bailingmoe3.cpp",
        "cohere2moe.cpp",
        "deepseek2.cpp",
        "deepseek32.cpp",
        "deepseek4.cpp",
        "dots3note.cpp",
        "exaone-moe.cpp",
        "exaone4.cpp",
        "glm-dsa.cpp",
        "glm4-moe.cpp",
        "glm4.cpp",
        "glm5-next.cpp",
        "hy-v3.cpp",
        "mimo2.cpp",
        "nemotron-h.cpp",
        "qwen35.cpp",
        "qwen35moe.cpp",
        "qwen3next.cpp",
        "step35.cpp",
    }
)


class _Rules(Mapping[str, Rule]):
    """The rows by architecture; the full rule is made when it is asked for, one in a run."""

    def __getitem__(self, architecture: str) -> Rule:
        rule = _ROWS.get(architecture)
        if rule is None and architecture in _NO_CACHE:
            rule = Rule(_NO_CACHE[architecture], memory="none", ties=False)
        if rule is None:
            rule = Rule(_PLAIN[architecture])
        return rule._replace(nextn_loaded=rule.file not in _NEXTN_LEFT_OUT)

    def __iter__(self) -> Iterator[str]:
        return iter((*_PLAIN, *_NO_CACHE, *_ROWS))

    def __len__(self) -> int:
        return len(_PLAIN) + len(_NO_CACHE) + len(_ROWS)


RULES = _Rules()
