"""Parser of the lines in which llama.cpp says what it allocates.

The same lines come out of llama-cpp-python, llama-server and Ollama's runner, there with time
stamps, container prefixes, ANSI colours and, under some locales, decimal commas. A model with
several caches prints the cache line several times; the lines are collected, never overwritten.
Sizes are printed with two decimals of a MiB, so a figure is right to half of 0.01 MiB per line.

Source of the formats: src/llama-model.cpp, llama-context.cpp, llama-kv-cache.cpp,
llama-memory-recurrent.cpp and llama-kv-cache-dsv4.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from localkv.units import MIB

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# No line of the engine comes near this length; it bounds the work on a line of anything else.
_LONGEST = 4096
#: A printed size and a count. A negative one, or one that wrapped around 64 bits, is none: such a
#: line says nothing.
NUMBER = r"(\d{1,9}(?:[.,]\d{1,4})?)"
INTEGER = r"(\d{1,10})"
_BUFFER = re.compile(rf"\s(model|KV|RS|output|compute|DSV4 \w+ state) buffer size =\s*{NUMBER} MiB")
_CACHE = re.compile(
    rf"size =\s*{NUMBER} MiB \(\s*{INTEGER} cells,\s*{INTEGER} layers,"
    rf"\s*{INTEGER}/\s*{INTEGER} seqs\), "
    rf"K \((\w+)\):\s*{NUMBER} MiB, V \((\w+)\):\s*{NUMBER} MiB"
)
_RECURRENT = re.compile(
    rf"size =\s*{NUMBER} MiB \(\s*{INTEGER} cells,[^)]*\), R \(\w+\):\s*{NUMBER} MiB, "
    rf"S \(\w+\):\s*{NUMBER} MiB(?:, P \(\w+\):\s*{NUMBER} MiB)?"
)
_CONTEXT = re.compile(
    rf":\s+(n_ctx|n_ctx_seq|n_seq_max|n_batch|n_ubatch|n_outputs_max)\s+=\s*{INTEGER}\b"
)
_OFFLOADED = re.compile(rf"offloaded {INTEGER}/{INTEGER} layers to GPU")
_FLASH = re.compile(r"Flash Attention (?:enabled|not supported)|: flash_attn\s+= (?:en|dis)abled")

#: What the engine says when an allocation fails, and which part could not be had.
ALLOCATION_FAILURES = (
    ("failed to allocate buffer for kv cache", "kv"),
    ("failed to allocate buffer for rs cache", "kv"),
    ("failed to allocate buffer for DSV4", "kv"),
    ("failed to allocate compute", "compute"),
    ("failed to reserve graph", "compute"),
    ("failed to allocate graph", "compute"),
    ("failed to allocate output buffer", "output"),
    ("failed to reserve initial output buffer", "output"),
    ("unable to allocate", "weights"),
)


@dataclass(frozen=True)
class Buffer:
    """A buffer on a device, ``kind`` as the engine words it, in bytes."""

    device: str
    kind: str
    bytes: int


@dataclass(frozen=True)
class Cache:
    """One KV cache line: cells per stream; sizes in bytes over all streams."""

    cells: int
    layers: int
    seqs: int
    streams: int
    k_type: str
    k_bytes: int
    v_type: str
    v_bytes: int
    bytes: int


@dataclass(frozen=True)
class Recurrent:
    """One line of recurrent state, in bytes; R is convolution, S state-space, P the history."""

    cells: int
    r_bytes: int
    s_bytes: int
    p_bytes: int
    bytes: int


@dataclass(frozen=True)
class EngineLog:
    """Everything the log says about memory and the context's final sizes; bytes throughout.

    ``context`` holds n_ctx, n_ctx_seq, n_seq_max, n_batch, n_ubatch as the engine settled them;
    ``flash_attn`` whether it is on after "auto" was resolved, None when the log does not say.
    """

    buffers: tuple[Buffer, ...] = ()
    caches: tuple[Cache, ...] = ()
    recurrent: tuple[Recurrent, ...] = ()
    context: tuple[tuple[str, int], ...] = ()
    flash_attn: bool | None = None
    layers_offloaded: tuple[int, int] | None = None

    def sum(self, kind: str) -> int:
        """Return the bytes of all buffers of ``kind`` over the devices."""
        return sum(b.bytes for b in self.buffers if b.kind == kind)

    @property
    def kv_bytes(self) -> int:
        """Return K and V of every cache, and the states of compressed caches, in bytes.

        An engine that does not tell its caches one by one still tells their buffers.
        """
        states = sum(b.bytes for b in self.buffers if b.kind.startswith("DSV4"))
        if not self.caches:
            return self.sum("KV") + states
        return sum(cache.bytes for cache in self.caches) + states

    @property
    def recurrent_bytes(self) -> int:
        """Return the recurrent state, in bytes."""
        return sum(state.bytes for state in self.recurrent)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON values, as ``PointRecord.engine`` holds them."""

        def of(kind: str) -> list[dict[str, Any]]:
            return [{"device": b.device, "bytes": b.bytes} for b in self.buffers if b.kind == kind]

        return {
            **dict(self.context),
            "flash_attn": self.flash_attn,
            "layers_offloaded": list(self.layers_offloaded) if self.layers_offloaded else None,
            "model_buffers": of("model"),
            "kv_buffers": of("KV"),
            "output_buffers": of("output"),
            "compute_buffers": of("compute"),
            "caches": [asdict(cache) for cache in self.caches],
            "recurrent": [asdict(state) for state in self.recurrent],
            "kv_bytes": self.kv_bytes,
            "recurrent_bytes": self.recurrent_bytes,
            "output_bytes": self.sum("output"),
            "compute_bytes": self.sum("compute"),
            "model_bytes": self.sum("model"),
        }


def parse_log(lines: Iterable[str]) -> EngineLog:
    """Return what ``lines`` of an engine's log say; lines that say nothing of memory are skipped.

    The context's settings are those of the last context that the log speaks of.
    """
    buffers: list[Buffer] = []
    caches: list[Cache] = []
    states: list[Recurrent] = []
    context: dict[str, int] = {}
    flash: bool | None = None
    offloaded: tuple[int, int] | None = None
    for raw in lines:
        line = plain_line(raw)
        if match := _BUFFER.search(line):
            buffers.append(Buffer(_device(line[: match.start()]), match[1], mebibytes(match[2])))
        elif match := _CACHE.search(line):
            caches.append(_cache(match))
        elif match := _RECURRENT.search(line):
            states.append(_state(match))
        elif match := _CONTEXT.search(line):
            context[match[1]] = int(match[2])
        elif match := _OFFLOADED.search(line):
            offloaded = int(match[1]), int(match[2])
        elif match := _FLASH.search(line):
            flash = match[0].endswith("enabled")
    return EngineLog(
        tuple(buffers), tuple(caches), tuple(states), tuple(context.items()), flash, offloaded
    )


def plain_line(raw: str) -> str:
    """Return a line of a log without colours, cut to a length that any line of the engine has."""
    return _ANSI.sub("", raw[:_LONGEST])


def mebibytes(text: str) -> int:
    """Return the bytes of a printed count of MiB, with a decimal point or a decimal comma."""
    return round(float(text.replace(",", ".")) * MIB)


def _device(before: str) -> str:
    """Return the device at the end of ``before``, "" when the line names none."""
    words = before.rsplit(None, 1)
    # A device may hold colons, as RPC0[127.0.0.1:50052] does; a function's name ends with one.
    return "" if not words or words[-1].endswith(":") else words[-1]


def _cache(match: re.Match[str]) -> Cache:
    size, cells, layers, seqs, streams, k_type, k, v_type, v = match.groups()
    return Cache(
        cells=int(cells),
        layers=int(layers),
        seqs=int(seqs),
        streams=int(streams),
        k_type=k_type,
        k_bytes=mebibytes(k),
        v_type=v_type,
        v_bytes=mebibytes(v),
        bytes=mebibytes(size),
    )


def _state(match: re.Match[str]) -> Recurrent:
    size, cells, r, s, p = match.groups()
    return Recurrent(
        cells=int(cells),
        r_bytes=mebibytes(r),
        s_bytes=mebibytes(s),
        p_bytes=mebibytes(p or "0"),
        bytes=mebibytes(size),
    )


def allocation_failure(text: str) -> str | None:
    """Return which part (weights, kv, compute, output) ``text`` says could not be allocated."""
    for phrase, stage in ALLOCATION_FAILURES:
        if phrase in text:
            return stage
    return None
