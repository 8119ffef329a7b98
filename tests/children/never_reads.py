"""A child that is stuck before it has read its job."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    while True:
        signal.pause()
