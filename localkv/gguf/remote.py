"""Models behind a URL: the header alone is fetched, in a few ranges or from the start of a stream.

A header with a vocabulary of 262k tokens has some ten megabytes, the file behind it gigabytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import BinaryIO, cast
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from localkv.errors import ModelError
from localkv.gguf.cursor import LIMIT
from localkv.gguf.diagnose import identify
from localkv.gguf.download import Answer, Downloader, check_url
from localkv.gguf.reader import MAGIC, Header, read_header
from localkv.gguf.shards import check_place, shard_names
from localkv.gguf.text import shown
from localkv.tuples import NamedTuple

#: Bytes fetched at first; every further request fetches as much again as there is.
FIRST_CHUNK = 1 << 20
_LARGEST_CHUNK = 16 << 20
#: Bytes of one file that are fetched at most: no real header comes near it.
MAX_HEADER = 64 << 20
#: Shards of one set: the largest sets have some sixty.
_MAX_SHARDS = 256
#: What a stream's length is taken for until its end is seen.
_ENDLESS = 1 << 60
_PIECE = 1 << 16


class RemoteHeader(NamedTuple):
    """The header of the file at ``url``; ``size`` is the file's in bytes, as far as it is told.

    ``data`` are its bytes up to the tensor data. ``told`` is False where
    the server does not give a size, and ``size`` is what the header promises.
    """

    url: str
    header: Header
    size: int
    told: bool
    data: bytes


def read_remote(
    url: str,
    arrays: str | Collection[str] = "short",
    *,
    read_timeout: float | None = None,
    total_timeout: float | None = None,
) -> tuple[RemoteHeader, ...]:
    """Return the headers of the model at ``url``, of all shards in order, fetched one by one.

    ``read_timeout`` and ``total_timeout`` are seconds for the next bytes and for one request.

    Raises:
        ModelError: it cannot be fetched, is no GGUF file, or a shard is missing or another's.
    """
    check_url(url)
    urls = _shard_urls(url)
    found = []
    with Downloader(read=read_timeout, total=total_timeout) as downloader:
        for index, one in enumerate(urls):
            try:
                remote = _read_one(downloader, one, arrays)
            except ModelError as error:
                if one == url:
                    raise
                raise ModelError(
                    f"a shard of a set of {len(urls)} cannot be had: {error.message}", error.hint
                ) from error
            if len(urls) > 1:  # before the next one is asked for
                check_place(one, remote.header, index, len(urls))
            found.append(remote)
    return tuple(found)


def _shard_urls(url: str) -> tuple[str, ...]:
    """Return the URLs of the whole set that ``url`` belongs to by its name."""
    parts = urlsplit(url)
    folder, _, name = parts.path.rpartition("/")
    names = shard_names(unquote(name))
    if len(names) == 1:
        return (url,)
    if len(names) > _MAX_SHARDS:
        raise ModelError(
            f"{shown(url)} is one of {len(names)} shards by its name", "no real set has so many"
        )
    return tuple(
        url if one == unquote(name) else urlunsplit(parts._replace(path=f"{folder}/{quote(one)}"))
        for one in names
    )


def _read_one(downloader: Downloader, url: str, arrays: str | Collection[str]) -> RemoteHeader:
    with RemoteFile(downloader, url) as stream:
        head = stream.read(512)
        if head[:4] != MAGIC:
            raise _not_gguf(url, head, stream.size)
        told = stream.size
        header = read_header(
            cast(BinaryIO, stream),
            arrays=arrays,
            size=_ENDLESS if told is None else told,
            name=url,
        )
        promised = header.data_offset
        if header.tensors:
            promised += header.tensors[-1].offset + header.tensors[-1].nbytes
        size = promised if told is None else told
        data = stream.prefix(header.data_offset)
        return RemoteHeader(url, header._replace(size=size), size, told is not None, data)


def _not_gguf(url: str, head: bytes, size: int | None) -> ModelError:
    found, hint = identify(head, len(head) if size is None else size)
    if "/blob/" in url:
        hint = "a hub serves the file itself under /resolve/ in place of /blob/"
    return ModelError(f"{shown(url)} is {found}, not a GGUF file", hint)


class RemoteFile:
    """The beginning of the file at ``url`` as a stream that :func:`read_header` takes.

    What was read is kept, so the header can be handed on. ``size`` is the file's in bytes, None
    where the server does not tell. A context manager: leaving it drops an answer in progress.
    """

    def __init__(self, downloader: Downloader, url: str) -> None:
        self.size: int | None = None
        self._downloader = downloader
        self._url = url
        self._at = 0
        self._data = bytearray()
        self._tag = ""
        self._resolved = url  # where redirects led: asked directly from then on
        self._stack = ExitStack()
        self._stream: Iterator[bytes] | None = None

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def seek(self, offset: int) -> int:
        """Go to ``offset`` from the start."""
        self._at = offset
        return offset

    def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes, fewer only at the end of the file.

        Raises:
            ModelError: they cannot be had, or lie beyond :data:`MAX_HEADER`.
        """
        end = self._at + count if self.size is None else min(self._at + count, self.size)
        if end > MAX_HEADER:
            raise ModelError(f"{shown(self._url)}: a header above {MAX_HEADER >> 20} MiB", LIMIT)
        while len(self._data) < end and self._more(end):
            pass
        piece = bytes(self._data[self._at : end])
        self._at += len(piece)
        return piece

    def prefix(self, count: int) -> bytes:
        """Return what was fetched of the first ``count`` bytes."""
        return bytes(self._data[:count])

    def _more(self, end: int) -> bool:
        """Fetch towards ``end``; False when the file ends before it."""
        first = len(self._data)
        if self._stream is not None:
            chunk = next(self._stream, None)
            self._data += chunk or b""
            return chunk is not None
        if not first:
            self._open(end)
            return self._stream is not None or bool(self._data)
        last = self._last(end)
        with self._downloader.get(self._resolved, first, last) as answer:
            self._check(answer, first)
            self._take(answer, last)
        return len(self._data) > first

    def _open(self, end: int) -> None:
        """Make the first request: for a range, which decides how the rest is read."""
        last = self._last(end)
        with ExitStack() as stack:
            answer = stack.enter_context(self._downloader.get(self._url, 0, last))
            if answer.ranged and answer.encoding == "identity":
                self.size, self._tag, self._resolved = answer.size, answer.tag, answer.url
                self._check(answer, 0)
                self._take(answer, last)
                return
            if answer.ranged:  # a range of an encoded body cannot be undone: ask for it whole
                stack.close()
                answer = stack.enter_context(self._downloader.get(self._url))
            self._stream = _decoded(answer)
            self.size = answer.size
            self._stack = stack.pop_all()  # stays open until the header is read

    def _last(self, end: int) -> int:
        """Return the last byte to ask for: doubling, within the file and the bounds."""
        there = len(self._data)
        step = min(max(there, FIRST_CHUNK), _LARGEST_CHUNK)
        stop = min(max(end, there + step), MAX_HEADER)
        return (stop if self.size is None else min(stop, self.size)) - 1

    def _check(self, answer: Answer, first: int) -> None:
        if not answer.ranged or answer.encoding != "identity" or answer.start != first:
            raise ModelError(
                f"{shown(self._url)}: the server sends another part than asked for",
                "download the file and give its path",
            )
        if (answer.size, answer.tag) != (self.size, self._tag):
            raise ModelError(f"{shown(self._url)} changed while it was read", "try again")

    def _take(self, answer: Answer, last: int) -> None:
        """Keep the bytes up to ``last``; the rest of what a server sends is not waited for."""
        for chunk in answer.chunks():
            self._data += chunk
            if len(self._data) > last:
                return


def _decoded(answer: Answer) -> Iterator[bytes]:
    """Yield the body in pieces of at most 64 KiB beyond what the network brings, decoded."""
    if answer.encoding == "identity":
        yield from answer.chunks()
        return
    if answer.encoding not in ("gzip", "x-gzip", "deflate"):
        raise ModelError(
            f"{shown(answer.url)} is sent as {shown(answer.encoding, 40)}, though it was asked for "
            "as it is",
            "download the file and give its path",
        )
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
    try:
        for chunk in answer.chunks():
            while chunk and not decoder.eof:
                yield decoder.decompress(chunk, _PIECE)
                chunk = decoder.unconsumed_tail
        while piece := decoder.decompress(b"", _PIECE):
            yield piece
    except zlib.error as error:
        raise ModelError(
            f"{shown(answer.url)}: its {answer.encoding} encoding is damaged ({error})", "try again"
        ) from error
