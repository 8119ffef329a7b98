"""``localkv capacity``: how many requests fit at once, how long each may be, what to change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from localkv.cli import server_pages
from localkv.cli.options import (
    SETTINGS,
    chosen_model,
    json_option,
    model_argument,
    run_options,
)
from localkv.errors import UsageError
from localkv.units import MIB

if TYPE_CHECKING:
    from localkv.cli.memory import Given
    from localkv.model.shape import ModelShape
    from localkv.predict.budget import Planner
    from localkv.predict.capacity import Capacity
    from localkv.predict.commands import Command
    from localkv.predict.contexts import LargestContext, Needed
    from localkv.predict.flags import Limits
    from localkv.predict.levers import Lever
    from localkv.predict.server_memory import ServerMemory

_DEFAULT_CONTEXT = 8192
#: Option -> field of a vLLM's setup.
PAGED = {
    "gpu_memory_utilization": "utilization",
    "block_size": "block_size",
    "kv_cache_dtype": "kv_dtype",
    "max_num_seqs": "max_num_seqs",
    "weights": "weights",
    "allowance": "allowance",
}


@click.command(
    "capacity",
    epilog="\b\nExamples: localkv capacity model.gguf --memory 24G --ctx-per-slot 8192\n"
    "          localkv capacity demo --memory 24G --ctx-per-slot 8192 -np 8",
)
@model_argument
@click.option("--config", metavar="PATH", help="A Hugging Face config.json, or its folder.")
@click.option(
    "--memory",
    metavar="SIZE,...",
    default="auto",
    show_default=True,
    help="24G: one memory for everything; with -ngl: one GPU. 24G,24G: two GPUs with all layers "
    "on them. auto: what is free on this machine's GPUs, or else in its RAM.",
)
@click.option(
    "--reserve", metavar="SIZE", help="Leave so much of each memory free.  [default: 512M]"
)
@click.option(
    "--ctx-per-slot",
    metavar="N",
    type=click.IntRange(1),
    help="Tokens of each request.  [default: 8192, or as trained]",
)
@click.option(
    "-np",
    "--parallel",
    "--users",
    metavar="N",
    type=click.IntRange(1),
    help="Ask whether so many at once fit, and what they need.",
)
@run_options
@server_pages.limit_options
@click.option("--engine", is_flag=True, help="Ask the engine for its plan of each configuration.")
@click.option(
    "--gpu-memory-utilization",
    metavar="SHARE",
    type=float,
    help="vLLM: share of each GPU.  [default: 0.9]",
)
@click.option(
    "--block-size",
    metavar="N",
    type=click.IntRange(1),
    help="vLLM: tokens per block.  [default: 16]",
)
@click.option("--kv-cache-dtype", metavar="TYPE", help="vLLM: auto, fp8, ...  [default: auto]")
@click.option("--weights", metavar="SIZE", help="vLLM: weights, where the folder has none.")
@click.option(
    "--allowance",
    metavar="SIZE",
    help="vLLM: activations, CUDA graphs and driver, per GPU.  [default: 2G]",
)
@click.option(
    "--max-num-seqs",
    metavar="N",
    type=click.IntRange(1),
    help="vLLM: most requests at once.  [default: 256]",
)
@json_option
def command(
    model: str | None, model_option: str | None, config: str | None, **options: Any
) -> None:
    """Say how many requests fit into a memory at once, and what would let more in.

    The number is exact: so many were computed and fit, one more was computed and does not. Exit
    code 1: not even one fits, or not as many as -np asks for.

    A Hugging Face config.json, or its folder, is planned as vLLM does it: in what weights and
    activations leave of each GPU, blocks of a pool that all requests share.
    """
    from localkv.model import read_model

    source = chosen_model(model, model_option, config)
    shape = read_model(source)
    if shape.path.endswith(".json"):
        from localkv.cli.capacity_vllm import answer

        raise SystemExit(answer(shape, options))
    raise SystemExit(_slots(shape, options, source))


class Beside:
    """What is told beside the number of slots; empty where only an engine knows."""

    def __init__(self, asked: Needed | None = None) -> None:
        self.asked = asked
        self.server: ServerMemory | None = None
        self.contexts: tuple[LargestContext, ...] = ()
        self.levers: tuple[Lever, ...] = ()
        self.commands: tuple[Command, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that stand beside the capacity's own."""
        return {
            "needed": self.asked.to_dict() if self.asked else None,
            "host_memory": self.server.to_dict() if self.server else None,
            "contexts": [row.to_dict() for row in self.contexts],
            "levers": [lever.to_dict() for lever in self.levers],
            "commands": {command.key: command.text for command in self.commands},
        }


def _slots(shape: ModelShape, options: dict[str, Any], source: str) -> int:
    """Print the answer for a program with slots; return the exit code."""
    from localkv.cli.memory import given_memory, reserve_bytes
    from localkv.predict.capacity import capacity_of
    from localkv.predict.contexts import needed

    refuse(options, PAGED, "is for a config.json, planned as vLLM does")
    given = given_memory(options["memory"], host_only=options["gpu_layers"] == "0")
    planner = _planner(shape, options, given, reserve_bytes(options["reserve"]))
    capacity = capacity_of(planner, context_of(shape, options))
    users = options["parallel"]
    asked = needed(planner, users, capacity.ctx_per_slot) if users else None
    beside = _beside(planner, capacity, given, asked, options, source)
    if options["as_json"]:
        from localkv.cli.terminal import print_json

        print_json({**capacity.to_dict(), "memory_source": given.source, **beside.to_dict()})
    else:
        from localkv.cli.capacity_pages import slots_page
        from localkv.cli.terminal import show, width

        show(slots_page(capacity, given, beside, width()))
    return int(not (asked.fits if asked else capacity.fits))


def context_of(shape: ModelShape, options: dict[str, Any]) -> int:
    """Return the tokens of each request: as asked, else 8192 or what the model was trained for."""
    asked: int | None = options["ctx_per_slot"]
    return asked or min(_DEFAULT_CONTEXT, shape.n_ctx_train or _DEFAULT_CONTEXT)


def _planner(shape: ModelShape, options: dict[str, Any], given: Given, reserve: int) -> Planner:
    from localkv.cli.devices import layers, shares
    from localkv.predict.budget import Planner

    wanted = layers(options["gpu_layers"])
    if wanted == "auto":
        raise UsageError("-ngl auto follows the memory that is left", "give a number, or all")
    settings = {name: options[option] for option, name in SETTINGS.items() if option != "parallel"}
    return Planner(
        shape,
        given.memory,
        reserve=reserve,
        program=options["defaults"],
        engine=options["engine"] or shape.rule != "exact",
        n_gpu_layers=None if options["gpu_layers"] is None else wanted,
        tensor_split=shares(options["tensor_split"]),
        op_offload=not options["no_op_offload"],
        repack=not options["no_repack"],
        **settings,
    )


def _beside(
    planner: Planner,
    capacity: Capacity,
    given: Given,
    asked: Needed | None,
    options: dict[str, Any],
    source: str,
) -> Beside:
    """Return what stands beside the number; nothing that would ask an engine over and over."""
    from localkv.predict.commands import model_commands
    from localkv.predict.contexts import SLOTS, largest_contexts
    from localkv.predict.flags import Limits

    ram = options["cache_ram"]
    limits = Limits(None if ram is None else max(ram, -1) * MIB, options["ctx_checkpoints"])
    shape, config = planner.shape, capacity.config
    runs = asked.fits if asked else capacity.fits
    if asked and runs:
        config = planner.config(asked.users, asked.ctx_per_slot)
    found = Beside(asked)
    if runs or capacity.fits:
        found.commands = model_commands(shape, config, source=source, limits=limits)
    if planner.program in server_pages.SERVERS:
        found.server = server_pages.memory_of(shape, config, options, planner.program)
    if planner.formula:
        slots = sorted({*SLOTS, asked.users} if asked else SLOTS)
        found.contexts = largest_contexts(planner, slots)
        found.levers = _levers(planner, capacity, given, limits)
    return found


def _levers(
    planner: Planner, capacity: Capacity, given: Given, limits: Limits
) -> tuple[Lever, ...]:
    from localkv.predict.levers import find_levers

    return find_levers(
        planner.shape,
        capacity.config,
        memory=given.memory,
        ctx_per_slot=capacity.ctx_per_slot,
        program=planner.program,
        reserve=planner.budget.reserved,
        limits=limits,
    )


def refuse(options: dict[str, Any], names: Iterable[str], why: str) -> None:
    """Return when none of the options ``names`` was given.

    Raises:
        UsageError: one was; ``why`` says what it is for.
    """
    for name in names:
        if options[name] is not None:
            raise UsageError(f"--{name.replace('_', '-')} {why}", "leave it out")
