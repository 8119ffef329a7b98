"""The host memory of a server: its options, and its lines below an estimate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from localkv.errors import UsageError
from localkv.units import MIB, format_bytes, format_count, plural

if TYPE_CHECKING:
    from localkv.model.shape import ModelShape
    from localkv.predict.config import RunConfig
    from localkv.predict.server_memory import ServerMemory

F = TypeVar("F", bound=Callable[..., Any])

_SERVER = click.option(
    "--server",
    is_flag=True,
    help="Add what llama-server or Ollama keeps in RAM besides: prompt cache, checkpoints.",
)
_OPTIONS = (
    click.option(
        "-cram",
        "--cache-ram",
        type=int,
        metavar="MiB",
        help="Limit of the server's prompt cache; 0: off, -1: no limit.  [default: 8192]",
    ),
    click.option(
        "-ctxcp",
        "--ctx-checkpoints",
        metavar="N",
        type=click.IntRange(0),
        help="Most context checkpoints of a slot.  [default: 32]",
    ),
    click.option(
        "-cms",
        "--checkpoint-min-step",
        metavar="N",
        type=click.IntRange(0),
        help="Tokens between a chat's checkpoints.  [default: 8192]",
    ),
    click.option(
        "--conversation",
        type=click.IntRange(1),
        metavar="TOKENS",
        help="Length of a conversation.  [default: a slot's context]",
    ),
)
#: The programs that keep such memory.
SERVERS = ("llama-server", "ollama")
#: Options that say nothing unless the server's memory is asked for, which they do by themselves.
_LIMITS = ("cache_ram", "ctx_checkpoints", "checkpoint_min_step", "conversation")


def limit_options(function: F) -> F:
    """Add the options that bound a server's host memory."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def server_options(function: F) -> F:
    """Add ``--server`` and the options that bound a server's host memory."""
    return _SERVER(limit_options(function))


def asked_for(options: Mapping[str, Any]) -> bool:
    """Return whether the options ask for a server's host memory."""
    return bool(options["server"]) or any(options[name] is not None for name in _LIMITS)


def memory_of(
    shape: ModelShape, config: RunConfig, options: Mapping[str, Any], program: str
) -> ServerMemory:
    """Return the host memory of ``program`` under the options of :func:`server_options`.

    Raises:
        UsageError: the program is no server, or a setting is out of range.
    """
    from localkv.predict.server_memory import server_memory

    if program not in SERVERS:
        raise UsageError(
            f"{program} keeps neither a prompt cache nor checkpoints",
            "leave --server out, or give --defaults llama-server or ollama",
        )
    if shape.path.endswith(".json"):
        raise UsageError(
            "a config.json is not what llama-server runs",
            "give a .gguf file, or leave --server out",
        )
    given = {
        name: options[name]
        for name in ("ctx_checkpoints", "checkpoint_min_step")
        if options[name] is not None
    }
    if options["cache_ram"] is not None:
        given["cache_ram"] = max(options["cache_ram"], -1) * MIB
    return server_memory(shape, config, n_tokens=options["conversation"], **given)


def server_lines(memory: ServerMemory) -> list[str]:
    """Return the lines on a server's host memory; the first is empty."""
    lines = ["", "Host memory of llama-server (Ollama runs it), in none of the figures above:"]
    if memory.unknown:
        return [*lines, f"unknown: {memory.unknown}"]
    if not memory.state_bytes:
        return [*lines, "none: the model keeps no cache, so that there is nothing to save"]
    lines += [*_entry(memory), *_prompt_cache(memory), *_checkpoints(memory)]
    if memory.total_bytes_most is not None:
        lines.append(f"{'at most':<18} {format_bytes(memory.total_bytes_most):>12}")
    flags = memory.flags()
    return [
        *lines,
        f"limits: llama-server {flags['llama-server']}",
        f"        Ollama {flags['ollama']} in the environment of ollama serve",
    ]


def _entry(memory: ServerMemory) -> list[str]:
    assert memory.state_bytes is not None
    assert memory.entry_bytes is not None
    share = " (a slot's share)" if memory.n_tokens * memory.slots == memory.n_ctx else ""
    what = f"a conversation of {plural(memory.n_tokens, 'token')}{share}, saved"
    made = len(memory.checkpoints)
    if made:
        what += f": state {format_bytes(memory.state_bytes)} + {plural(made, 'checkpoint')}"
    return [f"{'entry':<18} {format_bytes(memory.entry_bytes):>12}  {what}"]


def _prompt_cache(memory: ServerMemory) -> list[str]:
    if memory.cache_ram == 0:
        return [f"{'prompt cache':<18} {'off':>12}"]
    warm, least = memory.conversations_warm, memory.conversations_warm_least
    assert warm is not None
    assert least is not None
    count = (
        format_count(warm) if warm == least else f"{format_count(least)} to {format_count(warm)}"
    )
    stay = "conversation stays" if least == warm == 1 else "conversations stay"
    stay = f"{count} such {stay} warm"
    if memory.cache_ram is None:
        return [
            f"{'prompt cache':<18} {'no limit':>12}  {stay}: {format_count(memory.n_ctx)} tokens "
            "at most"
        ]
    if not warm:
        stay = "too small for one such conversation"
    return [f"{'prompt cache':<18} {format_bytes(memory.cache_ram):>12}  {stay}"]


def _checkpoints(memory: ServerMemory) -> list[str]:
    if not memory.checkpoint_bytes:
        why = "the model rolls its memory back without" if memory.rolls_back else "turned off"
        return [f"{'checkpoints':<18} {'none':>12}  {why}"]
    assert memory.slots_bytes is not None
    lines = [
        f"{'checkpoint':<18} {format_bytes(memory.checkpoint_bytes):>12}  the part that cannot be "
        "rolled back: windows, recurrent state",
        f"{'checkpoints':<18} {format_bytes(memory.slots_bytes):>12}  {memory.ctx_checkpoints} x "
        f"{plural(memory.slots, 'slot')} at most",
    ]
    if memory.chat_checkpoints > len(memory.checkpoints):
        lines[1] += f"; reading one chat leaves up to {memory.chat_checkpoints}"
    return lines
