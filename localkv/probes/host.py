"""The machine a measurement was made on: processor, system, container, memory."""

from __future__ import annotations

import mmap
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localkv.probes.memory import available_memory, swap_memory, total_memory
from localkv.probes.procfs import ROOT, in_first_pid_namespace, is_wsl, text_or_none
from localkv.records import Reading

# Processor features that ggml has kernels for, under ggml's names where the kernel's differ
# (ggml/src/ggml-cpu/CMakeLists.txt of the engine lists what each of its builds asks for).
_SAME_NAME = (
    *("ssse3", "sse4_2", "avx", "avx2", "f16c", "fma", "bmi2"),
    *("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"),
    *("i8mm", "sve", "sve2", "sme", "neon"),
)
_FEATURES = {
    **dict(zip(_SAME_NAME, _SAME_NAME, strict=True)),
    "avx512vbmi": "avx512_vbmi",
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fp16",
}


@dataclass(frozen=True)
class Host:
    """Facts of the machine; None is unknown.

    ``cpus_logical`` counts hardware threads, ``cpus_physical`` cores, ``cpus_usable`` the threads
    that this process may run on; ``load`` is the load average over 1, 5 and 15 minutes;
    ``page_size`` is in bytes; ``container`` names what the process runs in.
    """

    system: str
    kernel: str
    machine: str
    cpu_model: str | None
    cpus_logical: int | None
    cpus_physical: int | None
    cpus_usable: int | None
    cpu_features: tuple[str, ...] | None
    load: tuple[float, float, float] | None
    page_size: int
    container: str | None
    memory_total: Reading
    memory_available: Reading
    swap_total: Reading
    swap_free: Reading

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain JSON values, for the environment record of a run."""
        return asdict(self)


def read_host(root: Path = ROOT) -> Host:
    """Return what is known about this machine. Never raises; what cannot be read is None."""
    import platform

    cpuinfo = text_or_none(root / "proc/cpuinfo")
    swap = swap_memory(root)
    return Host(
        system=_system_name(root) or f"{platform.system()} {platform.release()}",
        kernel=(text_or_none(root / "proc/sys/kernel/osrelease") or platform.release()).strip(),
        machine=platform.machine(),
        cpu_model=_cpu_model(root, cpuinfo) or platform.processor() or None,
        cpus_logical=os.cpu_count(),
        cpus_physical=_physical_cores(root),
        cpus_usable=_usable_cpus(),
        cpu_features=_cpu_features(cpuinfo),
        load=_load_average(root),
        page_size=mmap.PAGESIZE,
        container=container_hint(root),
        memory_total=total_memory(root),
        memory_available=available_memory(root),
        swap_total=swap["total"],
        swap_free=swap["free"],
    )


def container_hint(root: Path = ROOT) -> str | None:
    """Return the kind of container this process seems to run in, None when nothing says so."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    named = (text_or_none(root / "run/systemd/container") or "").strip()
    if named:
        return named
    groups = text_or_none(root / "proc/self/cgroup") or ""
    found = re.search(r"kubepods|docker|libpod|containerd|lxc", groups)
    if found:
        return found[0]
    if is_wsl(root):
        return "wsl"
    return "pid namespace" if in_first_pid_namespace(root) is False else None


def _system_name(root: Path) -> str | None:
    release = text_or_none(root / "etc/os-release") or ""
    name = re.search(r'^PRETTY_NAME="?([^"\n]+)"?$', release, re.MULTILINE)
    return name[1] if name else None


def _cpu_model(root: Path, cpuinfo: str | None) -> str | None:
    named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo or "", re.MULTILINE)
    if named:
        return named[1].strip()
    # ARM kernels name the board, not the processor.
    board = text_or_none(root / "sys/firmware/devicetree/base/model")
    return board.strip("\0 \n") if board else None


def _cpu_features(cpuinfo: str | None) -> tuple[str, ...] | None:
    """Return ggml's names of the features the first processor has, in the kernel's order."""
    line = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo or "", re.MULTILINE)
    if not line:
        return None
    return tuple(_FEATURES[flag] for flag in line[1].split() if flag in _FEATURES)


def _physical_cores(root: Path) -> int | None:
    """Return the number of cores: the hardware threads of one core name the same siblings."""
    siblings = {
        text
        for cpu in (root / "sys/devices/system/cpu").glob("cpu[0-9]*")
        if (text := text_or_none(cpu / "topology/thread_siblings_list"))
    }
    if siblings:
        return len(siblings)
    if sys.platform.startswith("linux") or root != ROOT:
        return None
    import psutil

    return psutil.cpu_count(logical=False)


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _load_average(root: Path) -> tuple[float, float, float] | None:
    text = text_or_none(root / "proc/loadavg")
    if text:
        one, five, fifteen = (float(part) for part in text.split()[:3])
        return one, five, fifteen
    return os.getloadavg() if root == ROOT and hasattr(os, "getloadavg") else None
