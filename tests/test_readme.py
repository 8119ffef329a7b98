"""The README says what the program says."""

from __future__ import annotations

import re

from readme_helpers import README, ROOT, documented, rendered

from localkv.cli.app import COMMANDS


def test_help_texts_and_figures_are_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")

    assert text == rendered(text), "run: python tests/readme_helpers.py"


def test_every_command_is_documented() -> None:
    assert documented() == set(COMMANDS)


def test_links_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")

    links = re.findall(r"\]\(([^)#]+)\)", text)

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_ci_runs_the_readmes_test_command() -> None:
    text = README.read_text(encoding="utf-8")

    assert re.search(r"<!-- test command -->\n```sh\n[^\n]*-m pytest\n```", text)
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
