"""How much memory can still be had: the machine's, the control group's, the shell's limits.

The smallest of them decides, and the reading says which one it was.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from localkv.probes.cgroup import MemoryLimit, cgroup_limits
from localkv.probes.procfs import ROOT, kib_fields, text_or_none
from localkv.records import Reading

# A line of /proc/PID/limits, what "ulimit" calls it, and what of /proc/PID/status counts
# against it. Children inherit the limit and start from about the same size.
_ULIMITS = (
    ("Max address space", "ulimit -v (address space)", "VmSize"),
    ("Max data size", "ulimit -d (data)", "VmData"),
)


def available_memory(root: Path = ROOT) -> Reading:
    """Return the bytes that a new process may allocate without swapping or being killed.

    The smallest headroom of MemAvailable, every control group around this process and the limits
    of the shell; ``source`` names the one that decided.
    """
    headrooms = [(limit.headroom, limit.name) for limit in memory_limits(root)]
    return _smallest(headrooms, _machine(root, "available"))


def total_memory(root: Path = ROOT) -> Reading:
    """Return the bytes this process could use at most: installed memory or the lowest limit."""
    totals = [(limit.limit, limit.name) for limit in memory_limits(root)]
    return _smallest(totals, _machine(root, "total"))


def _smallest(limits: list[tuple[int, str]], machine: Reading) -> Reading:
    """Return the lowest of ``limits`` (bytes, name) and the machine's own figure, if known."""
    if machine.value is not None:
        limits = [*limits, (machine.value, machine.source)]
    if not limits:
        return machine
    value, source = min(limits)
    return Reading(value, source=source)


def swap_memory(root: Path = ROOT) -> dict[str, Reading]:
    """Return ``total`` and ``free`` swap space in bytes."""
    if not _has_proc(root):
        import psutil

        swap = psutil.swap_memory()
        return {
            "total": Reading(swap.total, source="psutil swap_memory total"),
            "free": Reading(swap.free, source="psutil swap_memory free"),
        }
    fields = kib_fields(text_or_none(root / "proc/meminfo") or "")
    return {"total": _field(fields, "SwapTotal"), "free": _field(fields, "SwapFree")}


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Return every limit that is set for this process: control groups, then the shell's."""
    return cgroup_limits(root) + _ulimits(root)


def locked_limit(root: Path = ROOT) -> int | None:
    """Return the bytes that this process may pin in memory (ulimit -l), None without a limit."""
    limits = text_or_none(root / "proc/self/limits") or ""
    soft = re.search(r"^Max locked memory\s+(\d+)\s", limits, re.MULTILINE)
    return int(soft[1]) if soft else None


def _ulimits(root: Path) -> list[MemoryLimit]:
    limits = text_or_none(root / "proc/self/limits") or ""
    status = kib_fields(text_or_none(root / "proc/self/status") or "")
    found = []
    for label, name, field in _ULIMITS:
        soft = re.search(rf"^{label}\s+(\d+)\s", limits, re.MULTILINE)
        if soft and field in status:
            found.append(MemoryLimit(name, int(soft[1]), status[field]))
    return found


def _has_proc(root: Path) -> bool:
    return sys.platform.startswith("linux") or root != ROOT


def _machine(root: Path, what: str) -> Reading:
    """Return ``total`` or ``available`` memory of the whole machine, no limits applied."""
    if not _has_proc(root):
        import psutil

        value = getattr(psutil.virtual_memory(), what)
        return Reading(value, source=f"psutil virtual_memory {what}")
    fields = kib_fields(text_or_none(root / "proc/meminfo") or "")
    return _field(fields, {"total": "MemTotal", "available": "MemAvailable"}[what])


def _field(fields: dict[str, int], name: str) -> Reading:
    if name not in fields:
        return Reading(None, why=f"/proc/meminfo has no {name}")
    return Reading(fields[name], source=f"/proc/meminfo {name}")
