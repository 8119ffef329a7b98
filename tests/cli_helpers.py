"""Runs the command line as a person does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LOCALKV = [sys.executable, "-m", "localkv"]


def localkv(
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run ``localkv ARGS`` and return what it printed and how it ended."""
    return subprocess.run(
        [*LOCALKV, *map(str, args)],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
