"""GGUF bytes built by hand, field by field, so that each of them can be made to lie."""

from __future__ import annotations

import io
import struct
from pathlib import Path

HEADERS = Path(__file__).parent / "data" / "headers"

# Metadata value types (ggml/include/gguf.h) with their struct letters.
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U32, STR, ARR, U64 = 4, 8, 9, 10


class Builder:
    """Writes the pieces of a GGUF header; ``order`` is "<" or ">"."""

    def __init__(self, version: int = 3, order: str = "<") -> None:
        self.version = version
        self.order = order

    def u32(self, value: int) -> bytes:
        return struct.pack(self.order + "I", value)

    def u64(self, value: int) -> bytes:
        return struct.pack(self.order + "Q", value)

    def string(self, text: str | bytes) -> bytes:
        data = text.encode() if isinstance(text, str) else text
        return self.u64(len(data)) + data

    def value(self, kind: int, value: object) -> bytes:
        if kind == STR:
            return self.string(value)
        return struct.pack(self.order + CODES[kind], value)

    def key(self, name: str, kind: int, value: object) -> bytes:
        return self.string(name) + self.u32(kind) + self.value(kind, value)

    def array(self, name: str, kind: int, values: list, length: int | None = None) -> bytes:
        count = len(values) if length is None else length
        head = self.string(name) + self.u32(ARR) + self.u32(kind) + self.u64(count)
        return head + b"".join(self.value(kind, v) for v in values)

    def tensor(self, name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
        dims = b"".join(self.u64(n % (1 << 64)) for n in shape)
        return self.string(name) + self.u32(len(shape)) + dims + self.u32(kind) + self.u64(offset)

    def header(
        self,
        keys: list[bytes] = (),
        tensors: list[bytes] = (),
        n_keys: int | None = None,
        n_tensors: int | None = None,
    ) -> bytes:
        counts = self.u64(len(tensors) if n_tensors is None else n_tensors)
        counts += self.u64(len(keys) if n_keys is None else n_keys)
        return b"GGUF" + self.u32(self.version) + counts + b"".join((*keys, *tensors))


def small_model(order: str = "<", version: int = 3, data: bool = True, **split: int) -> bytes:
    """Return a whole tiny model: two tensors of 32 and 128 bytes; ``split`` keys as given."""
    b = Builder(version, order)
    keys = [
        b.key("general.architecture", STR, "llama"),
        b.key("llama.block_count", U32, 1),
        b.array("llama.attention.head_count_kv", U32, [3, 1]),
        b.array("tokenizer.ggml.tokens", STR, ["<s>", "", "a" * 300, "\0\0\0\0\0\0\0\0x"]),
    ]
    for name, value in split.items():
        kind = 5 if name == "tensors_count" else 2  # i32 and u16, as llama.cpp writes them
        keys.append(b.key(f"split.{name.replace('_', '.')}", kind, value))
    suffix = f".{split['no']}" if "no" in split else ""
    tensors = [
        b.tensor(f"token_embd{suffix}.weight", (8,)),
        b.tensor(f"blk.0.attn_q{suffix}.weight", (8, 4), offset=32),
    ]
    head = b.header(keys, tensors)
    return head + bytes(-len(head) % 32) + bytes(32 + 128) if data else head


class ZeroTail(io.RawIOBase):
    """A stream of ``size`` bytes: ``head``, then zeros, as a sparse file has them."""

    def __init__(self, head: bytes, size: int) -> None:
        self.head, self.size, self.at, self.handed_out = head, size, 0, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def read(self, count: int = -1) -> bytes:
        count = min(count, self.size - self.at)
        piece = self.head[self.at : self.at + count]
        self.at += count
        self.handed_out += count
        return piece + bytes(count - len(piece))
