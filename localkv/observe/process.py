"""The server's own process on this machine: its memory, and the settings it was started with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localkv.observe.command_line import holder_settings, server_settings
from localkv.probes.listening import command_line, environment, family, is_alive, listener
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
        self.pid = listener(port) if port else None
        self.why = why or f"no process of this user listens on port {port}"

    def replaced(self) -> bool:
        """Return whether another process has taken the port since the known one ended."""
        if self._port is None or self.pid is None or is_alive(self.pid):
            return False
        another = listener(self._port)
        if another is None:
            return False
        self.pid = another
        return True

    def close(self) -> None:
        """Let go of the GPU library."""
        if self._nvml is not None:
            self._nvml.close()

    def pids(self) -> list[int]:
        """Return the process and its descendants; empty when it is gone."""
        return family(self.pid) if self.pid else []

    def settings(self) -> dict[str, Any] | None:
        """Return what the llama-server was told; None for another program."""
        return _settings_of(self.pid) if self.pid else None

    def holders(self) -> list[dict[str, Any]]:
        """Return the settings of the processes that hold a model: the server, or its runners."""
        told = [holder_settings(command_line(pid), environment(pid)) for pid in self.pids()]
        found = [each for each in told if each]
        # What vLLM starts besides repeats its command line.
        return found[:1] if told and told[0] else found

    def runners(self) -> dict[int, dict[str, Any]]:
        """Return the settings of the llama-servers among its descendants, by process id."""
        found = {pid: _settings_of(pid) for pid in self.pids() if pid != self.pid}
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


def _settings_of(pid: int) -> dict[str, Any] | None:
    return server_settings(command_line(pid), environment(pid))
