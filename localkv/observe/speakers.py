"""How each server is asked to generate: exact prompts, a streamed answer, its own counts.

Prompts are lists of token ids here; Ollama takes text alone, see
:mod:`localkv.observe.ollama_speaker`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from localkv.errors import EngineError
from localkv.http import Client, ServerError
from localkv.observe.streams import Piece, events

#: Words that most vocabularies have as one token each.
_TEXT = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father "
    "power hour game line"
)
WORDS = tuple(_TEXT.split())
#: Ids that every vocabulary has, past the ones that mark a beginning or an end.
_SMALL_IDS = tuple(range(10, 250))


class Speaker(Protocol):
    """One server's way to generate."""

    def prompt(self, n_tokens: int, shared: int, number: int) -> Any:
        """Return a prompt of ``n_tokens``, the first ``shared`` the same for every ``number``.

        Raises:
            EngineError: there is no such prompt.
        """

    def generate(
        self, client: Client, prompt: Any, n_predict: int, timeout: float
    ) -> Iterator[Piece]:
        """Yield the answer as it comes; the last piece holds the counts of ``COUNTS``.

        Raises:
            ServerError: the server refused, or broke off.
        """


class LlamaServerSpeaker:
    """llama-server's ``/completion`` with token ids; ``seed`` makes a run's prompts its own."""

    def __init__(self, client: Client, seed: int) -> None:
        """Learn some ids of the model's vocabulary.

        Raises:
            EngineError: the server has no tokenizer to ask.
        """
        answer = client.post_json("/tokenize", {"content": _TEXT}, timeout=60)
        self._ids = _ids(answer)
        self._seed = seed

    def prompt(self, n_tokens: int, shared: int, number: int) -> list[int]:
        """Return token ids."""
        return pick(self._ids, n_tokens, shared, number, self._seed)

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
            # Without it an event names no tokens, and one that holds half a letter is empty.
            "return_tokens": True,
        }
        for event in events(client, "/completion", body, timeout):
            counts = {}
            if event.get("stop"):
                timings = event.get("timings") or {}
                read, cached = timings.get("prompt_n"), timings.get("cache_n")
                counts = {
                    "prompt_tokens": None if read is None else read + (cached or 0),
                    "cached_tokens": cached,
                    "generated_tokens": timings.get("predicted_n"),
                }
            yield Piece(len(event.get("tokens") or ()), counts)


class VllmSpeaker:
    """vLLM's ``/v1/completions`` with token ids; its field for cached tokens is OpenAI's."""

    def __init__(self, client: Client, model: str, seed: int) -> None:
        """Learn some ids from its tokenizer, or take small ones where it has none."""
        self._model = model
        self._seed = seed
        try:
            answer = client.post_json("/tokenize", {"model": model, "prompt": _TEXT}, timeout=60)
            self._ids, self._has_text = _ids(answer), True
        except (ServerError, EngineError):
            self._ids, self._has_text = list(_SMALL_IDS), False

    def prompt(self, n_tokens: int, shared: int, number: int) -> list[int]:
        """Return token ids."""
        return pick(self._ids, n_tokens, shared, number, self._seed)

    def generate(
        self, client: Client, prompt: Any, n_predict: int, timeout: float
    ) -> Iterator[Piece]:
        """Yield the pieces of ``/v1/completions``."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": n_predict,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._has_text:
            # Started without a tokenizer: it cannot turn tokens into text.
            body["detokenize"] = False
        for event in events(client, "/v1/completions", body, timeout):
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

    def __init__(self, seed: int) -> None:
        """Take ids that every vocabulary has: it need not have a tokenizer to ask."""
        self._seed = seed

    def prompt(self, n_tokens: int, shared: int, number: int) -> list[int]:
        """Return token ids."""
        return pick(_SMALL_IDS, n_tokens, shared, number, self._seed)

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
        for event in events(client, "/generate", body, timeout):
            meta = event.get("meta_info") or {}
            done = int(meta.get("completion_tokens") or 0)
            counts = {
                "prompt_tokens": meta.get("prompt_tokens"),
                "cached_tokens": meta.get("cached_tokens"),
                "generated_tokens": meta.get("completion_tokens"),
            }
            yield Piece(max(done - before, 0), counts if meta.get("finish_reason") else {})
            before = max(done, before)


def pick(ids: Sequence[Any], n: int, shared: int, number: int, seed: int) -> list[Any]:
    """Return ``n`` of ``ids``: the first ``shared`` the same for every ``number``, the rest not."""
    head = Random(f"{seed} shared").choices(ids, k=min(shared, n))
    return head + Random(f"{seed} {number}").choices(ids, k=n - len(head))


def _ids(answer: Any) -> list[int]:
    """Return the ids of a tokenizer's answer, each once."""
    found = answer.get("tokens") if isinstance(answer, Mapping) else None
    ids = [i for i in found if isinstance(i, int)] if isinstance(found, list) else []
    if len(ids) < len(WORDS) // 2:
        raise EngineError("the server's tokenizer gives no ids", "is this the server you mean?")
    return list(dict.fromkeys(ids))
