"""Locks between processes, which end with the process that holds them, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def try_lock(descriptor: int) -> bool | None:
    """Return True with the lock held until ``descriptor`` is closed, False when it is taken.

    None where the file system has no locks.
    """
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def folder_lock(folder: str) -> Iterator[bool | None]:
    """Try to lock ``folder`` while the block runs; yields what :func:`try_lock` returns.

    The folder itself is locked, so nothing is left behind; Windows, which locks files alone, gets
    a file ``.lock`` in it.

    Raises:
        OSError: the folder cannot be opened.
    """
    if sys.platform == "win32":
        handle = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT)
    else:
        handle = os.open(folder, os.O_RDONLY)
    try:
        yield try_lock(handle)
    finally:
        os.close(handle)
