"""One bounded GET at a time over HTTP: redirects, ranges, time and encodings under control.

Hubs answer with a redirect to another host, so those are followed; a step from https down to http
is not, and no credentials go anywhere. httpx is loaded by the first request.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from localkv.errors import ModelError
from localkv.gguf.text import shown

if TYPE_CHECKING:
    import httpx

#: Seconds to connect and to wait for the next bytes, and for one whole answer.
CONNECT_TIMEOUT = 10.0
READ_TIMEOUT = 20.0
TOTAL_TIMEOUT = 120.0
_MAX_REDIRECTS = 8
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_REDIRECTS = (301, 302, 303, 307, 308)
_CHECK_URL = "check the URL in a browser, or download the file and give its path"
_STATUS_HINTS = {
    401: "the file needs a login: download it with the hub's own program and give hf:ORG/NAME",
    403: "the file needs a login or a licence accepted: download it and give its path",
    404: "check the URL: file names are exact, letter case included",
    429: "too many requests: wait a while",
}


class Answer:
    """The answer to a GET: ``size`` of the whole file in bytes, None where it is not told.

    ``start`` is the offset of the first byte of the body, 0 unless the server answered a range;
    ``ranged`` says that it did; ``url`` is where the redirects led.
    """

    def __init__(self, response: httpx.Response, url: str) -> None:
        self._response = response
        self.url = url
        self.ranged = response.status_code == 206
        self.encoding = response.headers.get("content-encoding", "identity").strip().lower()
        self.tag = response.headers.get("etag", "")
        self.start, self.size = self._extent()

    def chunks(self) -> Iterator[bytes]:
        """Yield the body as it comes, its content-encoding not undone."""
        return self._response.iter_raw()

    def _extent(self) -> tuple[int, int | None]:
        headers = self._response.headers
        if not self.ranged:
            length = headers.get("content-length", "")
            plain = self.encoding == "identity" and re.fullmatch(r"\d{1,18}", length)
            return 0, int(length) if plain else None
        match = _CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
        if not match:
            raise ModelError(
                f"{shown(self.url)}: the server sent a part of the file without saying which",
                "download the file and give its path",
            )
        return int(match[1]), None if match[3] == "*" else int(match[3])


class Downloader:
    """Makes requests over kept connections; a context manager.

    ``total`` bounds the seconds of one answer, from the request to the last byte that is read.
    """

    def __init__(self, *, read: float | None = None, total: float | None = None) -> None:
        import httpx

        self._total = TOTAL_TIMEOUT if total is None else total
        self._sockets: list[socket.socket] = []
        timeout = httpx.Timeout(
            READ_TIMEOUT if read is None else read, connect=min(CONNECT_TIMEOUT, self._total)
        )
        headers = {"Accept-Encoding": "identity", "User-Agent": "localkv"}
        self._client = httpx.Client(timeout=timeout, headers=headers, follow_redirects=False)

    def __enter__(self) -> Downloader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    @contextmanager
    def get(self, url: str, first: int | None = None, last: int = 0) -> Iterator[Answer]:
        """Give the answer to a GET of ``url``, of bytes ``first`` to ``last`` where given.

        The body is read within the context; leaving it drops the rest.

        Raises:
            ModelError: whatever keeps the answer away, in one line.
        """
        headers = {} if first is None else {"Range": f"bytes={first}-{last}"}
        with _Deadline(url, self._total, self._sockets) as deadline:
            response = self._follow(url, headers, deadline)
            try:
                yield Answer(response, str(response.url))
            finally:
                response.close()

    def _follow(self, url: str, headers: dict[str, str], deadline: _Deadline) -> httpx.Response:
        """Return the answer that is not a redirect."""
        current = url
        for _ in range(_MAX_REDIRECTS + 1):
            check_url(current, origin=url)
            request = self._client.build_request(
                "GET", current, headers=headers, extensions={"trace": deadline.watch}
            )
            response = self._client.send(request, stream=True)
            if response.status_code not in _REDIRECTS:
                return _good(response, url)
            response.close()
            current = _next_url(url, current, response.headers.get("location", ""))
        raise ModelError(f"{shown(url)} redirects more than {_MAX_REDIRECTS} times", _CHECK_URL)


def _next_url(origin: str, current: str, target: str) -> str:
    """Return where a redirect of ``current`` leads."""
    if not target:
        raise ModelError(f"{shown(origin)}: a redirect that leads nowhere", _CHECK_URL)
    try:
        step = urljoin(current, target)
        downhill = urlsplit(current).scheme == "https" and urlsplit(step).scheme == "http"
    except ValueError:
        return target  # is refused as what it is
    if downhill:
        raise ModelError(
            f"{shown(origin)} redirects from https to {shown(step)}", "this is not followed"
        )
    return step


def check_url(url: str, *, origin: str = "") -> None:
    """Refuse what is no plain http(s) URL; names and passwords in it are never sent or shown.

    Raises:
        ModelError: with the reason; ``origin`` is the URL that led to this one.
    """
    led = f"{shown(origin)} leads to an address that" if origin and origin != url else "the URL"
    try:
        parts = urlsplit(url)
        host, named = parts.hostname, "@" in parts.netloc
        _ = parts.port
    except ValueError as error:
        raise ModelError(f"{led} cannot be understood: {shown(str(error))}", _CHECK_URL) from None
    if parts.scheme not in ("http", "https") or not host:
        raise ModelError(f"{led} is no http or https URL with a host", _CHECK_URL)
    if named:
        raise ModelError(
            f"{led} holds a user name or a password", "localkv sends none: download the file"
        )


class _Deadline:
    """Ends a request that takes too long as a whole, however steadily its bytes trickle in.

    httpx bounds the wait for the next byte only. The socket is shut from a timer's thread, which
    makes the read in progress fail; the errors of both are turned into one line here.
    """

    def __init__(self, url: str, seconds: float, sockets: list[socket.socket]) -> None:
        self._url = url
        self._seconds = seconds
        self._sockets = sockets  # of all requests: a connection that is kept is not made again
        self._expired = False
        self._timer = Timer(seconds, self._expire)
        self._timer.daemon = True

    def watch(self, event: str, info: dict[str, Any]) -> None:
        """Take note of the connection's socket; called by httpx as the request goes on."""
        stream = info.get("return_value")
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")) and stream:
            self._sockets.append(stream.get_extra_info("socket"))
            if self._expired:
                self._expire()

    def _expire(self) -> None:
        self._expired = True
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if error is None or isinstance(error, ModelError):
            return
        import httpx

        if isinstance(error, (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError)):
            expired = self._seconds if self._expired else None
            raise _explained(self._url, error, expired) from error


def _good(response: httpx.Response, url: str) -> httpx.Response:
    """Return ``response`` when it holds a body of the file."""
    status = response.status_code
    if status in (200, 206):
        return response
    response.close()
    if status == 416:
        raise ModelError(f"{shown(url)} is empty or shorter than expected", _CHECK_URL)
    raise ModelError(
        f"{shown(url)}: the server answers {status} {shown(response.reason_phrase, 40)}",
        _STATUS_HINTS.get(status, "try again later" if status >= 500 else _CHECK_URL),
    )


def _explained(url: str, error: Exception, expired: float | None) -> ModelError:
    """Return what went wrong between here and the server, in one line."""
    import httpx

    said = shown(" ".join(str(error).split()) or type(error).__name__)
    if expired is not None:
        message, hint = f"no whole answer within {expired:g} s", "try again on a faster connection"
    elif isinstance(error, httpx.TimeoutException):
        message, hint = "the server does not answer in time", "try again later"
    elif "CERTIFICATE_VERIFY_FAILED" in said:
        message, hint = f"its certificate cannot be trusted ({said})", "check the address"
    elif isinstance(error, httpx.ConnectError):
        message, hint = f"no connection ({said})", "check the address and the network"
    elif isinstance(error, httpx.ProxyError):
        message, hint = f"the proxy refuses ({said})", "check HTTPS_PROXY and NO_PROXY"
    else:
        message, hint = f"the connection broke ({said})", "try again"
    return ModelError(f"{shown(url)}: {message}", hint)
