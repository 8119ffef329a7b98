"""Where the engine puts each block, and what each device then holds.

Source: llama_model_base::load_tensors in src/llama-model.cpp (the split over devices),
llama_prepare_model_devices in src/llama.cpp (split_mode none), llama_kv_cache and
llama_memory_recurrent (cache and state follow their block unless KV offload is off).
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack

from localkv.errors import UsageError
from localkv.model import ModelShape
from localkv.model.weights import OUTPUT
from localkv.predict.config import RunConfig
from localkv.predict.estimate import ComputeEstimate, DeviceEstimate
from localkv.predict.kv import SizedCache, StateBytes
from localkv.predict.repack import repacked_bytes

HOST = "host"


class Placement:
    """The device of each block and of the output layer; ``names`` are all devices, host first."""

    def __init__(self, names: tuple[str, ...], blocks: tuple[str, ...], output: str) -> None:
        self.names = names
        self.blocks = blocks
        self.output = output


def place(shape: ModelShape, config: RunConfig) -> Placement:
    """Return where the engine puts the blocks of ``shape``.

    The last ``n_gpu_layers`` of n_layer + 1 layers, the output being the last, go to the devices,
    cut by ``tensor_split`` or else by free memory.

    Raises:
        UsageError: a split or main device that does not fit the number of devices.
    """
    _check(config)
    count = shape.n_layer
    wanted = count + 1 if config.n_gpu_layers < 0 else config.n_gpu_layers
    used = [config.main_gpu] if config.split_mode == "none" else list(range(config.n_devices))
    offloaded = min(wanted, count + 1) if config.n_devices else 0
    if not offloaded:
        return Placement((HOST,), (HOST,) * count, HOST)
    from bisect import bisect_right

    first = count + 1 - offloaded
    ends = _split_points(config, used)
    layers = [HOST] * first
    for index in range(offloaded):
        # upper_bound over float shares: a share equal to a split point belongs to the next device
        share = _float(index / offloaded)
        layers.append(f"gpu{used[min(bisect_right(ends, share), len(used) - 1)]}")
    names = (HOST, *(f"gpu{index}" for index in range(config.n_devices)))
    return Placement(names, tuple(layers[:count]), layers[count])


def _check(config: RunConfig) -> None:
    if config.n_devices < 0:
        raise UsageError("n_devices must not be negative", "0 means the host alone")
    alone = config.split_mode == "none" and config.n_devices and config.n_gpu_layers
    if alone and not 0 <= config.main_gpu < config.n_devices:
        raise UsageError(
            f"invalid value for main_gpu: {config.main_gpu} "
            f"(available devices: {config.n_devices})",
            "count devices from 0",
        )
    for name, values in (
        ("tensor_split", config.tensor_split),
        ("device_free", config.device_free),
    ):
        if values is not None and len(values) > max(config.n_devices, 1):
            raise UsageError(
                f"{name} names {len(values)} devices, more than the {config.n_devices} asked for",
                "give one value per device",
            )
        if values is not None and any(value < 0 for value in values):
            raise UsageError(f"{name} has a negative value", "give shares of 0 or more")


def _split_points(config: RunConfig, used: Sequence[int]) -> list[float]:
    """Return the share of layers at which each device ends, in the engine's 32-bit arithmetic."""
    shares = config.tensor_split
    if shares is None or not any(shares):
        shares = config.device_free if config.device_free and any(config.device_free) else None
    ends: list[float] = []
    total = 0.0
    for position, device in enumerate(used):
        # tensor_split is read by position among the devices in use, free memory by device
        index = position if shares is config.tensor_split else device
        share = 1.0 if shares is None else shares[index] if index < len(shares) else 0.0
        total = _float(total + _float(share))
        ends.append(total)
    return [_float(end / total) if total else 1.0 for end in ends]


def _float(value: float) -> float:
    """Return ``value`` rounded to 32 bits."""
    result: float = unpack("f", pack("f", value))[0]
    return result


def weights_by_device(shape: ModelShape, config: RunConfig, placement: Placement) -> dict[str, int]:
    """Return the bytes of weights on each device.

    The input stays on the host; tied embeddings are held again where the output goes; rope tables
    are held by each device with blocks. Repacked copies come on top where the file is mapped.
    """
    held = dict.fromkeys(placement.names, 0)
    held[HOST] += shape.input_bytes
    held[placement.output] += shape.output_bytes
    for layer, device in zip(shape.layers, placement.blocks, strict=True):
        if layer.loaded:
            held[device] += layer.weight_bytes
            if config.n_cpu_moe and experts_on_host(layer.index, config):
                held[device] -= layer.expert_bytes
                held[HOST] += layer.expert_bytes
    for device in set(placement.blocks):
        held[device] += shape.every_device_bytes
    if placement.output != HOST:
        held[placement.output] += shape.tied_bytes
    held[HOST] += _repacked(shape, config, placement)
    return held


def experts_on_host(block: int, config: RunConfig) -> bool:
    """Return whether the experts of ``block`` stay on the host wherever the block goes.

    Source: ``--cpu-moe`` and ``--n-cpu-moe`` in common/arg.cpp, which count blocks from the first.
    """
    return config.n_cpu_moe < 0 or block < config.n_cpu_moe


def _repacked(shape: ModelShape, config: RunConfig, placement: Placement) -> int:
    """Return what repacking adds to the host."""
    if not (config.repack and config.cpu_features):
        return 0
    places = {
        layer.index
        for layer, device in zip(shape.layers, placement.blocks, strict=True)
        if device == HOST and layer.loaded
    }
    if placement.output == HOST:
        places.add(OUTPUT)
    if config.mmap:
        size = repacked_bytes(shape.matrices, places, config.cpu_features)
        if config.n_cpu_moe:
            alone = {
                layer.index
                for layer in shape.layers
                if layer.loaded and experts_on_host(layer.index, config)
            } - places
            experts = [group for group in shape.matrices if group.experts]
            size += repacked_bytes(experts, alone, config.cpu_features)
        return size
    # Without a map matrices are moved rather than copied, but for embeddings that stay to be read.
    tied = repacked_bytes(shape.matrices, {OUTPUT} & places, config.cpu_features)
    return min(tied, shape.tied_bytes)


def device_estimates(
    shape: ModelShape,
    config: RunConfig,
    placement: Placement,
    caches: Sequence[SizedCache],
    state: Sequence[StateBytes],
    compute: ComputeEstimate,
    output: int,
) -> tuple[DeviceEstimate, ...]:
    """Return what each device holds, host first; the output buffer is always on the host."""
    weights = weights_by_device(shape, config, placement)
    kv = dict.fromkeys(placement.names, 0)
    recurrent = dict.fromkeys(placement.names, 0)
    for cache in caches:
        if config.no_kv_offload or len(placement.names) == 1:
            kv[HOST] += cache.k_bytes + cache.v_bytes
            continue
        for block, size in cache.by_block():
            kv[placement.blocks[block]] += size
    for entry in state:
        device = HOST if config.no_kv_offload else placement.blocks[entry.block]
        recurrent[device] += entry.bytes
    parts = dict(compute.devices) or {placement.output: compute.bytes}
    return tuple(
        DeviceEstimate(
            name=name,
            weights=weights[name],
            kv=kv[name],
            recurrent=recurrent[name],
            compute=parts.get(name, 0),
            output=output if name == HOST else 0,
        )
        for name in placement.names
    )
