"""The server's own process on this machine: its memory, and the settings it was started with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localkv.observe.command_line import server_settings
from localkv.probes.listening import command_line, environment, family, listener
from localkv.probes.nvidia import open_nvml
from localkv.probes.process import sample_process
from localkv.records import Reading

_SUMMED = ("rss_anon", "rss_file")


class ServerProcess:
    """The process that listens on ``port`` of this machine, with those that it started.

    ``why`` says why there is none to read: another machine's, or another user's.
    """

    def __init__(self, port: int | None, why: str = "") -> None:
        """Look for the process; ``port`` None when the server is on another machine."""
        self._port = port
        self._nvml = open_nvml() if port else None
        self.pid: int | None = None
        self.why = why or f"no process of this user listens on port {port}"
        self.find()

    def find(self) -> bool:
        """Look for the process again; return whether it is another one than before."""
        known = self.pid
        self.pid = listener(self._port) if self._port else None
        return known is not None and self.pid is not None and known != self.pid

    def close(self) -> None:
        """Let go of the GPU library."""
        if self._nvml is not None:
            self._nvml.close()

    def pids(self) -> list[int]:
        """Return the process and its descendants; empty when it is gone."""
        return family(self.pid) if self.pid else []

    def runners(self) -> dict[int, dict[str, Any]]:
        """Return the settings of the llama-servers among its descendants, by process id."""
        found = {pid: settings_of(pid) for pid in self.pids() if pid != self.pid}
        return {pid: told for pid, told in found.items() if told and "port" in told}

    def read(self) -> dict[str, Reading]:
        """Return ``rss_anon``, ``rss_file`` and ``vram_process`` in bytes, over the family."""
        pids = self.pids()
        if not pids:
            why = "the process is gone" if self.pid else self.why
            return {key: Reading(None, why=why) for key in (*_SUMMED, "vram_process")}
        readings = [sample_process(pid) for pid in pids]
        found = {key: _sum([each[key] for each in readings], len(pids)) for key in _SUMMED}
        assert self._nvml is not None
        found["vram_process"] = _sum(
            [self._nvml.read(pid)["vram_process"] for pid in pids], len(pids)
        )
        return found


def _sum(readings: Sequence[Reading], count: int) -> Reading:
    """Add up what is known; a child that ended in between has nothing to add."""
    known = [reading.value for reading in readings if reading.value is not None]
    if not known:
        return readings[0]
    of = f" of {count} processes" if count > 1 else ""
    source = next(reading.source for reading in readings if reading.value is not None)
    return Reading(sum(known), source=f"{source}{of}")


def settings_of(pid: int | None) -> dict[str, Any] | None:
    """Return what the llama-server ``pid`` was told; None for another program."""
    return server_settings(command_line(pid), environment(pid)) if pid else None
