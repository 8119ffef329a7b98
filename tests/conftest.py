"""What tests share: the real models, fetched once into the user's cache directory; the command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from localkv.cli import main
from localkv.gguf.demo import fetch

# How fast a loaded machine runs an example says nothing about the code.
settings.register_profile(
    "localkv", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("localkv")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Return the path of SmolLM2-135M-Instruct Q4_1: plain attention, GQA, 30 layers."""
    return Path(fetch("demo"))


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Return the path of Gemma 3 270M: sliding windows and a vocabulary of 262k tokens."""
    return Path(fetch("demo-swa"))


#: Runs ``localkv ARGS`` in this process: (exit code, standard output, standard error).
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs ``localkv ARGS`` here: (exit code, stdout, stderr)."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["localkv", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (0 if code is None else int(code)), out, err

    return call
