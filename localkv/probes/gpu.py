"""Which GPU can be read on this machine, and the one sentence to say when none can."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localkv.probes.nvidia import NvidiaDevice, Unknown, open_nvml
from localkv.probes.procfs import ROOT, text_or_none

# PCI vendor numbers of GPUs; anything else under /sys/class/drm is a display of a virtual machine.
_VENDORS = {"0x1002": "AMD", "0x8086": "Intel", "0x10de": "NVIDIA"}


@dataclass(frozen=True)
class GpuSummary:
    """Whether device memory can be read; ``reason`` says why not, in words; the devices found.

    ``driver`` and ``cuda`` are versions, None without a readable device.
    """

    available: bool
    reason: str
    devices: tuple[NvidiaDevice, ...] = ()
    driver: str | None = None
    cuda: str | None = None


def gpu_summary(root: Path = ROOT) -> GpuSummary:
    """Return what can be read of this machine's GPUs. Never raises.

    The text of ``reason`` is complete: the caller says it once, when it falls back to RAM.
    """
    with open_nvml(root) as gpu:
        if isinstance(gpu, Unknown):
            return GpuSummary(available=False, reason=_why_none(gpu.reason, root))
        return GpuSummary(True, "", gpu.devices, gpu.driver, gpu.cuda)


def _why_none(nvml_reason: str, root: Path) -> str:
    seen = pci_gpus(root)
    if not seen:
        return nvml_reason
    names = " and ".join(seen)
    if seen == ["NVIDIA"]:
        return f"{nvml_reason} (the machine has an NVIDIA GPU)"
    return f"{nvml_reason}; the machine has a GPU of {names}, whose memory is not read"


def pci_gpus(root: Path = ROOT) -> list[str]:
    """Return the makers of the GPUs that Linux's display subsystem knows, each once."""
    found = (
        (text_or_none(card / "device/vendor") or "").strip()
        for card in sorted((root / "sys/class/drm").glob("card[0-9]"))
    )
    return list(dict.fromkeys(_VENDORS[vendor] for vendor in found if vendor in _VENDORS))
