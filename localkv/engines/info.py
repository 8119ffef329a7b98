"""What the installed engine is, asked in a child: loading one that does not fit can crash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localkv.engines.channel import Child

_WORKER = "localkv.engines.info_worker"
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class EngineAnswer:
    """``info`` is ``EngineInfo`` as a dict, empty when the engine gave none because of ``why``.

    ``signal`` names the signal that ended the child, if one did.
    """

    info: Mapping[str, Any] = field(default_factory=dict)
    why: str | None = None
    signal: str | None = None


def ask_engine(timeout: float = _TIMEOUT_S) -> EngineAnswer:
    """Return what the installed engine says of itself, or why it does not. Never raises for it."""
    info: dict[str, Any] = {}
    why = None
    with Child(_WORKER, {}) as child:
        for message in child.messages(timeout=timeout):
            info = message.get("info", info)
            why = message.get("error", why)
        end = child.finish()
    if info or why:
        return EngineAnswer(info, why)
    if end.timed_out:
        return EngineAnswer(why=f"it did not load within {timeout:g} s")
    said = f": {end.stderr_tail[-1]}" if end.stderr_tail else ""
    how = end.signal_name or f"exit code {end.code}"
    return EngineAnswer(why=f"loading it ended the process ({how}){said}", signal=end.signal_name)
