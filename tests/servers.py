"""Where the real servers are that ``.ci/servers`` builds; a test that needs a missing one skips.

Under CI a missing server is a failure: there nothing may go untested.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "servers"
#: Program -> the server that brings it, and where it lies in that server's folder.
_PROGRAMS = {
    "llama-server": ("llama-server", "bin/llama-server"),
    "llama-quantize": ("llama-server", "bin/llama-quantize"),
    "ollama": ("ollama", "bin/ollama"),
    "ollama-old": ("ollama-old", "bin/ollama"),
    "prometheus": ("prometheus", "bin/prometheus"),
    "promtool": ("prometheus", "bin/promtool"),
    "vllm-python": ("vllm", "venv/bin/python"),
}


def binary(name: str) -> Path:
    """Return the program ``name``: llama-server, llama-quantize, ollama, ollama-old, ..."""
    server, inside = _PROGRAMS[name]
    path = _folder(server) / inside
    if not path.exists() and server == "prometheus" and (found := shutil.which(name)):
        return Path(found)
    if not path.exists():
        reason = f"{name} is not built; run: .ci/servers {server}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def vllm_python() -> Path:
    """Return the Python of the environment that vLLM is installed in."""
    return binary("vllm-python")


@cache
def _folder(server: str) -> Path:
    if shutil.which("bash") is None:
        return Path("no-bash-here")
    done = subprocess.run(
        ["bash", _SCRIPT, "--path", server], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())
