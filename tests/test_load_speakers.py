"""Each server's way to generate: prompts of exact length, streams read, counts as it gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import url_helpers
from hypothesis import given
from hypothesis import strategies as st
from load_helpers import always, body_of, llama_site, sse
from url_helpers import Handler, Site, chunked, status

from localkv.errors import EngineError
from localkv.http import Client, ServerError
from localkv.observe.ollama_speaker import OllamaSpeaker, read_count, runner_count
from localkv.observe.speakers import (
    WORDS,
    LlamaServerSpeaker,
    SglangSpeaker,
    Speaker,
    VllmSpeaker,
    pick,
)
from localkv.observe.streams import Piece, split_lines


@pytest.fixture
def site() -> Iterator[Site]:
    with url_helpers.serving() as found:
        yield found


def pieces(site: Site, speaker: Speaker, prompt: object, n_predict: int = 4) -> list[Piece]:
    with Client(site.url) as client:
        return list(speaker.generate(client, prompt, n_predict, 30))


@given(st.integers(1, 300), st.integers(0, 400), st.integers(0, 50), st.integers(0, 9))
def test_a_prompt_has_its_length_and_shares_what_was_asked_for(
    n: int, shared: int, number: int, seed: int
) -> None:
    mine, other = (pick(range(1000), n, shared, k, seed) for k in (number, number + 1))
    assert len(mine) == len(other) == n
    assert mine[:shared] == other[:shared]
    assert pick(range(1000), n, shared, number, seed) == mine
    if n - shared > 20:
        assert mine[shared : shared + 20] != other[shared : shared + 20]
    if n > 20:
        # Another run's prompts are others, shared or not: nothing of them is in a cache.
        assert pick(range(1000), n, shared, number, seed + 1)[:20] != mine[:20]


@given(st.lists(st.binary(max_size=6)))
def test_lines_come_out_however_the_stream_was_cut(cut: list[bytes]) -> None:
    whole = [line.strip() for line in b"".join(cut).split(b"\n")]
    assert list(split_lines(cut)) == [line for line in whole if line]


def test_llama_server_counts_tokens_and_cached_ones() -> None:
    with llama_site() as site, Client(site.url) as client:
        speaker = LlamaServerSpeaker(client, 1)
        prompt = speaker.prompt(100, 0, 1)
        found = pieces(site, speaker, prompt)
    assert [p.tokens for p in found] == [1, 1, 1, 1, 0]
    assert found[-1].counts == {"prompt_tokens": 100, "cached_tokens": 3, "generated_tokens": 4}


def test_a_server_without_a_tokenizer_is_told(site: Site) -> None:
    site.add("/tokenize", status(200, b'{"tokens": []}'))
    with Client(site.url) as client, pytest.raises(EngineError, match="no ids"):
        LlamaServerSpeaker(client, 1)


def vllm_answer(details: Any) -> Any:
    def reply(handler: Handler) -> None:
        asked = body_of(handler)
        assert asked["stream_options"] == {"include_usage": True}
        assert asked["detokenize"] is False  # there is no /tokenize here
        n = asked["max_tokens"]
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": n, **details}
        tokens = [{"choices": [{"text": ""}]} for _ in range(n)]
        chunked([*sse(*tokens, {"choices": [], "usage": usage}), b"data: [DONE]\n\n"])(handler)

    return reply


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 64}}, 64),
        ({"prompt_tokens_details": None}, None),  # without --enable-prompt-tokens-details
        ({}, None),
    ],
)
def test_vllm_counts_cached_tokens_where_it_is_told_to(
    site: Site, details: Any, cached: int | None
) -> None:
    site.add("/v1/completions", vllm_answer(details))
    with Client(site.url) as client:
        speaker = VllmSpeaker(client, "m", 1)
    found = pieces(site, speaker, speaker.prompt(100, 10, 3))
    assert [p.tokens for p in found] == [1, 1, 1, 1, 0]
    assert found[-1].counts == {
        "prompt_tokens": 100,
        "cached_tokens": cached,
        "generated_tokens": 4,
    }


def test_sglang_counts_all_tokens_so_far_in_every_event(site: Site) -> None:
    def meta(done: int, **more: Any) -> dict[str, Any]:
        told = {"prompt_tokens": 100, "cached_tokens": 96, "completion_tokens": done}
        return {"text": "x", "meta_info": {**told, "finish_reason": None, **more}}

    def reply(handler: Handler) -> None:
        assert len(body_of(handler)["input_ids"]) == 100
        ended = meta(4, finish_reason={"type": "length"})
        chunked([*sse(meta(1), meta(3), ended), b"data: [DONE]\n\n"])(handler)

    site.add("/generate", reply)
    speaker = SglangSpeaker(1)
    found = pieces(site, speaker, speaker.prompt(100, 0, 1))
    assert [p.tokens for p in found] == [1, 2, 1]
    assert found[-1].counts == {"prompt_tokens": 100, "cached_tokens": 96, "generated_tokens": 4}
    assert not found[0].counts


def ollama_lines(*objects: object) -> list[bytes]:
    return [json.dumps(each).encode() + b"\n" for each in objects]


def test_ollama_reads_text_and_counts_what_it_read(site: Site) -> None:
    def reply(handler: Handler) -> None:
        asked = body_of(handler)
        read = len(asked["prompt"].split()) + 1  # a marker at the beginning
        done = {"response": "", "done": True, "prompt_eval_count": read, "eval_count": 1}
        chunked(ollama_lines({"response": "a", "done": False}, done))(handler)
        assert asked["options"]["num_ctx"] == 1024
        assert asked["raw"] is True

    site.add("/api/generate", reply)
    with Client(site.url) as client:
        speaker = OllamaSpeaker("m", read_count(client, "m", 1024, 30), 1024, 1)
    asked_before = len(site.asked)
    prompt = speaker.prompt(50, 20, 1)
    assert len(site.asked) == asked_before  # words are tokens here: nothing is left to count
    found = pieces(site, speaker, prompt)
    assert [p.tokens for p in found] == [1, 0]
    assert found[-1].counts == {"prompt_tokens": 50, "generated_tokens": 1}
    assert prompt.split()[:20] == speaker.prompt(50, 20, 2).split()[:20]


def test_ollamas_words_of_several_tokens_are_counted_until_they_fit() -> None:
    def count(text: str) -> int:
        return sum(1 + (len(word) > 4) for word in text.split())

    speaker = OllamaSpeaker("m", count, None, 1)
    for n in range(40, 60):
        assert count(speaker.prompt(n, 0, n)) == n


def test_no_text_of_a_number_of_tokens_is_told() -> None:
    speaker = OllamaSpeaker("m", lambda text: 2 * len(text.split()), None, 1)
    with pytest.raises(EngineError, match="no text of exactly 7 tokens"):
        speaker.prompt(7, 0, 1)


def test_a_runner_counts_by_its_tokenizer() -> None:
    with llama_site() as site, Client(site.url) as client:
        assert runner_count(client)(" ".join(WORDS)) == len(WORDS)


@pytest.mark.parametrize(
    ("stream", "code", "said"),
    [
        (sse({"error": {"code": 500, "message": "Context size has been exceeded."}}), 500, "been"),
        ([b'error: {"code": 400, "message": "too long"}\n\n'], 400, "too long"),
        ([b'data: {"error": "in words"}\n\n'], None, "in words"),
        ([b"data: half an obj"], None, "broke off"),
        ([b"data: [1]\n\n"], None, "broke off"),
    ],
)
def test_an_error_in_the_middle_of_a_stream_is_told(
    stream: list[bytes], code: int | None, said: str
) -> None:
    with llama_site(always(chunked(stream))) as site, Client(site.url) as client:
        speaker = LlamaServerSpeaker(client, 1)
        with pytest.raises(ServerError, match=said) as caught:
            list(speaker.generate(client, [1], 1, 30))
    assert caught.value.status == code
    assert "\n" not in str(caught.value)
