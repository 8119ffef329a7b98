"""The command line: one file per command; arguments in, one library call, text out."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import NoReturn

from localkv.errors import Interrupted, LocalkvError

#: Objects made and not freed before the garbage collector runs, instead of Python's 700.
_GARBAGE_AFTER = 100_000


#: What registers work for the end of the process imports the first; a library of C that may have
#: some is loaded through the second; files that go when their last reference does, by the third.
_TIDYING = frozenset({"atexit", "ctypes", "tempfile"})


def run() -> NoReturn:
    """Run ``localkv`` as a process of its own; the entry point of the installed command.

    As :func:`main`, but the interpreter is not taken apart where nothing waits for that: it would
    take a tenth of the time of a command that answers at once.
    """
    import threading

    code = _answer()
    if _TIDYING.isdisjoint(sys.modules) and threading.active_count() == 1:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main() -> NoReturn:
    """Run ``localkv`` and raise SystemExit with its exit code, for callers in the same process."""
    sys.exit(_answer())


def _answer() -> int:
    """Run ``localkv``, flush what it printed and return its exit code.

    Every error becomes one line on standard error here.
    """
    # A command that answers at once makes some ten thousand objects and keeps nearly all of them:
    # looking for garbage among them would take a tenth of its time.
    gc.set_threshold(_GARBAGE_AFTER)
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
    # What is left goes with the process: the collector need not walk through it once more.
    gc.freeze()
    return code


def _run() -> int:
    """Run the command and return the exit code; usage errors are click's own texts."""
    import click

    from localkv.cli.app import cli

    if "_LOCALKV_COMPLETE" in os.environ:
        import localkv.cli.shells  # noqa: F401 (click asks its classes)
    stdout = sys.stdout
    try:
        result = cli.main(prog_name="localkv", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as end:  # how a command says that the answer is no
        # click ends with 1 where the reader went away, and puts another stream in the way of it.
        result = end.code if sys.stdout is stdout else 0
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


def say(text: str) -> None:
    """Print one line on standard error, where everything but the result goes.

    Texts hold names from model files and what the engine said: nothing of that may act on the
    terminal.
    """
    print(one_line(text), file=sys.stderr, flush=True)
