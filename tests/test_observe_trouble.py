"""A server that misbehaves while it is watched: one line, the right exit code, a kept recording."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import Run
from observe_helpers import FakeServer, fake_server, html, slot, watching
from url_helpers import Handler, chunked, redirect, serving, serving_tls, status

from localkv.http import API_KEY, Client
from localkv.observe.recording import RECORDING_FILE, read_recording
from localkv.observe.sources import LlamaServer
from localkv.observe.watch import GONE_AFTER, watch

KEY = "not-to-be-seen"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as found:
        yield found


def half(handler: Handler) -> None:
    handler.head(200, Content_Length=1000)
    handler.put(b"llamacpp:requests_pro")
    handler.close_connection = True


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def test_a_server_that_recovers_is_watched_on(server: FakeServer, tmp_path: Path) -> None:
    piece = b"llamacpp:padding 1\n" * 50_000
    with serving() as elsewhere, watching(server.url, "-o", tmp_path / "seen") as seen:
        seen.answered()
        troubles = {
            "answered 401": status(401),
            "answered 404": status(404),
            "answered 500": status(500, b'{"error": {"message": "out of luck"}}'),
            "answered 501": status(501),
            "answered 503": status(503),
            "'<html>": html(),
            "half an answer": half,
            "more than 4.00 MiB": chunked([piece] * 110),
            f"redirects to {elsewhere.url}": redirect(elsewhere.url + "/metrics"),
        }
        for words, reply in troubles.items():
            server.answer(reply)
            look = seen.failed()
            assert words in look["error"]
            assert look["error"].isprintable()
            assert look["snapshot"] is None
            server.restore()
            assert seen.answered()["snapshot"]["used_tokens"] == 42
        assert elsewhere.asked == []
        assert server.site.sent < 20 * len(piece)
        assert seen.interrupt() == 0
        assert lines_of(seen.errors()) == [f"report: {tmp_path / 'seen' / 'report.md'}"]
    recording = read_recording(tmp_path / "seen" / RECORDING_FILE)
    assert recording.left_out == 0
    printed = [json.loads(line) for line in lines_of(seen.text)[1:]]
    assert json.loads(json.dumps([look.to_dict() for look in recording.seen])) == printed
    report = (tmp_path / "seen" / "report.md").read_text(encoding="utf-8")
    assert "the server answers again" in report


@pytest.mark.slow
def test_a_hanging_server_is_slow_and_asked_one_question_at_a_time(server: FakeServer) -> None:
    with watching(server.url) as seen:
        seen.answered()
        server.answer(server.hang)
        for _ in range(2):
            look = seen.failed()
            assert look["error_kind"] == "slow"
        assert server.most_pending == 1
        assert seen.interrupt() == 0
        assert seen.errors() == ""


def test_a_server_that_dies_ends_the_watch_and_the_recording_is_kept(tmp_path: Path) -> None:
    with ExitStack() as alive:
        server = alive.enter_context(fake_server())
        with watching(server.url, "-o", tmp_path) as seen:
            seen.answered()
            alive.close()
            assert seen.wait() == 4
            report, said = lines_of(seen.errors())
    assert "llama-server no longer answers" in said
    assert "what was seen is kept" in said
    assert report.endswith(str(tmp_path / "report.md"))
    looks = read_recording(tmp_path / RECORDING_FILE).seen
    assert [look.error_kind for look in looks[-GONE_AFTER:]] == ["unreachable"] * GONE_AFTER
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f"{GONE_AFTER} looks had no answer at all" in text
    assert "at the end:" in text


def test_a_key_that_is_refused_ends_the_watch_and_is_never_shown(
    server: FakeServer, tmp_path: Path
) -> None:
    with watching(server.url, "-o", tmp_path, env={API_KEY: KEY}) as seen:
        seen.answered()
        assert server.site.headers[-1]["authorization"] == f"Bearer {KEY}"
        server.answer(status(401, json.dumps({"error": f"no such key: {KEY}"}).encode()))
        assert seen.wait() == 4
        said = seen.text + seen.errors()
    assert "answered 401: no such key: (the API key)" in said
    kept = "".join(path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
    assert "no such key" in kept
    assert KEY not in said + kept


def test_a_server_that_loads_is_waited_for(server: FakeServer) -> None:
    source = LlamaServer(Client(server.url), {})
    looks = watch(source, interval=0, wait=lambda seconds: False)
    assert next(looks).snapshot
    server.answer(status(503, b'{"error": {"message": "Loading model"}}'))
    kinds = [next(looks).error_kind for _ in range(3 * GONE_AFTER)]
    assert set(kinds) == {"loading"}
    server.restore()
    assert next(looks).events == ("the server answers again",)


def test_an_endpoint_that_vanishes_is_an_error_first_and_then_off(server: FakeServer) -> None:
    looks = watch(LlamaServer(Client(server.url), {}), interval=0, wait=lambda seconds: False)
    assert next(looks).snapshot
    server.site.add("/slots", status(404))
    assert "/slots answered 404" in next(looks).error
    later = next(looks).snapshot
    assert later
    assert "--slots" in later.unknown["used_tokens"]


def test_counters_that_begin_again_are_an_event(server: FakeServer) -> None:
    looks = watch(LlamaServer(Client(server.url), {}), interval=0, wait=lambda seconds: False)
    assert next(looks).events == ()
    server.metrics["tokens_predicted_total"] = 3
    (event,) = next(looks).events
    assert "counters began again" in event
    assert "generated_tokens" in event
    assert next(looks).events == ()


def test_an_idle_server_is_not_asked_for_its_slots_again(server: FakeServer) -> None:
    """Asking for them puts off the sleep of a server that unloads its model when idle."""
    source = LlamaServer(Client(server.url), {})
    server.metrics["requests_processing"] = 0
    server.slots = [slot(0, 30), slot(1, 12)]
    assert [source.scrape().used_tokens for _ in range(3)] == [42] * 3
    assert server.asked("/slots") == 1
    server.metrics["n_decode_total"] += 1
    server.slots = [slot(0, 30), slot(1, 90)]
    assert [source.scrape().used_tokens for _ in range(3)] == [120] * 3
    assert server.asked("/slots") == 2
    server.metrics["requests_processing"] = 1
    for _ in range(3):
        source.scrape()
    assert server.asked("/slots") == 5


def test_a_sleeping_server_is_not_woken(server: FakeServer) -> None:
    server.props["is_sleeping"] = True
    server.metrics["requests_processing"] = 0
    shown = LlamaServer(Client(server.url), {"sleep_idle": 60}).scrape()
    assert server.asked("/slots") == 0
    assert shown.used_tokens is None
    assert "sleeps" in shown.unknown["used_tokens"]
    assert shown.facts["sleeping"] is True


def test_a_server_that_may_sleep_and_gives_no_metrics_is_left_alone(server: FakeServer) -> None:
    server.site.add("/metrics", status(501))
    shown = LlamaServer(Client(server.url), {"sleep_idle": 60}).scrape()
    assert server.asked("/slots") == 0
    assert "--metrics" in shown.unknown["used_tokens"]
    assert LlamaServer(Client(server.url), {}).scrape().used_tokens == 42


def test_malformed_metrics_are_a_warning_with_the_line(
    server: FakeServer, run: Run, tmp_path: Path
) -> None:
    server.more_metrics = "llamacpp:kv_cache{ 7\n"
    code, out, _ = run("observe", server.url, "--duration", "0", "-o", tmp_path)
    assert code == 0
    (warning,) = [line for line in out.splitlines() if line.startswith("warning:")]
    assert "line 6 of the metrics" in warning
    assert "llamacpp:kv_cache{" in warning
    assert "cache 42 " in out
    assert "line 6 of the metrics" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (status(401), API_KEY),
        (status(503, b'{"error": {"message": "Loading model"}}'), "Loading model"),
        (html(), "not as llama-server, Ollama, vLLM or SGLang"),
        (status(404), "not as llama-server, Ollama, vLLM or SGLang"),
        (half, "half an answer"),
    ],
)
def test_what_cannot_be_watched_is_said_in_one_line(
    server: FakeServer, run: Run, reply: object, words: str
) -> None:
    server.answer(reply)  # type: ignore[arg-type]
    code, out, err = run("observe", server.url, "--duration", "0")
    assert (code, out) == (4, "")
    (line,) = lines_of(err)
    assert words in line


def test_a_certificate_that_nobody_signed_is_refused(run: Run, tmp_path: Path) -> None:
    with serving_tls(tmp_path) as site:
        code, _, err = run("observe", site.url, "--duration", "0")
        assert site.asked == []
    assert code == 4
    (line,) = lines_of(err)
    assert "certificate verify failed" in line


def test_a_folder_that_holds_a_recording_is_left_alone(
    server: FakeServer, run: Run, tmp_path: Path
) -> None:
    (tmp_path / RECORDING_FILE).write_text("precious", encoding="utf-8")
    code, _, err = run("observe", server.url, "--duration", "0", "-o", tmp_path)
    assert code == 2
    assert "is there already" in err
    assert (tmp_path / RECORDING_FILE).read_text(encoding="utf-8") == "precious"
