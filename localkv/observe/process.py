"""The server's own process on this machine: its memory, and what its command line gives away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from localkv.probes.listening import command_line, environment, family, listener
from localkv.probes.nvidia import open_nvml
from localkv.probes.process import sample_process
from localkv.records import Reading

_SUMMED = ("rss_anon", "rss_file")
_TRUE, _FALSE = ("1", "on", "true", "enabled"), ("0", "off", "false", "disabled")


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


def unified_cache(words: Sequence[str], variables: Mapping[str, str]) -> bool | None:
    """Return whether a llama-server started with these shares one cache among its slots.

    None when these are not a llama-server's. Without a number of slots it chooses four that share
    one cache (tools/server/server.cpp); a flag counts more than its environment variable
    (common/arg.cpp).
    """
    if not any("llama-server" in word for word in words[:2]):
        return None
    flags = {"--kv-unified": True, "-kvu": True, "--no-kv-unified": False, "-no-kvu": False}
    for word in reversed(words):
        if word in flags:
            return flags[word]
    told = variables.get("LLAMA_ARG_KV_UNIFIED", "").lower()
    if told in _TRUE or told in _FALSE:
        return told in _TRUE
    slots = _value(words, ("-np", "--parallel")) or variables.get("LLAMA_ARG_N_PARALLEL")
    return slots is None or slots.startswith("-")


def _value(words: Sequence[str], flags: Iterable[str]) -> str | None:
    """Return what follows the last of ``flags``."""
    for index in range(len(words) - 2, -1, -1):
        if words[index] in flags:
            return words[index + 1]
    return None


def server_cache(pid: int | None) -> bool | None:
    """Return :func:`unified_cache` of the running process ``pid``."""
    return unified_cache(command_line(pid), environment(pid)) if pid else None
