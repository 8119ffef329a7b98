"""Models behind a URL: what is fetched, and what a hostile or broken server gets done."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_helpers import ARR, STR, U32, Builder, small_model
from url_helpers import (
    Handler,
    Site,
    chunked,
    ranges,
    redirect,
    serving,
    serving_tls,
    status,
    stream,
)

from localkv.errors import ModelError
from localkv.gguf import locate, open_model
from localkv.gguf.remote import FIRST_CHUNK, MAX_HEADER, read_remote


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as running:
        yield running


def _refusal(url: str, **limits: float) -> str:
    with pytest.raises(ModelError) as caught:
        read_remote(url, **limits)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert str(caught.value).isprintable()
    return str(caught.value)


def _wide_model(vocabulary: int, data: int = 1 << 20) -> bytes:
    """Return a model with a header of about ``vocabulary`` bytes and ``data`` bytes behind it."""
    b = Builder()
    tokens = [b"%09d" % n for n in range(vocabulary // 17)]
    keys = [
        b.key("general.architecture", STR, "llama"),
        b.array("tokenizer.ggml.tokens", STR, tokens),
        b.key("llama.block_count", U32, 7),
    ]
    head = b.header(keys, [b.tensor("token_embd.weight", (data // 4,))])
    return head + bytes(-len(head) % 32 + data)


# -- how much is fetched ---------------------------------------------------------------------


def test_a_real_model_is_read_by_a_few_ranges(site: Site, gemma_path: Path) -> None:
    model = open_model(site.add("/gemma.gguf", ranges(gemma_path)))
    local = open_model(str(gemma_path))
    assert model.metadata == local.metadata
    assert model.tensors == local.tensors
    assert model.file_bytes == local.file_bytes
    assert model.headers[0].data_offset < site.sent < 3 * model.headers[0].data_offset
    assert len(site.asked) <= 5
    assert model.missing is not None
    assert "only the header" in model.missing


def test_a_server_without_ranges_is_cut_off_after_the_header(site: Site) -> None:
    whole = _wide_model(3 << 20, data=64 << 20)
    model = open_model(site.add("/m.gguf", stream(whole)))
    assert model.metadata["llama.block_count"] == 7
    assert model.file_bytes == len(whole)
    assert len(site.asked) == 1
    assert site.sent < len(whole) / 2


def test_a_small_header_is_one_request(site: Site) -> None:
    model = open_model(site.add("/m.gguf", ranges(small_model())))
    assert model.file_bytes == len(small_model())
    assert site.asked == [("/m.gguf", f"bytes=0-{FIRST_CHUNK - 1}")]


def test_a_body_of_unknown_length_gets_its_size_from_the_header(site: Site) -> None:
    whole = small_model()
    model = open_model(site.add("/m.gguf", chunked([whole[:100], whole[100:]])))
    assert model.file_bytes == len(whole)
    assert "summed from the header" in str(model.missing)


def test_identity_is_asked_for_and_no_credentials_go_out(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    open_model(site.add("/m.gguf", ranges(small_model())))
    assert site.headers[0]["accept-encoding"] == "identity"
    assert not {"authorization", "cookie"} & site.headers[0].keys()
    assert "user name or a password" in _refusal("http://me:secret@127.0.0.1/m.gguf")
    assert "secret" not in _refusal("http://me:secret@127.0.0.1/m.gguf")


@pytest.mark.parametrize("make", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_an_encoding_that_comes_anyway_is_undone(site: Site, make) -> None:
    whole = _wide_model(2 << 20)
    name = "gzip" if make is gzip.compress else "deflate"
    url = site.add("/m.gguf", stream(make(whole), Content_Encoding=name))
    model = open_model(url)
    assert model.metadata["llama.block_count"] == 7
    assert model.file_bytes == len(whole)


def test_an_encoded_range_is_asked_for_again_as_a_whole(site: Site) -> None:
    packed = gzip.compress(small_model())

    def reply(handler: Handler) -> None:
        if handler.headers.get("Range"):
            ranges(packed, Content_Encoding="gzip")(handler)
        else:
            stream(packed, Content_Encoding="gzip")(handler)

    model = open_model(site.add("/m.gguf", reply))
    assert model.file_bytes == len(small_model())
    assert [asked for _, asked in site.asked][1] is None


def test_a_gzip_bomb_is_cut_off(site: Site) -> None:
    """A vocabulary of long empty-looking strings is next to nothing on the line."""
    b = Builder()
    tokens = b.string(bytes((1 << 20) - 8)) * 72
    packed = gzip.compress(_endless_header() + b.u64(1 << 20) + tokens, 1)
    assert len(packed) < 1 << 20
    url = site.add("/m.gguf", stream(packed, Content_Encoding="gzip"))
    assert "a header above 64 MiB" in _refusal(url)


def test_an_encoding_nobody_asked_for_is_refused(site: Site) -> None:
    url = site.add("/m.gguf", stream(small_model(), Content_Encoding="br"))
    assert "is sent as br" in _refusal(url)
    url = site.add("/m.gguf", stream(small_model(), Content_Encoding="gzip"))
    assert "gzip encoding is damaged" in _refusal(url)


# -- redirects -------------------------------------------------------------------------------


def test_redirects_are_followed_to_another_host_and_remembered(site: Site) -> None:
    with serving() as store:
        whole = _wide_model(3 << 20)
        target = store.add("/blob?signature=1", ranges(whole))
        site.add("/resolve", redirect(target, 307))
        model = open_model(site.add("/m.gguf", redirect("/resolve")))
        assert model.file_bytes == len(whole)
        assert model.path == f"{site.url}/m.gguf"
        assert [path for path, _ in site.asked] == ["/m.gguf", "/resolve"]
        assert len(store.asked) > 1


def test_redirects_are_bounded_and_never_lead_astray(site: Site) -> None:
    loop = site.add("/loop", redirect("/loop"))
    assert "redirects more than" in _refusal(loop)
    assert len(site.asked) < 20
    for target, words in {
        "file:///etc/passwd": "no http or https URL",
        "http://me:pw@127.0.0.1/x": "user name or a password",
        "http://[": "cannot be understood",
        "": "leads nowhere",
    }.items():
        assert words in _refusal(site.add("/away", redirect(target))), target


def test_a_step_from_https_down_to_http_is_refused(site: Site, tls_site: Site, monkeypatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", tls_site.certificate)
    url = tls_site.add("/m.gguf", redirect(site.add("/m.gguf", ranges(small_model()))))
    assert "redirects from https to http://" in _refusal(url)
    assert site.asked == []


# -- servers that fail -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (401, "the file needs a login"),
        (403, "the file needs a login"),
        (404, "check the URL"),
        (410, "answers 410"),
        (429, "wait a while"),
        (500, "try again later"),
        (503, "try again later"),
        (204, "answers 204"),
    ],
)
def test_a_refusal_by_the_server_is_one_line(site: Site, code: int, words: str) -> None:
    said = _refusal(site.add("/m.gguf", status(code)))
    assert f"the server answers {code}" in said
    assert words in said


def test_a_page_in_place_of_the_file_is_named(site: Site) -> None:
    page = b"<!DOCTYPE html><html>" + bytes(1000)
    for reply in (ranges(page), stream(page), chunked([page])):
        assert "is an HTML page, not a GGUF file" in _refusal(site.add("/m.gguf", reply))
    assert "/resolve/" in _refusal(site.add("/o/n/blob/main/m.gguf", stream(page)))
    assert "is JSON text" in _refusal(site.add("/m.gguf", stream(json.dumps({"e": 1}).encode())))
    assert "empty" in _refusal(site.add("/m.gguf", ranges(b"")))
    assert "is empty" in _refusal(site.add("/m.gguf", stream(b"")))


def test_no_server_at_all_is_one_line(site: Site) -> None:
    gone = site.url
    with serving() as other:
        gone = other.url
    assert "no connection" in _refusal(f"{gone}/m.gguf")
    assert "no connection" in _refusal("http://nowhere.invalid/m.gguf")
    secure = site.url.replace("http:", "https:")
    assert "no connection" in _refusal(f"{secure}/m.gguf")


def test_an_untrusted_certificate_is_said(tls_site: Site) -> None:
    said = _refusal(tls_site.add("/m.gguf", ranges(small_model())))
    assert "its certificate cannot be trusted" in said


@pytest.mark.parametrize("url", ["http://", "http://[::1", "https:///x.gguf", "http://h:99999/x"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    assert "the URL" in _refusal(url)


def test_a_server_that_says_nothing_is_given_up(site: Site) -> None:
    silent = site.add("/m.gguf", lambda handler: handler.site.closing.wait(60) and None)
    assert "does not answer in time" in _refusal(silent, read_timeout=0.2)


def _drip(handler: Handler) -> None:
    """Send one byte of a header every now and then, for ever."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not handler.site.closing.wait(0.02):
        handler.put(b"x")


def _drip_body(handler: Handler) -> None:
    handler.head(200, Content_Length=1 << 30)
    for n in itertools.count():
        handler.put(small_model()[n % 8 : n % 8 + 1])
        if handler.site.closing.wait(0.02):
            return


@pytest.mark.parametrize("reply", [_drip, _drip_body])
def test_a_server_that_drips_is_cut_off_as_a_whole(site: Site, reply) -> None:
    url = site.add("/m.gguf", reply)
    assert "no whole answer within 0.4 s" in _refusal(url, read_timeout=5, total_timeout=0.4)


def test_a_dripping_later_range_is_cut_off_as_well(site: Site) -> None:
    whole = _wide_model(3 << 20)

    def reply(handler: Handler) -> None:
        if handler.wanted()[0] == 0:
            ranges(whole)(handler)
        else:
            _drip(handler)

    url = site.add("/m.gguf", reply)
    assert "no whole answer within 0.5 s" in _refusal(url, read_timeout=5, total_timeout=0.5)


# -- servers that lie ------------------------------------------------------------------------


def _lie(content: bytes, **headers: object):
    """Serve a range of ``content`` with headers of its own."""

    def reply(handler: Handler) -> None:
        first, last = handler.wanted()
        handler.answer(206, content[first : last + 1], **headers)

    return reply


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Content_Range": "bytes 5-9/4000"}, "another part"),
        ({"Content_Range": "bytes"}, "without saying which"),
        ({}, "without saying which"),
        ({"Content_Range": f"bytes 0-9/{10**30}"}, "without saying which"),
        ({"Content_Range": "bytes 0-9/40"}, "byte 24: a header of 4 keys"),
        ({"Content_Range": "bytes 0-9/4000", "Content_Length": 100000}, "the connection broke"),
        ({"Content_Range": "bytes 0-9/4000", "Content_Length": -5}, "the connection broke"),
    ],
)
def test_a_lying_range_is_refused(site: Site, headers: dict, words: str) -> None:
    def reply(handler: Handler) -> None:
        _lie(small_model(), **headers)(handler)
        handler.close_connection = True

    assert words in _refusal(site.add("/m.gguf", reply))


def test_a_range_longer_than_asked_for_is_cut(site: Site) -> None:
    def reply(handler: Handler) -> None:
        handler.head(206, Content_Range=f"bytes 0-{FIRST_CHUNK - 1}/{1 << 40}", Connection="close")
        handler.put(small_model())
        while not handler.site.closing.is_set():
            handler.put(bytes(1 << 16))

    model = open_model(site.add("/m.gguf", reply))
    assert model.metadata["llama.block_count"] == 1


def test_a_body_shorter_than_its_length_is_said(site: Site) -> None:
    def reply(handler: Handler) -> None:
        handler.head(200, Content_Length=1 << 30)
        handler.put(small_model()[:60])
        handler.close_connection = True

    assert "the connection broke" in _refusal(site.add("/m.gguf", reply))
    said = _refusal(site.add("/m.gguf", chunked([small_model()[:60]])))
    assert "the file ends at byte 60" in said


def test_a_file_that_changes_between_ranges_is_refused(site: Site) -> None:
    whole = _wide_model(3 << 20)
    tags = itertools.count()

    def reply(handler: Handler) -> None:
        ranges(whole, ETag=f'"{next(tags)}"')(handler)

    assert "changed while it was read" in _refusal(site.add("/m.gguf", reply))


def _endless_header() -> bytes:
    b = Builder()
    return b.header(n_keys=1) + b.string("tokenizer.ggml.tokens") + b.u32(ARR) + b.u32(STR)


def test_an_endless_header_is_refused_at_a_bound(site: Site) -> None:
    b = Builder()
    start = _endless_header() + b.u64(1 << 23)
    token = b.string("x" * 4000) * 16
    url = site.add("/m.gguf", chunked(itertools.chain([start], itertools.repeat(token))))
    assert "a header above 64 MiB" in _refusal(url)
    assert site.sent < 2 * MAX_HEADER


def test_a_length_that_cannot_be_is_not_fetched(site: Site) -> None:
    b = Builder()
    start = _endless_header() + b.u64(2) + b.u64(1 << 35) + bytes(64)
    url = site.add("/m.gguf", ranges(start + bytes(FIRST_CHUNK)))
    assert "runs beyond the end of the file" in _refusal(url)
    told = {"Content_Range": f"bytes 0-{FIRST_CHUNK - 1}/{1 << 40}"}
    url = site.add("/m.gguf", _lie(start + bytes(FIRST_CHUNK), **told))
    assert "a header above 64 MiB" in _refusal(url)
    assert site.sent < 4 * FIRST_CHUNK


# -- sets of shards --------------------------------------------------------------------------


def _set(site: Site, count: int = 3, **changes: int) -> list[str]:
    urls = []
    for n in range(count):
        split = {"no": n, "count": count, "tensors_count": 2 * count, **changes}
        path = f"/f%20x/m-{n + 1:05d}-of-{count:05d}.gguf?download=true"
        urls.append(site.add(path, ranges(small_model(**split))))
    return urls


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_leads_to_the_set(site: Site, given: int) -> None:
    urls = _set(site)
    model = open_model(urls[given])
    assert list(model.files.paths) == urls
    assert model.file_bytes == sum(len(small_model(no=0, count=3, tensors_count=6)) for _ in urls)
    assert len(model.tensors) == 6
    assert locate(urls[given]) == model.files


def test_a_missing_or_foreign_shard_is_named(site: Site) -> None:
    urls = _set(site)
    site.add(urls[1].removeprefix(site.url), status(404))
    said = _refusal(urls[0])
    assert "a shard of a set of 3 cannot be had" in said
    assert "m-00002-of-00003.gguf" in said
    site.asked.clear()
    urls = _set(site, count=200, no=0)
    assert "but shard 1 by its header" in _refusal(urls[0])
    assert len(site.asked) == 2
    assert "no real set has so many" in _refusal(f"{site.url}/m-00001-of-90000.gguf")


# -- the way through the commands --------------------------------------------------------------


def test_what_needs_the_data_says_what_to_do(site: Site, run) -> None:
    url = site.add("/m.gguf", ranges(small_model()))
    with pytest.raises(ModelError, match="is on a server"):
        open_model(url, need_data=True)
    code, out, err = run("sweep", "-m", url)
    assert (code, out) == (3, ""), err
    assert "download the file and give its path" in err
    assert site.asked == []


def test_predict_and_inspect_take_a_url(site: Site, run, smollm2_path: Path) -> None:
    url = site.add("/SmolLM2.gguf", ranges(smollm2_path))
    told = {}
    for model in (url, str(smollm2_path)):
        code, out, err = run("predict", model, "-c", "4096", "--json")
        assert code == 0, err
        told[model] = json.loads(out)
    assert told[url]["total_bytes"] == told[str(smollm2_path)]["total_bytes"]
    assert told[url]["model"]["path"] == url
    assert any("only the header" in note for note in told[url]["notes"])
    code, out, _ = run("inspect", url, "--json")
    assert json.loads(out)["weights_bytes"] == told[url]["weights"]["bytes"]


@pytest.mark.engine
def test_the_engine_plans_from_a_fetched_header(site: Site, run, smollm2_path: Path) -> None:
    url = site.add("/SmolLM2.gguf", ranges(smollm2_path))
    code, out, err = run("predict", url, "-c", "2048", "--check", "--json")
    assert code == 0, err
    assert json.loads(out)["check"]["verdict"] == "equal"
    code, out, err = run("predict", url, "-c", "2048", "--engine", "--json")
    assert code == 0, err
    assert json.loads(out)["compute"]["source"] == "engine"


@pytest.mark.engine
def test_the_engine_is_not_asked_about_shards_on_a_server(site: Site, run) -> None:
    code, _, err = run("predict", _set(site)[0], "--engine")
    assert code == 3
    assert "download" in err


@pytest.fixture
def tls_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Serve over TLS with a certificate made for this test; skips where openssl is not there."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving_tls(tmp_path) as running:
        yield running
