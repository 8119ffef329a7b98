"""Headers read back as they were written, by ours and by the ``gguf`` package's writer."""

from __future__ import annotations

import io
import math
import random
import struct

import gguf
import pytest
from gguf_helpers import ARR, HEADERS, STR, U32, Builder, small_model
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.errors import ModelError
from localkv.gguf import ArrayRef, check_data, cursor, first_missing, load_array, read_header
from localkv.gguf.reader import SHORT_ARRAY, VALUE_TYPES

_INTS = {0: (0, 8), 1: (1, 8), 2: (0, 16), 3: (1, 16), 4: (0, 32), 5: (1, 32), 10: (0, 64)}
_INTS[11] = (1, 64)


def _scalars(kind: int) -> st.SearchStrategy:
    if kind in _INTS:
        signed, bits = _INTS[kind]
        low = -(1 << bits - 1) if signed else 0
        return st.integers(low, low + (1 << bits) - 1)
    if kind == 7:
        return st.booleans()
    if kind == STR:
        return st.text(max_size=40)
    return st.floats(width=32 if kind == 6 else 64, allow_nan=False)


_KINDS = st.sampled_from(sorted(set(VALUE_TYPES) - {ARR}))
_ENTRIES = _KINDS.flatmap(
    lambda kind: st.one_of(
        st.tuples(st.just(kind), _scalars(kind)),
        # The writer of the gguf package drops empty arrays.
        st.tuples(st.just(kind), st.lists(_scalars(kind), min_size=1, max_size=5)),
    )
)
_KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=30)
# The package's q8_1 has 40 bytes a block, the engine's (and ours) 36.
_TYPES = st.sampled_from(sorted(set(gguf.GGML_QUANT_SIZES) - {gguf.GGMLQuantizationType.Q8_1}))
_SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def _write(path, endian, entries, tensors) -> None:
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    for key, (kind, value) in entries.items():
        if isinstance(value, list):
            sub = gguf.GGUFValueType(kind)
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=sub)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType(kind))
    for name, (raw_type, shape, nbytes) in tensors.items():
        # The writer takes the shape in numpy's order: slowest dimension first.
        writer.add_tensor_info(name, shape[::-1], _NoDtype(), nbytes, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


class _NoDtype:
    """A dtype that is none of those the writer would translate."""


def _tensor(raw_type, shape):
    block, block_bytes = gguf.GGML_QUANT_SIZES[raw_type]
    shape = [shape[0] * block, *shape[1:]]
    return raw_type, shape, math.prod(shape) // block * block_bytes


@settings(max_examples=60, deadline=None)
@given(
    entries=st.dictionaries(_KEYS, _ENTRIES, max_size=6),
    tensors=st.dictionaries(
        st.text("abc.0123", min_size=1, max_size=20), st.tuples(_TYPES, _SHAPES), max_size=6
    ),
    endian=st.sampled_from(gguf.GGUFEndian),
)
def test_what_the_gguf_package_writes_is_read_back(tmp_path_factory, entries, tensors, endian):
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    entries.pop("general.architecture", None)
    entries.pop("general.alignment", None)
    written = {name: _tensor(*value) for name, value in tensors.items()}
    _write(path, endian, entries, written)
    with path.open("rb") as stream:
        header = read_header(stream, arrays="all")
    assert header.order == endian.name.lower()
    assert header.version == 3
    assert header.metadata == {"general.architecture": "llama"} | {
        key: tuple(value) if isinstance(value, list) else value
        for key, (_, value) in entries.items()
    }
    assert [(t.name, t.type, list(t.shape), t.nbytes) for t in header.tensors] == [
        (name, raw_type.name.lower().replace("_k", "_K"), shape, nbytes)
        for name, (raw_type, shape, nbytes) in written.items()
    ]
    assert header.end == path.stat().st_size


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("order", "name"), [("<", "little"), (">", "big")])
def test_versions_and_byte_orders_say_the_same(version, order, name):
    header = read_header(io.BytesIO(small_model(order, version)))
    assert (header.version, header.order) == (version, name)
    assert header.metadata["llama.attention.head_count_kv"] == (3, 1)
    assert [t.shape for t in header.tensors] == [(8,), (8, 4)]
    assert header.data_offset % 32 == 0
    check_data(header)


def test_version_1_and_unknown_versions_are_refused():
    for version, words in ((1, "version 1"), (4, "version 4"), (0, "version 0")):
        with pytest.raises(ModelError, match=f"byte 4: GGUF {words}"):
            read_header(io.BytesIO(small_model(version=version)))


def test_strings_and_long_arrays_stay_in_the_file_until_asked_for():
    b = Builder()
    long = list(range(SHORT_ARRAY + 1))
    words = ["", "x" * 300, "ü", "\0\0\0\0\0\0\0\0"]
    keys = [
        b.array("words", STR, words),
        b.array("long", U32, long),
        b.array("short", U32, long[:-1]),
        b.key("behind", U32, 7),
    ]
    stream = io.BytesIO(b.header(keys))
    header = read_header(stream)
    assert header.metadata["short"] == tuple(long[:-1])
    assert header.metadata["behind"] == 7
    for key, values, kind in (("words", words, "str"), ("long", long, "u32")):
        ref = header.metadata[key]
        assert isinstance(ref, ArrayRef)
        assert (ref.type, ref.length) == (kind, len(values))
        assert load_array(stream, ref) == tuple(values)
    assert read_header(stream, arrays=["words"]).metadata["words"] == tuple(words)
    assert isinstance(read_header(stream, arrays=["words"]).metadata["long"], ArrayRef)
    assert read_header(stream, arrays="all").metadata["long"] == tuple(long)


def test_strings_that_straddle_the_windows_are_walked_exactly(monkeypatch):
    b = Builder()
    words = [chr(97 + n % 26) * (n * 7 % 90) for n in range(400)]
    stream = io.BytesIO(b.header([b.array("words", STR, words), b.key("behind", U32, 7)]))
    for window in (9, 64, 100, 1000):
        monkeypatch.setattr("localkv.gguf.cursor.WINDOW", window)
        assert read_header(stream).metadata["behind"] == 7
        assert read_header(stream, arrays="all").metadata["words"] == tuple(words)


def _words(texts: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(texts, min_size=8, max_size=60)


@settings(max_examples=200, deadline=None)
@given(
    words=st.one_of(
        # Zeros are in lengths alone, and some lengths lack them.
        _words(
            st.one_of(
                st.binary(min_size=1, max_size=30).map(lambda text: text.replace(b"\0", b"0")),
                st.sampled_from([b"word" * n for n in (64, 65, 128, 175)]),
            )
        ),
        # There are zeros elsewhere, and no length lacks any.
        _words(st.one_of(st.binary(max_size=30), st.sampled_from([b"", b"\0", b"\0" * 255]))),
    ),
    window=st.integers(9, 4000),
)
def test_strings_of_any_length_and_content_are_stepped_over(words, window):
    b = Builder()
    stream = io.BytesIO(b.header([b.array("words", STR, words), b.key("behind", U32, 7)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localkv.gguf.cursor.WINDOW", window)
        assert read_header(stream).metadata["behind"] == 7


@pytest.mark.parametrize("length", [255, 256, 257, 300, 512, 700])
def test_a_long_string_among_short_ones_is_no_stumbling_block(length):
    """Steps that went astray in it would come back on the way before the window ends."""
    for seed in range(10):
        chance = random.Random(seed)
        words = ["a" * chance.randint(1, 12) for _ in range(2000)]
        words[chance.randint(0, 50)] = "\x05" * length
        b = Builder()
        stream = io.BytesIO(b.header([b.array("words", STR, words), b.key("behind", U32, 7)]))
        assert read_header(stream).metadata["behind"] == 7


def test_a_vocabulary_is_stepped_over_by_low_bytes(monkeypatch):
    walked = []

    def counted(window, at, count, unpack):
        at, left = step_over(window, at, count, unpack)
        walked.append(count - left)
        return at, left

    step_over = cursor._step_over
    monkeypatch.setattr(cursor, "_step_over", counted)
    b = Builder()
    words = [f"word {n}" for n in range(20_003)]
    stream = io.BytesIO(b.header([b.array("words", STR, words), b.key("behind", U32, 7)]))
    assert read_header(stream).metadata["behind"] == 7
    assert sum(walked) < len(words) / 50


def test_a_stream_that_hands_out_little_at_a_time_is_enough():
    class Slow(io.BytesIO):
        def read(self, count=-1):
            return super().read(min(count, 7))

    whole = small_model()
    assert read_header(Slow(whole)) == read_header(io.BytesIO(whole))


def test_bytes_that_are_not_utf8_come_out_escaped():
    b = Builder()
    header = read_header(io.BytesIO(b.header([b.key("name", STR, b"a\xffb")])))
    assert header.metadata["name"] == "a\\xffb"


def test_alignment_moves_the_data():
    b = Builder()
    keys = [b.key("general.alignment", U32, 256)]
    tensors = [b.tensor("a", (3,)), b.tensor("b", (1,), offset=256)]
    header = read_header(io.BytesIO(b.header(keys, tensors)))
    assert header.alignment == 256
    assert header.data_offset == -(-header.end // 256) * 256


def test_data_cut_short_is_told_by_tensor_and_byte():
    whole = small_model()
    header = read_header(io.BytesIO(whole))
    assert first_missing(header) is None
    last = header.tensors[-1]
    for size in (len(whole) - 1, header.data_offset + 32, header.end):
        cut = read_header(io.BytesIO(whole[:size]))
        missing = first_missing(cut)
        assert missing is not None
        end = header.data_offset + missing.offset + missing.nbytes
        assert end > size
        assert all(
            header.data_offset + t.offset + t.nbytes <= size for t in header.tensors[:-1]
        ) == (missing is not header.tensors[0] and missing.name == last.name)
        with pytest.raises(ModelError, match=f"{missing.name} ends at byte {end} but .* {size}:"):
            check_data(cut, name="x.gguf")
        check_data(cut, len(whole))
    assert first_missing(header, len(whole) - 1) == last


@pytest.mark.parametrize("path", sorted(HEADERS.glob("*.gguf")), ids=lambda p: p.stem)
def test_header_only_files_are_read_as_the_gguf_package_reads_them(path, tmp_path):
    with path.open("rb") as stream:
        header = read_header(stream, arrays="all")
    last = header.tensors[-1]
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(path.read_bytes())
    with whole.open("r+b") as file:
        file.truncate(header.data_offset + last.offset + last.nbytes)
    _compare(header, gguf.GGUFReader(whole))


@pytest.mark.slow
def test_smollm2_reads_as_the_gguf_package_reads_it(smollm2_path):
    with open(smollm2_path, "rb") as stream:
        _compare(read_header(stream, arrays="all"), gguf.GGUFReader(smollm2_path))


@pytest.mark.slow
def test_gemma_reads_as_the_gguf_package_reads_it(gemma_path):
    with open(gemma_path, "rb") as stream:
        header = read_header(stream)
        check_data(header)
        tokens = load_array(stream, header.metadata["tokenizer.ggml.tokens"])
    reader = gguf.GGUFReader(gemma_path)
    _compare(header, reader)
    field = reader.fields["tokenizer.ggml.tokens"]
    assert tokens == tuple(bytes(field.parts[i]).decode() for i in field.data)


def _compare(header, reader) -> None:
    for key, value in header.metadata.items():
        if not isinstance(value, ArrayRef):
            told = reader.fields[key].contents()
            assert value == (tuple(told) if isinstance(told, list) else told)
    assert set(header.metadata) == {k for k in reader.fields if not k.startswith("GGUF.")}
    assert header.data_offset == reader.data_offset
    assert [(t.name, t.shape, t.nbytes, header.data_offset + t.offset) for t in header.tensors] == [
        (t.name, tuple(int(n) for n in t.shape), t.n_bytes, t.data_offset) for t in reader.tensors
    ]


def test_the_size_can_be_told_instead_of_sought():
    whole = small_model()
    assert read_header(io.BytesIO(whole), size=len(whole)).size == len(whole)
    with pytest.raises(ModelError, match="is not whole: the file ends at byte"):
        read_header(io.BytesIO(whole[:100]), size=len(whole))


def test_f32_values_keep_their_bits():
    b = Builder()
    value = read_header(io.BytesIO(b.header([b.key("x", 6, 1e-5)]))).metadata["x"]
    assert struct.pack("<f", value) == struct.pack("<f", 1e-5)
