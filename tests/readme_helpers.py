"""What README.md and docs/*.md show of the program: help texts, commands, and what they print.

``python tests/readme_helpers.py`` writes the made parts anew; a test fails when they have drifted.
A comment in the line above a block of commands says what is special about it:

* ``<!-- test command -->``: what runs the tests, as CI does.
* ``<!-- not run: REASON -->``: no test runs it, but its localkv commands must be well formed.
* ``<!-- needs llama-server -->``: run while a llama-server answers.
* ``<!-- exit code 1 -->``: the answer is no.

After a block, ``<!-- output -->`` to ``<!-- end output -->`` holds what it prints: all of it, or as
in ``<!-- output: 5 lines -->`` and ``<!-- output: 5 lines from Host memory -->``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click
from click.testing import CliRunner

from localkv.cli.app import COMMANDS, cli
from localkv.gguf.demo import fetch

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
#: Its commands have a test of their own, test_cookbook.py.
COOKBOOK = ROOT / "docs" / "cookbook.md"
EXAMPLE = ROOT / "reports" / "example"
#: Columns of what is shown.
WIDTH = 96
TIMEOUT_S = 300.0
#: The address that the documentation gives a server.
SERVER = "http://127.0.0.1:8080"

_HELP = re.compile(r"(<!-- help: (\w+) -->\n).*?(<!-- end help -->)", re.DOTALL)
_EXCERPT = re.compile(r"(<!-- excerpt -->\n).*?(<!-- end excerpt -->)", re.DOTALL)
_BLOCK = re.compile(
    r"(?:<!-- (?P<marker>[^\n]+) -->\n)?```(?P<language>sh|python)\n(?P<code>(?:(?!```).*\n)+)```\n"
    r"(?P<made><!-- output(?:: (?P<count>\d+) lines?(?: from (?P<start>[^\n]+?))?)? -->\n"
    r"(?:```text\n(?P<output>(?:(?!```).*\n)*)```\n)?<!-- end output -->)?"
)
#: A command in the text, or in the middle of a line of a shell.
_INLINE = re.compile(r"`(localkv [^`\n]+)`")
_TYPED = re.compile(r'(?<![\w/.-])localkv (?:[^|;&()<>"#\n]|"[^"\n]*")+')


class Block(NamedTuple):
    """Commands in a page: ``marker`` says what is special, ``output`` what is shown of theirs."""

    page: str
    line: int
    marker: str
    language: str
    code: str
    output: str | None
    count: int | None
    start: str

    @property
    def runs(self) -> bool:
        return not self.marker.startswith(("not run", "test command"))

    @property
    def needs_server(self) -> bool:
        return self.marker == "needs llama-server"

    @property
    def exit_code(self) -> int:
        return int(self.marker.removeprefix("exit code ")) if "exit code" in self.marker else 0

    def excerpt(self, printed: str) -> str:
        """Return the part of ``printed`` that the page shows."""
        lines = printed.rstrip().splitlines()
        if self.start:
            first = next((i for i, line in enumerate(lines) if line.startswith(self.start)), None)
            assert first is not None, f"nothing printed begins with {self.start!r}:\n{printed}"
            lines = lines[first:]
        return "".join(f"{line.rstrip()}\n" for line in lines[: self.count])


def _block(match: re.Match[str], page: str) -> Block:
    return Block(
        page,
        match.string.count("\n", 0, match.start()) + 1,
        match["marker"] or "",
        match["language"],
        match["code"].rstrip(),
        match["output"] or "" if match["made"] else None,
        int(match["count"]) if match["count"] else None,
        match["start"] or "",
    )


def blocks() -> Iterator[Block]:
    """Yield every block of commands of README and docs, but for the cookbook's."""
    for page in PAGES:
        if page != COOKBOOK:
            for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
                yield _block(match, page.name)


def typed() -> list[tuple[str, str]]:
    """Return page and text of every localkv command, in blocks and in running text."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [(page.name, command) for command in _INLINE.findall(text)]
        for match in _BLOCK.finditer(text):
            if match["language"] == "sh":
                found += [(page.name, command.strip()) for command in _TYPED.findall(match["code"])]
    return found


def check_command(text: str) -> None:
    """Parse the command ``text`` without running it.

    Raises:
        click.UsageError: no such command or option, or a value that it does not take.
    """
    name, *words = shlex.split(text)[1:]
    with suppress(click.exceptions.Exit):  # of --help
        group = cli.make_context("localkv", [name, *words])
        command = cli.get_command(group, name)
        if command is None:
            raise click.UsageError(f"no such command: {text}")
        # In running text the name alone stands for the command.
        if words:
            command.make_context(name, words, parent=group)


def fill(folder: Path, model: Path) -> Path:
    """Make ``folder`` like the one in which a person types: the repository, with a model.gguf.

    What takes minutes is cut short: a sweep is only planned, and a load ends after two requests.
    """
    (folder / "model.gguf").symlink_to(model)
    for name in ("docs", "sweeps", "dashboards"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(EXAMPLE, folder / "reports" / "example")
    script = folder / "bin" / "localkv"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        'sweep*) set -- "$@" --dry-run ;;\n'
        'observe*--load*) set -- "$@" --max-requests 2 ;;\n'
        "esac\n"
        f'exec {shlex.quote(sys.executable)} -m localkv "$@"\n'
    )
    script.chmod(0o755)
    return folder


def run_block(
    block: Block, folder: Path, server: str = "", programs: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``block`` in ``folder``, with the folders of ``programs`` on PATH.

    ``server`` stands in for the address of the documentation.
    """
    places = (folder / "bin", *(program.parent for program in programs))
    shell = ["bash", "-euo", "pipefail", "-c"]
    program = shell if block.language == "sh" else [sys.executable, "-c"]
    return subprocess.run(
        [*program, block.code.replace(SERVER, server or SERVER)],
        cwd=folder,
        env={
            **os.environ,
            "PATH": os.pathsep.join((*map(str, places), os.environ["PATH"])),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": str(WIDTH),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def help_text(command: str) -> str:
    """Return what ``localkv COMMAND --help`` prints in a terminal of 96 columns."""
    result = CliRunner().invoke(
        cli, [command, "--help"], prog_name="localkv", terminal_width=96, max_content_width=96
    )
    assert result.exit_code == 0
    return result.output.rstrip()


def excerpt() -> str:
    """Return the first part of the example report, its pictures named from the README's place."""
    text = (EXAMPLE / "report.md").read_text(encoding="utf-8")
    answer = text.split("\n## ")[0].split("\n", 1)[1].strip()
    return f"{answer}\n\n![Measured against predicted](reports/example/fit.svg)"


def rendered(text: str) -> str:
    """Return the page ``text`` with its help texts and its excerpt made anew."""

    def with_help(match: re.Match[str]) -> str:
        return f"{match[1]}```text\n{help_text(match[2])}\n```\n{match[3]}"

    text = _HELP.sub(with_help, text)
    return _EXCERPT.sub(lambda m: f"{m[1]}{excerpt()}\n{m[2]}", text)


def with_outputs(text: str, folder: Path) -> str:
    """Return the page ``text`` with what its commands print made anew."""

    def with_output(match: re.Match[str]) -> str:
        block = _block(match, "")
        if block.output is None:
            return match[0]
        done = run_block(block, folder)
        assert done.returncode == block.exit_code, f"{block.code}: {done.stderr}"
        first, last = match["made"].split("\n", 1)[0], "<!-- end output -->"
        made = f"{first}\n```text\n{block.excerpt(done.stdout)}```\n{last}"
        return match[0].removesuffix(match["made"]) + made

    return _BLOCK.sub(with_output, text)


def documented() -> set[str]:
    """Return the commands whose help stands in the README."""
    return {match[2] for match in _HELP.finditer(README.read_text(encoding="utf-8"))}


def write() -> None:
    """Write the made parts of README and docs anew."""
    with tempfile.TemporaryDirectory() as place:
        folder = fill(Path(place), Path(fetch("demo")))
        for page in PAGES:
            text = rendered(page.read_text(encoding="utf-8"))
            if page != COOKBOOK:
                text = with_outputs(text, folder)
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
    assert documented() == set(COMMANDS)
