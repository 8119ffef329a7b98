"""A parent to be killed: starts ``acting`` with the behaviour named, and says what it hears."""

from __future__ import annotations

import signal
import sys

from localkv.engines.channel import Child


def main(behaviour: str, on_interrupt: str) -> None:
    if on_interrupt == "carry-on":
        signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
    with Child("acting", {"do": behaviour}) as child:
        for message in child.messages(timeout=300):
            print(child.pid, *message, flush=True)
        print("exit", child.finish().code, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
