"""How each server is asked to generate: exact prompts, a streamed answer, its own counts.

Prompts are lists of token ids where the server takes them; Ollama takes text alone, which is
counted by its runner's tokenizer or, for an older runner, by what the server says that it read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from localkv.errors import EngineError
from localkv.http import Client, ServerError

#: Words that every vocabulary has; text of them is cut into ids to build prompts from.
_TEXT = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father "
    "power hour game line"
)
_WORDS = _TEXT.split()
_DONE = b"[DONE]"


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer: ``tokens`` new ones, and what the last part counts."""

    tokens: int = 0
    counts: Mapping[str, Any] = field(default_factory=dict)


class Speaker(Protocol):
    """One server's way to generate."""

    def prompt(self, n_tokens: int, shared: int, number: int) -> Any:
        """Return a prompt of ``n_tokens``, the first ``shared`` of which every request has.

        ``number`` makes the rest differ from that of other requests.
        """

    def generate(
        self, client: Client, prompt: Any, n_predict: int, timeout: float
    ) -> Iterator[Piece]:
        """Yield the answer as it comes; the last piece holds the counts of :data:`COUNTS`.

        Raises:
            ServerError: the server refused, or broke off.
        """


#: What the last piece counts, as far as the server says it.
COUNTS = ("prompt_tokens", "cached_tokens", "generated_tokens")


class LlamaServerSpeaker:
    """llama-server's ``/completion`` with token ids."""

    def __init__(self, client: Client) -> None:
        """Learn some ids of the model's vocabulary.

        Raises:
            ServerError: the server has no tokenizer to ask.
        """
        answer = client.post_json("/tokenize", {"content": _TEXT})
        self._ids = _ids(answer.get("tokens") if isinstance(answer, Mapping) else None)

    def prompt(self, n_tokens: int, shared: int, number: int) -> list[int]:
        """Return token ids."""
        return token_prompt(self._ids, n_tokens, shared, number)

    def generate(
        self, client: Client, prompt: Any, n_predict: int, timeout: float
    ) -> Iterator[Piece]:
        """Yield the pieces of ``/completion``."""
        body = {
            "prompt": prompt,
            "n_predict": n_predict,
            "stream": True,
            "cache_prompt": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        for event in _events(client, "/completion", body, timeout):
            timings = event.get("timings") or {}
            counts = {}
            if event.get("stop"):
                read, cached = timings.get("prompt_n"), timings.get("cache_n")
                counts = {
                    "prompt_tokens": None if read is None else read + (cached or 0),
                    "cached_tokens": cached,
                    "generated_tokens": timings.get("predicted_n"),
                }
            yield Piece(len(event.get("tokens") or ()) or int(not event.get("stop")), counts)


class OpenAiSpeaker:
    """vLLM's ``/v1/completions`` with token ids; its field for cached tokens is OpenAI's."""

    def __init__(self, client: Client, model: str) -> None:
        """Learn some ids from its tokenizer, or take small ones where it has none."""
        self._model = model
        try:
            answer = client.post_json("/tokenize", {"model": model, "prompt": _TEXT})
            self._ids = _ids(answer.get("tokens") if isinstance(answer, Mapping) else None)
            self._detokenize = True
        except (ServerError, EngineError):
            # Started without a tokenizer. Every vocabulary has these ids.
            self._ids = list(range(10, 250))
            self._detokenize = False

    def prompt(self, n_tokens: int, shared: int, number: int) -> list[int]:
        """Return token ids."""
        return token_prompt(self._ids, n_tokens, shared, number)

    def generate(
        self, client: Client, prompt: Any, n_predict: int, timeout: float
    ) -> Iterator[Piece]:
        """Yield the pieces of ``/v1/completions``."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": n_predict,
            "min_tokens": n_predict,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._detokenize:
            body["detokenize"] = False
        for event in _events(client, "/v1/completions", body, timeout):
            usage = event.get("usage") or {}
            details = usage.get("prompt_tokens_details") or {}
            counts = {
                "prompt_tokens": usage.get("prompt_tokens"),
                "cached_tokens": details.get("cached_tokens"),
                "generated_tokens": usage.get("completion_tokens"),
            }
            yield Piece(int(bool(event.get("choices"))), counts if usage else {})


class SglangSpeaker:
    """SGLang's ``/generate`` with token ids (read, not run)."""

    def prompt(self, n_tokens: int, shared: int, number: int) -> list[int]:
        """Return token ids that every vocabulary has."""
        return token_prompt(list(range(10, 250)), n_tokens, shared, number)

    def generate(
        self, client: Client, prompt: Any, n_predict: int, timeout: float
    ) -> Iterator[Piece]:
        """Yield the pieces of ``/generate``; each event counts all tokens so far."""
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": n_predict,
                "ignore_eos": True,
                "temperature": 0,
            },
            "stream": True,
        }
        before = 0
        for event in _events(client, "/generate", body, timeout):
            meta = event.get("meta_info") or {}
            done = int(meta.get("completion_tokens") or 0)
            counts = {
                "prompt_tokens": meta.get("prompt_tokens"),
                "cached_tokens": meta.get("cached_tokens"),
                "generated_tokens": meta.get("completion_tokens"),
            }
            yield Piece(max(done - before, 0), counts if meta.get("finish_reason") else {})
            before = done


class OllamaSpeaker:
    """Ollama's ``/api/generate`` with raw text; ``n_ctx`` is its num_ctx, None for the default."""

    def __init__(self, model: str, count: Callable[[str], int], n_ctx: int | None = None) -> None:
        """Talk to ``model``; ``count`` gives the tokens of a text as the server counts them."""
        self._model = model
        self._count = count
        self._n_ctx = n_ctx

    def prompt(self, n_tokens: int, shared: int, number: int) -> str:
        """Return a text of exactly ``n_tokens`` tokens.

        Raises:
            EngineError: no text of that many tokens was found.
        """
        words = [_WORDS[i % len(_WORDS)] for i in range(shared)]
        words += [_WORDS[(7 * number + 3 * i + 1) % len(_WORDS)] for i in range(n_tokens - shared)]
        # A word is one token in most vocabularies; a marker at the start adds one or two.
        for _ in range(_TRIES):
            found = self._count(" ".join(words))
            if found == n_tokens:
                return " ".join(words)
            if found > n_tokens:
                words = words[: max(len(words) - (found - n_tokens), 1)]
            else:
                words += [_WORDS[i % len(_WORDS)] for i in range(n_tokens - found)]
        raise EngineError(
            f"no text of exactly {n_tokens} tokens was found for {self._model}",
            "give another number of tokens",
        )

    def generate(
        self, client: Client, prompt: Any, n_predict: int, timeout: float
    ) -> Iterator[Piece]:
        """Yield the pieces of ``/api/generate``."""
        options: dict[str, Any] = {"num_predict": n_predict, "temperature": 0}
        if self._n_ctx:
            options["num_ctx"] = self._n_ctx
        body = {
            "model": self._model,
            "prompt": prompt,
            "raw": True,
            "stream": True,
            "options": options,
        }
        for event in _lines(client, "/api/generate", body, timeout):
            if event.get("error"):
                raise ServerError(
                    f"{client.base_url}/api/generate: {event['error']}", "see its log", "answer"
                )
            counts = {}
            if event.get("done"):
                # It counts what it read in all; what came from the cache has no field.
                counts = {
                    "prompt_tokens": event.get("prompt_eval_count"),
                    "generated_tokens": event.get("eval_count"),
                }
            yield Piece(int(bool(event.get("response"))), counts)


_TRIES = 8


def token_prompt(ids: Sequence[int], n_tokens: int, shared: int, number: int) -> list[int]:
    """Return ``n_tokens`` of ``ids``: the first ``shared`` always the same, then by ``number``."""
    count = len(ids)
    head = [ids[i % count] for i in range(min(shared, n_tokens))]
    # Other first tokens for every number, so that no prefix is shared that was not asked for.
    tail = [ids[(number * 31 + i * (number % 13 + 1)) % count] for i in range(n_tokens - len(head))]
    return head + tail


def _ids(found: Any) -> list[int]:
    ids = [i for i in found or () if isinstance(i, int)]
    if len(ids) < len(_WORDS) // 2:
        raise EngineError("the server's tokenizer gives no ids", "is this the server you mean?")
    return list(dict.fromkeys(ids))


def _events(
    client: Client, path: str, body: Mapping[str, Any], timeout: float
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events."""
    for line in _raw_lines(client, path, body, timeout):
        name, _, data = line.partition(b":")
        data = data.strip()
        if name == b"error":
            raise _broken(client, path, data)
        if name == b"data" and data != _DONE:
            event = _object(client, path, data)
            if "error" in event:
                raise _broken(client, path, data)
            yield event


def _lines(
    client: Client, path: str, body: Mapping[str, Any], timeout: float
) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of one JSON object per line."""
    for line in _raw_lines(client, path, body, timeout):
        yield _object(client, path, line)


def _raw_lines(
    client: Client, path: str, body: Mapping[str, Any], timeout: float
) -> Iterator[bytes]:
    with client.stream("POST", path, body=body, timeout=timeout) as pieces:
        yield from split_lines(pieces)


def split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream that comes in pieces; empty ones are left out."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.strip() for line in whole if line.strip())
    if rest.strip():
        yield rest.strip()


def _object(client: Client, path: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _broken(client, path, data)
    return found


def _broken(client: Client, path: str, data: bytes) -> ServerError:
    text = data.decode("utf-8", "replace")
    error = ServerError(
        f"{client.base_url}{path} broke off", "see the server's log", "answer", body=text
    )
    told = error.json()
    inner = told.get("error") if isinstance(told, dict) else None
    inner = inner if isinstance(inner, dict) else told if isinstance(told, dict) else {}
    if isinstance(inner.get("code"), int):
        error.status = inner["code"]
    if message := inner.get("message"):
        error.message += f": {str(message)[:200]}"
    return error
