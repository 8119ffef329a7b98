"""Memory limits of Linux control groups, version 1 and 2, from this process's group upwards.

A group may use no more than the tightest of its own limit and those of all groups around it, so
every level that is visible is read. Inside a container the levels above are not visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localkv.probes.procfs import ROOT, text_or_none

# Version 1 writes "no limit" as the largest multiple of the page size below 2**63.
_UNLIMITED = 1 << 60

_OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on memory: its ``name``, ``limit`` and how much of it is ``used``, in bytes."""

    name: str
    limit: int
    used: int

    @property
    def headroom(self) -> int:
        """Bytes that may still be allocated under this limit."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class _Hierarchy:
    """One mounted hierarchy that controls memory, and the files that tell about a group in it."""

    version: int
    mount: Path
    group: str
    limit_files: tuple[str, ...]
    usage_file: str
    reclaimable_field: str


def cgroup_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Return the memory limits that are set around this process, its own group first.

    ``used`` leaves out inactive file pages: the kernel drops those before it refuses memory.
    The list is empty without control groups and where no limit is set.
    """
    return [limit for tree in _hierarchies(root) for limit in _limits(tree)]


def _hierarchies(root: Path) -> Iterator[_Hierarchy]:
    groups = text_or_none(root / "proc/self/cgroup") or ""
    mounts = text_or_none(root / "proc/self/mountinfo") or ""
    for line in groups.splitlines():
        number, controllers, group = ([*line.split(":", 2), "", ""])[:3]
        if number == "0" and not controllers:
            found = _mount(mounts, "cgroup2", None)
            files: tuple[tuple[str, ...], str, str] = (
                ("memory.max", "memory.high"),
                "memory.current",
                "inactive_file",
            )
        elif "memory" in controllers.split(","):
            found = _mount(mounts, "cgroup", "memory")
            files = (
                ("memory.limit_in_bytes",),
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        if found:
            mount_root, mount_point = found
            inside = _below(group, mount_root)
            mount = root / mount_point.lstrip("/")
            yield _Hierarchy(2 if number == "0" else 1, mount, inside, *files)


def _mount(mountinfo: str, kind: str, controller: str | None) -> tuple[str, str] | None:
    """Return the root within the hierarchy and the place of its mount (man 5 proc, mountinfo)."""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if not separator or len(left) < 5 or len(right) < 3 or right[0] != kind:
            continue
        if controller is None or controller in right[2].split(","):
            return _unescape(left[3]), _unescape(left[4])
    return None


def _unescape(path: str) -> str:
    return _OCTAL_ESCAPE.sub(lambda match: chr(int(match[1], 8)), path)


def _below(group: str, mount_root: str) -> str:
    """Return the path of ``group`` below a mount that shows only what is below ``mount_root``."""
    if mount_root == "/":
        return group.strip("/")
    if group == mount_root or group.startswith(mount_root + "/"):
        return group[len(mount_root) :].strip("/")
    # A group outside of what is mounted: only the mount's own top can be read.
    return ""


def _limits(tree: _Hierarchy) -> Iterator[MemoryLimit]:
    parts = [part for part in tree.group.split("/") if part]
    if ".." in parts:
        parts = []
    for depth in range(len(parts), -1, -1):
        folder = tree.mount.joinpath(*parts[:depth])
        used = _used(folder, tree)
        if used is None:
            continue
        for name in tree.limit_files:
            limit = _number(folder / name)
            if limit is not None and limit < _UNLIMITED:
                label = f"cgroup v{tree.version} /{'/'.join(parts[:depth])} {name}"
                yield MemoryLimit(label, limit, used)


def _used(folder: Path, tree: _Hierarchy) -> int | None:
    usage = _number(folder / tree.usage_file)
    if usage is None:
        return None
    for line in (text_or_none(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == tree.reclaimable_field and value.isdecimal():
            return max(0, usage - int(value))
    return usage


def _number(path: Path) -> int | None:
    """Return the number in ``path``; None without the file, and for ``max``."""
    text = (text_or_none(path) or "").strip()
    return int(text) if text.isdecimal() else None
