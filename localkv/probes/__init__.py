"""Probes: figures read from the machine, each with its unit, its source, or why it is unknown.

A name here loads its module when it is first used, and psutil and NVML are loaded by the call
that needs them: asking for the available memory does not pay for the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localkv.probes.gpu import gpu_summary as gpu_summary
    from localkv.probes.host import read_host as read_host
    from localkv.probes.memory import available_memory as available_memory
    from localkv.probes.memory import total_memory as total_memory
    from localkv.probes.nvidia import open_nvml as open_nvml
    from localkv.probes.process import read_process as read_process
    from localkv.probes.process import reset_peak as reset_peak
    from localkv.probes.process import sample_process as sample_process

_HOME = {
    "available_memory": "memory",
    "gpu_summary": "gpu",
    "open_nvml": "nvidia",
    "read_host": "host",
    "read_process": "process",
    "reset_peak": "process",
    "sample_process": "process",
    "total_memory": "memory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
