"""The type table against the engine's own, and the rows of caches."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import gguf
import pytest

from localkv.errors import UsageError
from localkv.gguf import CACHE_TYPES, cache_type, row_bytes
from localkv.gguf.types import GGML_TYPES, GGML_TYPES_BY_NAME, REMOVED_GGML_TYPES, VALUE_TYPES


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "lib"
    library = ctypes.CDLL(str(sorted(folder.glob("*ggml-base*"), key=lambda p: len(p.name))[0]))
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    return library


GGML_TYPE_COUNT = 43


def test_names_and_sizes_are_those_of_the_engine(ggml):
    theirs = {}
    for number in range(GGML_TYPE_COUNT):
        block = ggml.ggml_blck_size(number)
        if block:
            name = ggml.ggml_type_name(number).decode()
            theirs[number] = (number, name, block, ggml.ggml_type_size(number))
    assert {number: tuple(kind) for number, kind in GGML_TYPES.items()} == theirs


def test_every_number_below_the_engines_count_is_a_type_or_was_one():
    assert sorted([*GGML_TYPES, *REMOVED_GGML_TYPES]) == list(range(GGML_TYPE_COUNT))
    assert len(GGML_TYPES_BY_NAME) == len(GGML_TYPES)


def test_value_types_are_those_of_the_gguf_package():
    assert set(VALUE_TYPES) == {int(t) for t in gguf.GGUFValueType}


def test_rows_of_cache_types():
    for name in CACHE_TYPES:
        kind = cache_type(name.upper())
        assert row_bytes(name, kind.block * 6) == 6 * kind.block_bytes
    assert row_bytes("f16", 0) == 0


@pytest.mark.parametrize(("name", "width"), [("q8_0", 33), ("q4_0", 31), ("nope", 32), ("f16", -1)])
def test_rows_that_cannot_be_are_refused(name, width):
    with pytest.raises(UsageError):
        row_bytes(name, width)


def test_a_type_that_is_no_cache_type_is_refused_with_the_list():
    with pytest.raises(UsageError, match="iq4_nl"):
        cache_type("q4_K")
