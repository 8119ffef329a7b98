"""An estimate with the engine's own figures in it: exact where the formula only has a band."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localkv.predict.estimate import (
    CacheEstimate,
    ComputeEstimate,
    DeviceEstimate,
    Estimate,
    Term,
)

_TOLD = "the engine's own plan"


def with_engine_plan(estimate: Estimate, engine: Mapping[str, Any]) -> Estimate:
    """Return ``estimate`` with what the engine planned (``EngineLog.to_dict``, bytes).

    The compute buffers always come from the engine. Where the architecture has no rule, so do the
    caches, the recurrent state and the output buffer: the formula has no claim to them.
    """
    if not estimate.known:
        estimate = _with_caches(estimate, engine)
    compute = int(engine["compute_bytes"])
    return estimate._replace(
        compute=ComputeEstimate(compute, "engine", compute, compute),
        devices=_with_compute(estimate.devices, engine["compute_buffers"]),
        terms=_replaced(estimate.terms, Term("compute", compute, "engine", _TOLD)),
    )


def _with_caches(estimate: Estimate, engine: Mapping[str, Any]) -> Estimate:
    caches = tuple(
        CacheEstimate(
            kind="unknown",
            cells=int(entry["cells"]),
            streams=int(entry["streams"]),
            layers=int(entry["layers"]),
            k_bytes=int(entry["k_bytes"]),
            v_bytes=int(entry["v_bytes"]),
        )
        for entry in engine["caches"]
    )
    state = {key: sum(int(e[f"{key}_bytes"]) for e in engine["recurrent"]) for key in "rsp"}
    output = int(engine["output_bytes"])
    changed = estimate._replace(
        caches=caches,
        r_bytes=state["r"],
        s_bytes=state["s"],
        p_bytes=state["p"],
        output_bytes=output,
        known=True,
        kv_bounds=None,
    )
    told = f"{_TOLD}: localkv has no rule for this architecture"
    terms = estimate.terms
    for name, size in (
        ("kv", changed.kv_bytes),
        ("recurrent", changed.recurrent_bytes),
        ("output", output),
    ):
        terms = _replaced(terms, Term(name, size, "engine", told))
    # A dry run does not say on which device a cache lies, so all of it stands with the host.
    host, *others = changed.devices
    host = host._replace(
        kv=changed.kv_bytes, recurrent=changed.recurrent_bytes, output=changed.output_bytes
    )
    return changed._replace(terms=terms, devices=(host, *others))


def _replaced(terms: tuple[Term, ...], term: Term) -> tuple[Term, ...]:
    if any(old.name == term.name for old in terms):
        return tuple(term if old.name == term.name else old for old in terms)
    return (*terms, term)


def _with_compute(
    devices: tuple[DeviceEstimate, ...], buffers: list[Mapping[str, Any]]
) -> tuple[DeviceEstimate, ...]:
    """Return ``devices`` with the compute buffers where the engine puts them."""
    compute = dict.fromkeys((device.name for device in devices), 0)
    for buffer in buffers:
        name = device_name(buffer["device"])
        compute[name] = compute.get(name, 0) + int(buffer["bytes"])
    known = {device.name: device for device in devices}
    return tuple(
        known.get(name, DeviceEstimate(name))._replace(compute=size)
        for name, size in compute.items()
    )


def device_name(engine_name: str) -> str:
    """Return localkv's name (host, gpu0, gpu1, ...) for a buffer's device as the engine prints it.

    ``CPU``, ``CPU_Mapped``, ``CUDA_Host`` and the like are host memory; ``CUDA1``, ``Vulkan1``,
    ``MTL1`` and ``RPC1[host:port]`` are the second GPU.
    """
    stem = engine_name.split("[")[0]
    digits = stem[len(stem.rstrip("0123456789")) :]
    if stem.startswith("CPU") or stem.endswith("_Host") or stem in ("BLAS", "AMX", "ACCEL"):
        return "host"
    return f"gpu{int(digits or 0)}"
