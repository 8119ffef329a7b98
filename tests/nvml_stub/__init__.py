"""Builds the stub of NVIDIA's library, for tests that run the real client without a driver.

``env = os.environ | build_nvml_stub(tmp_path)`` is the environment of a process that sees one
24 GiB device on which every process that loaded the engine grows as its own RssAnon does.
The loader reads LD_LIBRARY_PATH when a process starts, so this needs a new process.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20

TOTAL = 24 * GIB
BASE = 512 * MIB
CONTEXT = 300 * MIB

#: The parent of a sweep opens NVML too, but never loads the engine: it holds no device memory.
ENGINE_GROWS = f"total {TOTAL}\nbase {BASE}\ncontext {CONTEXT}\nprocess maps:libllama rss\n"

_SOURCE = Path(__file__).with_name("nvml_stub.c")
_FLAGS = ("-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wpedantic")


def build_nvml_stub(
    directory: Path, state: str = ENGINE_GROWS, error: str = "", old: bool = False
) -> dict[str, str]:
    """Compile the stub into ``directory`` and return the environment variables that select it.

    ``state`` is the text of the state file (its grammar is at the top of the C source); a test
    rewrites ``env["LOCALKV_NVML_STUB_STATE"]`` to change it while processes run. ``error`` is
    ``function:code`` pairs. ``old`` leaves out what libraries before NVML 11.5 lack.
    """
    library = directory / "libnvidia-ml.so.1"
    compiler = os.environ.get("CC", "cc")
    defines = ["-DNVML_STUB_OLD"] if old else []
    subprocess.run(
        [compiler, *_FLAGS, *defines, "-o", str(library), str(_SOURCE)], check=True, timeout=120
    )
    state_file = directory / "nvml_state.txt"
    state_file.write_text(state, encoding="utf-8")
    paths = [str(directory), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path),
        "LOCALKV_NVML_STUB_STATE": str(state_file),
        "LOCALKV_NVML_STUB_ERROR": error,
    }
