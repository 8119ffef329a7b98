"""``localkv capacity``: how many requests fit at once, how long each may be, what to change."""

from __future__ import annotations

from typing import Any

import click

from localkv.cli import server_pages
from localkv.cli.options import (
    chosen_model,
    json_option,
    model_argument,
    run_options,
)


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
@click.option(
    "--levers", is_flag=True, help="Say what would let more in, even where all that was asked fits."
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
        from localkv.cli import capacity_vllm

        raise SystemExit(capacity_vllm.answer(shape, options))
    from localkv.cli import capacity_slots

    raise SystemExit(capacity_slots.answer(shape, options, source))
