"""The command line: one file per command; arguments in, one library call, text out."""

from __future__ import annotations

import contextlib
import os
import sys

from localkv.errors import Interrupted, LocalkvError


def main() -> None:
    """Run ``localkv``; the entry point of the installed command.

    Every error becomes one line on standard error here, and its exit code the process's.
    """
    _prepare_streams()
    try:
        code = _run()
        sys.stdout.flush()
    except LocalkvError as error:
        code = _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = _fail("interrupted", Interrupted.exit_code)
    except BrokenPipeError:
        code = 0  # the reader went away, as `localkv ... | head` does; nothing is wrong
    except OSError as error:
        name = f": {error.filename}" if error.filename else ""
        code = _fail(f"{error.strerror or error}{name}", LocalkvError.exit_code)
    except Exception as error:
        if os.environ.get("LOCALKV_TRACEBACK"):
            raise
        said = f"{type(error).__name__}: {error}"
        code = _fail(f"unexpected error ({said}); LOCALKV_TRACEBACK=1 shows where", 1)
    _drop_unwritable_output()
    sys.exit(code)


def _run() -> int:
    """Run the command and return the exit code; usage errors are click's own texts."""
    import click

    from localkv.cli.app import cli

    try:
        result = cli.main(prog_name="localkv", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    return result if isinstance(result, int) else 0


def _fail(text: str, code: int) -> int:
    if sys.stderr is not None:
        # Where there is nowhere left to say it, the exit code still does.
        with contextlib.suppress(OSError):
            print(f"localkv: {one_line(text)}", file=sys.stderr, flush=True)
    return code


def _prepare_streams() -> None:
    """Give every stream a place to write to, and an answer to letters it cannot write."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (lives as long as we do)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_unwritable_output() -> None:
    """Keep the interpreter from trying once more, at exit, what could not be written."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (lives until exit)


def one_line(text: str) -> str:
    """Return ``text`` as one line that no terminal takes for a command."""
    return "".join(c if c.isprintable() else " " for c in text)
