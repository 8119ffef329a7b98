"""The types of the GGUF format: metadata values and ggml tensor types, with their sizes.

Source of the figures: ``enum ggml_type`` in ggml/include/ggml.h, ``type_traits`` in
ggml/src/ggml.c and the block structures in ggml/src/ggml-common.h of the engine version that
localkv pins.
"""

from __future__ import annotations

from localkv.errors import UsageError
from localkv.tuples import NamedTuple

QK_K = 256  # elements of a super-block of the K and IQ types


class GgmlType(NamedTuple):
    """One tensor type: ``block`` elements are stored in ``block_bytes`` bytes."""

    id: int
    name: str
    block: int
    block_bytes: int


_TYPES = (
    GgmlType(0, "f32", 1, 4),
    GgmlType(1, "f16", 1, 2),
    GgmlType(2, "q4_0", 32, 18),
    GgmlType(3, "q4_1", 32, 20),
    GgmlType(6, "q5_0", 32, 22),
    GgmlType(7, "q5_1", 32, 24),
    GgmlType(8, "q8_0", 32, 34),
    GgmlType(9, "q8_1", 32, 36),
    GgmlType(10, "q2_K", QK_K, 84),
    GgmlType(11, "q3_K", QK_K, 110),
    GgmlType(12, "q4_K", QK_K, 144),
    GgmlType(13, "q5_K", QK_K, 176),
    GgmlType(14, "q6_K", QK_K, 210),
    GgmlType(15, "q8_K", QK_K, 292),
    GgmlType(16, "iq2_xxs", QK_K, 66),
    GgmlType(17, "iq2_xs", QK_K, 74),
    GgmlType(18, "iq3_xxs", QK_K, 98),
    GgmlType(19, "iq1_s", QK_K, 50),
    GgmlType(20, "iq4_nl", 32, 18),
    GgmlType(21, "iq3_s", QK_K, 110),
    GgmlType(22, "iq2_s", QK_K, 82),
    GgmlType(23, "iq4_xs", QK_K, 136),
    GgmlType(24, "i8", 1, 1),
    GgmlType(25, "i16", 1, 2),
    GgmlType(26, "i32", 1, 4),
    GgmlType(27, "i64", 1, 8),
    GgmlType(28, "f64", 1, 8),
    GgmlType(29, "iq1_m", QK_K, 56),
    GgmlType(30, "bf16", 1, 2),
    GgmlType(34, "tq1_0", QK_K, 54),
    GgmlType(35, "tq2_0", QK_K, 66),
    GgmlType(39, "mxfp4", 32, 17),
    GgmlType(40, "nvfp4", 64, 36),
    GgmlType(41, "q1_0", 128, 18),
    GgmlType(42, "q2_0", 64, 18),
)

#: Tensor types by the number that stands in the file.
GGML_TYPES: dict[int, GgmlType] = {entry.id: entry for entry in _TYPES}

#: Tensor types by the engine's name for them.
GGML_TYPES_BY_NAME: dict[str, GgmlType] = {entry.name: entry for entry in _TYPES}

#: Numbers that once meant a type; the engine refuses files that use them.
REMOVED_GGML_TYPES: dict[int, str] = {
    4: "q4_2",
    5: "q4_3",
    31: "q4_0_4_4",
    32: "q4_0_4_8",
    33: "q4_0_8_8",
    36: "iq4_nl_4_4",
    37: "iq4_nl_4_8",
    38: "iq4_nl_8_8",
}

#: The types that the engine takes for the K and V caches (``kv_cache_types``, common/arg.cpp).
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


class ValueType(NamedTuple):
    """One metadata value type; ``code`` is its :mod:`struct` letter, "" for string and array."""

    id: int
    name: str
    code: str
    bytes: int


STRING = 8
ARRAY = 9

#: Metadata value types by their number (``enum gguf_type``, ggml/include/gguf.h).
VALUE_TYPES: dict[int, ValueType] = {
    entry.id: entry
    for entry in (
        ValueType(0, "u8", "B", 1),
        ValueType(1, "i8", "b", 1),
        ValueType(2, "u16", "H", 2),
        ValueType(3, "i16", "h", 2),
        ValueType(4, "u32", "I", 4),
        ValueType(5, "i32", "i", 4),
        ValueType(6, "f32", "f", 4),
        ValueType(7, "bool", "?", 1),
        ValueType(STRING, "str", "", 0),
        ValueType(ARRAY, "arr", "", 0),
        ValueType(10, "u64", "Q", 8),
        ValueType(11, "i64", "q", 8),
        ValueType(12, "f64", "d", 8),
    )
}


def cache_type(name: str) -> GgmlType:
    """Return the cache type called ``name``, in any case.

    Raises:
        UsageError: the engine takes no such cache type.
    """
    lowered = name.lower()
    if lowered not in CACHE_TYPES:
        raise UsageError(f"{name!r} is not a cache type", f"use one of {', '.join(CACHE_TYPES)}")
    return GGML_TYPES_BY_NAME[lowered]


def row_bytes(type_name: str, width: int) -> int:
    """Return the bytes of one row of ``width`` elements of the ggml type ``type_name``.

    Formula: ``width / block * block_bytes`` (``ggml_row_size``, ggml/src/ggml.c).

    Raises:
        UsageError: no such type, or its block size does not divide ``width``.
    """
    found = GGML_TYPES_BY_NAME.get(type_name)
    if found is None:
        raise UsageError(f"{type_name!r} is not a ggml type", "use a name such as f16 or q8_0")
    if width < 0 or width % found.block:
        raise UsageError(
            f"{type_name} with block size {found.block} does not divide a row of {width} elements",
            "use a type with a smaller block, e.g. f16",
        )
    return width // found.block * found.block_bytes
