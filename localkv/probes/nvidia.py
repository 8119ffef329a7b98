"""Memory of NVIDIA devices, and of one process on them, through NVML (nvidia-ml-py).

NVML is NVIDIA's own library; it comes with the driver. Without it, or where it does not tell, the
answer is "unknown" with the reason: a process that uses no device memory and a process of which
nothing is known are different things.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localkv.probes.procfs import ROOT, in_first_pid_namespace, is_wsl
from localkv.records import Reading

#: The keys of :meth:`Nvml.read` that are there on every machine.
VRAM_KEYS = ("vram_process", "vram_device")

# NVML's return codes (nvml.h, nvmlReturn_t) in words that say more than NVML's own.
_WHY = {
    1: "the connection to the NVIDIA driver is closed",
    3: "the driver does not report it for this device",
    4: "this user may not ask the NVIDIA driver",
    9: "NVIDIA's library is here, but its driver is not loaded",
    12: "there is no NVIDIA driver library (libnvidia-ml) on this machine",
    13: "the installed NVIDIA driver is too old to tell",
    15: "the device is lost: it fell off the bus or was reset",
    18: "the NVIDIA driver was updated while in use: reboot first",
}
_NOT_SUPPORTED, _FUNCTION_NOT_FOUND = 3, 13


@dataclass(frozen=True)
class Unknown:
    """Stands where an open device probe would: every reading is unknown, for one ``reason``."""

    reason: str
    devices: tuple[NvidiaDevice, ...] = ()

    def read(self, pid: int | None = None) -> dict[str, Reading]:
        """Return :data:`VRAM_KEYS` as unknown."""
        del pid
        return {key: Reading(None, why=self.reason) for key in VRAM_KEYS}

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def __enter__(self) -> Unknown:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class NvidiaDevice:
    """One device: sizes in bytes, None where the driver does not say.

    ``used`` is what all processes hold, without the driver's own ``reserved`` part where the
    driver tells the two apart. ``mig`` says whether the device is cut into instances.
    """

    index: int
    name: str
    uuid: str | None
    total: int | None
    free: int | None
    used: int | None
    reserved: int | None
    mig: bool | None


class Nvml:
    """An open connection to the driver; close it, or use it in a ``with`` block.

    ``driver`` is the driver's version, ``cuda`` the newest CUDA it runs ("12.4"). Opening costs
    the process some memory of its own, so a measured process opens it before its baseline.
    """

    def __init__(self, pynvml: Any, handles: list[Any], root: Path = ROOT) -> None:
        self._nvml = pynvml
        self._handles = handles
        self._root = root
        self.driver: str | None = self._ask(pynvml.nvmlSystemGetDriverVersion)[0]
        cuda: int | None = self._ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)[0]
        self.cuda = None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the driver. Readings after this are unknown."""
        self._ask(self._nvml.nvmlShutdown)

    @property
    def devices(self) -> tuple[NvidiaDevice, ...]:
        """The devices with their memory as it is now, in NVML's order."""
        return tuple(self._device(index) for index in range(len(self._handles)))

    def read(self, pid: int | None = None) -> dict[str, Reading]:
        """Return the device memory in bytes, of process ``pid`` (None: this one) and of everyone.

        ``vram_process`` and ``vram_device`` are sums over the devices; where there are several,
        ``vram_process.gpu0``, ``vram_device.gpu0`` and so on follow. A sum with an unknown part
        is unknown. Never raises for what the driver cannot tell.
        """
        asked = os.getpid() if pid is None else pid
        indices = range(len(self._handles))
        by_key = {
            "vram_process": [self._process(index, asked) for index in indices],
            "vram_device": [self._used(index) for index in indices],
        }
        readings = {key: _sum(parts) for key, parts in by_key.items()}
        if len(self._handles) > 1:
            for key, parts in by_key.items():
                readings.update({f"{key}.gpu{i}": part for i, part in enumerate(parts)})
        return readings

    def _ask(self, function: Any, *args: Any) -> tuple[Any, Any]:
        """Return what ``function`` returns and None, or None and the NVMLError it raised."""
        try:
            return function(*args), None
        except self._nvml.NVMLError as error:
            return None, error

    def _device(self, index: int) -> NvidiaDevice:
        handle = self._handles[index]
        memory, _ = self._memory(index)
        mig, _ = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
        return NvidiaDevice(
            index=index,
            name=self._ask(self._nvml.nvmlDeviceGetName, handle)[0] or f"GPU {index}",
            uuid=self._ask(self._nvml.nvmlDeviceGetUUID, handle)[0],
            total=getattr(memory, "total", None),
            free=getattr(memory, "free", None),
            used=getattr(memory, "used", None),
            reserved=getattr(memory, "reserved", None),
            mig=None if mig is None else bool(mig[0]),
        )

    def _memory(self, index: int) -> tuple[Any, Any]:
        """Return NVML's memory record: the second form, or the first from an older driver."""
        ask, handle = self._nvml.nvmlDeviceGetMemoryInfo, self._handles[index]
        memory, error = self._ask(ask, handle, self._nvml.nvmlMemory_v2)
        if error and error.value in (_FUNCTION_NOT_FOUND, _NOT_SUPPORTED):
            return self._ask(ask, handle)
        return memory, error

    def _used(self, index: int) -> Reading:
        memory, error = self._memory(index)
        if error:
            return Reading(None, why=f"gpu{index}: {_reason(error)}")
        return Reading(memory.used, source=f"NVML gpu{index} used by all processes")

    def _process(self, index: int, pid: int) -> Reading:
        listed: list[Any] = []
        for kind in ("Compute", "Graphics"):
            entries, error = self._running(kind, index)
            if error:
                why = f"gpu{index}: no list of {kind.lower()} processes: {_reason(error)}"
                return Reading(None, why=why)
            listed += entries
        doubt = _doubt_about_pids(pid, {entry.pid for entry in listed}, self._root)
        if doubt:
            return Reading(None, why=f"gpu{index}: {doubt}")
        own = [entry for entry in listed if entry.pid == pid]
        if own:
            return self._own_memory(index, own)
        return self._not_listed(index, listed)

    def _running(self, kind: str, index: int) -> tuple[Any, Any]:
        """Return the processes of one kind on a device, asked in the newest form there is."""
        newest, older = (
            getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses_{version}", None)
            for version in ("v3", "v2")
        )
        entries, error = self._ask(newest, self._handles[index])
        # Clients of the 12 series have no second form to ask an old driver with.
        if error and error.value == _FUNCTION_NOT_FOUND and older:
            return self._ask(older, self._handles[index])
        return entries, error

    def _own_memory(self, index: int, own: list[Any]) -> Reading:
        # A process that computes and draws stands in both lists with the same figure.
        instances = {(e.gpuInstanceId, e.computeInstanceId): e.usedGpuMemory for e in own}
        if None in instances.values():
            return Reading(None, why=f"gpu{index}: {self._why_not_available(index)}")
        return Reading(sum(instances.values()), source=f"NVML gpu{index} running processes")

    def _not_listed(self, index: int, listed: list[Any]) -> Reading:
        """Decide whether a process that no list names holds nothing, or is not told about."""
        why = None
        if self._device(index).mig or any(e.usedGpuMemory is None for e in listed):
            why = self._why_not_available(index)
        elif is_wsl(self._root):
            why = "the Windows Subsystem for Linux does not list the processes of a device"
        elif in_first_pid_namespace(self._root) is False:
            why = (
                "the process is not listed, and inside a container that proves nothing; "
                "start the container with the host's process ids (docker run --pid=host)"
            )
        if why:
            return Reading(None, why=f"gpu{index}: {why}")
        return Reading(0, source=f"NVML gpu{index}: not among the running processes")

    def _why_not_available(self, index: int) -> str:
        if self._device(index).mig:
            return "the device is cut into MIG instances, and does not tell per process"
        if sys.platform == "win32" or is_wsl(self._root):
            return "Windows manages the memory (WDDM), and the driver does not tell per process"
        return "the driver lists the process, but not its memory"


def open_nvml(root: Path = ROOT) -> Nvml | Unknown:
    """Return an open NVML, or :class:`Unknown` with the reason in words: no package, no library,
    no driver, no permission, no device. Never raises.
    """
    try:
        import pynvml
    except ImportError:
        return Unknown("the Python package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Unknown(_reason(error))
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        return Unknown(_reason(error))
    if not handles:
        pynvml.nvmlShutdown()
        return Unknown("the NVIDIA driver is loaded, but sees no device")
    return Nvml(pynvml, handles, root)


def _reason(error: Any) -> str:
    return _WHY.get(error.value) or f"the NVIDIA driver says: {error}"


def _sum(parts: list[Reading]) -> Reading:
    """Return the sum over devices, unknown as soon as one part is."""
    unknown = next((part for part in parts if part.value is None), None)
    if unknown:
        return unknown
    total = sum(part.value for part in parts if part.value is not None)
    return Reading(total, source="; ".join(part.source for part in parts))


def _doubt_about_pids(pid: int, listed: Iterable[int], root: Path) -> str | None:
    """Return why the process ids that NVML lists may not be ours, None when they are.

    Newer drivers list the ids as the caller's PID namespace has them, older ones the host's. In
    a namespace of our own every listed id must then be a live process, or they are the host's.
    """
    processes = root / "proc"
    if not processes.exists():
        return None
    if not (processes / str(pid)).exists():
        return f"process {pid} is gone"
    if in_first_pid_namespace(root) is not False:
        return None
    if all((processes / str(other)).exists() for other in listed):
        return None
    return (
        "the driver lists the host's process ids, and this container has its own; "
        "start it with the host's (docker run --pid=host)"
    )
