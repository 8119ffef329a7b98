"""Repacked weights: copies in another layout that the CPU back end computes faster with.

Source: ggml_repack_get_optimal_repack_type in ggml/src/ggml-cpu/repack.cpp. Matrices kept by the
CPU go into a buffer of their own (CPU_REPACK); where the file is mapped, the original stays
mapped too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from localkv.model import MatrixGroup

#: Matrix type -> what the CPU must have, and what must then divide the number of rows.
_REPACKED: dict[str, tuple[tuple[frozenset[str], int], ...]] = {
    "q4_0": (
        (frozenset({"avx2"}), 8),
        (frozenset({"neon", "i8mm"}), 4),
        (frozenset({"neon", "dotprod"}), 4),
        (frozenset({"vxe"}), 4),
        (frozenset({"rvv256"}), 16),
    ),
    "q4_K": (
        (frozenset({"avx2"}), 8),
        (frozenset({"neon", "i8mm"}), 8),
        (frozenset({"neon", "dotprod"}), 8),
        (frozenset({"rvv256"}), 16),
    ),
    "q2_K": ((frozenset({"avx512"}), 8), (frozenset({"rvv256"}), 16)),
    "q5_K": ((frozenset({"neon", "i8mm"}), 8), (frozenset({"neon", "dotprod"}), 8)),
    "q6_K": ((frozenset({"neon", "i8mm"}), 8), (frozenset({"neon", "dotprod"}), 8)),
    "iq4_nl": (
        (frozenset({"avx2"}), 8),
        (frozenset({"neon", "dotprod"}), 4),
        (frozenset({"rvv256"}), 16),
    ),
    "mxfp4": ((frozenset({"avx2"}), 8), (frozenset({"neon", "dotprod"}), 4)),
    "q8_0": (
        (frozenset({"neon", "i8mm"}), 4),
        (frozenset({"neon", "dotprod"}), 4),
        (frozenset({"rvv256"}), 16),
    ),
    "q1_0": ((frozenset({"neon", "i8mm"}), 4), (frozenset({"neon", "dotprod"}), 4)),
}


def repacked_bytes(
    matrices: Iterable[MatrixGroup], places: Collection[int], features: Collection[str]
) -> int:
    """Return the bytes of the matrices at ``places`` that a CPU with ``features`` repacks.

    ``features`` are of avx2, avx512, neon, dotprod, i8mm, vxe and rvv256 (RISC-V vectors of 256
    bits); a CPU without any of them repacks nothing.
    """
    if not features:
        return 0
    return sum(
        group.nbytes for group in matrices if group.place in places and is_repacked(group, features)
    )


def is_repacked(group: MatrixGroup, features: Collection[str]) -> bool:
    """Return whether a CPU with ``features`` repacks the matrices of ``group``."""
    return any(
        needed.issubset(features) and group.rows % rows == 0
        for needed, rows in _REPACKED.get(group.type, ())
    )
