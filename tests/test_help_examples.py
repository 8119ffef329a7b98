"""Every example of every ``--help`` works as it is printed there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from readme_helpers import fill

from localkv.cli.app import COMMANDS, cli

REPOSITORY = Path(__file__).resolve().parents[1]

#: Commands whose example needs a running server: test_readme.py and test_export.py have one.
NEEDS_A_SERVER = ("observe", "export")


def command_of(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def examples(name: str) -> list[str]:
    """Return the commands that the help of ``name`` gives as examples."""
    epilog = command_of(name).epilog or ""
    return [line.strip() for line in re.findall(r"Examples?:((?:.|\n)+)", epilog)[0].splitlines()]


EXAMPLES = [
    (name, example)
    for name in COMMANDS
    if name not in NEEDS_A_SERVER
    for example in examples(name)
    if example
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, gemma_path: Path) -> Path:
    return fill(tmp_path_factory.mktemp("examples"), smollm2_path)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in NEEDS_A_SERVER])
def test_every_command_has_an_example_that_names_it(name: str) -> None:
    found = examples(name)
    assert found
    assert all(f"localkv {name}" in example for example in found)


@pytest.mark.engine
@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_an_example_works(place: Path, name: str, example: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("the examples are typed into a POSIX shell")
    done = subprocess.run(
        [bash, "-c", example],
        cwd=place,
        env={
            **os.environ,
            "PATH": os.pathsep.join((str(place / "bin"), os.environ["PATH"])),
            "PYTHONPATH": str(REPOSITORY),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout or example.startswith("eval ")
