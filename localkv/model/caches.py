"""The caches that the engine makes for a model: which blocks each one holds, and how wide.

Source: llama_model::create_memory in src/llama-model.cpp picks the memory and its layer filters;
the constructors in src/llama-kv-cache*.cpp, src/llama-memory-*.cpp say what each one allocates.
``MEMORIES`` maps the name that a rule gives to the function that follows that branch. Sizes in
tokens come later, from the settings of a run: see ``predict.kv``.
"""

from __future__ import annotations

from collections.abc import Callable

from localkv.model.hparams import Hparams
from localkv.model.metadata import RefusedError
from localkv.model.specs import CacheLayer, CacheSpec

#: DSV4_CSA_RATIO and DSV4_HCA_RATIO in src/llama-kv-cache-dsv4.cpp: tokens per compressed row.
CSA_RATIO = 4
HCA_RATIO = 128


Filter = Callable[[int], bool]


def build_caches(hp: Hparams, memory: str) -> tuple[CacheSpec, ...]:
    """Return the caches of a model, in the order in which the engine makes and prints them.

    Raises:
        RefusedError: the engine gives up on such a model.
    """
    return MEMORIES[memory](hp)


def _attention(hp: Hparams, kind: str, keep: Filter, *, per_slot: bool = False) -> CacheSpec:
    """Return the cache of the blocks that ``keep`` lets through: llama_kv_cache."""
    layers = tuple(
        CacheLayer(block, hp.k_width(block), 0 if hp.mla else hp.v_width(block))
        for block in range(hp.n_layer_all)
        if hp.has_kv(block) and keep(block)
    )
    return CacheSpec(
        kind,
        layers,
        cells="window" if kind == "sliding" else "context",
        v_padded=0 if hp.mla else hp.v_width_max(),
        per_slot=per_slot,
    )


def _both_windows(hp: Hparams, keep: Filter, *, per_slot: bool = False) -> tuple[CacheSpec, ...]:
    """Return the full and the sliding cache: llama_kv_cache_iswa."""
    return (
        _attention(hp, "full", lambda b: keep(b) and not hp.sliding[b], per_slot=per_slot),
        _attention(hp, "sliding", lambda b: keep(b) and hp.sliding[b], per_slot=per_slot),
    )


def _indexer(hp: Hparams, keep: Filter, *, with_v: bool = False) -> CacheSpec:
    """Return an indexer's cache: one key head per block, and a V head where the engine adds one.

    The engine makes it by setting n_embd_head_k_full and one KV head, so that a sliding block
    would keep its own key width.
    """
    layers = tuple(
        CacheLayer(
            b,
            hp.k_head_sliding if hp.sliding[b] else hp.indexer_width,
            hp.v_head_of(b) if with_v else 0,
        )
        for b in range(hp.n_layer_all)
        if keep(b)
    )
    widest = max(hp.v_head_of(b) for b in range(hp.n_layer_all))
    return CacheSpec("indexer", layers, v_padded=widest if with_v else 0)


def _kv(hp: Hparams) -> tuple[CacheSpec, ...]:
    """create_memory, default branch: NextN blocks are left out unless they are all there is."""
    trunk_only = 0 < hp.n_layer < hp.n_layer_all and not hp.router

    def keep(block: int) -> bool:
        return not trunk_only or block < hp.n_layer

    if not hp.slides:
        return (_attention(hp, "full", keep),)
    if not any(hp.sliding):
        raise RefusedError("a window is declared but no block slides: GGML_ASSERT(is_swa_any())")
    return _both_windows(hp, keep)


def _kv_all_blocks(hp: Hparams) -> tuple[CacheSpec, ...]:
    """create_memory for hy_v4 without an indexer, and for drafts: nothing is filtered."""
    return _hybrid_where(hp, lambda block: True)


def _none(hp: Hparams) -> tuple[CacheSpec, ...]:
    return ()


def _unsupported(hp: Hparams) -> tuple[CacheSpec, ...]:
    raise RefusedError("unsupported model architecture")


def _hybrid(hp: Hparams) -> tuple[CacheSpec, ...]:
    """llama_memory_hybrid with its own filter: every block that is not recurrent."""
    return _hybrid_where(hp, lambda block: not hp.recurrent[block])


def _hybrid_trunk(hp: Hparams) -> tuple[CacheSpec, ...]:
    return _hybrid_where(hp, lambda block: block < hp.n_layer and not hp.recurrent[block])


def _hybrid_no_ff(hp: Hparams) -> tuple[CacheSpec, ...]:
    return _hybrid_where(hp, lambda block: not hp.recurrent[block] and hp.n_ff[block] == 0)


def _hybrid_beside(hp: Hparams) -> tuple[CacheSpec, ...]:
    return _hybrid_where(hp, lambda block: True)


def _hybrid_where(hp: Hparams, keep: Filter) -> tuple[CacheSpec, ...]:
    return _both_windows(hp, keep) if hp.slides else (_attention(hp, "full", keep),)


def _hybrid_indexer(hp: Hparams) -> tuple[CacheSpec, ...]:
    """llama_memory_hybrid_idx: K alone in the indexer's cache, whatever the main cache holds."""
    trunk = _hybrid_trunk(hp)
    attention = {layer.block for layer in trunk[0].layers}
    return (*trunk, _indexer(hp, lambda b: b in attention and hp.indexed[b]))


def _dsa(hp: Hparams) -> tuple[CacheSpec, ...]:
    """llama_kv_cache_dsa over the trunk."""
    return (
        _attention(hp, "full", lambda b: b < hp.n_layer),
        _dsa_indexer(hp),
    )


def _dsa_indexer(hp: Hparams) -> CacheSpec:
    return _indexer(hp, lambda b: b < hp.n_layer and hp.indexed[b], with_v=not hp.mla)


def _dsa_all_blocks(hp: Hparams) -> tuple[CacheSpec, ...]:
    """The branch of hy_v4 with an indexer: no NextN filter."""
    if hp.n_layer < hp.n_layer_all:
        raise RefusedError("NextN blocks beside an indexer: is_indexer_full aborts")
    return _attention(hp, "full", lambda b: True), _dsa_indexer(hp)


def _dsa_iswa(hp: Hparams) -> tuple[CacheSpec, ...]:
    """llama_kv_cache_dsa_iswa: main, indexer, then the sliding blocks."""
    full, sliding = _both_windows(hp, lambda b: b < hp.n_layer)
    return full, _dsa_indexer(hp), sliding


def _msa(hp: Hparams) -> tuple[CacheSpec, ...]:
    """llama_kv_cache_msa: no NextN filter; the indexer's cache keeps a V head too."""
    return (
        _attention(hp, "full", lambda b: True),
        _indexer(hp, lambda b: hp.indexed[b], with_v=True),
    )


def _dsv4(hp: Hparams) -> tuple[CacheSpec, ...]:
    """llama_kv_cache_dsv4: raw window, two compressed caches, an indexer, and their states.

    K alone throughout, a stream per slot whatever kv_unified says, NextN blocks in the raw cache.
    """
    raw = tuple(
        CacheSpec(
            kind,
            tuple(
                CacheLayer(b, hp.k_width(b), 0)
                for b in range(hp.n_layer_all)
                if hp.sliding[b] == (kind == "sliding")
            ),
            cells="window" if kind == "sliding" else "context",
            per_slot=True,
        )
        for kind in ("full", "sliding")
    )
    csa = [b for b in range(hp.n_layer_all) if hp.compress_ratios[b] == CSA_RATIO]
    hca = [b for b in range(hp.n_layer_all) if hp.compress_ratios[b] == HCA_RATIO]
    head, index = hp.k_head_of(0), hp.indexer_width
    return (
        *raw,
        _compressed(hp, "compressed", csa, CSA_RATIO, 0),
        _compressed(hp, "compressed", hca, HCA_RATIO, 0),
        _compressed(hp, "indexer", csa, CSA_RATIO, index),
        _state(hp, csa, 2 * CSA_RATIO, 2 * head),
        _state(hp, hca, HCA_RATIO, head),
        _state(hp, csa, 2 * CSA_RATIO, 2 * index),
    )


def _compressed(hp: Hparams, kind: str, blocks: list[int], ratio: int, width: int) -> CacheSpec:
    layers = tuple(CacheLayer(b, width or hp.k_width(b), 0) for b in blocks)
    return CacheSpec(kind, layers, cells="ratio", number=ratio, per_slot=True)


def _state(hp: Hparams, blocks: list[int], rows: int, width: int) -> CacheSpec:
    """Return a compressor's state, KV and scores: llama_dsv4_comp_state."""
    layers = tuple(CacheLayer(b, width, width) for b in blocks if b < hp.n_layer)
    return CacheSpec(
        "state", layers, cells="fixed", number=rows, v_padded=width, per_slot=True, f32=True
    )


MEMORIES: dict[str, Callable[[Hparams], tuple[CacheSpec, ...]]] = {
    "kv": _kv,
    "kv all blocks": _kv_all_blocks,
    "none": _none,
    "unsupported": _unsupported,
    "recurrent": _none,
    "hybrid": _hybrid,
    "hybrid trunk": _hybrid_trunk,
    "hybrid no ff": _hybrid_no_ff,
    "hybrid beside": _hybrid_beside,
    "hybrid indexer": _hybrid_indexer,
    "dsa": _dsa,
    "dsa all blocks": _dsa_all_blocks,
    "dsa iswa": _dsa_iswa,
    "msa": _msa,
    "dsv4": _dsv4,
}
