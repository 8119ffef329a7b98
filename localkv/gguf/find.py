"""From what a person types to the files of a model and their headers.

Understood: the path of a .gguf file, any shard of a set ``NAME-00001-of-00003.gguf``, and the
built-in models ``demo`` and ``demo-swa``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from localkv.errors import ModelError
from localkv.gguf.cursor import DAMAGED
from localkv.gguf.diagnose import check_file
from localkv.gguf.reader import Header, TensorInfo, Value, check_data, first_missing, read_header
from localkv.gguf.text import shown

#: ``progress(done_bytes, total_bytes, label)``: told while a built-in model is being fetched.
Progress = Callable[[int, int, str], None]

# The engine's own pattern: llama_split_path, src/llama.cpp.
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)

#: Ways to name a model that localkv does not follow yet, and what to type until then.
_LATER: tuple[tuple[str, str], ...] = (
    ("ollama:", "give the blob itself: `ollama show NAME --modelfile` prints its path after FROM"),
    ("hf:", "download the .gguf file and give its path"),
    ("http://", "download the .gguf file and give its path"),
    ("https://", "download the .gguf file and give its path"),
)


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model: ``paths`` in the order of the shards, ``sizes`` in bytes.

    ``argument`` is what the person typed.
    """

    argument: str
    paths: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def path(self) -> str:
        """Return the file that the engine is given: the first shard."""
        return self.paths[0]

    @property
    def file_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(self.sizes)


@dataclass(frozen=True)
class GgufModel:
    """A model's files with their headers read, seen as one.

    ``missing`` says, as a sentence, which tensor data the files lack; None when all is there.
    """

    files: ModelFiles
    headers: tuple[Header, ...]
    missing: str | None = None

    @property
    def path(self) -> str:
        """Return the file that the engine is given: the first shard."""
        return self.files.path

    @property
    def file_bytes(self) -> int:
        """Return the size of all files together, as they are on disk."""
        return self.files.file_bytes

    @property
    def metadata(self) -> Mapping[str, Value]:
        """Return the model's metadata, which stand in the first shard."""
        return self.headers[0].metadata

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return the tensors of all shards; offsets count within the shard of each."""
        return tuple(tensor for header in self.headers for tensor in header.tensors)


def locate(argument: str, *, progress: Progress | None = None) -> ModelFiles:
    """Return the files of the model that ``argument`` names; a built-in one is fetched if need be.

    Only the first bytes of each file are looked at.

    Raises:
        ModelError: nothing there, not a GGUF file, a shard is missing, or a built-in model
            cannot be had.
    """
    for prefix, hint in _LATER:
        if argument.startswith(prefix):
            raise ModelError(f"{shown(argument)}: {prefix} names are not supported yet", hint)
    if argument == "demo" or argument.startswith("demo-"):
        from localkv.gguf.demo import DEMOS, fetch

        if argument in DEMOS:
            path = fetch(argument, progress=progress)
            return ModelFiles(argument, (path,), (check_file(path),))
    size = check_file(argument)
    paths = _shard_paths(argument)
    if len(paths) == 1:
        return ModelFiles(argument, paths, (size,))
    return ModelFiles(argument, paths, tuple(check_file(path) for path in paths))


def open_model(
    argument: str,
    *,
    arrays: str | Collection[str] = "short",
    need_data: bool = False,
    progress: Progress | None = None,
) -> GgufModel:
    """Return the model that ``argument`` names, headers read and shards checked.

    ``arrays`` as for :func:`read_header`. Without ``need_data``, files cut off after their header
    are taken and ``missing`` says so; with it, every tensor's data must be there.

    Raises:
        ModelError: the files cannot be found, read or understood, or do not belong together.
    """
    files = locate(argument, progress=progress)
    headers = tuple(_read(path, arrays) for path in files.paths)
    _check_shards(files.paths, headers)
    missing = None
    for path, header in zip(files.paths, headers, strict=True):
        if need_data:
            check_data(header, name=path)
        elif missing is None and (tensor := first_missing(header)):
            missing = (
                f"{shown(path)} holds no data from tensor {shown(tensor.name)} on: figures come "
                "from its header alone"
            )
    return GgufModel(files, headers, missing)


def _read(path: str, arrays: str | Collection[str]) -> Header:
    try:
        # Unbuffered: the reader has a window of its own.
        with open(path, "rb", buffering=0) as stream:
            return read_header(stream, arrays=arrays, name=path)
    except OSError as error:
        raise ModelError(
            f"{shown(path)} cannot be read: {error.strerror}",
            "check the disk and the file's rights",
        ) from error


def _shard_paths(path: str) -> tuple[str, ...]:
    """Return all shards of the set that ``path`` belongs to by its name, in order."""
    match = _SHARD.match(path)
    count = int(match["count"]) if match else 1
    if match is None or count <= 1:
        return (path,)
    number = int(match["number"])
    if not 1 <= number <= count:
        raise ModelError(
            f"{shown(path)} is shard {number} of {count} by its name", "restore its proper name"
        )
    paths = tuple(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1))
    for sibling in paths:
        if not os.path.exists(sibling):
            raise ModelError(
                f"shard {shown(sibling)} is missing of a set of {count}",
                "download it into the same folder",
            )
    return paths


def _check_shards(paths: tuple[str, ...], headers: tuple[Header, ...]) -> None:
    """Refuse shards that do not belong together, as ``llama_model_loader`` does.

    Source: src/llama-model-loader.cpp; keys split.no, split.count and split.tensors.count.
    """
    if len(paths) == 1:
        _check_single(paths[0], headers[0])
        return
    names: set[str] = set()
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        count = header.metadata.get("split.count")
        if count != len(paths):
            raise ModelError(
                f"{shown(path)} is one of {len(paths)} shards by its name, but its header says "
                f"{_said(count)}",
                "get all shards of one set, and rename a whole model that is only named like one",
            )
        number = header.metadata.get("split.no")
        if number != index:
            told = number + 1 if isinstance(number, int) else _said(number)
            raise ModelError(
                f"{shown(path)} is shard {index + 1} by its name, but shard {told} by its header",
                "the files were renamed or mixed up: download this shard again",
            )
        _check_names(path, header, names)
    expected = headers[0].metadata.get("split.tensors.count")
    if expected != len(names):
        raise ModelError(
            f"the shards of {shown(paths[0])} hold {len(names)} tensors, but the first one says "
            f"{_said(expected)}",
            "the shards come from different sets: download them again",
        )


def _check_single(path: str, header: Header) -> None:
    count = header.metadata.get("split.count")
    if isinstance(count, int) and count > 1:
        number = header.metadata.get("split.no")
        place = f"{number + 1:05d}" if isinstance(number, int) else "0000N"
        raise ModelError(
            f"{shown(path)} is one of {count} shards by its header, but its name does not say so",
            f"give every shard its name back: NAME-{place}-of-{count:05d}.gguf",
        )


def _check_names(path: str, header: Header, names: set[str]) -> None:
    for tensor in header.tensors:
        if tensor.name in names:
            raise ModelError(
                f"{shown(path)} holds tensor {shown(tensor.name)}, which an earlier shard has too",
                DAMAGED,
            )
        names.add(tensor.name)


def _said(value: object) -> str:
    return "nothing" if value is None else shown(str(value))
