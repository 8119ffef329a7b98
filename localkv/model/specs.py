"""What is read of a tensor, and what one cache of a model is before a run is known."""

from __future__ import annotations

from typing import Protocol

from localkv.tuples import NamedTuple


class Tensor(Protocol):
    """What is read of a tensor info; ``shape`` has the fastest dimension first."""

    @property
    def name(self) -> str:
        """Return the tensor's name."""

    @property
    def type(self) -> str:
        """Return its ggml type, e.g. ``q4_1``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its dimensions, in elements."""

    @property
    def nbytes(self) -> int:
        """Return the size of its data, in bytes."""


class CacheLayer(NamedTuple):
    """One block's share of a cache: elements of K and of V per cell."""

    block: int
    k_width: int
    v_width: int


class CacheSpec(NamedTuple):
    """One cache of a model, before any setting of a run is known.

    ``kind`` is full, sliding, indexer, compressed or state. ``cells`` says how many cells a stream
    has: "context": one per token; "window": those of a sliding window; "ratio": one per ``number``
    tokens; "fixed": ``number``. ``v_padded`` is the width that V takes without flash attention
    (0: no V). ``per_slot``: a stream per slot even where the cache is unified. ``f32``: kept in
    f32 whatever the cache type.
    """

    kind: str
    layers: tuple[CacheLayer, ...]
    cells: str = "context"
    number: int = 0
    v_padded: int = 0
    per_slot: bool = False
    f32: bool = False
