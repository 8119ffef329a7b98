"""Text of Linux's /proc and /sys files: small readers that every probe shares."""

from __future__ import annotations

import re
from pathlib import Path

#: Where the trees start. Every probe takes a root so that tests can bring a tree of their own.
ROOT = Path("/")

# The number of the first PID namespace is fixed by the kernel (include/linux/proc_ns.h), so a
# process can tell that it is inside another one without looking at process 1, which is forbidden.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"

_KIB_FIELD = re.compile(r"^(\w+(?:\(\w+\))?):\s+(\d+) kB$", re.MULTILINE)


def kib_fields(text: str) -> dict[str, int]:
    """Return the ``Name:  123 kB`` lines of ``text`` in bytes; a name that repeats is summed.

    /proc/meminfo, /proc/PID/status and smaps_rollup name each field once; /proc/PID/smaps names
    it once per mapping, and the sum is what smaps_rollup would say.
    """
    fields: dict[str, int] = {}
    for name, kib in _KIB_FIELD.findall(text):
        fields[name] = fields.get(name, 0) + int(kib) * 1024
    return fields


def text_or_none(path: Path) -> str | None:
    """Return the text of ``path``, None when there is no such file or it may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def in_first_pid_namespace(root: Path = ROOT) -> bool | None:
    """Return whether process ids seen here are the machine's own; None when it cannot be told."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return None


def is_wsl(root: Path = ROOT) -> bool:
    """Return whether this is the Windows Subsystem for Linux, by the name of its kernel."""
    return "microsoft" in (text_or_none(root / "proc/sys/kernel/osrelease") or "").lower()
