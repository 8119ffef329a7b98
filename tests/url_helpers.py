"""A real HTTP server on this machine whose every answer a test decides."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

Reply = Callable[["Handler"], None]


class Site:
    """Routes by path, and what was asked: ``asked`` holds (path, Range header or None)."""

    def __init__(self, port: int, scheme: str) -> None:
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.routes: dict[str, Reply] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.headers: list[dict[str, str]] = []
        self.sent = 0
        self.closing = threading.Event()
        self.certificate = ""  # of a server with TLS

    def add(self, path: str, reply: Reply) -> str:
        """Answer ``path`` by ``reply`` and return its URL."""
        self.routes[path] = reply
        return self.url + path


class Handler(BaseHTTPRequestHandler):
    """Hands every GET and POST to the route's reply."""

    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self) -> None:
        self.site.asked.append((self.path, self.headers.get("Range")))
        self.site.headers.append({k.lower(): v for k, v in self.headers.items()})
        try:
            self.site.routes.get(self.path, status(404))(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has what it wanted

    do_POST = do_GET

    def answer(self, code: int, body: bytes = b"", **headers: object) -> None:
        """Send a whole answer; names of ``headers`` with underscores for dashes."""
        self.head(code, **{"Content_Length": len(body), **headers})
        self.put(body)

    def head(self, code: int, **headers: object) -> None:
        """Send status and headers alone."""
        self.send_response(code)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def put(self, body: bytes) -> None:
        """Send a piece of the body."""
        self.wfile.write(body)
        self.wfile.flush()
        self.site.sent += len(body)

    def wanted(self) -> tuple[int, int]:
        """Return the first and the last byte of the range that is asked for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        assert match, "a range was expected"
        return int(match[1]), int(match[2])

    def log_message(self, *args: object) -> None:
        return


class Server(ThreadingHTTPServer):
    """Keeps quiet about clients that go away, which is what the tests are about."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        return


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[Site]:
    """Run a server on a port of the kernel's choice until the block ends; TLS by ``context``."""
    server = Server(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    site = Site(server.server_address[1], "https" if context else "http")
    server.RequestHandlerClass = type("Bound", (Handler,), {"site": site})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextmanager
def serving_tls(folder: Path) -> Iterator[Site]:
    """Serve over TLS with a certificate made in ``folder``; skips where openssl is not there."""
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate of this test")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    words += " -addext subjectAltName=IP:127.0.0.1 -keyout"
    command = [*words.split(), str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(context) as running:
        running.certificate = str(certificate)
        yield running


def status(code: int, body: bytes = b"") -> Reply:
    return lambda handler: handler.answer(code, body)


def redirect(location: str, code: int = 302) -> Reply:
    return lambda handler: handler.answer(code, Location=location)


def ranges(content: bytes | Path, **headers: object) -> Reply:
    """Serve by ranges, as hubs and their CDNs do; a file is not read as a whole."""

    def reply(handler: Handler) -> None:
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        first, last = handler.wanted()
        if first >= size:
            handler.answer(416, Content_Range=f"bytes */{size}")
            return
        last = min(last, size - 1)
        if isinstance(content, Path):
            with content.open("rb") as file:
                file.seek(first)
                piece = file.read(last + 1 - first)
        else:
            piece = content[first : last + 1]
        told = {"Content_Range": f"bytes {first}-{last}/{size}", **headers}
        handler.answer(206, piece, **told)

    return reply


def stream(content: bytes | Path, piece: int = 1 << 16, **headers: object) -> Reply:
    """Serve the whole file whatever range was asked for."""

    def reply(handler: Handler) -> None:
        body = content.read_bytes() if isinstance(content, Path) else content
        handler.head(200, **{"Content_Length": len(body), **headers})
        for at in range(0, len(body), piece):
            handler.put(body[at : at + piece])

    return reply


def chunked(pieces: Iterator[bytes] | list[bytes], **headers: object) -> Reply:
    """Serve without a length, in chunks."""

    def reply(handler: Handler) -> None:
        handler.head(200, Transfer_Encoding="chunked", **headers)
        for piece in pieces:
            if handler.site.closing.is_set():
                return
            handler.put(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.put(b"0\r\n\r\n")

    return reply
