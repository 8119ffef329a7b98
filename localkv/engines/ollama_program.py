"""Ollama's program on this machine: where it is, and which version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from localkv.errors import EngineError

PROGRAM = "ollama"
_CLIENT = re.compile(r"version is (\d[\w.+-]*)")
_TIMEOUT = 60.0


def find_program(named: str | None = None) -> str:
    """Return the path of Ollama's program: ``named``, or the one on PATH.

    Raises:
        EngineError: there is none.
    """
    found = shutil.which(os.path.expanduser(named or PROGRAM))
    if found is None:
        raise EngineError(
            f"{named or PROGRAM} is no program on PATH",
            "install Ollama, or name its program with --server-bin",
        )
    return found


def program_version(program: str, *, timeout: float = _TIMEOUT) -> str:
    """Return the version that ``program`` says it has, "" when it says none in ``timeout`` s."""
    # Port 9 is nobody's: a running server would be asked for its version first.
    env = {**os.environ, "OLLAMA_HOST": "127.0.0.1:9"}
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=timeout, env=env
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    found = _CLIENT.search(done.stdout + done.stderr)
    return found[1] if found else ""
