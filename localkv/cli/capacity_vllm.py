"""``localkv capacity`` of a Hugging Face config: what vLLM makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localkv.cli.capacity_asked import PAGED, context_of, refuse, wants_levers
from localkv.cli.memory import given_memory
from localkv.cli.options import SETTINGS
from localkv.errors import UsageError
from localkv.predict.commands import Command, Paged, model_commands
from localkv.predict.config import RunConfig
from localkv.predict.paged_capacity import (
    PagedCapacity,
    PagedSetup,
    needed_bytes,
    paged_capacity,
    paged_levers,
    paged_setup,
)
from localkv.units import parse_size

if TYPE_CHECKING:
    from localkv.cli.memory import Given
    from localkv.model.shape import ModelShape

#: The options of a vLLM that are sizes.
_SIZES = ("weights", "allowance")
#: What llama.cpp's programs are told, and vLLM is not.
_NOT_PAGED = (
    *(name for name in SETTINGS if name != "parallel"),
    *("gpu_layers", "tensor_split", "cache_ram", "ctx_checkpoints", "checkpoint_min_step"),
    *("conversation", "reserve"),
)


def answer(shape: ModelShape, options: dict[str, Any]) -> int:
    """Print the answer; return the exit code."""
    refuse(options, _NOT_PAGED, "is for a .gguf file: a config.json is planned as vLLM does")
    if options["engine"]:
        raise UsageError("--engine is for a .gguf file", "leave it out")
    given = given_memory(options["memory"], total=True)
    capacity = paged_capacity(shape, _setup(shape, options, given), context_of(shape, options))
    asked = _asked(capacity, options["parallel"])
    runs = bool(asked["fits"]) if asked else capacity.fits
    commands = _commands(capacity, options) if runs else ()
    levers = list(paged_levers(capacity)) if wants_levers(options, runs) else None
    if options["as_json"]:
        from localkv.cli.terminal import print_json

        print_json(
            {
                **capacity.to_dict(),
                "memory_source": given.source,
                "needed": asked,
                "host_memory": None,
                "contexts": [],
                "levers": levers or [],
                "commands": {command.key: command.text for command in commands},
            }
        )
    else:
        from localkv.cli.capacity_pages import paged_page
        from localkv.cli.terminal import show, width

        show(paged_page(capacity, given, asked, levers, commands, width()))
    return int(not runs)


def _asked(capacity: PagedCapacity, users: int | None) -> dict[str, Any] | None:
    if users is None:
        return None
    need = needed_bytes(capacity.shape, capacity.setup, users, capacity.ctx_per_slot)
    return {"users": users, "memory_bytes": need, "fits": users <= capacity.max_slots}


def _commands(capacity: PagedCapacity, options: dict[str, Any]) -> tuple[Command, ...]:
    setup = capacity.setup
    told = Paged(
        capacity.ctx_per_slot,
        options["parallel"] or capacity.max_slots,
        setup.utilization,
        setup.kv_dtype,
        options["block_size"],
        gpus=len(setup.sizes),
    )
    return model_commands(capacity.shape, RunConfig(), paged=told)


def _setup(shape: ModelShape, options: dict[str, Any], given: Given) -> PagedSetup:
    chosen = {
        field: parse_size(options[option]) if option in _SIZES else options[option]
        for option, field in PAGED.items()
        if options[option] is not None
    }
    return paged_setup(shape, given.sizes, **chosen)
