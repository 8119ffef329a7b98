"""Option decorators that several commands share, under llama.cpp's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from localkv.errors import UsageError
from localkv.units import parse_int_values

F = TypeVar("F", bound=Callable[..., Any])


class ValueList(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A list of values for one option; ``parse`` turns its text into a tuple."""

    def __init__(self, name: str, parse: Callable[[str], tuple[Any, ...]]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the tuple that ``value`` stands for, or end with a usage error of click's."""
        if isinstance(value, tuple):
            return value
        try:
            return self._parse(value)
        except UsageError as error:
            raise click.BadParameter(str(error), ctx, param) from None


class FiniteRange(click.FloatRange):
    """A number in a range: NaN, which no comparison refuses, and infinity are none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return ``value`` as a float, or end with a usage error of click's."""
        if not math.isfinite(click.FLOAT.convert(value, param, ctx)):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return super().convert(value, param, ctx)


#: Integers as 1,2,4 or 2048-32768*2.
INT_LIST = ValueList("values", parse_int_values)

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def behind_options(function: F) -> F:
    """Add what a live server may not tell of itself: its model, and whether its slots share."""
    function = click.option(
        "--kv-unified/--no-kv-unified",
        default=None,
        help="llama-server: whether the slots share one cache.  [default: as it was started]",
    )(function)
    return click.option(
        "--model",
        metavar="MODEL",
        help="The server's model, where its file cannot be read from here.",
    )(function)


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Return what a shell may offer for a model; loaded only when a shell asks."""
    from localkv.cli.shells import model_items

    return model_items(incomplete)


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Return what a shell may offer for the directory of a run."""
    from localkv.cli.shells import run_items

    return run_items(incomplete)


def model_argument(function: F) -> F:
    """Add the model as an argument, or as ``-m/--model``."""
    function = click.argument("model", required=False, shell_complete=complete_model)(function)
    return click.option(
        "-m",
        "--model",
        "model_option",
        metavar="MODEL",
        shell_complete=complete_model,
        help="The model: a .gguf file or its URL, ollama:NAME, hf:ORG/NAME, or demo.",
    )(function)


def chosen_model(*named: str | None, default: str = "demo") -> str:
    """Return the model that was named in one of the ways to name one, or ``default``.

    Raises:
        UsageError: two different models were named, or an empty name.
    """
    given = list(dict.fromkeys(name for name in named if name is not None))
    if "" in given:
        raise UsageError("the model's name is empty", "name a .gguf file, or demo")
    if len(given) > 1:
        raise UsageError(f"two models were named: {given[0]} and {given[1]}", "name one")
    return given[0] if given else default


#: Option -> setting of a run, of :func:`run_options`.
SETTINGS = {
    "parallel": "n_seq_max",
    "cache_type_k": "cache_type_k",
    "cache_type_v": "cache_type_v",
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "flash_attn": "flash_attn",
    "kv_unified": "kv_unified",
    "swa_full": "swa_full",
    "split_mode": "split_mode",
    "main_gpu": "main_gpu",
    "no_kv_offload": "no_kv_offload",
    "n_cpu_moe": "n_cpu_moe",
}

_RUN_OPTIONS = (
    click.option(
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help="Type of the K cache: f16, q8_0, q4_0, ...  [default: f16]",
    ),
    click.option(
        "-ctv",
        "--cache-type-v",
        metavar="TYPE",
        help="Type of the V cache.  [default: f16]",
    ),
    click.option("-b", "--batch-size", metavar="N", type=int, help="Logical batch size."),
    click.option(
        "-ub",
        "--ubatch-size",
        metavar="N",
        type=int,
        help="Physical batch size: the compute buffers follow it.",
    ),
    click.option(
        "-fa", "--flash-attn", type=click.Choice(["auto", "on", "off"]), help="Flash attention."
    ),
    click.option(
        "--kv-unified/--no-kv-unified", default=None, help="One cache that the slots share."
    ),
    click.option(
        "--swa-full/--no-swa-full",
        default=None,
        help="Sliding layers keep all of the context.",
    ),
    click.option(
        "-ngl",
        "--gpu-layers",
        metavar="N|all|auto",
        help="Layers on the GPUs; the output counts as one.  [default: 0]",
    ),
    click.option("-ts", "--tensor-split", metavar="N,...", help="Share of each GPU, as 3,1."),
    click.option(
        "-sm", "--split-mode", type=click.Choice(["layer", "none"]), help="Over all GPUs, or one."
    ),
    click.option(
        "-mg",
        "--main-gpu",
        metavar="N",
        type=int,
        help="The GPU used with --split-mode none.",
    ),
    click.option(
        "-nkvo", "--no-kv-offload", is_flag=True, default=None, help="Keep the KV cache in RAM."
    ),
    click.option(
        "-ncmoe",
        "--n-cpu-moe",
        metavar="N",
        type=click.IntRange(-1),
        help="Keep the experts of the first N blocks in RAM; -1: all.",
    ),
    click.option(
        "--no-op-offload", is_flag=True, help="Compute the layers in RAM on the CPU alone."
    ),
    click.option("-nr", "--no-repack", is_flag=True, help="Make no repacked copies of weights."),
    click.option(
        "--defaults",
        type=click.Choice(["llama-server", "llama-cpp-python", "ollama"]),
        default="llama-server",
        show_default=True,
        help="Whose defaults fill in what is not given.",
    ),
)


def run_options(function: F) -> F:
    """Add the settings of a run that predict and capacity share, but for context and slots."""
    for option in reversed(_RUN_OPTIONS):
        function = option(function)
    return function
