"""The memory to plan for: as given, or this machine's own."""

from __future__ import annotations

from localkv.errors import LocalkvError
from localkv.predict.budget import memory_sizes
from localkv.tuples import NamedTuple
from localkv.units import MIB, format_bytes, parse_size

#: Kept free unless --reserve says otherwise: the context that a driver opens on each GPU and the
#: process itself take 0.3 to 0.5 GiB that no prediction of the model holds.
RESERVE = 512 * MIB


class Given(NamedTuple):
    """Sizes in bytes; ``gpus`` tells that they are GPUs, ``source`` where they came from."""

    sizes: tuple[int, ...]
    gpus: bool
    source: str = ""

    @property
    def memory(self) -> int | tuple[int, ...]:
        """Return the memory as ``kv_capacity`` takes it."""
        return self.sizes if self.gpus else self.sizes[0]


def given_memory(text: str, *, host_only: bool = False, total: bool = False) -> Given:
    """Return the memory that ``--memory`` means; several sizes are GPUs, one is a pool.

    ``auto`` is what is free on this machine's GPUs (``total``: all of it), or the RAM that a
    process can still have where there is no GPU or with ``host_only``.

    Raises:
        UsageError: the text is no size.
        LocalkvError: this machine does not tell.
    """
    if text != "auto":
        sizes = memory_sizes(text)
        return Given(sizes, gpus=len(sizes) > 1)
    why = ""
    if not host_only:
        from localkv.probes.gpu import gpu_summary

        found = gpu_summary()
        free = [device.total if total else device.free for device in found.devices]
        known = tuple(size for size in free if size)
        if known and len(known) == len(free):
            names = ", ".join(device.name for device in found.devices)
            return Given(known, True, f"{'all' if total else 'free'} memory of {names}, by NVML")
        why = found.reason or "the driver does not tell how much memory is free"
    if total:
        raise LocalkvError(f"no GPU to plan for: {why}", "give its size with --memory, as 24G")
    from localkv.probes.memory import available_memory

    ram = available_memory()
    if not ram.value:
        raise LocalkvError(f"available memory unknown: {ram.why}", "give it with --memory, as 24G")
    source = f"available RAM, by {ram.source}"
    return Given((ram.value,), False, f"{source}; no GPU: {why}" if why else source)


def reserve_bytes(text: str | None) -> int:
    """Return ``--reserve`` in bytes."""
    return RESERVE if text is None else parse_size(text)


def sizes_text(sizes: tuple[int, ...]) -> str:
    """Return sizes as a person writes them, the same ones counted: 2 x 24.00 GiB."""
    kinds = list(dict.fromkeys(sizes))
    return " + ".join(
        f"{sizes.count(size)} x {format_bytes(size)}"
        if sizes.count(size) > 1
        else format_bytes(size)
        for size in kinds
    )
