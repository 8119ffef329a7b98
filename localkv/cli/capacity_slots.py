"""``localkv capacity`` of a GGUF file: how many slots fit, as llama.cpp's programs run them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localkv.cli import server_pages
from localkv.cli.capacity_asked import PAGED, context_of, refuse, wants_levers
from localkv.cli.capacity_pages import Beside, slots_page
from localkv.cli.memory import Given, given_memory, reserve_bytes
from localkv.cli.options import SETTINGS
from localkv.errors import UsageError
from localkv.predict.budget import Planner
from localkv.predict.capacity import Capacity, capacity_of
from localkv.predict.contexts import SLOTS, Needed, largest_contexts, needed
from localkv.units import MIB

if TYPE_CHECKING:
    from localkv.model.shape import ModelShape
    from localkv.predict.flags import Limits
    from localkv.predict.levers import Lever


def answer(shape: ModelShape, options: dict[str, Any], source: str) -> int:
    """Print the answer; return the exit code."""
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
        from localkv.cli.terminal import show, width

        show(slots_page(capacity, given, beside, width()))
    return int(not (asked.fits if asked else capacity.fits))


def _planner(shape: ModelShape, options: dict[str, Any], given: Given, reserve: int) -> Planner:
    from localkv.cli.devices import layers, shares

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
        wanted = wants_levers(options, runs)
        found.levers = _levers(planner, capacity, given, limits) if wanted else None
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
