"""SIGTERM for commands that have begun something: a service manager's way to say Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block, or the decorated function, as Ctrl-C does: cleaned up and told."""
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield  # Python hands signals to the main thread alone
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
