"""The words in which an architecture's rule is written down.

A :class:`Rule` says what one architecture reads from its header and which caches the engine makes
of it. The table of rules is in ``architectures``; ``hparams`` and ``caches`` carry them out. Keys
are named without their prefix: ``attention.sliding_window`` stands for ``<arch>.attention...``.
"""

from __future__ import annotations

from localkv.tuples import NamedTuple


class Sliding(NamedTuple):
    """Which blocks attend only to a window of tokens, and how wide that window is.

    ``period``: every period-th block is full, the last of each group, or the first with
    ``full_first``; 0: no block is full; None: the header must list the blocks. A header's
    ``attention.sliding_window_pattern``, a period or a list, goes before ``period`` unless
    ``listed`` is False (load_swa_pattern in src/llama-model.cpp).
    ``window`` says when blocks slide at all: "required": the key must be there; "optional": when
    the key is there and above 0; "default": always, ``width`` when the key is missing;
    "unless zero": unless the key says 0. ``fixed`` is a width that overrules the key.
    ``only_n_layer``: models of this many blocks only. ``attention_only``: recurrent blocks do not
    slide, all others do.
    """

    period: int | None = None
    full_first: bool = False
    window: str = "required"
    width: int = 0
    fixed: int = 0
    listed: bool = True
    only_n_layer: int = 0
    attention_only: bool = False


class Recurrent(NamedTuple):
    """Which blocks keep a state of fixed size, and of what kind.

    ``blocks``: "all"; "no kv heads": those with 0 KV heads; "no kv heads, no ff": those that also
    have no feed-forward part; "interval": all but every ``interval``-th (the header's
    ``full_attention_interval`` or list ``attention.recurrent_layers`` goes first).
    ``state``: "ssm" (Mamba 2), "ssm1" (Mamba 1: no groups), "wkv" (RWKV), "shortconv" (LFM2),
    "kda" (Kimi delta attention), "lightning" (MiniMax linear attention): the widths are those of
    llama_hparams::n_embd_r and n_embd_s in src/llama-hparams.cpp.
    """

    blocks: str
    state: str
    interval: int = 0


class Indexer(NamedTuple):
    """The K cache of a sparse-attention indexer: one head of ``attention.indexer.key_length``.

    ``blocks``: "all"; "after dense lead": those from ``leading_dense_block_count`` on;
    "typed": those that ``attention.indexer.types`` marks with 1, ``default`` where it is missing:
    "all", "none", or "glm 5.2" (that model's own list when it was trained for 1M tokens).
    ``pool_key``: where this key is above 0, a token keeps three keys' worth (key, gate, pooled).
    """

    blocks: str = "all"
    default: str = "none"
    pool_key: str = ""


class Rule(NamedTuple):
    """How one architecture fills its cache and places its weights.

    file: below src/models of llama.cpp; the row follows its ``load_arch_hparams``.
    memory: the branch of llama_model::create_memory that makes its caches, see ``caches``.
    mla: whether the MLA key lengths are read ("no", "optional", "required"); where both are
        there, K alone is cached.
    v_head_key: the key that gives the width of a V head instead.
    causal: False where the engine turns causal attention off.
    kv_from_start: only this many first blocks keep K and V, the others read those of a block
        before them; shared_key: all but the number under that key do.
    repeat_key: how many times over the blocks run, and cache.
    router: one single-headed block more than the header counts.
    nextn_probe: NextN/MTP blocks count only where this tensor of theirs is in the file.
    nextn_loaded: False where the engine leaves the tensors of NextN blocks in the file.
    embd_out_key: embeddings are this many times n_embd wide.
    embd_keys: the keys of the width inside and of the embeddings.
    flash_attn: False where the engine turns flash attention off.
    companion: what the model needs beside it and cannot run without.
    rot_is_head: a rope width other than the head width is refused.
    head_keys_always: the head widths are read even where block 0 has no heads.
    per_layer_embedding: the blocks under ``ple.layers`` keep the history of a convolution.
    ties: a file without output matrix uses the token embeddings, held again for the output.
    norm_of_output: token_embd_norm is the output's norm, under a wrong name.
    where: a key, and the rule that holds instead where that key is above 0.
    """

    file: str
    memory: str = "kv"
    sliding: Sliding | None = None
    recurrent: Recurrent | None = None
    indexer: Indexer | None = None
    mla: str = "no"
    v_head_key: str = ""
    causal: bool = True
    kv_from_start: int = 0
    shared_key: str = ""
    repeat_key: str = ""
    router: bool = False
    nextn_probe: str = ""
    nextn_loaded: bool = True
    embd_out_key: str = ""
    embd_keys: tuple[str, str] | None = None
    flash_attn: bool = True
    companion: str = ""
    rot_is_head: bool = False
    head_keys_always: bool = False
    per_layer_embedding: bool = False
    ties: bool = True
    norm_of_output: bool = False
    where: tuple[str, Rule] | None = None
