"""The errors localkv shows to people, with the exit code each of them stands for.

Every error is one line that says what is wrong and where, and a hint that says what to do.
They are turned into text in one place, at the edge of the command line.
"""

from __future__ import annotations


class LocalkvError(Exception):
    """Base of all errors that are meant for a person.

    ``message`` says what is wrong and where; ``hint`` says what to do next.
    ``exit_code`` is the process exit code the command line uses: 1 the answer is no.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message


class UsageError(LocalkvError):
    """The request itself is wrong: a value out of range, options that exclude each other."""

    exit_code = 2


class ModelError(LocalkvError):
    """The model file cannot be found, read or understood."""

    exit_code = 3


class EngineError(LocalkvError):
    """The inference engine or a server failed, or is not installed."""

    exit_code = 4


class Interrupted(LocalkvError):
    """The person pressed Ctrl-C; what was done so far is kept."""

    exit_code = 130
