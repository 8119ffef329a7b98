"""Read an architecture's keys as the engine reads them: with its defaults, and its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: LLAMA_MAX_LAYERS in src/llama-hparams.h
MAX_LAYERS = 512


class RefusedError(Exception):
    """The engine will not load a model with such a header; the text is its reason."""


class Metadata:
    """The metadata of a header, seen through one architecture's prefix.

    ``assumed`` collects what the header lacks and the engine's default fills in. Source of the
    readings: llama_model_loader::get_key, get_arr and get_key_or_arr in
    src/llama-model-loader.cpp.
    """

    def __init__(self, values: Mapping[str, Any], architecture: str) -> None:
        self._values = values
        self._prefix = architecture + "."
        self.assumed: list[str] = []

    def has(self, key: str) -> bool:
        """Return whether the header holds ``key``."""
        return self._prefix + key in self._values

    def number(self, key: str, default: int | None = None) -> int:
        """Return the integer under ``key``, or ``default``.

        Raises:
            RefusedError: the key is missing and has no default, or is not a single integer.
        """
        value = self._values.get(self._prefix + key)
        if value is None:
            if default is None:
                raise RefusedError(f"key not found in model: {self._prefix}{key}")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise RefusedError(f"key {self._prefix}{key} has wrong type {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the truth value under ``key``, or ``default``."""
        value = self._values.get(self._prefix + key, default)
        return bool(value)

    def listed(self, key: str) -> list[int] | None:
        """Return the list of integers under ``key``; None when there is no list.

        Raises:
            RefusedError: the list is longer than the engine has room for.
        """
        value = self._values.get(self._prefix + key)
        if value is None or not _is_list(value):
            return None
        length = len(value) if isinstance(value, (list, tuple)) else int(value.length)
        if length > MAX_LAYERS or not isinstance(value, (list, tuple)):
            raise RefusedError(
                f"array length {length} for key {self._prefix}{key} exceeds max {MAX_LAYERS}"
            )
        if not all(isinstance(entry, int) for entry in value):
            raise RefusedError(f"{self._prefix}{key} has wrong array element type")
        return [int(entry) for entry in value]

    def numbers(self) -> dict[str, int | tuple[int, ...]]:
        """Return every key that holds an integer, or at most MAX_LAYERS of them, without prefix."""
        found: dict[str, int | tuple[int, ...]] = {}
        for key, value in self._values.items():
            if not key.startswith(self._prefix):
                continue
            name = key[len(self._prefix) :]
            if isinstance(value, int):
                found[name] = int(value)
            elif (
                isinstance(value, (list, tuple))
                and len(value) <= MAX_LAYERS
                and all(isinstance(entry, int) for entry in value)
            ):
                found[name] = tuple(int(entry) for entry in value)
        return found

    def per_block(self, key: str, count: int, default: list[int] | None = None) -> list[int]:
        """Return one integer per block: the list under ``key``, or its single value repeated.

        Raises:
            RefusedError: the list has another length than ``count``, or there is no value.
        """
        entries = self.listed(key)
        if entries is not None:
            if len(entries) != count:
                raise RefusedError(
                    f"key {self._prefix}{key} has wrong array length; "
                    f"expected {count}, got {len(entries)}"
                )
            return entries
        if default is not None and not self.has(key):
            return list(default)
        return [self.number(key)] * count


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) or hasattr(value, "length")
