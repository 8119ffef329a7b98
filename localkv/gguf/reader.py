"""Read the header of a GGUF file: metadata and tensor infos, nothing of the data.

Format: docs/gguf.md of ggml; what the engine refuses (``gguf_init_from_reader``,
ggml/src/gguf.cpp) is refused here too, before anything is allocated for it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from struct import Struct
from typing import BinaryIO, NoReturn

from localkv.errors import ModelError
from localkv.gguf.cursor import DAMAGED, LIMIT, MAX_KEPT, Cursor
from localkv.gguf.text import shown
from localkv.gguf.types import (
    ARRAY,
    GGML_TYPES,
    REMOVED_GGML_TYPES,
    STRING,
    VALUE_TYPES,
    GgmlType,
    ValueType,
)
from localkv.tuples import NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
#: Numeric arrays up to this length are materialised: per-layer figures, not vocabularies.
SHORT_ARRAY = 1024

MAX_KEYS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_TENSORS = 1 << 18
MAX_TENSOR_NAME = 63  # GGML_MAX_NAME - 1
MAX_DIMS = 4
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, one byte of value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # name length, dimensions, type, offset
_INT64_MAX = (1 << 63) - 1
_BROKEN = "the engine refuses such a file: download or convert it again"


class ArrayRef(NamedTuple):
    """An array left in the file: ``length`` elements of ``type`` from byte ``offset`` on.

    ``order`` is "little" or "big". :func:`load_array` reads it.
    """

    type: str
    length: int
    offset: int
    order: str


Scalar = bool | int | float | str
Array = tuple[Scalar, ...]
Value = Scalar | Array | ArrayRef


class TensorInfo(NamedTuple):
    """One tensor: ``shape`` in elements, fastest dimension first; ``offset`` from the data start.

    ``type`` is the ggml name (``q4_1``); ``nbytes`` the size of the data without padding.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """What a GGUF file says about itself; offsets and sizes in bytes.

    ``order`` is "little" or "big"; ``end`` the offset behind the last tensor info; ``data_offset``
    where the tensor data starts, which a file cut off after its header does not reach; ``size``
    the length of the stream it was read from.
    """

    version: int
    order: str
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    end: int
    data_offset: int
    size: int


def read_header(
    stream: BinaryIO,
    *,
    arrays: str | Collection[str] = "short",
    size: int | None = None,
    name: str = "the file",
) -> Header:
    """Read the header of the GGUF file in ``stream``, any seekable binary stream.

    ``arrays``: "short" materialises numeric arrays of up to 1024 elements and leaves the others
    in the file as :class:`ArrayRef`; "all" materialises every one; a collection of keys
    materialises those as well. ``size`` is the length of the stream in bytes (default: found by
    seeking); ``name`` stands in errors. The tensor data need not be there: see :func:`check_data`.

    Raises:
        ModelError: not a GGUF file of version 2 or 3, damaged, or cut short in the header; the
            message names the byte offset.
    """
    if size is None:
        size = stream.seek(0, os.SEEK_END)
    cursor = Cursor(stream, size, name, size if arrays == "all" else MAX_KEPT)
    version = _read_version(cursor)
    n_tensors, n_keys = _read_counts(cursor)
    metadata = _read_metadata(cursor, n_keys, arrays)
    alignment = _alignment(cursor, metadata)
    tensors = _read_tensors(cursor, n_tensors, alignment)
    end = cursor.offset
    return Header(
        version=version,
        order="little" if cursor.order == "<" else "big",
        metadata=metadata,
        tensors=tensors,
        alignment=alignment,
        end=end,
        data_offset=_pad(end, alignment) if tensors else end,
        size=size,
    )


def load_array(stream: BinaryIO, ref: ArrayRef, *, name: str = "the file") -> Array:
    """Return the elements of an array that :func:`read_header` left in the file.

    ``stream`` is the one the header came from. Memory grows with the real length of the array.

    Raises:
        ModelError: the array does not lie within the stream.
    """
    size = stream.seek(0, os.SEEK_END)
    cursor = Cursor(stream, size, name, kept=size)
    cursor.order = "<" if ref.order == "little" else ">"
    cursor.skip(ref.offset, "the array")
    element = next(entry for entry in VALUE_TYPES.values() if entry.name == ref.type)
    return _read_elements(cursor, element, ref.length, "the array")


def first_missing(header: Header, file_size: int | None = None) -> TensorInfo | None:
    """Return the first tensor whose data a file of ``file_size`` bytes does not hold, or None.

    ``file_size`` defaults to the size of the stream that the header was read from.
    """
    there = (header.size if file_size is None else file_size) - header.data_offset
    return next((t for t in header.tensors if t.offset + t.nbytes > there), None)


def check_data(header: Header, file_size: int | None = None, *, name: str = "the file") -> None:
    """Return when a file of ``file_size`` bytes holds the data of every tensor of ``header``.

    Raises:
        ModelError: the file is cut short in the data; names the first tensor that is not whole.
    """
    size = header.size if file_size is None else file_size
    tensor = first_missing(header, size)
    if tensor is None:
        return
    last = header.tensors[-1]
    raise ModelError(
        f"{shown(name)}: the file is cut short in the data: tensor {shown(tensor.name)} ends at "
        f"byte {header.data_offset + tensor.offset + tensor.nbytes} but the file has {size}",
        f"download it again, the whole file has {header.data_offset + last.offset + last.nbytes} "
        "bytes or more",
    )


def _read_version(cursor: Cursor) -> int:
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise cursor.error(
            f"starts with {shown(repr(magic)[2:-1])}, not with GGUF", "give a GGUF file", offset=0
        )
    raw = cursor.take(4, "the version")
    version = int.from_bytes(raw, "little")
    # A small number read in the wrong order has its low half empty; the engine looks at the same.
    if version & 0xFFFF == 0 and version:
        cursor.order = ">"
        version = int.from_bytes(raw, "big")
    if version in VERSIONS:
        return version
    if version == 1:
        hint = "convert the model again with a current llama.cpp"
        raise cursor.error("GGUF version 1, which no current engine reads", hint, offset=4)
    hint = "update localkv, or check that the file is not damaged"
    raise cursor.error(f"GGUF version {version}; localkv knows 2 and 3", hint, offset=4)


def _read_counts(cursor: Cursor) -> tuple[int, int]:
    layout = Struct(cursor.order + "Q")
    (n_tensors,) = cursor.unpack(layout, "the tensor count")
    (n_keys,) = cursor.unpack(layout, "the key count")
    if n_tensors > MAX_TENSORS:
        raise cursor.error(f"claims {n_tensors} tensors", LIMIT, offset=8)
    if n_keys > MAX_KEYS:
        raise cursor.error(f"claims {n_keys} metadata keys", LIMIT, offset=16)
    cursor.require(
        n_keys * _MIN_KEY_BYTES + n_tensors * _MIN_TENSOR_BYTES,
        f"a header of {n_keys} keys and {n_tensors} tensors",
    )
    return n_tensors, n_keys


def _read_metadata(cursor: Cursor, count: int, arrays: str | Collection[str]) -> dict[str, Value]:
    long_too = () if isinstance(arrays, str) else arrays
    length_layout = Struct(cursor.order + "Q")
    type_layout = Struct(cursor.order + "I")
    metadata: dict[str, Value] = {}
    for index in range(count):
        begin = cursor.offset
        (length,) = cursor.unpack(length_layout, f"the name of key {index}")
        if not 0 < length <= MAX_KEY_BYTES:
            raise cursor.error(f"the name of key {index} has {length} bytes", offset=begin)
        key = cursor.text(length, f"the name of key {index}")
        if key in metadata:
            raise cursor.error(f"key {shown(key)} is there twice", _BROKEN, begin)
        what = f"key {shown(key)}"
        (type_id,) = cursor.unpack(type_layout, what)
        whole = arrays == "all" or key in long_too
        metadata[key] = _read_value(cursor, type_id, what, whole)
    return metadata


def _read_value(cursor: Cursor, type_id: int, what: str, whole: bool) -> Value:
    if type_id == ARRAY:
        return _read_array(cursor, what, whole)
    value_type = _value_type(cursor, type_id, what)
    if value_type.id == STRING:
        return cursor.string(what)
    value: Scalar = cursor.unpack(Struct(cursor.order + value_type.code), what)[0]
    return value


def _value_type(cursor: Cursor, type_id: int, what: str) -> ValueType:
    value_type = VALUE_TYPES.get(type_id)
    if value_type is None or type_id == ARRAY:
        problem = "an array of arrays" if type_id == ARRAY else f"value type {type_id}"
        raise cursor.error(
            f"{what} has {problem}, which the engine does not know", offset=cursor.offset - 4
        )
    return value_type


def _read_array(cursor: Cursor, what: str, whole: bool) -> Value:
    (type_id,) = cursor.unpack(Struct(cursor.order + "I"), what)
    element = _value_type(cursor, type_id, what)
    (length,) = cursor.unpack(Struct(cursor.order + "Q"), what)
    if whole or (element.id != STRING and length <= SHORT_ARRAY):
        return _read_elements(cursor, element, length, what)
    order = "little" if cursor.order == "<" else "big"
    ref = ArrayRef(element.name, length, cursor.offset, order)
    if element.id == STRING:
        cursor.skip_strings(length, what)
    else:
        cursor.skip(length * element.bytes, what)
    return ref


def _read_elements(cursor: Cursor, element: ValueType, length: int, what: str) -> Array:
    if element.id == STRING:
        cursor.require(8 * length, what)
        return tuple(cursor.string(what) for _ in range(length))
    cursor.require(length * element.bytes, what)
    cursor.keep(length * element.bytes, what)
    return cursor.unpack(Struct(f"{cursor.order}{length}{element.code}"), what)


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}, not a power of 2", _BROKEN)
    return alignment


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    length_layout = Struct(cursor.order + "Q")
    dims_layout = Struct(cursor.order + "I")
    tails = [Struct(f"{cursor.order}{n}qIQ") for n in range(MAX_DIMS + 1)]
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for index in range(count):
        begin = cursor.offset
        # Words for an error are put together when there is one: this runs a thousand times.
        (length,) = cursor.unpack(length_layout, "the name of a tensor")
        if length > MAX_TENSOR_NAME:
            raise cursor.error(f"the name of tensor {index} has {length} bytes", offset=begin)
        name = cursor.text(length, "the name of a tensor")
        (n_dims,) = cursor.unpack(dims_layout, "the shape of a tensor")
        if n_dims > MAX_DIMS:
            problem = f"{_tensor(name)} has {n_dims} dimensions, more than {MAX_DIMS}"
            raise cursor.error(problem, offset=begin)
        *shape, type_id, offset = cursor.unpack(tails[n_dims], "the shape of a tensor")
        if name in tensors:
            raise cursor.error(f"{_tensor(name)} is there twice", _BROKEN, begin)
        ggml_type = GGML_TYPES.get(type_id) or _refuse_type(cursor, type_id, name, begin)
        nbytes = _tensor_bytes(cursor, shape, ggml_type, name, begin)
        if offset != expected:
            problem = f"{_tensor(name)} starts at {offset} of the data, not at {expected}"
            raise cursor.error(problem, _BROKEN, begin)
        expected += _pad(nbytes, alignment)
        tensors[name] = TensorInfo(name, ggml_type.name, tuple(shape), offset, nbytes)
    return tuple(tensors.values())


def _tensor(name: str) -> str:
    return f"tensor {shown(name)}"


def _refuse_type(cursor: Cursor, type_id: int, name: str, offset: int) -> NoReturn:
    what = _tensor(name)
    removed = REMOVED_GGML_TYPES.get(type_id)
    if removed:
        hint = "quantise the model again; q4_0 and iq4_nl are repacked at load time now"
        raise cursor.error(f"{what} has type {removed}, which the engine has dropped", hint, offset)
    hint = "made by another engine or a newer one, or damaged: get it in a standard quantisation"
    raise cursor.error(
        f"{what} has type number {type_id}, which the engine does not know", hint, offset
    )


def _tensor_bytes(
    cursor: Cursor, shape: list[int], ggml_type: GgmlType, name: str, offset: int
) -> int:
    """Return the bytes of a tensor, refusing what overflows the engine's 64-bit arithmetic."""
    elements = 1
    for n in shape:
        elements *= n
        if n < 0 or elements > _INT64_MAX:
            problem = f"{_tensor(name)} has the impossible shape {tuple(shape)}"
            raise cursor.error(problem, DAMAGED, offset)
    row = shape[0] if shape else 1
    if row % ggml_type.block:
        problem = (
            f"{_tensor(name)} has rows of {row} elements, not a multiple of the "
            f"{ggml_type.block} of {ggml_type.name}"
        )
        raise cursor.error(problem, _BROKEN, offset)
    nbytes = elements // ggml_type.block * ggml_type.block_bytes
    if nbytes > _INT64_MAX:
        raise cursor.error(f"{_tensor(name)} has {nbytes} bytes", DAMAGED, offset)
    return nbytes


def _pad(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
