"""A child that fills its standard output before it reads its job."""

from __future__ import annotations

import os

from localkv.engines.channel import Channel

if __name__ == "__main__":
    os.write(1, b"a banner of some import hook\n" * 40_000)
    channel = Channel()
    channel.send({"bytes": len(channel.job["filler"])})
