"""The ``localkv`` command itself; a subcommand's module is loaded when it is called."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import click

import localkv

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Subcommand -> what the overview says of it. The module is localkv.cli.<name>.
COMMANDS = {
    "sweep": "Measure a model at several contexts and slots; write a report.",
    "inspect": "Show on one page what a model's context costs.",
    "predict": "Compute what one configuration needs, to the byte.",
    "capacity": "Say how many requests fit at once, and what lets more in.",
    "models": "List the models on this machine, and which of them fit.",
    "report": "Write the report of a sweep or a recording again.",
    "compare": "Compare two sweeps: what differs by more than scatter.",
    "observe": "Watch a live server, or load it until it gives up.",
    "export": "Serve the figures of live servers to Prometheus.",
    "doctor": "Check this machine: what is missing, and how to get it.",
    "selftest": "Compare formula and engine, for a bug report.",
    "completion": "Print the completion script for bash, zsh or fish.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used: start-up is part of the answer."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, loading its module."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"localkv.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with ``incomplete`` without loading any command."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=text)
            for name, text in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview without loading any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nFirst steps: localkv inspect demo   what the context of a model costs\n"
    "             localkv sweep          measure it here, with a report",
)
@click.version_option(localkv.__version__, prog_name="localkv")
def cli() -> None:
    """How much memory does a local language model really need?

    localkv computes it from the header of the model's file, measures a real run of it, watches
    live servers, and says what fits and what to change.

    A MODEL is a .gguf file (any one of its shards); ollama:NAME[:TAG] or hf:ORG/NAME[/FILE] for
    what is on this machine already; the URL of a .gguf file, of which only the header is fetched;
    or demo or demo-swa, two small models that are fetched on first use.
    """
