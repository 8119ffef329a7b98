"""The hyperparameters that size a model's caches, as the engine reads them from a header.

Source: llama_model_base::load_hparams in src/llama-model.cpp for what all architectures share,
llama_hparams in src/llama-hparams.cpp for the widths, and per architecture the rules of
``architectures``.
"""

from __future__ import annotations

from collections.abc import Collection

from localkv.model.metadata import MAX_LAYERS, Metadata, RefusedError
from localkv.model.rules import Indexer, Recurrent, Rule, Sliding
from localkv.units import plural


class Hparams:
    """What the engine knows of a model after loading its header.

    ``n_layer_all`` counts all blocks, ``n_layer`` those without the NextN/MTP blocks at the end.
    Lists have one entry per block. ``window`` is 0 when no block slides; ``slides`` says whether
    the engine makes a sliding-window cache at all.
    """

    # What a model does not have stays as it is here.
    k_head = v_head = 0
    k_head_sliding = v_head_sliding = 0
    mla = slides = router = False
    window = 0
    kv_from_start = -1
    r_width = s_width = p_width = 0
    p_blocks: tuple[int, ...] = ()
    indexer_width = 0

    def __init__(
        self,
        *,
        n_ctx_train: int,
        n_embd: int,
        n_embd_out: int,
        n_layer_all: int,
        n_layer: int,
        causal: bool,
        n_head: list[int],
        n_head_kv: list[int],
        n_ff: list[int],
    ) -> None:
        self.n_ctx_train = n_ctx_train
        self.n_embd = n_embd
        self.n_embd_out = n_embd_out
        self.n_layer_all = n_layer_all
        self.n_layer = n_layer
        self.causal = causal
        self.n_head = n_head
        self.n_head_kv = n_head_kv
        self.n_ff = n_ff
        self.sliding: list[bool] = []
        self.recurrent: list[bool] = []
        self.indexed: list[bool] = []
        self.compress_ratios: list[int] = []

    def k_head_of(self, block: int) -> int:
        """Return the elements of one K head in ``block``."""
        return self.k_head_sliding if self.sliding[block] else self.k_head

    def v_head_of(self, block: int) -> int:
        """Return the elements of one V head in ``block``."""
        return self.v_head_sliding if self.sliding[block] else self.v_head

    def k_width(self, block: int) -> int:
        """Return n_embd_k_gqa of ``block``: elements of K per token over all KV heads."""
        return self.k_head_of(block) * self.n_head_kv[block]

    def v_width(self, block: int) -> int:
        """Return n_embd_v_gqa of ``block``."""
        return self.v_head_of(block) * self.n_head_kv[block]

    def v_width_max(self) -> int:
        """Return the widest V of all blocks, to which V is padded without flash attention."""
        return max(self.v_width(block) for block in range(self.n_layer_all))

    def has_kv(self, block: int) -> bool:
        """Return whether ``block`` keeps K and V of its own."""
        return self.kv_from_start < 0 or block < self.kv_from_start


def effective_rule(meta: Metadata, rule: Rule) -> Rule:
    """Return the rule that holds for this header: ``rule``, or the one its ``where`` names."""
    if rule.where and meta.number(rule.where[0], 0) > 0:
        return rule.where[1]
    return rule


def load_hparams(meta: Metadata, rule: Rule, tensor_names: Collection[str]) -> Hparams:
    """Return the hyperparameters that ``meta`` holds under ``rule``.

    Raises:
        RefusedError: the engine will not load such a header.
    """
    hp = _load_common(meta, rule, tensor_names)
    _load_head_widths(meta, rule, hp)
    if rule.repeat_key:
        _repeat_blocks(hp, meta.number(rule.repeat_key, 1))
    hp.recurrent = [False] * hp.n_layer_all
    if rule.recurrent:
        _load_recurrent(meta, rule.recurrent, hp)
    hp.sliding = [False] * hp.n_layer_all
    if rule.sliding:
        _load_sliding(meta, rule.sliding, hp)
    if rule.memory == "dsv4":
        hp.compress_ratios = _compress_ratios(meta, hp)
    if rule.kv_from_start:
        hp.kv_from_start = rule.kv_from_start
    if rule.shared_key:
        hp.kv_from_start = hp.n_layer_all - meta.number(rule.shared_key, 0)
        if hp.kv_from_start < 2:
            raise RefusedError("GGML_ASSERT(n_layer_kv_from_start >= 2): too many blocks share KV")
    if rule.per_layer_embedding and meta.listed("ple.layers"):
        _load_per_layer_embedding(meta, hp)
    if rule.indexer:
        _load_indexer(meta, rule.indexer, hp)
    if rule.router:
        _add_router(hp)
    return hp


def _load_common(meta: Metadata, rule: Rule, tensor_names: Collection[str]) -> Hparams:
    count = meta.number("block_count")
    if not 0 < count <= MAX_LAYERS:
        raise RefusedError(f"block_count {count} is not between 1 and {MAX_LAYERS}")
    nextn = meta.number("nextn_predict_layers", 0)
    if nextn > count:
        raise RefusedError(f"nextn_predict_layers {nextn} exceeds block_count {count}")
    if nextn and rule.nextn_probe and f"blk.{count - nextn}.{rule.nextn_probe}" not in tensor_names:
        nextn = 0
    inside, outside = rule.embd_keys or ("embedding_length", "embedding_length_out")
    n_embd = meta.number(inside)
    n_embd_out = meta.number(outside, 0) or n_embd
    if rule.embd_out_key:
        n_embd_out = meta.number(rule.embd_out_key) * n_embd
    n_head = meta.per_block("attention.head_count", count, [0] * count)
    if not meta.has("attention.head_count_kv") and max(n_head):
        meta.assumed.append("attention.head_count_kv missing: as many KV heads as heads")
    return Hparams(
        n_ctx_train=meta.number("context_length"),
        n_embd=n_embd,
        n_embd_out=n_embd_out,
        n_layer_all=count,
        n_layer=count - nextn,
        causal=meta.flag("attention.causal", True) and rule.causal,
        n_head=n_head,
        n_head_kv=meta.per_block("attention.head_count_kv", count, n_head),
        n_ff=meta.per_block("feed_forward_length", count, [0] * count),
    )


def _load_head_widths(meta: Metadata, rule: Rule, hp: Hparams) -> None:
    if hp.n_head[0] > 0:
        by_heads = hp.n_embd // hp.n_head[0]
        for key in ("attention.key_length", "attention.value_length"):
            if not meta.has(key):
                meta.assumed.append(f"{key} missing: embedding / heads = {by_heads}")
        hp.k_head = meta.number("attention.key_length", by_heads)
        hp.v_head = meta.number("attention.value_length", by_heads)
        n_rot = meta.number("rope.dimension_count", hp.k_head)
        if rule.rot_is_head and n_rot != hp.k_head:
            raise RefusedError(f"invalid n_rot: {n_rot}, expected {hp.k_head}")
    elif rule.head_keys_always:
        hp.k_head = meta.number("attention.key_length", 0)
        hp.v_head = meta.number("attention.value_length", 0)
    hp.k_head_sliding = meta.number("attention.key_length_swa", hp.k_head)
    hp.v_head_sliding = meta.number("attention.value_length_swa", hp.v_head)
    if rule.v_head_key:
        hp.v_head = meta.number(rule.v_head_key)
    if rule.mla != "no":
        default = None if rule.mla == "required" else 0
        k_mla = meta.number("attention.key_length_mla", default)
        v_mla = meta.number("attention.value_length_mla", default)
        hp.mla = k_mla != 0 and v_mla != 0


def _repeat_blocks(hp: Hparams, times: int) -> None:
    if times < 1 or hp.n_layer * times > MAX_LAYERS:
        said = f"{plural(times, 'loop')} over {plural(hp.n_layer, 'block')}"
        raise RefusedError(f"{said}: more than {MAX_LAYERS} blocks")
    if times > 1:
        hp.n_layer_all = hp.n_layer * times
        hp.n_head = hp.n_head[: hp.n_layer] * times
        hp.n_head_kv = hp.n_head_kv[: hp.n_layer] * times
        hp.n_ff = hp.n_ff[: hp.n_layer] * times
        hp.n_layer = hp.n_layer_all


def _add_router(hp: Hparams) -> None:
    hp.router = True
    hp.n_layer_all = hp.n_layer + 1
    for per_block, entry in ((hp.n_head, 1), (hp.n_head_kv, 1), (hp.n_ff, 0)):
        per_block[hp.n_layer :] = [entry]
    hp.sliding[hp.n_layer :] = [False]
    hp.recurrent[hp.n_layer :] = [False]


def _load_sliding(meta: Metadata, rule: Sliding, hp: Hparams) -> None:
    window = meta.number("attention.sliding_window", None if rule.window == "required" else -1)
    active = {
        "required": True,
        "optional": window > 0,
        "default": True,
        "unless zero": window != 0,
    }[rule.window]
    if not active or (rule.only_n_layer and hp.n_layer != rule.only_n_layer):
        return
    hp.slides = True
    hp.window = rule.fixed or (rule.width if window < 0 else window)
    if window < 0:
        meta.assumed.append(f"attention.sliding_window missing: {hp.window}")
    elif rule.fixed and rule.fixed != window:
        meta.assumed.append(
            f"attention.sliding_window {window} is not used: the engine takes {rule.fixed}"
        )
    hp.sliding = _sliding_blocks(meta, rule, hp)


def _sliding_blocks(meta: Metadata, rule: Sliding, hp: Hparams) -> list[bool]:
    """Return which blocks slide: load_swa_pattern, llama_hparams::set_swa_pattern."""
    key = "attention.sliding_window_pattern"
    if rule.attention_only:
        return [block < hp.n_layer and not hp.recurrent[block] for block in range(hp.n_layer_all)]
    if not rule.listed:
        return [True] * hp.n_layer_all
    entries = meta.listed(key)
    if entries is not None:
        marks = [entry != 0 for entry in entries[: hp.n_layer_all]]
        return marks + [False] * (hp.n_layer_all - len(marks))
    if rule.period is None:
        raise RefusedError(f"array key not found in model: {key}")
    if not meta.has(key):
        meta.assumed.append(f"{key} missing: {rule.period}")
    period = meta.number(key, rule.period)
    full = 0 if rule.full_first else period - 1
    return [
        block < hp.n_layer and (period == 0 or block % period != full)
        for block in range(hp.n_layer_all)
    ]


def _load_recurrent(meta: Metadata, rule: Recurrent, hp: Hparams) -> None:
    hp.recurrent = _recurrent_blocks(meta, rule, hp)
    n_head = hp.n_head[0]
    if rule.state == "wkv":
        head = meta.number("wkv.head_size")
        hp.r_width = meta.number("token_shift_count", 2) * hp.n_embd
        hp.s_width = hp.n_embd * head
    elif rule.state == "shortconv":
        hp.r_width = hp.n_embd * (meta.number("shortconv.l_cache") - 1)
    elif rule.state == "kda":
        head = meta.number("kda.head_dim")
        kernel = meta.number("ssm.conv_kernel")
        hp.r_width = 3 * (kernel - 1 if kernel > 0 else 3) * n_head * head
        hp.s_width = head * head * n_head
    elif rule.state == "lightning":
        hp.s_width = hp.k_head * hp.k_head * n_head
    else:
        kernel = meta.number("ssm.conv_kernel")
        inner = meta.number("ssm.inner_size")
        state = meta.number("ssm.state_size")
        groups = meta.number("ssm.group_count") if rule.state == "ssm" else 0
        hp.r_width = max(kernel - 1, 0) * (inner + 2 * groups * state)
        hp.s_width = state * inner


def _recurrent_blocks(meta: Metadata, rule: Recurrent, hp: Hparams) -> list[bool]:
    blocks = range(hp.n_layer_all)
    if rule.blocks == "all":
        return [True] * hp.n_layer_all
    if rule.blocks == "no kv heads":
        return [block < hp.n_layer and hp.n_head_kv[block] == 0 for block in blocks]
    if rule.blocks == "no kv heads, no ff":
        return [
            block < hp.n_layer and hp.n_head_kv[block] == 0 and hp.n_ff[block] == 0
            for block in blocks
        ]
    if meta.has("attention.recurrent_layers"):
        marks = meta.per_block("attention.recurrent_layers", hp.n_layer_all)
        return [mark != 0 for mark in marks]
    interval = meta.number("full_attention_interval", rule.interval)
    if interval < 1:
        raise RefusedError("full_attention_interval must be at least 1")
    if not meta.has("full_attention_interval"):
        meta.assumed.append(f"full_attention_interval missing: {interval}")
    return [block < hp.n_layer and (block + 1) % interval != 0 for block in blocks]


def _load_per_layer_embedding(meta: Metadata, hp: Hparams) -> None:
    """llama_hparams::ple_conv_state: history of a convolution, kept by qwen4exp's PLE blocks."""
    hp.p_blocks = tuple(meta.listed("ple.layers") or ())
    rows = (meta.number("ple.conv_kernel") - 1) * meta.number("ple.ngram_size")
    hp.p_width = rows * meta.number("hyper_connection.count") * hp.n_embd


#: From this training context on, GLM_5_2_DEFAULT_INDEXER_TYPES in src/models/glm-dsa.cpp: the
#: first two blocks, then one in four of the 76 that follow.
_GLM_5_2_FROM_CTX = 1048576


def _load_indexer(meta: Metadata, indexer: Indexer, hp: Hparams) -> None:
    hp.indexer_width = meta.number("attention.indexer.key_length")
    if indexer.pool_key and meta.number(indexer.pool_key) > 0:
        hp.indexer_width *= 3
    if indexer.blocks == "all":
        hp.indexed = [True] * hp.n_layer_all
    elif indexer.blocks == "after dense lead":
        lead = meta.number("leading_dense_block_count", 0)
        hp.indexed = [block >= lead for block in range(hp.n_layer_all)]
    else:
        marks = meta.per_block(
            "attention.indexer.types", hp.n_layer, _indexer_types(indexer.default, hp)
        )
        hp.indexed = [mark != 0 for mark in marks] + [False] * (hp.n_layer_all - hp.n_layer)


def _indexer_types(default: str, hp: Hparams) -> list[int]:
    if default == "glm 5.2" and hp.n_ctx_train >= _GLM_5_2_FROM_CTX:
        return [
            int(block < 2 or (block < 78 and (block - 2) % 4 == 0)) for block in range(hp.n_layer)
        ]
    return [int(default != "none")] * hp.n_layer


def _compress_ratios(meta: Metadata, hp: Hparams) -> list[int]:
    ratios = meta.listed("attention.compress_ratios")
    if ratios is None or len(ratios) < hp.n_layer_all:
        raise RefusedError("DeepSeek-V4 compress_ratios is shorter than block_count")
    return ratios
