"""Sets of shards ``NAME-00001-of-00003.gguf``: the names of a set, and whether files belong to one.

Names and headers are all that is looked at, so the same rules serve folders and servers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localkv.errors import ModelError
from localkv.gguf.cursor import DAMAGED
from localkv.gguf.reader import Header
from localkv.gguf.text import shown
from localkv.units import plural

# The engine's own pattern: llama_split_path, src/llama.cpp.
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


def shard_place(name: str) -> tuple[str, int, int]:
    """Return the stem, the number and the count of a shard by its name; (name, 1, 1) for others."""
    match = _SHARD.match(name)
    if match is None or int(match["count"]) <= 1:
        return name, 1, 1
    return match["stem"], int(match["number"]), int(match["count"])


def shard_names(name: str) -> tuple[str, ...]:
    """Return the names of the whole set that ``name`` belongs to, in order.

    Raises:
        ModelError: the number does not lie within the set.
    """
    stem, number, count = shard_place(name)
    if count == 1:
        return (name,)
    if not 1 <= number <= count:
        raise ModelError(
            f"{shown(name)} is shard {number} of {count} by its name", "restore its proper name"
        )
    return tuple(f"{stem}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1))


def check_shards(names: Sequence[str], headers: Sequence[Header]) -> None:
    """Refuse shards that do not belong together, as ``llama_model_loader`` does.

    Source: src/llama-model-loader.cpp; keys split.no, split.count and split.tensors.count.

    Raises:
        ModelError: names and headers disagree, or the headers among themselves.
    """
    if len(names) == 1:
        _check_single(names[0], headers[0])
        return
    seen: set[str] = set()
    for index, (name, header) in enumerate(zip(names, headers, strict=True)):
        check_place(name, header, index, len(names))
        _check_tensors(name, header, seen)
    expected = headers[0].metadata.get("split.tensors.count")
    if expected != len(seen):
        raise ModelError(
            f"the shards of {shown(names[0])} hold {plural(len(seen), 'tensor')}, but the "
            f"first one says {_said(expected)}",
            "the shards come from different sets: download them again",
        )


def check_place(name: str, header: Header, index: int, total: int) -> None:
    """Refuse a shard whose header does not say that it is number ``index`` (from 0) of ``total``.

    Raises:
        ModelError: the header says another place, or none.
    """
    count = header.metadata.get("split.count")
    if count != total:
        raise ModelError(
            f"{shown(name)} is one of {total} shards by its name, but its header says "
            f"{_said(count)}",
            "get all shards of one set, and rename a whole model that is only named like one",
        )
    number = header.metadata.get("split.no")
    if number != index:
        told = number + 1 if isinstance(number, int) else _said(number)
        raise ModelError(
            f"{shown(name)} is shard {index + 1} by its name, but shard {told} by its header",
            "the files were renamed or mixed up: download this shard again",
        )


def _check_single(name: str, header: Header) -> None:
    count = header.metadata.get("split.count")
    if isinstance(count, int) and count > 1:
        number = header.metadata.get("split.no")
        place = f"{number + 1:05d}" if isinstance(number, int) else "0000N"
        raise ModelError(
            f"{shown(name)} is one of {count} shards by its header, but its name does not say so",
            f"give every shard its name back: NAME-{place}-of-{count:05d}.gguf",
        )


def _check_tensors(name: str, header: Header, seen: set[str]) -> None:
    for tensor in header.tensors:
        if tensor.name in seen:
            raise ModelError(
                f"{shown(name)} holds tensor {shown(tensor.name)}, which an earlier shard has too",
                DAMAGED,
            )
        seen.add(tensor.name)


def _said(value: object) -> str:
    return "nothing" if value is None else shown(str(value))
