"""A child that behaves as its job says: ``{"do": NAME, ...}``, and ends well after it."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from typing import Any

from localkv.engines.channel import Channel

JSON_LINE = b'{"forged": true}\n'


def c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def echo(channel: Channel, job: dict[str, Any]) -> None:
    channel.send({"job": job})


def count(channel: Channel, job: dict[str, Any]) -> None:
    for number in range(job["messages"]):
        channel.send({"number": number, "filler": "x" * job["bytes"]})


def noise(channel: Channel, job: dict[str, Any]) -> None:
    """Print as engines do: through Python, through C's buffers, and straight to descriptor 1."""
    for number in range(5):
        channel.send({"number": number})
        os.write(1, JSON_LINE * 100)
        os.write(1, b'\x00\xff{"torn": ')
        print('{"forged": true}')
        c_library().puts(b'{"forged": true}')
        c_library().fflush(None)
    os.system("echo '{\"forged\": true}'")


def signalled(channel: Channel, job: dict[str, Any]) -> None:
    channel.send({"before": True})
    os.kill(os.getpid(), job["signal"])


def abort(channel: Channel, job: dict[str, Any]) -> None:
    channel.send({"before": True})
    c_library().abort()


def segfault(channel: Channel, job: dict[str, Any]) -> None:
    channel.send({"before": True})
    ctypes.string_at(1)


def leave(channel: Channel, job: dict[str, Any]) -> None:
    channel.send({"before": True})
    sys.exit(job["code"])


def torn(channel: Channel, job: dict[str, Any]) -> None:
    """Die in the middle of a message."""
    channel.send({"whole": True})
    os.write(channel._out, b'{"half": "a mess')
    os.kill(os.getpid(), signal.SIGKILL)


def complain(channel: Channel, job: dict[str, Any]) -> None:
    os.write(2, b"".join(b"line %d\n" % number for number in range(job["lines"])))
    os.write(2, b"\xff bad bytes\n\n" + b"y" * job["bytes"] + b"\nthe last words\n")
    os._exit(3)


def chatter(channel: Channel, job: dict[str, Any]) -> None:
    while True:
        channel.send({"again": True})


def hang(channel: Channel, job: dict[str, Any]) -> None:
    """Wait for ever, deaf to everything that can be ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel.send({"ready": True})
    while True:
        signal.pause()


def hang_in_c(channel: Channel, job: dict[str, Any]) -> None:
    """Wait for ever in C with the interpreter locked, so that no other thread can run."""
    channel.send({"ready": True})
    ctypes.PyDLL(None).pause()


def hang_without_kernel_help(channel: Channel, job: dict[str, Any]) -> None:
    """Wait as on a system that does not end children with their parent."""
    pr_set_pdeathsig = 1
    assert c_library().prctl(pr_set_pdeathsig, 0, 0, 0, 0) == 0
    hang(channel, job)


def wait_for_usr1(channel: Channel, job: dict[str, Any]) -> None:
    # Any thread may be the one that the signal interrupts; the pipe hears of it in every case.
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    channel.send({"ready": True})
    os.read(heard, 1)
    channel.send({"alive": True})


def leave_a_helper(channel: Channel, job: dict[str, Any]) -> None:
    """Start a program that outlives this one, with every descriptor that it can inherit."""
    pid = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
    channel.send({"helper": pid})


def leave_slowly(channel: Channel, job: dict[str, Any]) -> None:
    """Be busy with shutting down until somebody opens the named pipe for writing."""
    atexit.register(lambda: os.close(os.open(job["pipe"], os.O_RDONLY)))
    channel.send({"done": True})


def main() -> None:
    channel = Channel()
    globals()[channel.job["do"]](channel, channel.job)


if __name__ == "__main__":
    main()
