"""A run that never was: records whose memory is the formula's plus a fixed cost and noise.

The model is a small one with grouped-query attention: 4 layers, 8 heads, 2 KV heads of 64. The
sizes follow from that by arithmetic here, not by the code under test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from localkv.records import Phase, PointRecord, Reading, RunInfo

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 8, 2, 64, 32000
WEIGHTS = 100 * MIB
COMPUTE = 20 * MIB
BASELINE = 24 * MIB
VOCABULARY = 12 * MIB
CONTEXT_FIXED = 2 * MIB
ELEMENT = {"f16": (2, 1), "q8_0": (34, 32), "q4_0": (18, 32)}


def kv_bytes(n_ctx: int, types: str) -> int:
    """K and V over all layers, as the engine allocates them."""
    block, per = ELEMENT[types]
    return 2 * n_ctx * LAYERS * KV_HEADS * HEAD_DIM * block // per


def table_bytes(n_ctx: int, slots: int) -> int:
    """The engine's own table: 52 bytes a cell and 256 sets of 48 bytes a stream."""
    return n_ctx * (4 + 12 + 4 + 32) + slots * 256 * 48


def prediction(n_ctx: int, slots: int, types: str, **config: Any) -> dict[str, Any]:
    kv, output = kv_bytes(n_ctx, types), slots * VOCAB * 4
    total = WEIGHTS + kv + output + COMPUTE
    return {
        "schema": 1,
        "config": {
            **config,
            "n_ctx": n_ctx,
            "n_ctx_requested": config.get("n_ctx", n_ctx),
            "n_ctx_per_slot": n_ctx // slots,
            "n_seq_max": slots,
        },
        "kv": {
            "bytes": kv,
            "k_bytes": kv // 2,
            "v_bytes": kv // 2,
            "caches": [
                {
                    "kind": "full",
                    "cells": n_ctx // slots,
                    "streams": slots,
                    "layers": LAYERS,
                    "k_bytes": kv // 2,
                    "v_bytes": kv // 2,
                }
            ],
        },
        "recurrent": {"bytes": 0, "r_bytes": 0, "s_bytes": 0},
        "weights": {"bytes": WEIGHTS},
        "output": {"bytes": output},
        "compute": {"bytes": COMPUTE, "source": "engine", "low": COMPUTE, "high": COMPUTE},
        "total_bytes": total,
        "devices": [{"name": "host", "weights": WEIGHTS, "kv": kv, "total": total}],
        "terms": [
            {"name": "weights", "bytes": WEIGHTS, "source": "file", "formula": "all tensors"},
            {"name": "kv full", "bytes": kv, "source": "formula", "formula": "layers x cells"},
            {"name": "compute", "bytes": COMPUTE, "source": "engine", "formula": "its plan"},
        ],
        "notes": [],
    }


def record(
    n_ctx: int,
    slots: int = 1,
    types: str = "f16",
    *,
    repeat: int = 0,
    outcome: str = "ok",
    slope: float = 1.0,
    extra: int = 0,
    reason: str | None = None,
    stage: str | None = None,
    **config: Any,
) -> PointRecord:
    """One run of one point; ``extra`` bytes come on top when the context is created."""
    settings: dict[str, Any] = {
        "n_ctx": n_ctx,
        "n_seq_max": slots,
        "n_batch": 2048,
        "n_ubatch": 512,
        "kv_unified": False,
        "swa_full": False,
        "flash_attn": "auto",
        "cache_type_k": types,
        "cache_type_v": types,
        "n_gpu_layers": 0,
        **config,
    }
    told = prediction(n_ctx, slots, types)
    ok = outcome == "ok"
    grown = round(
        slope * (told["kv"]["bytes"] + told["output"]["bytes"] + table_bytes(n_ctx, slots))
    )
    return PointRecord(
        key=f"c{n_ctx}-np{slots}-{types}",
        repeat=repeat,
        outcome=outcome,
        config=settings,
        reason=reason,
        stage=stage,
        phases=phases(grown + CONTEXT_FIXED + extra) if ok else (),
        peak=peak(grown + CONTEXT_FIXED + extra) if ok else {},
        engine={"n_ctx": n_ctx, "n_ctx_seq": n_ctx // slots, **engine_log(told)} if ok else {},
        prediction=told,
        timings={"load": 0.5, "context": 0.1, "decode": 0.7, "wall": 1.6},
    )


def engine_log(told: dict[str, Any]) -> dict[str, Any]:
    kv = told["kv"]["bytes"]
    return {
        "model_buffers": [{"device": "CPU_Mapped", "bytes": WEIGHTS}],
        "caches": [{"bytes": kv, "k_bytes": kv // 2, "v_bytes": kv // 2}],
    }


def phases(grown: int) -> tuple[Phase, ...]:
    anon, file = BASELINE // 2, BASELINE // 2
    loaded = anon + VOCABULARY
    return (
        _phase("baseline", 0.1, anon, file),
        _phase("model", 0.6, loaded, file + WEIGHTS),
        _phase("context", 0.7, loaded + grown, file + WEIGHTS),
        _phase("decode", 1.4, loaded + grown + COMPUTE, file + WEIGHTS),
        _phase("closed", 1.5, loaded, file),
    )


def _phase(name: str, seconds: float, anon: int, file: int) -> Phase:
    return Phase(
        name,
        seconds,
        {
            "rss": Reading(anon + file, source="status"),
            "rss_anon": Reading(anon, source="smaps"),
            "rss_file": Reading(file, source="status"),
            "vram_process": Reading(None, why="there is no driver"),
        },
    )


def peak(grown: int) -> dict[str, Reading]:
    total = BASELINE + VOCABULARY + WEIGHTS + grown + COMPUTE
    return {"peak_rss": Reading(total, source="VmHWM"), "rss": Reading(total, source="status")}


def grid(
    contexts: Sequence[int] = (1024, 2048, 4096, 8192),
    slots: Sequence[int] = (1, 2, 4),
    types: Sequence[str] = ("f16",),
    noise: Callable[[], int] | None = None,
    **each: Any,
) -> list[PointRecord]:
    """The records of a whole grid; by default each is off by up to two pages, always the same."""
    generator = random.Random(7)
    extra = noise or (lambda: PAGE * generator.randint(-2, 2))
    return [record(c, n, t, extra=extra(), **each) for t in types for n in slots for c in contexts]


def run_info(points: int = 12, **changes: Any) -> RunInfo:
    model: dict[str, Any] = {
        "name": "Tiny Model",
        "architecture": "llama",
        "path": "/models/tiny.gguf",
        "file_bytes": WEIGHTS + MIB,
        "weights_bytes": WEIGHTS,
        "n_layer": LAYERS,
        "n_ctx_train": 16384,
        "n_embd": HEADS * HEAD_DIM,
        "n_vocab": VOCAB,
        "rule": "exact",
        "layers": [
            {
                "kind": "full",
                "n_head": HEADS,
                "n_head_kv": KV_HEADS,
                "k_width": KV_HEADS * HEAD_DIM,
                "v_width": KV_HEADS * HEAD_DIM,
                "window": 0,
            }
        ]
        * LAYERS,
    }
    environment = {
        "memory": {"available": 2 * GIB, "total": 4 * GIB, "source": "MemAvailable"},
        "host": {"cpu_model": "A CPU", "cpus_usable": 2, "load": [0.1, 0.1, 0.1]},
        "gpu": {"available": False, "reason": "there is no driver", "devices": []},
    }
    return RunInfo(
        localkv="0.1.0",
        created="2026-01-02T03:04:05",
        argv=("localkv", "sweep", "-m", "tiny.gguf"),
        points=points,
        model={**model, **changes.pop("model", {})},
        environment={**environment, **changes.pop("environment", {})},
        **changes,
    )
