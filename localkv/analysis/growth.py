"""Whether a server's growth in memory is explained: what is known to have grown, and the rest."""

from __future__ import annotations

from localkv.snapshots import HostMemory, MemoryPart
from localkv.tuples import NamedTuple
from localkv.units import MIB

#: What the allocator and small things take beside the parts: measured at llama-server, 1 to 3 MiB
#: on SmolLM2, less than 1 MiB with MALLOC_MMAP_THRESHOLD_ set.
SLACK = 4 * MIB
#: Share of what is saved that glibc may keep after it was freed: freed checkpoints and entries stay
#: in its arenas. Measured: up to 9 % on Gemma 3 270M, 1 % on SmolLM2.
SAVED_SLACK = 0.1
_SAVED = ("prompt cache", "context checkpoints")


class Explanation(NamedTuple):
    """How ``grown`` bytes compare with what is known; bytes throughout.

    ``verdict``: explained; possible (within what the rules allow, but not seen); not explained;
    shrunk (less is there than was allocated: swapped out, or given back); unknown, because of
    ``why``. ``rest`` is what no known part explains, negative where there is less than that.
    ``main`` is the part that grew most, None where none did.
    """

    verdict: str
    grown: int = 0
    known: int = 0
    rest: int = 0
    tolerance: int = 0
    main: MemoryPart | None = None
    why: str = ""


def explain(memory: HostMemory) -> Explanation:
    """Return whether the growth of ``memory`` since it was first seen is explained.

    Compute buffers take up what they can of the rest, since a server says not how much of them has
    been used; what the slots did not show is possible, no more.
    """
    if memory.measured is None or memory.first is None:
        return Explanation("unknown", why="its memory cannot be read from here")
    grown = memory.measured - memory.first
    if not memory.parts:
        return Explanation("unknown", grown, why=memory.why or "nothing is known of its parts")
    least = sum(part.grown for part in memory.parts)
    sure = sum(part.grown if part.source == "slots" else part.grown_most for part in memory.parts)
    most = sum(part.grown_most for part in memory.parts)
    saved = sum(part.least for part in memory.parts if part.name in _SAVED)
    tolerance = SLACK + int(SAVED_SLACK * saved)
    known = min(max(grown, least), sure)
    if grown < least - tolerance:
        verdict = "shrunk"
    elif grown <= sure + tolerance:
        verdict = "explained"
    elif grown <= most + tolerance:
        verdict = "possible"
    else:
        verdict = "not explained"
    main = max(memory.parts, key=lambda part: part.grown, default=None)
    if main is not None and main.grown <= 0:
        main = None
    return Explanation(verdict, grown, known, grown - known, tolerance, main)


def rest_now(memory: HostMemory) -> int | None:
    """Return the bytes that no part explains now: the program itself, and what the allocator keeps.

    None where nothing is known; never below zero.
    """
    if memory.measured is None or not memory.parts:
        return None
    return max(0, memory.measured - sum(_shown(part) for part in memory.parts))


def _shown(part: MemoryPart) -> int:
    return part.least if part.source == "slots" else part.most
