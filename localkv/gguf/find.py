"""From what a person types to the files of a model and their headers.

Understood: the path of a .gguf file, any shard of a set ``NAME-00001-of-00003.gguf``,
``ollama:NAME[:TAG]``, ``hf:ORG/NAME[/FILE][:QUANT]`` from the caches of this machine, the URL of a
file (or of any shard), and the built-in models ``demo`` and ``demo-swa``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import BinaryIO

from localkv.errors import ModelError
from localkv.gguf.diagnose import check_file
from localkv.gguf.reader import (
    MAGIC,
    Header,
    TensorInfo,
    Value,
    check_data,
    first_missing,
    read_header,
)
from localkv.gguf.shards import check_shards, shard_names
from localkv.gguf.text import shown
from localkv.tuples import NamedTuple

#: ``progress(done_bytes, total_bytes, label)``: told while a built-in model is being fetched.
Progress = Callable[[int, int, str], None]


class ModelFiles(NamedTuple):
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


class GgufModel(NamedTuple):
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

    Only the first bytes of each file are looked at; of a URL, the header.

    Raises:
        ModelError: nothing there, not a GGUF file, a shard is missing, or a built-in model
            cannot be had.
    """
    if is_url(argument):
        return open_model(argument).files
    path = _path_of(argument, progress)
    size = check_file(path)
    paths = _in_folder(path)
    if len(paths) == 1:
        return ModelFiles(argument, paths, (size,))
    return ModelFiles(argument, paths, tuple(check_file(path) for path in paths))


def _path_of(argument: str, progress: Progress | None) -> str:
    """Return the path of the file that ``argument`` stands for; the argument if it is a path."""
    if argument.startswith("ollama:"):
        from localkv.gguf.ollama_store import find_ollama
        from localkv.gguf.places import places

        return find_ollama(argument.removeprefix("ollama:"), places().ollama).path
    if argument.startswith("hf:"):
        from localkv.gguf.hub_cache import find_hub
        from localkv.gguf.places import places

        return find_hub(argument.removeprefix("hf:"), places()).path
    if argument == "demo" or argument.startswith("demo-"):
        from localkv.gguf.demo import DEMOS, fetch

        if argument in DEMOS:
            return fetch(argument, progress=progress)
    return argument


def is_url(argument: str) -> bool:
    """Return whether ``argument`` is meant as the URL of a file."""
    return argument[:8].lower().startswith(("http://", "https://"))


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
    if is_url(argument):
        return _open_url(argument, arrays, need_data)
    files = locate(argument, progress=progress)
    headers = tuple(_read(path, arrays) for path in files.paths)
    check_shards(files.paths, headers)
    if need_data:
        for path, header in zip(files.paths, headers, strict=True):
            check_data(header, name=path)
    return GgufModel(files, headers, _missing(files.paths, headers))


def _open_url(url: str, arrays: str | Collection[str], need_data: bool) -> GgufModel:
    if need_data:
        raise ModelError(
            f"{shown(url)} is on a server, and its data is needed here",
            "download the file and give its path; `localkv predict` needs no more than the URL",
        )
    from localkv.gguf.remote import read_remote

    found = read_remote(url, arrays)
    headers = tuple(remote.header for remote in found)
    paths = tuple(remote.url for remote in found)
    check_shards(paths, headers)
    missing = _missing(paths, headers)
    if missing is None:
        missing = f"only the header of {shown(url)} was fetched; the size is the server's word"
        if not all(remote.told for remote in found):
            missing = f"{shown(url)} has no size by its server: it is summed from the header"
    files = ModelFiles(url, paths, tuple(remote.size for remote in found))
    return GgufModel(files, headers, missing)


def _missing(paths: tuple[str, ...], headers: tuple[Header, ...]) -> str | None:
    for path, header in zip(paths, headers, strict=True):
        if tensor := first_missing(header):
            return (
                f"{shown(path)} holds no data from tensor {shown(tensor.name)} on: figures come "
                "from its header alone"
            )
    return None


def _read(path: str, arrays: str | Collection[str]) -> Header:
    try:
        # Unbuffered: the reader has a window of its own.
        with open(path, "rb", buffering=0) as stream:
            header = read_header(stream, arrays=arrays, name=path)
            _refuse_joined(stream, header, path)
            return header
    except OSError as error:
        raise ModelError(
            f"{shown(path)} cannot be read: {error.strerror}",
            "check the disk and the file's rights",
        ) from error


def _in_folder(path: str) -> tuple[str, ...]:
    """Return the paths of all shards of the set that ``path`` belongs to by its name, in order."""
    paths = shard_names(path)
    for sibling in paths:
        if len(paths) > 1 and not os.path.exists(sibling):
            raise ModelError(
                f"shard {shown(sibling)} is missing of a set of {len(paths)}",
                "download it into the same folder",
            )
    return paths


def _refuse_joined(stream: BinaryIO, header: Header, path: str) -> None:
    """Refuse files that were written one behind the other: the engine reads only the first."""
    end = header.data_offset
    if header.tensors:
        end += header.tensors[-1].offset + header.tensors[-1].nbytes
    for offset in (end, -(-end // header.alignment) * header.alignment):
        if offset + len(MAGIC) <= header.size:
            stream.seek(offset)
            if stream.read(len(MAGIC)) == MAGIC:
                raise ModelError(
                    f"{shown(path)}: another GGUF file begins at byte {offset}: several files, "
                    "shards perhaps, were joined into one",
                    "download the shards under their own names: the engine finds them by these",
                )
