"""The command line: one file per command; arguments in, one library call, text out."""

from __future__ import annotations

import os
import sys

from localkv.errors import LocalkvError


def main() -> None:
    """Run ``localkv``; the entry point of the installed command.

    Every error that is meant for a person becomes one line on standard error here, and its exit
    code the process's.
    """
    from localkv.cli.app import cli

    try:
        cli.main(prog_name="localkv", standalone_mode=True)
    except LocalkvError as error:
        print(f"localkv: {one_line(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output went away, as `localkv ... | head` does; nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def one_line(text: str) -> str:
    """Return ``text`` as one line that no terminal takes for a command."""
    return "".join(c if c.isprintable() else " " for c in text)
