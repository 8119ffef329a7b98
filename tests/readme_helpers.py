"""The parts of the README that are made, not written: help texts and the report excerpt.

``python tests/readme_helpers.py`` writes them anew; a test fails when they have drifted.
"""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from localkv.cli.app import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
EXAMPLE = ROOT / "reports" / "example"
_HELP = re.compile(r"(<!-- help: (\w+) -->\n).*?(<!-- end help -->)", re.DOTALL)
_EXCERPT = re.compile(r"(<!-- excerpt -->\n).*?(<!-- end excerpt -->)", re.DOTALL)


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
    """Return the README ``text`` with its made parts made anew."""

    def with_help(match: re.Match[str]) -> str:
        return f"{match[1]}```text\n{help_text(match[2])}\n```\n{match[3]}"

    text = _HELP.sub(with_help, text)
    return _EXCERPT.sub(lambda m: f"{m[1]}{excerpt()}\n{m[2]}", text)


def documented() -> set[str]:
    """Return the commands whose help stands in the README."""
    return {match[2] for match in _HELP.finditer(README.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")
    assert documented() == set(COMMANDS)
