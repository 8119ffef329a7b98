"""Prefill and decode speed at several depths, over all slots at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from localkv.engines.llamacpp import Context
from localkv.records import Speed
from localkv.sweep.decode import decode, slot_capacity

#: Tokens generated per slot for one decode figure: enough to average over, few enough to be quick.
DECODE_TOKENS = 16


def usable_depths(depths: Sequence[int], capacity: int, n_ubatch: int) -> list[int]:
    """Return the ``depths`` that leave room for one timed ubatch and the timed generation."""
    room = capacity - n_ubatch - DECODE_TOKENS
    return sorted({depth for depth in depths if depth <= room})


def measure_speed(context: Context, n_ubatch: int, depths: Sequence[int]) -> Iterator[Speed]:
    """Yield the speed at each depth that fits, tokens per second over all slots together.

    At depth d every slot holds d tokens; then one ubatch per slot is timed (prefill), and
    ``DECODE_TOKENS`` steps in which every slot generates one token (decode).
    """
    slots = range(context.n_seq_max)
    capacity = slot_capacity(context)
    count = min(n_ubatch, max(1, capacity // 2))
    context.clear()
    filled = 0
    for depth in usable_depths(depths, capacity, count):
        if filled > depth:
            context.clear()
            filled = 0
        for slot in slots:
            decode(context, [(slot, position) for position in range(filled, depth)])
        prefill = _seconds(lambda at=depth: _prefill(context, at, count))  # type: ignore[misc]
        step = depth + count
        generate = _seconds(lambda at=step: _generate(context, at))  # type: ignore[misc]
        filled = step + DECODE_TOKENS
        yield Speed(
            depth=depth,
            slots=len(slots),
            prefill_tokens_per_s=len(slots) * count / prefill,
            decode_tokens_per_s=len(slots) * DECODE_TOKENS / generate,
        )


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _prefill(context: Context, depth: int, count: int) -> None:
    for slot in range(context.n_seq_max):
        decode(context, [(slot, position) for position in range(depth, depth + count)])


def _generate(context: Context, depth: int) -> None:
    for position in range(depth, depth + DECODE_TOKENS):
        decode(context, [(slot, position) for slot in range(context.n_seq_max)])
