"""How each architecture's blocks are put together: what differs from a plain transformer.

Every architecture is a plain transformer (a norm before each part, separate Q, K and V, a gated
feed-forward part) but for the traits that name it here. To check one, open the architecture's file
below src/models of llama.cpp and read the loop over the blocks in its graph.
"""

from __future__ import annotations

from functools import cache


class Family:
    """The structure of an architecture's graph; the words are those of ``compute_recipes``.

    ``experts``: "all" blocks have them, those "after lead" (leading_dense_block_count), "every"
    interleave_moe_layer_step-th block, "alternate" ones (moe_every_n_layers), or none ("").
    ``gated``: experts have a gate; ``shared``: shared experts beside them; ``merged``: one matrix
    for gate and up; ``biased``: the choice of experts has a bias.
    ``state`` is the recipe of blocks that keep a state; ``beside``: attention in the same block.
    ``choice``: how an indexer chooses tokens ("tokens", "pools", "pooled", "blocks",
    "compressed"). ``per_layer``: a second embedding for every block; ``bias``: attention has a
    bias per pair of positions; ``cached`` False: K and V are not read from the cache.
    ``outputs``: the rows whose logits are asked for are picked "after" the last block, or "all"
    rows go on; otherwise they are picked before its feed-forward part. ``logits``: how many
    tensors of logits there are. ``positions``: numbers per token of the positions' input.
    ``low`` and ``high`` bound the truth as shares of the estimate.
    """

    def __init__(self, architecture: str) -> None:
        def of(traits: dict[str, str], default: str = "") -> str:
            names = (name for name, those in traits.items() if architecture in those.split())
            return next(names, default)

        def has(names: str) -> bool:
            return architecture in names.split()

        self.layout = of(_LAYOUT, "pre")
        self.projections = of(_PROJECTIONS)
        self.dense = of(_DENSE, "gated")
        self.experts = of(_EXPERTS)
        self.gated = not has("nomic-bert-moe nemotron_h_moe")
        self.shared = has(_SHARED)
        self.merged = has(_MERGED)
        self.biased = has(_BIASED)
        # A config.json has names of its own: its recurrent blocks are taken for the commonest.
        self.state = of(_STATE, "mamba2")
        self.beside = has("falcon-h1")
        self.choice = of(_CHOICE)
        self.per_layer = has("gemma3n gemma4")
        self.bias = has("t5 t5encoder")
        self.cached = not has("llama-embed t5encoder")
        self.outputs = of(_OUTPUTS)
        self.logits = 0 if has(_NO_LOGITS) else 2 if has("chameleon") else 1
        self.positions = 4 if has(_FOUR_POSITIONS) else 1
        self.low, self.high = _ROUGH_BAND if has(_ROUGH) else _BAND


_LAYOUT = {
    "parallel": "phi2 plamo gptj",
    "falcon": "falcon",
    "cohere": "cohere2 cohere2moe command-r",
    "if parallel": "gptneox stablelm",
    "post": "olmo2 exaone4 bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe",
    "altup": "gemma3n",
    "streams": "deepseek4 glm5-next hy_v4 qwen4exp",
}
_PROJECTIONS = {
    "fused": "bailingmoe2 cogvlm dbrx falcon gptneox graniteswitch modern-bert neo-bert openelm "
    "plamo2 plamo3 qwen",
    "fused, no rope": "bloom gpt2 jais mpt starcoder",
    "no rope": "baichuan refact jamba jina-bert-v2 nemotron_h nemotron_h_moe",
    "gated": "qwen3next qwen35 qwen35moe qwen4exp",
}
_DENSE = {
    "plain": "arcee bert bloom codeshell falcon gpt2 gptneox jais2 mpt nemotron phi2 "
    "plm pockettts starcoder starcoder2 t5 t5encoder apertus nemotron_h nemotron_h_moe "
    "jina-bert-v3 nomic-bert-moe",
    "fused": "chatglm glm4 phi3 plamo2 plamo3 neo-bert granite_swa modern-bert",
    "": "mamba mamba2",
}
_EXPERTS = {
    "alternate": "nomic-bert-moe",
    "every": "llama4 ernie4_5-moe",
    "after lead": "afmoe bailingmoe bailingmoe2 bailingmoe3 cohere2moe deepseek deepseek2 "
    "deepseek2-ocr deepseek32 dots1 dots3note exaone-moe glm-dsa glm4moe glm5-next hy_v4 kimi-k3 "
    "kimi-linear laguna lfm2moe minimax-m3 mistral4",
    "all": "arctic dbrx deepseek4 gemma4 granitehybrid granite granite_swa granitemoe gpt-oss grok "
    "grovemoe hunyuan-moe hy_v3 jamba llada-moe llama llama-embed maple mellum mimo2 minimax-01 "
    "minimax-m2 minicpm mistral3 olmoe phimoe qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe "
    "qwen4exp rnd1 smallthinker step35",
}
_STATE = {
    "mamba": "mamba jamba",
    "mamba2": "mamba2 granitehybrid nemotron_h nemotron_h_moe falcon-h1 plamo2",
    "delta": "qwen35 qwen35moe qwen4exp",
    "delta repeated": "qwen3next",
    "shortconv": "lfm2 lfm2moe",
    "wkv": "rwkv6 rwkv6qwen2",
    "wkv7": "rwkv7 arwkv7",
    "kda": "kimi-linear kimi-k3 bailingmoe3 glm5-next",
    "lightning": "minimax-01",
}
_CHOICE = {
    "tokens": "deepseek32 glm-dsa dots3note hy_v4",
    "pools": "glm5-next",
    "pooled": "qwen4exp",
    "blocks": "minimax-m3",
    "compressed": "deepseek4",
}
_OUTPUTS = {
    "after": "bailingmoe3 cohere2moe gemma3n gemma4 glm5-next gpt-oss hrm_text hy_v3 "
    "kimi-k3 mamba mamba2 nemotron_h nemotron_h_moe qwen35 qwen35moe qwen3next step35",
    "all": "cogvlm dflash wavtokenizer-dec",
}
_SHARED = (
    "afmoe bailingmoe bailingmoe2 bailingmoe3 cohere2moe deepseek deepseek2 deepseek2-ocr "
    "deepseek32 deepseek4 dots1 dots3note ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next "
    "hunyuan-moe hy_v3 hy_v4 kimi-k3 kimi-linear laguna llama4 minimax-m3 mistral4 nemotron_h_moe "
    "qwen2moe qwen35moe qwen3next qwen4exp step35"
)
_MERGED = (
    "cohere2moe deepseek2 deepseek2-ocr deepseek32 dots3note gemma4 glm-dsa granite_swa hy_v3 "
    "mistral4 qwen35moe qwen3next qwen4exp"
)
_BIASED = (
    "afmoe bailingmoe2 bailingmoe3 deepseek2 deepseek2-ocr deepseek32 deepseek4 dots1 dots3note "
    "ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next hy_v3 hy_v4 kimi-k3 kimi-linear laguna "
    "lfm2moe mimo2 minimax-01 minimax-m2 minimax-m3 mistral4 nemotron_h_moe step35"
)
_NO_LOGITS = (
    "bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert "
    "nomic-bert nomic-bert-moe t5encoder wavtokenizer-dec"
)
_FOUR_POSITIONS = (  # M-RoPE
    "qwen2vl qwen3vl qwen3vlmoe qwen3tts qwen35 qwen35moe qwen4exp paddleocr hunyuan_vl glm4moe "
    "glm4 bailingmoe3"
)


#: Sketched more coarsely, so that their band is wider.
_ROUGH = (
    "deepseek4 falcon glm5-next kimi-k3 minicpm3 minimax-01 minimax-m3 modern-bert qwen refact "
    "smallthinker step35 t5encoder wavtokenizer-dec"
)
_BAND, _ROUGH_BAND = (0.90, 1.15), (0.65, 1.5)


@cache
def family(architecture: str) -> Family:
    """Return the structure of ``architecture``."""
    return Family(architecture)
