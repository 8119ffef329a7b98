"""Ollama asked to generate: it takes text alone, so that prompts are words that are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from localkv.errors import EngineError
from localkv.http import Client
from localkv.observe.speakers import WORDS, pick
from localkv.observe.streams import Piece, json_lines

_TRIES = 24

Count = Callable[[str], int]


class OllamaSpeaker:
    """Ollama's ``/api/generate`` with raw text; ``n_ctx`` is its num_ctx, None for the default."""

    def __init__(self, model: str, count: Count, n_ctx: int | None, seed: int) -> None:
        """Talk to ``model``; ``count`` gives the tokens of a text as the server counts them.

        Raises:
            ServerError: nothing could be counted.
        """
        self._model = model
        self._count = count
        self._n_ctx = n_ctx
        self._seed = seed
        # A marker at the beginning is one token more than the words, in vocabularies that have it.
        self._extra = count(_text(list(WORDS))) - len(WORDS)

    def prompt(self, n_tokens: int, shared: int, number: int) -> str:
        """Return a text of ``n_tokens`` tokens, the first ``shared`` words of them shared.

        Raises:
            EngineError: no text of that many tokens was found.
        """
        words = pick(WORDS, max(n_tokens - max(self._extra, 0), 1), shared, number, self._seed)
        if self._extra in (0, 1):
            # Every word is one token: nothing is left to be counted.
            return _text(words)
        for attempt in range(1, _TRIES + 1):
            over = self._count(_text(words)) - n_tokens
            if over == 0:
                return _text(words)
            # Half of the way, as a word may be more than a token; other words in every attempt.
            step = max(abs(over) // 2, 1)
            if over > 0:
                words = words[: max(len(words) - step, 1)]
            else:
                words += pick(WORDS, step, 0, number, self._seed + attempt)
        raise EngineError(
            f"no text of exactly {n_tokens} tokens was found for {self._model}",
            "load another model, or ask for --only another part",
        )

    def generate(
        self, client: Client, prompt: Any, n_predict: int, timeout: float
    ) -> Iterator[Piece]:
        """Yield the pieces of ``/api/generate``."""
        body = request(self._model, prompt, n_predict, self._n_ctx)
        for event in json_lines(client, "/api/generate", body, timeout):
            counts = {}
            if event.get("done"):
                # What was read, from the cache too: what came from there has no field.
                counts = {
                    "prompt_tokens": event.get("prompt_eval_count"),
                    "generated_tokens": event.get("eval_count"),
                }
            yield Piece(int(bool(event.get("response"))), counts)


def request(model: str, prompt: str, n_predict: int, n_ctx: int | None) -> dict[str, Any]:
    """Return the body of a request that is streamed; an empty ``prompt`` only loads the model."""
    options: dict[str, Any] = {"num_predict": n_predict, "temperature": 0}
    if n_ctx:
        options["num_ctx"] = n_ctx
    return {"model": model, "prompt": prompt, "raw": True, "stream": True, "options": options}


def runner_count(runner: Client) -> Count:
    """Return a count by the tokenizer of Ollama's runner, a llama-server."""

    def count(text: str) -> int:
        asked = {"content": text, "add_special": True, "parse_special": True}
        answer = runner.post_json("/tokenize", asked, timeout=60)
        tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
        if not isinstance(tokens, list):
            raise EngineError("Ollama's runner gives no tokens", "update Ollama")
        return len(tokens)

    return count


def read_count(client: Client, model: str, n_ctx: int | None, timeout: float) -> Count:
    """Return a count by what the server says that it read, a marker at the beginning included."""

    def count(text: str) -> int:
        body = request(model, text, 1, n_ctx)
        for event in json_lines(client, "/api/generate", body, timeout):
            if event.get("done") and isinstance(event.get("prompt_eval_count"), int):
                return int(event["prompt_eval_count"])
        raise EngineError("Ollama does not say how many tokens it read", "update Ollama")

    return count


def _text(words: list[str]) -> str:
    # A word after a space is another token than one at the beginning.
    return "".join(f" {word}" for word in words)
