"""The process behind a port of this machine, what it was started with, and what it started."""

from __future__ import annotations

import os
from collections.abc import Mapping


def listener(port: int) -> int | None:
    """Return the process that listens on TCP ``port`` here.

    None: nobody does, or it belongs to another user and the system keeps that from us.
    """
    import psutil

    try:
        for entry in psutil.net_connections(kind="tcp"):
            if entry.status == psutil.CONN_LISTEN and entry.laddr[1:] == (port,) and entry.pid:
                return int(entry.pid)
    except psutil.Error:
        pass
    return None


def is_alive(pid: int) -> bool:
    """Return whether ``pid`` runs; one that only waits to be reaped does not."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def family(pid: int) -> list[int]:
    """Return ``pid`` and its descendants; empty when it is gone."""
    import psutil

    found = [pid]
    for each in found:
        children = _children(each)
        if children is None:
            break
        found += children
    else:
        return found
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


def _children(pid: int) -> list[int] | None:
    """Return the children of ``pid`` as Linux lists them by thread; None where it does not.

    A hundred times cheaper than asking every process of the machine for its parent.
    """
    folder = f"/proc/{pid}/task"
    found: list[int] = []
    try:
        for task in os.listdir(folder):
            # A server has a thread for each core and more: this runs at every look.
            with open(f"{folder}/{task}/children", "rb", buffering=0) as file:
                found += map(int, file.read().split())
    except OSError:
        return None
    return found


def command_line(pid: int) -> list[str]:
    """Return the words that ``pid`` was started with; empty when they cannot be read."""
    import psutil

    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


def environment(pid: int) -> Mapping[str, str]:
    """Return the environment that ``pid`` was started with; empty when it cannot be read."""
    import psutil

    try:
        return dict(psutil.Process(pid).environ())
    except (psutil.Error, OSError):
        return {}
