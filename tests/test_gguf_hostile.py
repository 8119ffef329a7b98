"""Damaged and hostile headers: always a ModelError that names a byte, never memory or time."""

from __future__ import annotations

import io
import tracemalloc

import pytest
from gguf_helpers import ARR, CODES, HEADERS, STR, U32, Builder, ZeroTail, small_model
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localkv.errors import ModelError
from localkv.gguf import Header, read_header
from localkv.gguf.cursor import MAX_READ

HUGE = [1 << 20, 1 << 31, 1 << 32, (1 << 61) + 1, 1 << 63, (1 << 64) - 1]
WHOLE = (HEADERS / "gpt-oss-moe.gguf").read_bytes()


def _refusal(data: bytes) -> str:
    """Return the error of reading ``data``; memory must stay far below what counts may claim."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"^x\.gguf: byte \d+: ") as caught:
            read_header(io.BytesIO(data), name="x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert caught.value.hint
    assert "\n" not in text
    return text


def _header_or_refusal(data: bytes) -> None:
    try:
        outcome: object = read_header(io.BytesIO(data))
    except ModelError as error:
        outcome = error.message
    assert isinstance(outcome, Header) or "byte " in str(outcome)


def test_a_header_cut_anywhere_is_refused():
    head = small_model(data=False)
    for length in range(len(head)):
        _refusal(head[:length])
    assert read_header(io.BytesIO(head)).end == len(head)


def test_a_real_header_cut_anywhere_is_refused():
    end = read_header(io.BytesIO(WHOLE)).end
    for length in range(0, end, 101):
        with pytest.raises(ModelError, match=r"byte \d+"):
            read_header(io.BytesIO(WHOLE[:length]))


@settings(max_examples=150, deadline=None)
@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4
    )
)
@example(flips=[(4, 0), (7, 3)])
def test_changed_bytes_give_a_header_or_a_model_error(flips):
    data = bytearray(WHOLE)
    for position, value in flips:
        data[position] = value
    tracemalloc.start()
    try:
        _header_or_refusal(bytes(data))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200), order=st.sampled_from("<>"))
def test_noise_behind_a_true_start_is_a_model_error_or_a_header(data, order):
    b = Builder(order=order)
    _header_or_refusal(b"GGUF" + b.u32(3) + data)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("count", HUGE)
def test_lying_counts_and_lengths_cost_nothing(count, order):
    b = Builder(order=order)
    one = b.key("a", U32, 1)
    lying = {
        "tensors": b.header([one], n_tensors=count),
        "keys": b.header([one], n_keys=count),
        "key length": b.header([b.u64(count) + b"abc" + b.u32(U32) + b.u32(1)]),
        "string length": b.header([b.string("k") + b.u32(STR) + b.u64(count) + b"text" * 4]),
        "inner string": b.header(
            [b.string("k") + b.u32(ARR) + b.u32(STR) + b.u64(2) + b.string("a") + b.u64(count)]
        ),
        "tensor name": b.header([], [b.u64(count) + bytes(40)]),
        "dimensions": b.header([], [b.string("t") + b.u32(min(count, 0xFFFFFFFF)) + bytes(60)]),
    }
    for kind in (*CODES, STR):
        lying[f"array of {kind}"] = b.header([b.array("k", kind, [], length=count), bytes(64)])
    for data in lying.values():
        _refusal(data)


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        ((1 << 32, 1 << 32), 0, "impossible shape"),
        ((1 << 62, 2), 0, "impossible shape"),
        ((-1,), 0, "impossible shape"),
        ((-8, -8), 0, "impossible shape"),
        (((1 << 63) - 1,), 0, "bytes"),
        ((33,), 8, "not a multiple of the 32 of q8_0"),
        ((1, 1, 1, 1, 1), 0, "5 dimensions"),
        ((32,), 31, "q4_0_4_4, which the engine has dropped"),
        ((32,), 4, "q4_2, which the engine has dropped"),
        ((32,), 99, "type number 99"),
        ((32,), (1 << 32) - 1, "type number 4294967295"),
    ],
)
def test_impossible_tensors_are_refused(shape, kind, words):
    b = Builder()
    assert words in _refusal(b.header([], [b.tensor("t", shape, kind)]))


def test_empty_tensors_and_scalars_are_as_the_engine_has_them():
    b = Builder()
    tensors = [b.tensor("none", (0, 1 << 62, 8)), b.tensor("one", ())]
    header = read_header(io.BytesIO(b.header([], tensors)))
    assert [t.nbytes for t in header.tensors] == [0, 4]


def test_what_stands_there_twice_is_refused():
    b = Builder()
    one, tensor = b.key("a", U32, 1), b.tensor("t", (8,))
    assert "key a is there twice" in _refusal(b.header([one, one]))
    assert "tensor t is there twice" in _refusal(b.header([], [tensor, tensor]))


def test_tensors_that_overlap_or_leave_gaps_are_refused():
    b = Builder()
    for offset in (0, 31, 64, 1 << 63):
        tensors = [b.tensor("t", (8,)), b.tensor("u", (8,), offset=offset)]
        assert f"starts at {offset} of the data, not at 32" in _refusal(b.header([], tensors))


def test_values_the_engine_does_not_take_are_refused():
    b = Builder()
    assert "key 0 has 0 bytes" in _refusal(b.header([b.key("", U32, 1)]))
    assert "value type 13" in _refusal(b.header([b.string("k") + b.u32(13) + bytes(8)]))
    nested = b.string("k") + b.u32(ARR) + b.u32(ARR) + b.u64(0)
    assert "an array of arrays" in _refusal(b.header([nested]))
    for bad in (0, 3, 48):
        assert "not a power of 2" in _refusal(b.header([b.key("general.alignment", U32, bad)]))
    assert "'abc', not a power" in _refusal(b.header([b.key("general.alignment", STR, "abc")]))


def test_names_from_the_file_are_escaped_and_cut():
    b = Builder()
    key = b.key("\x1b[31m\n" + "k" * 5000, U32, 1)
    text = _refusal(b.header([key, key]))
    assert len(text) < 400
    assert text.isprintable()
    evil = b.tensor("\x1b]0;x\x07\n", (33,), 8)
    assert "\\x1b]0;x\\x07\\n" in _refusal(b.header([], [evil]))


def _sparse(keys: list[bytes], n_keys: int) -> ZeroTail:
    return ZeroTail(Builder().header(keys, n_keys=n_keys), 1 << 50)


def test_billions_of_empty_strings_in_a_sparse_file_are_not_walked():
    b = Builder()
    stream = _sparse([b.array("k", STR, [], length=1 << 40)], 1)
    with pytest.raises(ModelError, match="strings"):
        read_header(stream)
    assert stream.handed_out < 4 << 20


def test_one_huge_string_in_a_sparse_file_is_not_read():
    b = Builder()
    stream = _sparse([b.string("k") + b.u32(STR) + b.u64(1 << 40)], 1)
    with pytest.raises(ModelError, match="MiB of text"):
        read_header(stream)
    assert stream.handed_out < 4 << 20


def test_the_reading_of_far_flung_strings_ends(monkeypatch):
    monkeypatch.setattr("localkv.gguf.cursor.MAX_READ", 40 << 20)
    b = Builder()

    class FarApart(ZeroTail):
        def read(self, count=-1):
            # Every string claims half a MiB: whatever is read, it is a length.
            super().read(count)
            return b.u64(1 << 19) * (count // 8) if self.at > 1 << 19 else self._first(count)

        def _first(self, count):
            return (self.head + b.u64(1 << 19) * (count // 8))[:count]

    stream = FarApart(b.header([b.array("k", STR, [], length=1 << 23)]), 1 << 50)
    with pytest.raises(ModelError, match="of header"):
        read_header(stream)
    assert stream.handed_out <= 40 << 20 < MAX_READ
