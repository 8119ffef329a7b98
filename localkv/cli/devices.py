"""The options about GPUs, from text to settings."""

from __future__ import annotations

import re

from localkv.errors import UsageError
from localkv.units import parse_size


def layers(text: str | None) -> int | str:
    """Return ``-ngl``: a number of layers, -1 for all, or "auto".

    Raises:
        UsageError: the text is none of these.
    """
    if text is None:
        return 0
    if text == "auto":
        return text
    if text == "all":
        return -1
    if not re.fullmatch(r"\d{1,6}", text):
        raise UsageError(f"-ngl {text!r} is no number of layers", "give a number, all or auto")
    return int(text)


def shares(text: str | None) -> tuple[float, ...] | None:
    """Return ``-ts``: the share of each GPU, separated as llama.cpp takes them.

    Raises:
        UsageError: an entry is not a number.
    """
    if text is None:
        return None
    parts = re.split(r"[,/]", text)
    if not all(re.fullmatch(r"\s*\d{1,9}(\.\d{1,9})?\s*", part) for part in parts):
        raise UsageError(f"-ts {text!r} is no list of shares", "write 3,1")
    return tuple(float(part) for part in parts)


def free_memory(text: str | None, *, probe: bool) -> tuple[int, ...] | None:
    """Return the bytes free on each GPU: as given, or else as NVIDIA's library tells.

    None where neither says it, or where one GPU keeps it to itself.

    Raises:
        UsageError: an entry is not a size.
    """
    if text is not None:
        return tuple(parse_size(part) for part in text.split(","))
    if not probe:
        return None
    from localkv.probes.gpu import gpu_summary

    free = [device.free for device in gpu_summary().devices]
    told = tuple(size for size in free if size is not None)
    return told if told and len(told) == len(free) else None
