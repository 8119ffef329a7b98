"""Paths as options and arguments."""

from __future__ import annotations

from typing import Any

import click

from localkv.errors import UsageError


class FilledPath(click.Path):
    """A path that is not empty: pathlib takes an empty one for the current directory."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return ``value`` as :class:`click.Path` does.

        Raises:
            UsageError: it is empty, as an unset variable of a shell leaves it.
        """
        if value == "":
            named = isinstance(param, click.Option)
            name = param.opts[-1] if named else param.human_readable_name
            raise UsageError(f"{name} is empty", "give a path")
        return super().convert(value, param, ctx)
