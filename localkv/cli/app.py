"""The ``localkv`` command itself; a subcommand's module is loaded when it is called."""

from __future__ import annotations

from importlib import import_module

import click

import localkv

#: Subcommand -> what the overview says of it. The module is localkv.cli.<name>.
COMMANDS = {
    "sweep": "Measure a model at several contexts and slot counts, and write a report.",
    "inspect": "Show what a model file says about its memory, in one page.",
    "predict": "Compute what one configuration needs, to the byte.",
    "selftest": "Compare formula and engine over a grid of configurations, for a bug report.",
    "report": "Render the report of a finished or interrupted sweep again.",
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview without loading any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="First steps: localkv sweep",
)
@click.version_option(localkv.__version__, prog_name="localkv")
def cli() -> None:
    """How much memory does a local language model really need?

    localkv predicts it from the model file's header, asks the engine for its plan, measures the
    real process, and says what fits and what to change.

    A MODEL is the path of a .gguf file (any shard of a set), or one of the built-in models "demo"
    and "demo-swa", which are fetched on first use.
    """
