"""Everything about the machine and the engine that could change a figure, as one record."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import localkv
from localkv.engines.llamacpp import package_version
from localkv.probes import gpu_summary, read_host

#: The packages whose versions a run records: the engine, the probes, fit and report.
PACKAGES = ("llama-cpp-python", "psutil", "nvidia-ml-py", "numpy", "scipy", "pandas", "matplotlib")


def environment(engine: Mapping[str, Any], n_threads: int) -> dict[str, Any]:
    """Return the environment record; ``engine`` is ``EngineInfo`` as a dict, or of a server."""
    host = read_host()
    return {
        "localkv": localkv.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "engine": dict(engine),
        "n_threads": n_threads,
        "host": host.to_dict(),
        "memory": {
            "available": host.memory_available.value,
            "total": host.memory_total.value,
            "source": host.memory_available.source,
        },
        "gpu": asdict(gpu_summary()),
        "packages": {name: package_version(name) for name in PACKAGES},
    }


def default_threads() -> int:
    """Return the threads that llama-server would use: the physical cores this process may use."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    physical = psutil.cpu_count(logical=False)
    return max(1, min(physical or usable or 1, usable or 1))


def shown_path(path: str) -> str:
    """Return ``path`` as a record keeps it: the home directory, which names a person, as ``~``."""
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path
