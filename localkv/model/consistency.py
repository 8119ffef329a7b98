"""What a header's keys say against what its tensors show, said aloud."""

from __future__ import annotations

from collections.abc import Iterable

from localkv.model.hparams import Hparams
from localkv.model.rules import Rule
from localkv.model.specs import Tensor

#: Tensors that only a block of that kind has (LLM_TENSOR_NAMES in src/llama-arch.cpp).
_STATE = ("ssm_", "shortconv.", "time_mix_")
_ATTENTION = ("attn_k.", "attn_kv_a_mqa.", "attn_k_norm.")


def contradictions(hp: Hparams, rule: Rule, tensors: Iterable[Tensor]) -> list[str]:
    """Return one sentence for each way in which the tensors contradict the metadata.

    The engine follows the metadata; so does the prediction.
    """
    mixed = rule.recurrent is not None and rule.memory != "hybrid beside"
    state: set[int] = set()
    attention: set[int] = set()
    blocks: set[int] = set()
    keys: list[str] = []
    for tensor in tensors:
        if not tensor.name.startswith("blk."):
            continue
        number, _, kind = tensor.name[4:].partition(".")
        if not number.isdecimal():
            continue
        block = int(number)
        blocks.add(block)
        if mixed and kind.startswith(_STATE):
            state.add(block)
        elif mixed and kind.startswith(_ATTENTION):
            attention.add(block)
        if kind == "attn_k.weight" and block < hp.n_layer_all and len(tensor.shape) > 1:
            width = hp.k_width(block)
            if width and tensor.shape[1] != width:
                keys.append(f"block {block} makes {tensor.shape[1]} elements of K, not {width}")
    found = _kinds(hp, state, attention) if mixed else []
    if keys:
        found.append(f"the metadata's head counts contradict the tensors: {keys[0]}")
    count = max(blocks, default=-1) + 1
    if count > hp.n_layer_all:
        found.append(f"the file holds {count} blocks, but block_count says {hp.n_layer_all}")
    return found


def _kinds(hp: Hparams, state: set[int], attention: set[int]) -> list[str]:
    counted = {block for block in range(hp.n_layer) if hp.recurrent[block]}
    found = []
    # Linear attention has K projections of its own, so only blocks without state tensors count.
    wrongly = sorted(b for b in attention - state if b in counted and state)
    if wrongly:
        found.append(
            f"{_named(wrongly)} attention tensors, but the metadata counts "
            f"{'it' if len(wrongly) == 1 else 'them'} as recurrent"
        )
    missed = sorted(b for b in state - counted if b < hp.n_layer)
    if missed:
        found.append(
            f"{_named(missed)} recurrent tensors, but the metadata counts "
            f"{'it' if len(missed) == 1 else 'them'} as attention"
        )
    return found


def _named(blocks: list[int]) -> str:
    if len(blocks) == 1:
        return f"block {blocks[0]} has"
    return f"blocks {', '.join(map(str, blocks[:8]))}{', ...' if len(blocks) > 8 else ''} have"
