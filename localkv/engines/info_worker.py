"""The child that says what the installed engine is. Started by ``engines.info``."""

from __future__ import annotations

from dataclasses import asdict

from localkv.engines.channel import Channel
from localkv.engines.llamacpp import Engine
from localkv.errors import LocalkvError


def main() -> None:
    """Load the engine without any model, and send what it says of itself."""
    channel = Channel()
    try:
        with Engine() as engine:
            channel.send({"info": asdict(engine.info())})
    except LocalkvError as error:
        channel.send({"error": error.message})


if __name__ == "__main__":
    main()
