"""What the engine did, as handed down: ``data/engine_cases.tar.xz``, unpacked once per session.

Inside: ``headers`` and ``headers_deep`` (GGUF files cut off after the header), ``engine_truth``
and ``deep_truth`` (one model per line with many configurations), ``device_truth`` (real loads
over one and two devices), ``public_records`` (figures from logs of real users). Sizes are MiB as
the engine prints them, two decimals.
"""

from __future__ import annotations

import json
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

from localkv.model import ModelShape, shape_from_header
from localkv.units import MIB

ARCHIVE = Path(__file__).parent / "data" / "engine_cases.tar.xz"
FLASH_ATTN = {-1: "auto", 0: "off", 1: "on"}
#: One unit of the last printed digit, and the float that the engine rounds.
PRINTED = 0.0101


@cache
def _contents() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE, "r:xz") as archive:
        return {
            member.name: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if member.isfile()
        }


def records(name: str) -> list[dict[str, Any]]:
    """Return the lines of ``name``.jsonl."""
    return [json.loads(line) for line in _contents()[f"{name}.jsonl"].splitlines()]


@cache
def shape(name: str) -> ModelShape:
    """Return the shape of a handed header, read without its file being there."""
    from io import BytesIO

    from localkv.gguf import read_header

    folder = "headers_deep" if name.endswith("-d1") else "headers"
    header = read_header(BytesIO(_contents()[f"{folder}/{name}.gguf"]))
    return shape_from_header(header.metadata, header.tensors, path=f"{name}.gguf")


def header_bytes(name: str) -> bytes:
    """Return the header file of a model."""
    folder = "headers_deep" if name.endswith("-d1") else "headers"
    return _contents()[f"{folder}/{name}.gguf"]


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a truth entry as ``predict`` takes them."""
    return {
        "n_ctx": config["n_ctx"],
        "n_seq_max": config["n_seq_max"],
        "kv_unified": bool(config["kv_unified"]),
        "swa_full": bool(config["swa_full"]),
        "flash_attn": FLASH_ATTN[config.get("flash_attn", -1)],
        "cache_type_k": config.get("type_k", "f16"),
        "cache_type_v": config.get("type_v", "f16"),
        "n_ubatch": config["n_ubatch"],
        "n_batch": config["n_batch"],
    }


def printed(size: int, mib: float, within: float = PRINTED) -> bool:
    """Return whether ``size`` bytes would be printed as ``mib``."""
    return abs(size / MIB - mib) <= within


def named(entries: list[dict[str, Any]]) -> list[str]:
    """Return each model's name once, in order."""
    return list(dict.fromkeys(entry["name"] for entry in entries))
