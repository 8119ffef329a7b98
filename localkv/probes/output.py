"""The file that a process of this machine writes its log to, where that is a file."""

from __future__ import annotations

import stat
from pathlib import Path

from localkv.probes.procfs import ROOT


def output_file(pid: int, root: Path = ROOT) -> Path | None:
    """Return the regular file that ``pid`` has as its standard error or output.

    The path leads through /proc, so that it also works for a file that was renamed since, or that
    has another name in the process's container. None: a terminal, a pipe, a journal, another
    user's process, or a system without /proc.
    """
    for number in (2, 1):
        path = root / "proc" / str(pid) / "fd" / str(number)
        try:
            if stat.S_ISREG(path.stat().st_mode):
                return path
        except OSError:
            continue
    return None


def working_folder(pid: int, root: Path = ROOT) -> Path:
    """Return where relative names of ``pid`` start, through /proc."""
    return root / "proc" / str(pid) / "cwd"
