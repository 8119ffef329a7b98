"""Runs the command line as a person does, in a process of its own; and reads its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conftest import Run

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


def told(run: Run, *args: object, code: int = 0) -> Any:
    """Return the JSON that ``localkv predict ARGS --json`` prints, run by the fixture ``run``."""
    ended, out, err = run("predict", *args, "--json")
    assert ended == code, err
    return json.loads(out)
