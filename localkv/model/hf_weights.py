"""The weights beside a config.json: bytes of the safetensors files, from headers alone.

Source of the format: an 8-byte little-endian header length, then that much JSON (tensor name ->
dtype, shape, data_offsets), then the data. Files are strangers: the length is held against the
file's own size and a ceiling before anything is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localkv.errors import ModelError
from localkv.gguf.text import shown

INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
#: The format's own ceiling for a header.
_HEADER_MOST = 100_000_000
_MOST_FILES = 4_096


@dataclass(frozen=True)
class Weights:
    """The bytes of all tensors, the bytes of the files, and the files; ``why`` if unknown."""

    tensor_bytes: int = 0
    file_bytes: int = 0
    paths: tuple[str, ...] = ()
    why: str = ""


def read_weights(folder: str) -> Weights:
    """Return the weights in ``folder``: the index's own total, else the sum over all headers.

    Raises:
        ModelError: a file is there but is not what its name says.
    """
    index = os.path.join(folder, INDEX)
    paths = _safetensors(folder)
    files = sum(os.path.getsize(path) for path in paths)
    if os.path.isfile(index):
        return Weights(_index_total(index), files, paths)
    if not paths:
        return Weights(why="no *.safetensors and no index beside the config.json")
    if len(paths) > 1 and not os.path.exists(os.path.join(folder, "model.safetensors")):
        missing = _missing_shards(paths)
        if missing:
            return Weights(file_bytes=files, paths=paths, why=f"{missing} is not there")
    single = os.path.join(folder, "model.safetensors")
    counted = (single,) if single in paths else paths
    return Weights(sum(tensor_bytes(path) for path in counted), files, paths)


def tensor_bytes(path: str) -> int:
    """Return the bytes of all tensors in one safetensors file, from its header.

    Raises:
        ModelError: the file is cut off, or its header is not one.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_HEADER_MOST, size - 8):
            raise _bad(path, f"a header of {length} bytes at offset 0 in a file of {size} bytes")
        header = _json(file.read(length), path)
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, Mapping) else None
        span = _length(offsets, size - 8 - length)
        if span is None:
            raise _bad(path, f"tensor {shown(str(name), 60)!r} lies outside of the file")
        total += span
    return total


def _length(offsets: Any, most: int) -> int | None:
    """Return the length of a [begin, end] range within ``most`` bytes, None if it is not one."""
    if not (isinstance(offsets, list) and len(offsets) == 2):
        return None
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= most:
        return None
    return end - begin


def _index_total(path: str) -> int:
    if os.path.getsize(path) > _HEADER_MOST:
        raise _bad(path, "more than 100 MB of index")
    with open(path, "rb") as file:
        metadata = _json(file.read(_HEADER_MOST), path).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if isinstance(total, bool) or not isinstance(total, int) or not 0 <= total < 1 << 60:
        raise _bad(path, "metadata.total_size is not a number of bytes")
    return total


def _safetensors(folder: str) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.name.endswith(_SUFFIX) and e.is_file())
    if len(names) > _MOST_FILES:
        raise _bad(folder, f"more than {_MOST_FILES} safetensors files")
    return tuple(os.path.join(folder, name) for name in names)


def _missing_shards(paths: tuple[str, ...]) -> str:
    """Return the first shard that ``x-00001-of-00003`` names promise and the folder lacks."""
    names = {os.path.basename(path) for path in paths}
    for name in sorted(names):
        stem, _, count = name[: -len(_SUFFIX)].rpartition("-of-")
        prefix, _, number = stem.rpartition("-")
        if not (count.isdecimal() and number.isdecimal() and int(count) <= _MOST_FILES):
            continue
        for shard in range(1, int(count) + 1):
            wanted = f"{prefix}-{shard:0{len(number)}d}-of-{count}{_SUFFIX}"
            if wanted not in names:
                return shown(wanted)
    return ""


def _json(data: bytes, path: str) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _bad(path, "not JSON") from error
    if not isinstance(value, Mapping):
        raise _bad(path, "not a JSON object")
    return value


def _bad(path: str, what: str) -> ModelError:
    return ModelError(f"{shown(path)}: {what}", "download the file again")
