"""The fields of a Hugging Face config.json, by the field's own facts, typed and bounded.

A config.json is text from a stranger: every number is checked before it is used, and what a field
leaves out is filled by the configuration class's own default, which is then listed as assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localkv.errors import ModelError
from localkv.gguf.text import shown
from localkv.model.hf_defaults import class_defaults
from localkv.units import plural

#: Fact -> the names that configurations give it, first match wins.
ALIASES: dict[str, tuple[str, ...]] = {
    "n_layer": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "num_transformer_layers",
    ),
    "n_head": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "n_head_kv": (
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
    ),
    "head_dim": ("head_dim", "hidden_size_per_head", "kv_channels", "attention_head_dim", "d_kv"),
    "n_embd": ("hidden_size", "n_embd", "d_model", "model_dim"),
    "window": ("sliding_window", "sliding_window_size", "attention_window_size"),
    "n_ctx": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
        "model_max_length",
        "n_ctx",
    ),
    "n_vocab": ("vocab_size", "padded_vocab_size"),
}

#: The name to speak of where the first alias is not today's.
_SHOWN = {"n_head_kv": "num_key_value_heads"}

#: Far above any model, far below what would make a loop or a product a burden.
_MOST = 1 << 32
_MOST_LAYERS = 10_000


class Fields:
    """The language model's fields of one configuration.

    ``assumed`` gathers the facts that came from a class default, in words.
    """

    def __init__(self, config: Mapping[str, Any], model_type: str, where: str) -> None:
        self.config = config
        self.model_type = model_type
        self.where = where
        self.assumed: list[str] = []
        self._defaults = class_defaults(model_type)

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null."""
        return self.config.get(name) is not None

    def fail(self, message: str) -> ModelError:
        """Return the error for this configuration: what is wrong, and what to do."""
        return ModelError(
            f"{self.where}: {message}", "give the config.json of a language model, unabridged"
        )

    def fact(self, fact: str) -> int | None:
        """Return the number behind ``fact``, whatever its name; None when it is null or unknown.

        Raises:
            ModelError: the field holds something else than a number in range.
        """
        for name in ALIASES[fact]:
            if name in self.config:
                value = self.config[name]
                return None if value is None else self._whole(name, value)
        if fact not in self._defaults:
            return None
        default = self._defaults[fact]
        if default is not None:
            self._assume(f"{_shown_name(fact)} = {default}")
        return default

    def need(self, fact: str) -> int:
        """Return ``fact``, which there is no answer without.

        Raises:
            ModelError: it is not there, or 0.
        """
        value = self.fact(fact)
        if not value:
            raise self.fail(f"model_type {shown(self.model_type)!r} without {_shown_name(fact)}")
        return value

    def layers(self) -> int:
        """Return the number of blocks.

        Raises:
            ModelError: it is missing or out of all proportion.
        """
        return self.bounded(self.need("n_layer"))

    def bounded(self, count: int) -> int:
        """Return a number of layers that is in proportion.

        Raises:
            ModelError: it is none, or more than any model has.
        """
        if not 0 < count <= _MOST_LAYERS:
            raise self.fail(f"{count} layers, where a model has 1 to {_MOST_LAYERS}")
        return count

    def number(self, name: str, default: int | None = None) -> int:
        """Return the number in the field ``name``; ``default`` is its class's own, and assumed.

        Raises:
            ModelError: it is neither there nor has a default, or it is not a number.
        """
        if self.has(name):
            return self._whole(name, self.config[name])
        if default is None:
            raise self.fail(f"model_type {shown(self.model_type)!r} without {name}")
        self._assume(f"{name} = {default}")
        return default

    def optional(self, name: str) -> int | None:
        """Return the number in the field ``name``, None when it is not there or null."""
        return self._whole(name, self.config[name]) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        """Return the field ``name`` as a yes or no."""
        value = self.config.get(name)
        return default if value is None else bool(value)

    def words(self, name: str, count: int) -> list[str] | None:
        """Return a list of ``count`` words, None when the field is not there.

        Raises:
            ModelError: the list has another length, or holds something else.
        """
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.fail(f"{name} is not a list of words")
        if len(value) != count:
            entries = plural(len(value), "entry", "entries")
            raise self.fail(f"{name} has {entries} for {plural(count, 'layer')}")
        return value

    def numbers(self, name: str) -> list[int] | None:
        """Return a list of numbers, None when the field is no list.

        Raises:
            ModelError: an entry is not a number.
        """
        value = self.config.get(name)
        if not isinstance(value, list):
            return None
        return [0 if v is None else self._whole(name, v) for v in value[:_MOST_LAYERS]]

    def nested(self, name: str) -> Mapping[str, Any]:
        """Return the object in the field ``name``, empty when there is none."""
        value = self.config.get(name)
        return value if isinstance(value, Mapping) else {}

    def _whole(self, name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
            raise self.fail(f"{name} is {shown(str(value), 40)!r}, not a count")
        return int(value)

    def _assume(self, text: str) -> None:
        line = f"{text} (class default of {self.model_type})"
        if line not in self.assumed:
            self.assumed.append(line)


def _shown_name(fact: str) -> str:
    return _SHOWN.get(fact, ALIASES[fact][0])
