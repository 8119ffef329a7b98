"""The arithmetic of a KV cache: bytes per token, and a table of contexts by batch sizes.

What a cache holds when every sequence is full, whichever engine keeps it: no engine's padding but
the rounding to blocks of ``block_size`` tokens, no recurrent state, no buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localkv.errors import UsageError
from localkv.gguf.types import row_bytes
from localkv.model.shape import LayerSpec, ModelShape
from localkv.predict.paged_pages import is_element_type, layer_token_bytes


@dataclass(frozen=True)
class KvTable:
    """KV bytes by context (rows) and batch (columns).

    ``bytes_per_token`` is what one token takes in all layers; ``kv_dtype`` the type that was used.
    """

    kv_dtype: str
    bytes_per_token: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]


def kv_bytes_per_token(shape: ModelShape, kv_dtype: str = "auto") -> int:
    """Return the bytes of K and V that one token takes in all layers that hold a cache.

    Per layer: KV heads x (K head + V head) x bytes per element; MLA has the latent alone.
    ``kv_dtype`` auto is the type that the model's config names, else f16; f16, bf16, f32, fp8,
    int8, int8_per_token_head, fp8_per_token_head, or a type of llama.cpp's such as q8_0.

    Raises:
        UsageError: no such type, or its block size does not divide a row.
    """
    dtype = _dtype(shape, kv_dtype)
    return sum(_token_bytes(layer, dtype) for layer in shape.layers)


def kv_table(
    shape: ModelShape,
    contexts: Sequence[int],
    batches: Sequence[int],
    kv_dtype: str = "auto",
    *,
    block_size: int = 1,
) -> KvTable:
    """Return the KV bytes of ``batches`` sequences of ``contexts`` tokens each, all full.

    A sliding layer keeps no more than its window. Tokens are rounded up to whole blocks.

    Raises:
        UsageError: a number that is not positive, or a type that is not known.
    """
    for name, values in (
        ("context", contexts),
        ("batch size", batches),
        ("block size", (block_size,)),
    ):
        if any(value < 1 for value in values):
            raise UsageError(f"a {name} of {min(values)}", "give at least 1")
    dtype = _dtype(shape, kv_dtype)
    layers = [(_token_bytes(layer, dtype), layer.window) for layer in shape.layers]
    rows = []
    for context in contexts:
        sequence = sum(
            size * _blocks(min(context, window or context), block_size) for size, window in layers
        )
        rows.append(tuple(sequence * batch for batch in batches))
    return KvTable(
        kv_dtype=dtype,
        bytes_per_token=sum(size for size, _ in layers),
        contexts=tuple(contexts),
        batches=tuple(batches),
        rows=tuple(rows),
    )


def _dtype(shape: ModelShape, kv_dtype: str) -> str:
    return (shape.dtype or "f16") if kv_dtype == "auto" else kv_dtype


def _blocks(tokens: int, block_size: int) -> int:
    """Return ``tokens`` rounded up to whole blocks."""
    return -(-tokens // block_size) * block_size


def _token_bytes(layer: LayerSpec, dtype: str) -> int:
    if is_element_type(dtype):
        return layer_token_bytes(layer, dtype)
    return row_bytes(dtype, layer.k_width) + row_bytes(dtype, layer.v_width)
