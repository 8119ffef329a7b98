"""What the log of ``ollama serve`` says of the model that was loaded last.

Ollama passes its runner's output through. A runner that is llama.cpp (every one since 0.30, most
before) prints llama.cpp's lines; Ollama's own engine (some models, before 0.30) sums them up in
three lines per device, with one decimal.

Sources: llm/llama_server.go and server/sched.go of Ollama 0.33; llm/server.go, ml/device.go and
runner/ollamarunner/runner.go of Ollama 0.17.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from localkv.engines.log import NUMBER, Buffer, EngineLog, parse_log, plain_line
from localkv.units import GIB, KIB, MIB

# A runner without --model is one that only looks at the devices.
_STARTED = re.compile(r'msg="starting (?:runner|llama-server)" cmd=.* --model ')
_BUFFER = re.compile(
    rf'msg="(model weights|kv cache|compute graph)" device=(\S{{1,64}}) size="{NUMBER} (\w+)"'
)
_REQUEST = re.compile(
    r"msg=load request=\"\{Operation:(?:commit|alloc)\b.{0,80}? Parallel:(\d{1,4})"
    r" BatchSize:(\d{1,9}) FlashAttention:(\w+) KvSize:(\d{1,10})\b"
)
_OFFLOADED = re.compile(r'msg="offloaded (\d{1,6})/(\d{1,6}) layers to GPU"')
_KINDS = {"model weights": "model", "kv cache": "KV", "compute graph": "compute"}
_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_FLASH = {"enabled": True, "disabled": False}


def last_load(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines from the start of the last runner that was given a model; none: no lines."""
    for index in range(len(lines) - 1, -1, -1):
        if _STARTED.search(lines[index]):
            return lines[index:]
    return ()


def parse_ollama_log(lines: Sequence[str]) -> EngineLog:
    """Return what ``lines`` of Ollama's log say of the model that was loaded last."""
    part = last_load(lines)
    told = parse_log(part)
    return told if told.buffers else _own_engine(part)


def _own_engine(lines: Iterable[str]) -> EngineLog:
    """Return what Ollama's own engine says: buffers by device, no single caches."""
    buffers: dict[tuple[str, str], Buffer] = {}
    context: dict[str, int] = {}
    flash: bool | None = None
    offloaded: tuple[int, int] | None = None
    for raw in lines:
        line = plain_line(raw)
        if match := _BUFFER.search(line):
            name, device, size, unit = match.groups()
            # It plans several times; the last word on a buffer counts.
            if unit in _UNITS:
                kind = _KINDS[name]
                count = round(float(size.replace(",", ".")) * _UNITS[unit])
                buffers[device, kind] = Buffer(device, kind, count)
        elif match := _REQUEST.search(line):
            parallel, batch, mode, cells = match.groups()
            context = {"n_ctx": int(cells), "n_seq_max": int(parallel), "n_ubatch": int(batch)}
            flash = _FLASH.get(mode.lower())
        elif match := _OFFLOADED.search(line):
            offloaded = int(match[1]), int(match[2])
    return EngineLog(
        tuple(buffers.values()),
        context=tuple(context.items()),
        flash_attn=flash,
        layers_offloaded=offloaded,
    )
