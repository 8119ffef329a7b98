"""``localkv inspect``: one page about a model file."""

from __future__ import annotations

import click

from localkv.cli.options import INT_LIST, chosen_model, json_option, model_argument
from localkv.errors import UsageError


@click.command(
    "inspect",
    epilog="\b\nExamples: localkv inspect model.gguf --ctx-per-slot 4096-32768*2 -np 1,8\n"
    "          localkv inspect demo-swa --diagram",
)
@model_argument
@click.option(
    "--ctx-per-slot",
    type=INT_LIST,
    help="Rows of the table: tokens in each slot.  [default: 2048 to the training context]",
)
@click.option("-np", "--parallel", type=INT_LIST, help="Its columns: slots.  [default: 1,2,4,8]")
@click.option(
    "-ctk",
    "--cache-type-k",
    metavar="TYPE",
    default="f16",
    show_default=True,
    help="Type of the K cache.",
)
@click.option(
    "-ctv",
    "--cache-type-v",
    metavar="TYPE",
    default="f16",
    show_default=True,
    help="Type of the V cache.",
)
@click.option("--diagram", is_flag=True, help="Draw the cache as notebooks of pages.")
@click.option(
    "--requests", type=INT_LIST, help="Tokens in each slot, for --diagram.  [default: an example]"
)
@json_option
def command(
    model: str | None,
    model_option: str | None,
    ctx_per_slot: tuple[int, ...] | None,
    parallel: tuple[int, ...] | None,
    cache_type_k: str,
    cache_type_v: str,
    diagram: bool,
    requests: tuple[int, ...] | None,
    as_json: bool,
) -> None:
    """Show what a model's context costs: layers, KV heads, KV per token, a table of sizes.

    Only the header of a .gguf file is read, or the config.json of a Hugging Face folder. The table
    is for llama-server with a cache of its own for every slot. * marks a cache that is larger than
    the weights. Exit code 1: localkv has no rule for this architecture, so the cache is unknown.
    """
    from localkv.cli.terminal import print_json, show, width
    from localkv.model import read_model
    from localkv.predict.inspection import SLOTS, inspect_model

    shape = read_model(chosen_model(model, model_option))
    if diagram:
        if as_json:
            raise UsageError("a diagram has no JSON", "leave out --json or --diagram")
        from localkv.cli.diagram import diagram_page
        from localkv.report.diagram_text import STYLES as DIAGRAM_STYLES

        lines = diagram_page(
            shape,
            width(),
            contexts=ctx_per_slot,
            slots=parallel,
            requests=requests,
            cache_types=(cache_type_k, cache_type_v),
        )
        show(lines, DIAGRAM_STYLES)
        return
    if requests:
        raise UsageError("--requests is for a diagram", "add --diagram")
    facts = inspect_model(
        shape, cache_type_k, cache_type_v, contexts=ctx_per_slot, slots=parallel or SLOTS
    )
    if as_json:
        print_json(facts)
    else:
        from localkv.cli.inspect_page import STYLES, page

        show(page(facts, width()), STYLES)
    if shape.rule != "exact":
        raise SystemExit(1)
