"""HTTP to one server: bounded in time and in size, and never led away to another host.

An API key comes from the environment variable ``LOCALKV_API_KEY`` only; it is sent with every
request and stands in no message and no record. TLS certificates are verified.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from localkv.errors import EngineError, UsageError
from localkv.units import format_bytes

if TYPE_CHECKING:
    import httpx

API_KEY = "LOCALKV_API_KEY"
#: Seconds for an answer, and bytes of one, unless a caller knows better.
TIMEOUT = 5.0
MAX_BODY = 16 << 20
_REDIRECTS = 3
_SHOWN = 200


class ServerError(EngineError):
    """A server did not answer as it should.

    ``kind``: "unreachable" (nobody listens, or the connection broke), "slow" (no answer in time;
    the server may well be alive), "status" (it refused: ``status`` is the code, ``body`` the start
    of what it said), "answer" (too large, cut short, not what was asked for, another host).
    """

    def __init__(
        self, message: str, hint: str, kind: str, *, status: int | None = None, body: str = ""
    ) -> None:
        super().__init__(message, hint)
        self.kind = kind
        self.status = status
        self.body = body

    def json(self) -> Any:
        """Return the body as JSON, None when it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class Client:
    """The HTTP side of the server at ``base_url``; a context manager.

    ``timeout`` is in seconds for a whole answer, ``max_body`` in bytes; each call can set its own.
    """

    def __init__(
        self, base_url: str, *, timeout: float = TIMEOUT, max_body: int = MAX_BODY
    ) -> None:
        """Prepare for ``base_url``; nothing is sent yet.

        Raises:
            UsageError: it is no http(s) URL, or holds a password; or the API key cannot be sent.
        """
        import httpx

        self.base_url = checked_url(base_url)
        self.timeout = timeout
        self.max_body = max_body
        host = urlsplit(self.base_url).hostname or ""
        self.is_local = is_loopback(host)
        # The encodings that httpx would ask for can turn a small body into a huge one; a connection
        # that stays open holds one of llama-server's HTTP threads for seconds.
        headers = {
            "Accept-Encoding": "identity",
            "Connection": "close",
            "User-Agent": "localkv",
        }
        self._key = _api_key()
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._headers = httpx.Headers(headers)
        secure = self.base_url.startswith("https:")
        # Its transport alone: a whole httpx.Client adds cookies, redirects and .netrc, none of
        # which is wanted here, and half as much work again to every look at a server.
        self._http = httpx.HTTPTransport(
            # Loading the certificates that one trusts takes longer than a local answer.
            verify=True if secure else _no_tls(),
            # What the environment says, proxies and certificates, is for the world outside.
            trust_env=not self.is_local,
            proxy=None if self.is_local else _proxy(self.base_url),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get_text(self, path: str, **limits: Any) -> str:
        """Return the text at ``path``; ``limits`` are ``timeout`` and ``max_body``.

        Raises:
            ServerError: no answer, a refusal, or an answer that breaks the limits.
        """
        return self.request("GET", path, **limits).decode("utf-8", "replace")

    def get_json(self, path: str, **limits: Any) -> Any:
        """Return the JSON value at ``path``.

        Raises:
            ServerError: as :meth:`get_text`, or the answer is not JSON.
        """
        return self._json(path, self.request("GET", path, **limits))

    def post_json(self, path: str, body: Any, **limits: Any) -> Any:
        """Send ``body`` as JSON and return the JSON value of the answer, None for an empty one.

        Raises:
            ServerError: as :meth:`get_json`.
        """
        answer = self.request("POST", path, body=body, **limits)
        return self._json(path, answer) if answer else None

    def request(
        self, method: str, path: str, *, body: Any = None, content: Any = None, **limits: Any
    ) -> bytes:
        """Return the body of the answer; ``body`` goes out as JSON, ``content`` as it is.

        Raises:
            ServerError: no answer, a refusal, or an answer that breaks the limits.
        """
        with self.stream(method, path, body=body, content=content, **limits) as pieces:
            return b"".join(pieces)

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        content: Any = None,
        timeout: float | None = None,
        max_body: int | None = None,
    ) -> Iterator[Iterator[bytes]]:
        """Give the pieces of the answer as they come, within the limits.

        Raises:
            ServerError: as :meth:`request`; also while the pieces are taken.
        """
        import httpx

        seconds = self.timeout if timeout is None else timeout
        most = self.max_body if max_body is None else max_body
        deadline = time.monotonic() + seconds
        url = self.base_url + path
        with self._said_plainly(url, seconds):
            for _ in range(_REDIRECTS + 1):
                response = self._http.handle_request(
                    httpx.Request(
                        method,
                        url,
                        headers=self._headers,
                        json=body,
                        content=content,
                        extensions={"timeout": httpx.Timeout(seconds).as_dict()},
                    )
                )
                try:
                    if not response.is_redirect:
                        pieces = _bounded(response, url, most, deadline, seconds)
                        if response.status_code >= 400:
                            raise _refusal(response, url, pieces)
                        yield pieces
                        return
                    url = self._redirected(method, url, response)
                finally:
                    response.close()
        raise ServerError(
            f"{self.base_url} redirects again and again", "give its final address", "answer"
        )

    def _redirected(self, method: str, url: str, response: httpx.Response) -> str:
        """Return where ``response`` points to, when that is the same server."""
        target = urljoin(url, str(response.headers.get("location", "")))
        old, new = urlsplit(url), urlsplit(target)
        same = (old.scheme, old.netloc) == (new.scheme, new.netloc)
        if method != "GET" or not same:
            raise ServerError(
                f"{self.base_url} redirects to {f'{new.scheme}://{new.netloc}'[:_SHOWN]}",
                "give that address if you trust it",
                "answer",
            )
        return target

    @contextmanager
    def _said_plainly(self, url: str, seconds: float) -> Iterator[None]:
        """Turn what httpx raises into one line and a hint."""
        import httpx

        try:
            yield
        except ServerError as error:
            # A server may say back what it was sent.
            error.message = self._without_key(error.message)
            error.body = self._without_key(error.body)
            raise
        except httpx.TimeoutException:
            raise _slow(url, seconds) from None
        except (httpx.RemoteProtocolError, httpx.DecodingError) as error:
            raise ServerError(
                f"{url} sent half an answer or none ({error})",
                "the server may have died: see its log",
                "unreachable",
            ) from None
        except httpx.HTTPError as error:
            raise ServerError(
                f"{url} cannot be reached ({error})", "is the server running?", "unreachable"
            ) from None
        except httpx.InvalidURL as error:
            raise UsageError(f"{url} is not a URL ({error})", "give http://HOST:PORT") from None

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "(the API key)") if self._key else text

    def _json(self, path: str, answer: bytes) -> Any:
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            start = self._without_key(answer.decode("utf-8", "replace"))[:60]
            raise ServerError(
                f"{self.base_url}{path} answered no JSON but {start!r}",
                "is this the server that you mean?",
                "answer",
            ) from None


def _api_key() -> str:
    """Return the key of the environment; a stray end of line (CRLF files) is no part of it."""
    key = os.environ.get(API_KEY, "").strip()
    # httpx quotes a header that it refuses, key and all.
    if not all(" " <= character <= "~" for character in key):
        raise UsageError(f"{API_KEY} holds a character that no key has", "set it to the key alone")
    return key


def checked_url(text: str) -> str:
    """Return ``text`` as the root of an http(s) server, without the slash at its end.

    Raises:
        UsageError: it is something else, or it holds a user name or password.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        parts.port  # noqa: B018 (asking raises ValueError when it is no number)
    except ValueError:
        raise UsageError(f"{text[:_SHOWN]!r} is not a URL", "give http://HOST:PORT") from None
    if parts.username is not None or parts.password is not None:
        raise UsageError("the URL holds a user name or password", f"put an API key into {API_KEY}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{text[:_SHOWN]!r} is no server's URL", "give http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def is_loopback(host: str) -> bool:
    """Return whether ``host`` names this machine for certain."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bounded(
    response: httpx.Response, url: str, most: int, deadline: float, seconds: float
) -> Iterator[bytes]:
    """Yield the body; the limits hold for all of it, however slowly it drips."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise ServerError(f"{url} answered compressed unasked", "is a proxy in between?", "answer")
    total = 0
    for piece in response.iter_raw():
        total += len(piece)
        if total > most:
            raise ServerError(
                f"{url} answered more than {format_bytes(most)}",
                "is this the server that you mean?",
                "answer",
            )
        if time.monotonic() > deadline:
            raise _slow(url, seconds)
        yield piece


def _slow(url: str, seconds: float) -> ServerError:
    return ServerError(
        f"{url} did not answer within {seconds:g} s", "it may be busy: try again", "slow"
    )


_HINTS = {
    401: f"put the API key into {API_KEY}",
    403: f"put the API key into {API_KEY}",
    404: "is this the server that you mean?",
    501: "the server has this endpoint switched off",
    503: "it may still be loading its model: try again",
}


def _refusal(response: httpx.Response, url: str, pieces: Iterator[bytes]) -> ServerError:
    text = b"".join(pieces).decode("utf-8", "replace")
    code = response.status_code
    error = ServerError(
        f"{url} answered {code}",
        _HINTS.get(code, "see the server's log"),
        "status",
        status=code,
        body=text,
    )
    if said := _reason(error.json()):
        error.message += f": {said[:_SHOWN]}"
    return error


def _reason(answer: Any) -> str:
    """Return what a JSON error says: OpenAI's form, Ollama's, or none."""
    said = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(said, dict):
        said = said.get("message")
    return said if isinstance(said, str) else ""


def _no_tls() -> ssl.SSLContext:
    """Return a context that trusts nobody, for a server that is reached without TLS."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _proxy(url: str) -> str | None:
    """Return the proxy that the environment names for ``url``, if any."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    named = getproxies()
    proxy = named.get(parts.scheme) or named.get("all")
    if not proxy or proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
