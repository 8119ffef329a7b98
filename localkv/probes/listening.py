"""The process behind a port of this machine, what it was started with, and what it started."""

from __future__ import annotations

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


def family(pid: int) -> list[int]:
    """Return ``pid`` and its descendants; empty when it is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


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
