"""The C library's heap, kept from blurring what a measurement reads.

glibc raises the size from which an allocation gets pages of its own whenever a large one is freed,
so that the same context lands now in pages of its own and now in holes that loading the model left
behind: differences of half a MiB that no setting explains. Held at its initial value, and with
free pages returned before each reading, the same context costs the same every time.
"""

from __future__ import annotations

import ctypes
import os

# malloc.h of glibc; the value is the initial one (DEFAULT_MMAP_THRESHOLD, malloc/malloc.c).
_M_MMAP_THRESHOLD = -3
_INITIAL_THRESHOLD = 128 * 1024


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
