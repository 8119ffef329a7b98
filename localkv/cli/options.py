"""Option decorators that several commands share, under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from localkv.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def model_argument(function: F) -> F:
    """Add the model as an argument, or as ``-m/--model``."""
    function = click.argument("model", required=False)(function)
    return click.option(
        "-m",
        "--model",
        "model_option",
        metavar="MODEL",
        help="The model: a .gguf file, or demo, or demo-swa.",
    )(function)


def chosen_model(argument: str | None, option: str | None, default: str = "demo") -> str:
    """Return the model that was named in either way, or ``default``.

    Raises:
        UsageError: two different models were named.
    """
    if argument and option and argument != option:
        raise UsageError(f"two models were named: {argument} and {option}", "name one")
    named = argument if argument is not None else option
    if named == "":
        raise UsageError("the model's name is empty", "name a .gguf file, or demo")
    return default if named is None else named
