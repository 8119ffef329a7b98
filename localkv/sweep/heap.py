"""Heaps, kept from blurring what a measurement reads: the C library's, and Go's.

glibc raises the size from which an allocation gets pages of its own whenever a large one is freed,
so that the same context lands now in pages of its own and now in holes that loading the model left
behind: differences of half a MiB that no setting explains. Held at its initial value, and with
free pages returned before each reading, the same context costs the same every time.

A server is another process, where free pages cannot be returned from outside: one that localkv
starts is told by its environment to keep none.
"""

from __future__ import annotations

import ctypes
import os

# malloc.h of glibc; the value is the initial one (DEFAULT_MMAP_THRESHOLD, malloc/malloc.c).
_M_MMAP_THRESHOLD = -3
_INITIAL_THRESHOLD = 128 * 1024

_STEADY_MALLOC = (
    "glibc.malloc.arena_max=1",
    f"glibc.malloc.mmap_threshold={_INITIAL_THRESHOLD}",
    "glibc.malloc.tcache_count=0",
    "glibc.malloc.mxfast=0",
)
#: For the environment of an Ollama before 0.30, whose runner is llama.cpp inside a Go program. The
#: same load of SmolLM2 differs by up to 2.4 MiB, by chance; with this, by 0.2 MiB:
#: - Go collects its garbage at 4 MiB, which is about what the runner needs: whether it does, and
#:   what it gives back, is half a MiB either way. Here it collects only beyond a limit that the
#:   runner does not reach, and that keeps the serve process small. Free lists, one for each
#:   processor, are two on every machine.
#: - llama.cpp is called from whichever thread Go has at hand, so that it lands in one heap of glibc
#:   or another, and small free chunks keep a heap's end from being given back, 0.8 MiB of it. Here
#:   there is one heap, without lists of small chunks, and the threshold is as above.
#: Of what is measured, the cache and the buffers, nothing changes. A model of Ollama's own engine
#: has its vocabulary in Go's heap, beyond the limit: 1 MiB of chance is left at 262,144 tokens, of
#: 20 to 30. llama-server, which later lines run, gives the same figures each time without this.
STEADY_GO_HEAP = {
    "GOGC": "off",
    "GOMEMLIMIT": "24MiB",
    "GOMAXPROCS": "2",
    "GLIBC_TUNABLES": ":".join(_STEADY_MALLOC),
}


class Heap:
    """The heap of this process. On another C library than glibc nothing is changed."""

    def __init__(self) -> None:
        """Hold the threshold; call this before the engine is loaded."""
        library = ctypes.CDLL(None) if os.name == "posix" else None
        is_glibc = hasattr(library, "gnu_get_libc_version")
        self._library = library if is_glibc else None
        if self._library is not None:
            self._library.mallopt(_M_MMAP_THRESHOLD, _INITIAL_THRESHOLD)

    def give_back_free_pages(self) -> None:
        """Return the heap's free pages to the system, so that a reading is what is in use."""
        if self._library is not None:
            self._library.malloc_trim(0)
