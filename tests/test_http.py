"""The HTTP client against servers that misbehave: one line, the right kind, never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import url_helpers
from url_helpers import Handler, Site, chunked, redirect, status

from localkv.errors import UsageError
from localkv.http import API_KEY, Client, ServerError, checked_url, is_loopback


@pytest.fixture
def site() -> Iterator[Site]:
    with url_helpers.serving() as found:
        yield found


def failure(
    site: Site, ask: Callable[[Client], object] | None = None, **limits: object
) -> ServerError:
    """Return how asking ``/x`` of ``site`` fails."""
    with (
        Client(site.url, **limits) as client,  # type: ignore[arg-type]
        pytest.raises(ServerError) as caught,
    ):
        (ask or (lambda c: c.get_json("/x")))(client)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    return caught.value


def test_an_answer_comes_back_as_it_is(site: Site) -> None:
    site.add("/x", status(200, b'{"a": [1, "\xc3\xa9"]}'))
    with Client(site.url + "/") as client:
        assert client.get_json("/x") == {"a": [1, "é"]}
        assert client.get_text("/x") == '{"a": [1, "é"]}'
        assert client.is_local


def test_json_goes_out_and_comes_back(site: Site) -> None:
    def echo(handler: Handler) -> None:
        handler.answer(200, handler.rfile.read(int(handler.headers["Content-Length"])))

    site.add("/x", echo)
    with Client(site.url) as client:
        assert client.post_json("/x", {"prompt": "é"}) == {"prompt": "é"}


def test_an_empty_answer_to_a_post_is_none(site: Site) -> None:
    site.add("/x", status(200))
    with Client(site.url) as client:
        # The handler leaves the body unread: the connection is not used again.
        assert client.post_json("/x", None) is None


@pytest.mark.parametrize("code", [400, 401, 403, 404, 500, 501, 503])
def test_a_refusal_says_what_the_server_said(site: Site, code: int) -> None:
    body = b'{"error": {"message": "not today", "type": "exceed_context_size_error", "n_ctx": 512}}'
    site.add("/x", status(code, body))
    error = failure(site)
    assert (error.kind, error.status) == ("status", code)
    assert f"answered {code}: not today" in str(error)
    assert error.json()["error"]["n_ctx"] == 512


@pytest.mark.parametrize(
    "body", [b"", b"<html>no</html>", b'{"error": "plain"}', b'{"error": 7}', b"[" * 100_000]
)
def test_a_refusal_in_any_form_is_one_line(site: Site, body: bytes) -> None:
    site.add("/x", status(500, body))
    error = failure(site)
    assert ("plain" in str(error)) is (b"plain" in body)
    assert len(str(error)) < 200


@pytest.mark.parametrize(
    "body", [b"<html>hello</html>", b"", b'{"half": ', b"[" * 1_000_000, b"\xff\xfe"]
)
def test_an_answer_that_is_not_json_is_named(site: Site, body: bytes) -> None:
    site.add("/x", status(200, body))
    assert failure(site).kind == "answer"


def test_a_body_without_end_is_cut_off(site: Site) -> None:
    piece = b"metric 1\n" * 1000

    def endless() -> Iterator[bytes]:
        while True:
            yield piece

    site.add("/x", chunked(endless()))
    error = failure(site, max_body=1 << 20)
    assert error.kind == "answer"
    assert "more than 1.00 MiB" in str(error)
    assert site.sent < 32 << 20


def test_a_body_that_drips_ends_at_the_time_out(site: Site) -> None:
    def drip(handler: Handler) -> None:
        handler.head(200, Content_Length=1_000_000)
        while not site.closing.wait(0.02):
            handler.put(b"x")

    site.add("/x", drip)
    started = time.monotonic()
    assert failure(site, timeout=0.3).kind == "slow"
    assert time.monotonic() - started < 30


def test_a_server_that_hangs_is_slow_and_not_gone(site: Site) -> None:
    site.add("/x", lambda handler: site.closing.wait(30) and None)
    error = failure(site, timeout=0.2)
    assert error.kind == "slow"
    assert "within 0.2 s" in str(error)


def test_half_a_body_is_no_answer(site: Site) -> None:
    def half(handler: Handler) -> None:
        handler.head(200, Content_Length=100)
        handler.put(b'{"a": 1')
        handler.close_connection = True

    site.add("/x", half)
    assert failure(site).kind == "unreachable"


def test_nobody_listening_is_unreachable() -> None:
    with url_helpers.serving() as gone:
        pass
    assert failure(gone).kind == "unreachable"


def test_a_compressed_answer_is_refused(site: Site) -> None:
    def bomb(handler: Handler) -> None:
        handler.answer(200, b"\x1f\x8b" + b"\0" * 100, Content_Encoding="gzip")

    site.add("/x", bomb)
    assert failure(site).kind == "answer"
    assert site.headers[0]["accept-encoding"] == "identity"


def test_a_redirect_on_the_same_server_is_followed(site: Site) -> None:
    site.add("/x", redirect("/y"))
    site.add("/y", status(200, b"1"))
    with Client(site.url) as client:
        assert client.get_json("/x") == 1


def test_a_redirect_to_another_host_is_refused_with_the_key(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "secret-key")
    with url_helpers.serving() as other:
        other.add("/x", status(200, b"1"))
        site.add("/x", redirect(other.url + "/x"))
        error = failure(site)
        assert other.asked == []
    assert error.kind == "answer"
    assert other.url in str(error)
    assert "secret" not in str(error)


def test_redirects_in_a_circle_end(site: Site) -> None:
    site.add("/x", redirect("/x"))
    assert failure(site).kind == "answer"
    assert len(site.asked) < 10


def test_the_key_comes_from_the_environment_and_is_not_shown(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("/x", status(401, b'{"error": "who are you?"}'))
    failure(site)
    assert "authorization" not in site.headers[-1]
    monkeypatch.setenv(API_KEY, "secret-key")
    error = failure(site)
    assert site.headers[-1]["authorization"] == "Bearer secret-key"
    assert "secret-key" not in f"{error} {error!r} {error.body}"


@pytest.mark.parametrize("key", ["sec\nret", "sec\x7fret", "secrét"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
    key: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, key)
    with pytest.raises(UsageError) as caught:
        Client(site.url)
    assert "sec" not in str(caught.value)


def test_the_end_of_line_behind_a_key_is_not_sent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("/x", status(404))
    monkeypatch.setenv(API_KEY, "secret-key\r\n")
    failure(site)
    assert site.headers[-1]["authorization"] == "Bearer secret-key"


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("/x", status(200, b"1"))
    with url_helpers.serving() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        with Client(site.url) as client:
            assert client.get_json("/x") == 1
        assert proxy.asked == []


def test_a_proxy_of_the_environment_is_asked_for_another_machine(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = "http://192.0.2.1"
    site.add(f"{far}/x", status(200, b"1"))
    monkeypatch.setenv("http_proxy", site.url.removeprefix("http://"))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "example.org")
    with Client(far) as client:
        assert client.get_json("/x") == 1
    monkeypatch.setenv("no_proxy", "192.0.2.1")
    with Client(far, timeout=0.05) as client, pytest.raises(ServerError):
        client.get_json("/x")
    assert len(site.asked) == 1


def test_a_cookie_is_not_sent_back(site: Site) -> None:
    site.add("/x", lambda handler: handler.answer(200, b"1", Set_Cookie="a=b"))
    with Client(site.url) as client:
        for _ in range(2):
            client.get_json("/x")
    assert "cookie" not in site.headers[-1]


@pytest.mark.parametrize(
    "text", ["ftp://host", "http://", "http://user:word@host", "http://h:port", "file:///etc", ""]
)
def test_what_is_no_servers_url_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_url(text)
    assert "word" not in caught.value.message.replace("password", "")


def test_a_url_may_be_short() -> None:
    assert checked_url("127.0.0.1:8080") == "http://127.0.0.1:8080"
    assert checked_url("https://host/api/") == "https://host/api"
    assert checked_url("http://[::1]:8080/") == "http://[::1]:8080"


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.evil.example", False),
        ("192.0.2.1", False),
        ("localhost.example", False),
    ],
)
def test_what_counts_as_this_machine(host: str, local: bool) -> None:
    assert is_loopback(host) is local
