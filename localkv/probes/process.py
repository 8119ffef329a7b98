"""Memory of one process: what is anonymous, what is file-backed, what is its alone, the peak.

On Linux the figures come from /proc. Elsewhere psutil gives the nearest true readings, under the
names psutil has for them. Nothing here is imported that exists on one system only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from localkv.probes.procfs import ROOT, kib_fields
from localkv.records import Reading

#: The keys of :func:`read_process`.
PROCESS_KEYS = ("rss", "rss_anon", "rss_file", "uss", "swap", "peak_rss")

_STATUS_FIELDS = {
    "rss": "VmRSS",
    "rss_anon": "RssAnon",
    "rss_file": "RssFile",
    "swap": "VmSwap",
    "peak_rss": "VmHWM",
}
_SAMPLED = ("rss_anon", "rss_file", "peak_rss")


def read_process(pid: int | None = None, root: Path = ROOT) -> dict[str, Reading]:
    """Return all memory readings of process ``pid`` in bytes; None means this process.

    ``rss_anon`` holds what the process allocated (KV cache, compute buffers, the heap),
    ``rss_file`` the resident pages of files (weights under mmap, libraries), ``uss`` what no other
    process shares, ``swap`` what was pushed out (then every other figure reads too low), and
    ``peak_rss`` the kernel's high-water mark of anonymous and file pages together.

    On Linux ``rss_anon`` and ``uss`` are counted page by page (smaps_rollup): kernels 6.2 to 6.16
    let the counters of /proc/PID/status lag by up to 32 pages per CPU. The walk takes time in
    proportion to the memory, so call this at phases and :func:`sample_process` in between.

    Never raises for a process that is gone or not ours: those readings are None with the reason.
    """
    if not sys.platform.startswith("linux"):
        return _psutil_readings(pid)
    status, why = _fields(pid, "status", root)
    if why:
        return _all_unknown(PROCESS_KEYS, why)
    readings = {key: _from_status(status, key, pid) for key in _STATUS_FIELDS}
    readings.update(_counted_pages(pid, readings["rss_anon"], root))
    return {key: readings[key] for key in PROCESS_KEYS}


def sample_process(pid: int | None = None, root: Path = ROOT) -> dict[str, Reading]:
    """Return ``rss_anon``, ``rss_file`` and ``peak_rss`` of ``pid`` from one read of its status.

    Cheap enough for a sampling loop: the kernel's counters, no walk over pages. Outside Linux
    these are three of the readings of :func:`read_process`.
    """
    if not sys.platform.startswith("linux"):
        readings = _psutil_readings(pid)
        return {key: readings[key] for key in _SAMPLED}
    status, why = _fields(pid, "status", root)
    if why:
        return _all_unknown(_SAMPLED, why)
    return {key: _from_status(status, key, pid) for key in _SAMPLED}


def reset_peak(root: Path = ROOT) -> tuple[bool, str]:
    """Set this process's ``peak_rss`` back to what is resident now.

    Returns whether it was done, and otherwise the reason (another system, a kernel without
    clear_refs, a read-only /proc).
    """
    path = root / "proc/self/clear_refs"
    if not sys.platform.startswith("linux"):
        return False, "only Linux can reset a process's peak"
    try:
        # 5 resets VmHWM and nothing else (man 5 proc).
        path.write_text("5", encoding="ascii")
    except OSError as error:
        return False, f"{path} cannot be written ({error.strerror})"
    return True, ""


def _proc(pid: int | None) -> str:
    return "self" if pid is None else str(pid)


def _fields(pid: int | None, name: str, root: Path) -> tuple[dict[str, int], str]:
    """Return the fields of /proc/PID/``name``, or the reason why there are none."""
    path = root / f"proc/{_proc(pid)}/{name}"
    try:
        fields = kib_fields(path.read_text(encoding="utf-8", errors="replace"))
    except PermissionError:
        return {}, f"{path} may not be read by this user"
    except (FileNotFoundError, ProcessLookupError):
        gone = not path.parent.exists()
        return {}, f"process {_proc(pid)} is gone" if gone else f"this kernel has no {path}"
    except OSError as error:
        return {}, f"{path} cannot be read ({error.strerror})"
    # A zombie still has a status file, but none of its memory.
    return fields, "" if fields else f"process {_proc(pid)} has ended: it holds no memory"


def _from_status(status: dict[str, int], key: str, pid: int | None) -> Reading:
    field, path = _STATUS_FIELDS[key], f"/proc/{_proc(pid)}/status"
    if field not in status:
        return Reading(None, why=f"{path} has no {field} on this kernel")
    return Reading(status[field], source=f"{path} {field}")


def _counted_pages(pid: int | None, counter: Reading, root: Path) -> dict[str, Reading]:
    """Return ``uss`` and ``rss_anon`` counted over pages; without the count, keep ``counter``."""
    name = "smaps_rollup"
    pages, why = _fields(pid, name, root)
    if why.startswith("this kernel has no"):
        name = "smaps"
        pages, why = _fields(pid, name, root)
    if why:
        return {"uss": Reading(None, why=why), "rss_anon": counter}
    source = f"/proc/{_proc(pid)}/{name}"
    anon, clean, dirty = (pages.get(f) for f in ("Anonymous", "Private_Clean", "Private_Dirty"))
    uss = Reading(None, why=f"{source} does not count private pages")
    if clean is not None and dirty is not None:
        uss = Reading(clean + dirty, source=f"{source} Private_Clean+Private_Dirty")
    if anon is None:
        return {"uss": uss, "rss_anon": counter}
    return {"uss": uss, "rss_anon": Reading(anon, source=f"{source} Anonymous")}


def _all_unknown(keys: tuple[str, ...], why: str) -> dict[str, Reading]:
    return {key: Reading(None, why=why) for key in keys}


def _psutil_readings(pid: int | None) -> dict[str, Reading]:
    """Return what psutil knows: the way on macOS, Windows and the BSDs."""
    import psutil

    system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
    try:
        process = psutil.Process(pid)
        basic = process.memory_info()
    except psutil.Error as error:
        return _all_unknown(PROCESS_KEYS, f"psutil: {error}")
    readings = _all_unknown(PROCESS_KEYS, f"{system} does not tell this apart")
    readings["rss"] = Reading(basic.rss, source="psutil rss")
    try:
        full = process.memory_full_info()
        private = getattr(full, "uss", None)
    except psutil.Error as error:
        readings["uss"] = readings["rss_anon"] = Reading(None, why=f"psutil: {error}")
    else:
        if private is not None:
            readings["uss"] = Reading(private, source="psutil uss")
            # Resident pages that are this process's alone: what it allocated, and the file pages
            # that it wrote to. Nothing that these systems tell is nearer to RssAnon.
            readings["rss_anon"] = Reading(private, source="psutil uss")
    readings["peak_rss"] = _peak_elsewhere(pid, getattr(basic, "peak_wset", None), system)
    return readings


def _peak_elsewhere(pid: int | None, peak_wset: int | None, system: str) -> Reading:
    if peak_wset is not None:
        return Reading(peak_wset, source="psutil peak_wset")
    if sys.platform == "darwin" and pid in (None, os.getpid()):
        import resource

        # macOS counts ru_maxrss in bytes, where others count KiB.
        return Reading(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, source="getrusage ru_maxrss"
        )
    return Reading(None, why=f"{system} tells the peak to the process itself only")
