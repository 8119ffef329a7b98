"""What is decoded to make memory resident, and the batches that all decoding here is made of."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.engines.llamacpp import Context
from localkv.predict.config import EffectiveContext, RunConfig, pad


def decoded_per_slot(n_ubatch: int, capacity: int) -> int:
    """Return the tokens per slot of the first step; the last step needs one more cell."""
    return max(1, min(n_ubatch, capacity - 1))


def at_decoded_depth(config: RunConfig, context: EffectiveContext, deepest: int) -> RunConfig:
    """Return ``config`` with a context no larger than what a measurement of it fills.

    The engine reserves its compute buffers for a full context, but the part that grows with the
    context (the attention mask) becomes resident only as far as cells are in use. ``deepest`` is
    the greatest number of tokens per slot that a speed measurement fills, 0 without one.
    """
    slots = config.n_seq_max
    capacity = context.n_ctx // slots if config.kv_unified else context.n_ctx_seq
    cells = max(decoded_per_slot(context.n_ubatch, capacity) + 1, min(deepest, capacity))
    size = pad(cells * slots) if config.kv_unified else pad(cells) * slots
    return config.with_(n_ctx=min(size, context.n_ctx))


def slot_capacity(context: Context) -> int:
    """Return the tokens that each slot can hold while all the others are as full."""
    if context.n_ctx_seq == context.n_ctx:  # one stream: the slots share its cells
        return context.n_ctx // context.n_seq_max
    return context.n_ctx_seq


def decode_ubatch_in_every_slot(context: Context, n_ubatch: int) -> None:
    """Decode one ubatch for every slot, all slots side by side, then one token in each.

    Side by side, since the engine reserves its compute buffers for ubatches that mix the slots:
    with small slots, only a mixed ubatch is a full one and makes all of the buffer resident.
    Never more than a ubatch at once: a larger batch would cost the process memory of its own.
    """
    slots = range(context.n_seq_max)
    count = decoded_per_slot(n_ubatch, slot_capacity(context))
    step = max(1, n_ubatch // context.n_seq_max)
    for start in range(0, count, step):
        positions = range(start, min(start + step, count))
        decode(context, [(slot, position) for slot in slots for position in positions])
    decode(context, [(slot, count) for slot in slots])


def decode(context: Context, cells: Sequence[tuple[int, int]]) -> None:
    """Decode tokens for ``cells``, (slot, position) each, in batches that the context takes."""
    for start in range(0, len(cells), context.n_batch):
        part = cells[start : start + context.n_batch]
        entries = [(slot, token_at(context.model.n_vocab, slot, pos)) for slot, pos in part]
        context.decode(entries, [position for _, position in part])


def token_at(n_vocab: int, slot: int, position: int) -> int:
    """Return a token id; they are spread over the vocabulary, and which one does not matter."""
    return (slot + 1 + position * 7919) % n_vocab
