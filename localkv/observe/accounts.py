"""The books of a watched server: what its processes allocated, and what stays pinned while idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from localkv.engines.log_follow import LogFollower
from localkv.errors import LocalkvError, UsageError
from localkv.gguf.ollama_store import find_ollama
from localkv.observe.growth import Ledger, slots_of
from localkv.observe.pinned import pinned_by_llama_server, pinned_by_ollama
from localkv.observe.targets import Server
from localkv.probes.listening import command_line
from localkv.probes.output import output_file, working_folder
from localkv.probes.process import sample_process
from localkv.probes.runner import ollama_runners
from localkv.snapshots import HostMemory, Loaded, Observed, Snapshot


class Accountant:
    """Adds to each look what the server's processes on this machine hold."""

    def __init__(
        self, server: Server, log: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Keep the books of ``server``; ``log`` is its log, None to look where its process writes.

        ``clock`` gives seconds of the epoch.

        Raises:
            UsageError: ``log`` cannot be read.
        """
        self._server = server
        self._given = LogFollower(log) if log else None
        self._clock = clock
        self._ledgers: dict[int, Ledger] = {}
        self._told: dict[int, Mapping[str, Any]] = {}
        self._used: dict[int, int | None] = {}

    def add(self, seen: Observed, predicted: Mapping[str, Any]) -> Observed:
        """Return ``seen`` with its memory taken apart; ``predicted`` as for that look."""
        said = seen.snapshot
        if said is None or said.server not in ("llama-server", "ollama"):
            return seen
        self._used = {}
        kv_bytes, url = predicted.get("kv_bytes"), self._server.url
        if said.server == "ollama":
            memory = self._runners(said)
            pinned = pinned_by_ollama(url, said, memory, self._used, kv_bytes, self._clock())
        else:
            memory = self._own(said, seen)
            own = memory[0] if memory else None
            used = self._used.get(own.pid) if own else None
            settings = self._settings(self._server.process.pid)
            pinned = pinned_by_llama_server(url, said, own, kv_bytes, used, settings)
        return replace(seen, memory=memory, pinned=pinned)

    def _own(self, said: Snapshot, seen: Observed) -> tuple[HostMemory, ...]:
        """Return the books of a llama-server."""
        pid = self._server.process.pid
        if pid is None:
            return ()
        ledger = self._ledger(pid, self._settings(pid), name=Path(said.model).name, alone=True)
        reading = seen.process.get("rss_anon")
        return (self._read(ledger, said, reading.value if reading else None),)

    def _runners(self, said: Snapshot) -> tuple[HostMemory, ...]:
        """Return the books of Ollama's runners; those before 0.30 have no parts."""
        serve = self._server.process.pid
        blobs = ollama_runners(serve) if serve else {}
        names = _names(blobs, said.loaded)
        told = self._server.process.runners() if blobs else {}
        found = []
        for pid in blobs:
            measured = sample_process(pid)["rss_anon"].value
            name = names.get(pid, "")
            if pid not in told:
                why = "Ollama before 0.30 keeps neither a prompt cache nor checkpoints"
                found.append(HostMemory(pid, name, measured, why=why))
                continue
            ledger = self._ledger(pid, told[pid], name=name, alone=len(blobs) == 1)
            found.append(self._read(ledger, _as_llama_server(said, pid, told[pid]), measured))
        return tuple(found)

    def _read(self, ledger: Ledger, said: Snapshot, measured: int | None) -> HostMemory:
        found = ledger.read(said, measured)
        if said.slots:
            idle = [slot.tokens for slot in said.slots if not slot.busy]
            self._used[ledger.pid] = ledger.state_bytes(idle)
        return found

    def _settings(self, pid: int | None) -> Mapping[str, Any]:
        """Return what the server was told, asked once for each process."""
        if pid is None:
            return {}
        if pid not in self._told:
            self._told[pid] = self._server.process.settings() or {}
        return self._told[pid]

    def _ledger(self, pid: int, settings: Mapping[str, Any], *, name: str, alone: bool) -> Ledger:
        if pid not in self._ledgers:
            # The lines of several runners cannot be told apart.
            log = self._log(settings) if alone else None
            self._ledgers[pid] = Ledger(pid, settings, name=name, log=log)
        return self._ledgers[pid]

    def _log(self, settings: Mapping[str, Any]) -> LogFollower | None:
        """Return the log that was given, or the one that the server's process writes."""
        if self._given:
            return self._given
        pid = self._server.process.pid
        if pid is None:
            return None
        named = settings.get("log_file")
        path = working_folder(pid) / named if named else output_file(pid)
        if path is None:
            return None
        with suppress(OSError, UsageError):
            name = named or str(path.readlink())
            return LogFollower(path, name)
        return None


def _names(blobs: Mapping[int, str], loaded: Sequence[Loaded]) -> dict[int, str]:
    """Return which of the ``loaded`` models each runner holds, by process id."""
    if len(blobs) == len(loaded) == 1:
        return dict.fromkeys(blobs, loaded[0].name)
    names = {}
    for pid, digest in blobs.items():
        words = [word for word in command_line(pid) if digest in word]
        roots = [str(Path(word).parents[1]) for word in words]
        for model in loaded:
            with suppress(LocalkvError):
                if find_ollama(model.name, roots).path.endswith(digest):
                    names[pid] = model.name
    return names


def _as_llama_server(said: Snapshot, pid: int, settings: Mapping[str, Any]) -> Snapshot:
    """Return what Ollama's runner ``pid`` says of itself, as a llama-server would."""
    slots = settings.get("n_seq_max", 1)
    facts = {"total_slots": slots, "n_ctx_per_slot": settings.get("n_ctx", 0) // slots}
    return Snapshot(server="llama-server", slots=slots_of(said, pid), facts=facts)
