"""Estimate: what a configuration of a model needs, each figure with where it came from."""

from __future__ import annotations

from typing import Any

from localkv.tuples import NamedTuple

SCHEMA = 1

#: Where a figure came from: summed from tensor sizes, computed from a rule of the engine, told by
#: the engine itself, or read by a probe.
SOURCES = ("file", "formula", "engine", "measured")


class CacheEstimate(NamedTuple):
    """One cache as the engine prints it: ``cells`` per stream, over ``layers`` layers.

    ``kind`` is full, sliding, indexer, compressed or state; sizes are bytes.
    """

    kind: str
    cells: int
    streams: int
    layers: int
    k_bytes: int
    v_bytes: int

    @property
    def bytes(self) -> int:
        """Return K and V together, in bytes."""
        return self.k_bytes + self.v_bytes


class ComputeEstimate(NamedTuple):
    """The compute buffers: ``bytes`` with the band ``low`` to ``high``; equal when exact.

    ``devices`` says how they are spread, by device name; empty: all where the output layer is.
    """

    bytes: int
    source: str
    low: int
    high: int
    devices: tuple[tuple[str, int], ...] = ()


class DeviceEstimate(NamedTuple):
    """What one device holds, in bytes; ``name`` is host, gpu0, gpu1, ..."""

    name: str
    weights: int = 0
    kv: int = 0
    recurrent: int = 0
    compute: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all kinds, in bytes."""
        return self.weights + self.kv + self.recurrent + self.compute + self.output


class Term(NamedTuple):
    """One addend of the total: its bytes, its source and its formula in words."""

    name: str
    bytes: int
    source: str
    formula: str


class Estimate(NamedTuple):
    """The memory that a model needs under one configuration; bytes throughout.

    ``r_bytes``, ``s_bytes`` and ``p_bytes`` are the recurrent state: convolution, state space, and
    the convolution of a per-layer embedding. ``known`` is False where no rule gives the caches:
    then they are missing from every sum, and ``kv_bounds`` may hold the least and the most that
    they can be. ``to_dict`` is the stable JSON of ``localkv predict --json``.
    """

    model: dict[str, Any]
    config: dict[str, Any]
    caches: tuple[CacheEstimate, ...]
    r_bytes: int
    s_bytes: int
    weights_bytes: int
    output_bytes: int
    compute: ComputeEstimate
    devices: tuple[DeviceEstimate, ...]
    terms: tuple[Term, ...]
    notes: tuple[str, ...] = ()
    p_bytes: int = 0
    known: bool = True
    kv_bounds: tuple[int, int] | None = None

    @property
    def k_bytes(self) -> int:
        """Return the bytes of all K caches."""
        return sum(cache.k_bytes for cache in self.caches)

    @property
    def v_bytes(self) -> int:
        """Return the bytes of all V caches."""
        return sum(cache.v_bytes for cache in self.caches)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of every attention-like cache."""
        return self.k_bytes + self.v_bytes

    @property
    def recurrent_bytes(self) -> int:
        """Return the bytes of the recurrent state."""
        return self.r_bytes + self.s_bytes + self.p_bytes

    @property
    def context_bytes(self) -> int:
        """Return what creating the context makes resident: KV, recurrent state and output."""
        return self.kv_bytes + self.recurrent_bytes + self.output_bytes

    @property
    def total_bytes(self) -> int:
        """Return the sum of all terms, in bytes."""
        return sum(term.bytes for term in self.terms)

    def to_dict(self) -> dict[str, Any]:
        """Return the stable JSON object (schema 1)."""
        return {
            "schema": SCHEMA,
            "model": dict(self.model),
            "config": dict(self.config),
            "kv": {
                "bytes": self.kv_bytes if self.known else None,
                "k_bytes": self.k_bytes if self.known else None,
                "v_bytes": self.v_bytes if self.known else None,
                **_bounds(self.kv_bounds),
                "caches": [
                    {
                        "kind": c.kind,
                        "cells": c.cells,
                        "streams": c.streams,
                        "layers": c.layers,
                        "k_bytes": c.k_bytes,
                        "v_bytes": c.v_bytes,
                    }
                    for c in self.caches
                ],
            },
            "recurrent": {
                "bytes": self.recurrent_bytes if self.known else None,
                "r_bytes": self.r_bytes,
                "s_bytes": self.s_bytes,
                "p_bytes": self.p_bytes,
            },
            "weights": {"bytes": self.weights_bytes},
            "output": {"bytes": self.output_bytes},
            "compute": {
                "bytes": self.compute.bytes,
                "source": self.compute.source,
                "low": self.compute.low,
                "high": self.compute.high,
            },
            "total_bytes": self.total_bytes if self.known else None,
            "devices": [
                {
                    "name": d.name,
                    "weights": d.weights,
                    "kv": d.kv,
                    "recurrent": d.recurrent,
                    "compute": d.compute,
                    "output": d.output,
                    "total": d.total,
                }
                for d in self.devices
            ],
            "terms": [
                {"name": t.name, "bytes": t.bytes, "source": t.source, "formula": t.formula}
                for t in self.terms
            ],
            "notes": list(self.notes),
        }


def _bounds(bounds: tuple[int, int] | None) -> dict[str, int]:
    return {"low": bounds[0], "high": bounds[1]} if bounds else {}
