"""What transformers' configuration classes fill in where a config.json leaves a field out.

Source: the class attributes of each ``configuration_<model_type>.py`` in transformers 5.19.
``-`` is None (then derived: as many KV heads as heads, head_dim = hidden size / heads, no window);
``.`` is a field that the class does not have.
"""

from __future__ import annotations

#: The columns of ``_TABLE`` after the model type, as facts of :mod:`localkv.model.hf_fields`.
_COLUMNS = ("n_layer", "n_head", "n_head_kv", "head_dim", "n_embd", "window", "n_ctx", "n_vocab")

_TABLE = """
afmoe                32   16    -  128  2048  1024   16384 200192
apertus              32   32    -    .  4096     .   65536 131072
arcee                32   32    -    -  2560     .    4096  32000
bamba                32   32    8    .  4096     .  262144 128000
biogpt               24   16    .    .  1024     .    1024  42384
bitnet               30   20    5    .  2560     .    2048 128256
bloom                 2    8    .    .    64     .       . 250880
codegen              28   16    .    .  4096     .    2048  50400
cohere               40   64    -    .  8192     .    8192 256000
cohere2              40   64    -    .  8192  4096    8192 256000
cwm                  64   48    8  128  6144  8192  131072 128256
dbrx                 24   16    .    .  2048     .    2048  32000
deepseek_v2          32   32    -    -  4096     .    2048 102400
deepseek_v3          61  128  128    .  7168     .    4096 129280
deepseek_v32         61  128  128   64  7168     .  163840 129280
diffllama            16   32    -    -  2048     .    2048  32000
dots1                62   32   32    .  4608  4096    2048 152064
ernie4_5             18   16    2  128  1024     .  131072 103424
ernie4_5_moe         28   20    4    .  2560     .  131072 103424
exaone4              32   32   32    .  4096  4096    2048 102400
falcon               32   71    -    .  4544     .    2048  65024
falcon_h1            32   32    8    .  4096     .    8192 128000
falcon_mamba         32    .    .    .   768     .       .  50280
gemma                28   16   16  256  3072     .    8192 256000
gemma2               26    8    4  256  2304  4096    8192 256000
gemma3_text          26    8    4  256  2304  4096  131072 262208
gemma3n_text         35    8    2  256  2048   512   32768 262400
gemma4_text          30    8    4  256  2304   512  131072 262144
glm                  40   32    2  128  4096     .  131072 151552
glm4                 40   32    2  128  4096     .  131072 151552
glm4_moe             46   96    8    .  4096     .  131072 151552
glm4_moe_lite        47   20   20   64  2048     .  202752 154880
glm_moe_dsa          78   64   64   64  6144     .  202752 154880
gpt2                 12   12    .    .   768     .    1024  50257
gpt_bigcode          12   12    .    .   768     .    1024  50257
gpt_neo              24   16    .    .  2048     .    2048  50257
gpt_neox             44   64    .    .  6144     .    2048  50432
gpt_oss              36   64    8   64  2880   128  131072 201088
gptj                 28   16    .    .  4096     .    2048  50400
granite              32   32    -    .  4096     .    2048  32000
granitemoe           32   32    -    .  4096     .    2048  32000
granitemoehybrid     32   32    -    .  4096     .    2048  32000
granitemoeshared     32   32    -    .  4096     .    2048  32000
helium               24   20   20  128  2560     .    4096  48000
hunyuan_v1_dense     32   32    -    -  4096     .    2048 290943
jamba                32   32    8    .  4096     .  262144  65536
kimi_linear          27   32   32    .  2304     . 1048576 163840
lfm2                 32   32    8    .  2560     .  128000  65536
lfm2_moe             32   32    8    .  2048     .  128000  65536
llama                32   32    -    -  4096     .    2048  32000
llama4_text          48   40    8  128  5120     .  131072 202048
longcat_flash         .   64    -   64  6144     .  131072 131072
mamba                32    .    .    .   768     .       .  50280
mamba2               64    .    .    .  4096     .       .  32768
minicpm3             62   40   40    -  2560     .   32768  73448
minimax              32   32    8    -  4096     -  131072  32000
minimax_m2           62   48    8  128  3072     .  196608 200064
ministral            32   32    8    -  4096  4096  131072  32000
ministral3           34   32    8  128  4096     -  262144 131072
mistral              32   32    8    -  4096  4096  131072  32000
mixtral              32   32    8    -  4096     -  131072  32000
mpt                  24   16    .    .  2048     .       .  50368
nemotron             32   48    -    -  6144     .    4096 256000
nemotron_h            .   32    8  128  4096     -    4096 131072
olmo                 32   32    -    .  4096     .    2048  50304
olmo2                32   32    -    .  4096     .    2048  50304
olmo3                32   32    -    .  4096  4096    2048  50304
olmo_hybrid          32   30    -    .  3840     .   65536 100352
olmoe                16   16    -    .  2048     .    4096  50304
opt                  12   12    .    .   768     .    2048  50272
persimmon            36   64    .    .  4096     .   16384 262144
phi                  24   32    -    .  2048     .    2048  51200
phi3                 32   32    -    .  3072     -    4096  32064
phimoe               32   32    8    .  4096     -  131072  32064
qwen2                32   32   32    .  4096  4096   32768 151936
qwen2_5_vl_text      80   64    8    .  8192  4096   32768 152064
qwen2_moe            24   16   16    .  2048  4096   32768 151936
qwen2_vl_text        80   64    8    .  8192  4096   32768 152064
qwen3                32   32   32  128  4096  4096   32768 151936
qwen3_5_moe_text     40   16    2  256  2048     .   32768 248320
qwen3_5_text         32   16    4  256  4096     .   32768 248320
qwen3_moe            24   32    4    .  2048  4096   32768 151936
qwen3_next           48   16    2  256  2048     .   32768 151936
qwen3_vl_text        32   32   32  128  4096     .  128000 151936
recurrent_gemma      26   10    -    .  2560  2048       . 256000
seed_oss             64   80    8  128  4096     .  524288 155136
smollm3              36   16    4    .  2048     -   32768 128256
stablelm             32   32   32    .  2560     .    4096  50304
starcoder2           30   24    2    .  3072     -    4096  49152
vaultgemma           26    8    4  256  2304  4096    8192 256000
xglm                 24   16    .    .  1024     .    2048 256008
zamba                76   16   16    -  3712     .    4096  32000
zamba2               54   32    -    .  2560     .    4096  32000
"""

#: Model types that vision and audio models wrap, where ``text_config`` does not name its own.
TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "mllama": "llama",
    "paligemma": "gemma",
    "pixtral": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
}


def class_defaults(model_type: str) -> dict[str, int | None]:
    """Return the defaults of a configuration class by fact; a fact it does not have is absent."""
    for line in _TABLE.splitlines():
        name, _, rest = line.partition(" ")
        if name == model_type and name:
            return {
                column: None if cell == "-" else int(cell)
                for column, cell in zip(_COLUMNS, rest.split(), strict=True)
                if cell != "."
            }
    return {}
