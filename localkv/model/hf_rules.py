"""The rules of Hugging Face model types: layout of the layers, state, attention, as data.

One row per model type of transformers. A row can be checked in a minute: ``layout`` against the
type's ``configuration_*.py`` (what it computes for ``layer_types``), ``state`` against the cache
its modeling file makes, ``mla`` against whether the cache holds the compressed latent, as vLLM
decides it (transformers_utils/model_arch_config_convertor.py, is_deepseek_mla).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HfRule:
    """How a model type lays out what it caches.

    ``layout`` is a key of ``hf_layouts.LAYOUTS``; ``state`` of ``hf_states.STATES``; ``heads`` a
    key of ``hf_attention.HEADS``. ``mla``: K is the latent of kv_lora_rank + qk_rope_head_dim,
    there is no V.
    """

    layout: str = "full"
    state: str = ""
    heads: str = "plain"
    mla: bool = False


_PLAIN = """
apertus arcee aria_text bitnet cohere diffllama ernie4_5 ernie4_5_moe exaone flex_olmo gemma glm
glm4 glm4_moe granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
hyperclovax internlm2 internlm3 jais2 laguna minimax_m2 ministral3 nanochat nemotron olmo olmo2
olmoe openelm orion phi phimoe qwen qwen2_5_vl_text qwen2_vl_text qwen3_vl_moe_text
qwen3_vl_text seed_oss solar_open stablelm baichuan chatglm
"""

#: As many KV heads as heads, whatever else the file says.
_MULTI_HEAD = """
bart biogpt bloom codegen gpt2 gpt_neo gpt_neox gpt_neox_japanese gptj marian mbart mt5 opt pegasus
persimmon t5 umt5 whisper xglm
"""

_MLA = """
deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2
"""

RULES: dict[str, HfRule] = {
    **{name: HfRule() for name in _PLAIN.split()},
    **{name: HfRule(heads="multi-head") for name in _MULTI_HEAD.split()},
    **{name: HfRule(mla=True) for name in _MLA.split()},
    "llama": HfRule(),
    "dbrx": HfRule(heads="dbrx"),
    "mpt": HfRule(heads="mpt"),
    "falcon": HfRule(heads="falcon"),
    "gpt_bigcode": HfRule(heads="bigcode"),
    "minicpm3": HfRule(heads="expanded mla"),
    "longcat_flash": HfRule("twice", mla=True),
    "mistral": HfRule("sliding"),
    "mixtral": HfRule("sliding"),
    "ministral": HfRule("sliding"),
    "phi3": HfRule("sliding"),
    "phi4_multimodal": HfRule("sliding"),
    "starcoder2": HfRule("sliding"),
    "qwen2": HfRule("late window"),
    "qwen2_moe": HfRule("late window"),
    "qwen3": HfRule("late window"),
    "qwen3_moe": HfRule("late window"),
    "smollm3": HfRule("late window"),
    "dots1": HfRule("late window"),
    "gemma2": HfRule("every 2"),
    "vaultgemma": HfRule("every 2"),
    "gpt_oss": HfRule("every 2"),
    "cohere2": HfRule("every 4"),
    "olmo3": HfRule("every 4"),
    "exaone4": HfRule("every 4"),
    "exaone_moe": HfRule("every 4"),
    "afmoe": HfRule("every 4 global"),
    "gemma3_text": HfRule("every 6"),
    "gemma3n_text": HfRule("every 5"),
    "gemma4_text": HfRule("gemma4", heads="gemma4"),
    "gemma4_unified_text": HfRule("gemma4", heads="gemma4"),
    "cohere2_moe": HfRule("every 4"),
    "cwm": HfRule("first of 4"),
    "granite_swa": HfRule("first of 4"),
    "granitemoe_swa": HfRule("first of 4"),
    "llama4_text": HfRule("llama4"),
    "modernbert-decoder": HfRule("every 3"),
    "mamba": HfRule("recurrent", "mamba"),
    "falcon_mamba": HfRule("recurrent", "mamba"),
    "mamba2": HfRule("recurrent", "mamba2"),
    "jamba": HfRule("jamba", "jamba"),
    "bamba": HfRule("bamba", "bamba"),
    "granitemoehybrid": HfRule("recurrent", "bamba"),
    "falcon_h1": HfRule("both", "bamba"),
    "nemotron_h": HfRule("nemotron_h", "nemotron_h"),
    "zamba": HfRule("zamba", "zamba", heads="zamba"),
    "zamba2": HfRule("zamba2", "zamba2", heads="zamba"),
    "lfm2": HfRule("lfm2", "short_conv"),
    "lfm2_moe": HfRule("lfm2", "short_conv"),
    "qwen3_next": HfRule("interval", "gated_delta"),
    "qwen3_5_text": HfRule("interval", "gated_delta"),
    "qwen3_5_moe_text": HfRule("interval", "gated_delta"),
    "olmo_hybrid": HfRule("interval", "gated_delta"),
    "kimi_linear": HfRule("kimi", "kimi_delta", mla=True),
    "minimax": HfRule("minimax", "lightning"),
    "recurrent_gemma": HfRule("griffin", "griffin"),
}

_ENCODERS = """
albert bert camembert convbert deberta deberta-v2 distilbert electra ernie esm eurobert flaubert
gte layoutlm layoutlmv3 longformer luke modernbert mobilebert mpnet new nomic_bert nystromformer
roberta roberta-prelayernorm roformer squeezebert xlm xlm-roberta xlm-roberta-xl xlnet xmod
bert_generation clip_text_model siglip_text_model
"""

#: Encoders: nothing is kept from token to token.
ENCODERS = frozenset(_ENCODERS.split())
