"""README.md and docs/*.md say what the program says, and every command in them runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from readme_helpers import (
    PAGES,
    README,
    ROOT,
    Block,
    blocks,
    check_command,
    documented,
    fill,
    rendered,
    run_block,
    typed,
)
from server_helpers import running_llama_server
from servers import binary

from localkv.cli.app import COMMANDS

BLOCKS = {f"{block.page}:{block.line}": block for block in blocks()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, gemma_path: Path) -> Path:
    return fill(tmp_path_factory.mktemp("typed"), smollm2_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("-c", 8192, "-np", 4, "-t", 2, "--metrics", "--no-warmup")
    with running_llama_server(folder, smollm2_path, *flags) as running:
        yield running.url


def check(block: Block, place: Path, *how: Any) -> None:
    done = run_block(block, place, *how)

    assert done.returncode == block.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    if block.output is not None:
        assert block.output == block.excerpt(done.stdout), "run: python tests/readme_helpers.py"


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", [name for name, block in BLOCKS.items() if block.runs and not block.needs_server]
)
def test_a_block_of_commands_runs_and_prints_what_is_shown(place: Path, name: str) -> None:
    check(BLOCKS[name], place)


@pytest.mark.server
@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if block.needs_server])
def test_a_block_of_commands_runs_on_a_server(place: Path, server: str, name: str) -> None:
    check(BLOCKS[name], place, server, [binary("llama-server")])


@pytest.mark.parametrize(("page", "command"), sorted(set(typed())))
def test_a_command_is_well_formed(page: str, command: str) -> None:
    check_command(command)


def test_what_is_not_run_says_why() -> None:
    markers = {block.marker for block in BLOCKS.values() if not block.runs}

    assert "test command" in markers
    assert all(re.fullmatch(r"test command|not run: .{10,}", marker) for marker in markers)


def test_every_fence_of_commands_is_found() -> None:
    fences = sum(
        len(re.findall(r"^ *```(?:sh|bash|shell|console|python)\b", page.read_text("utf-8"), re.M))
        for page in PAGES
        if page.name != "cookbook.md"
    )

    assert fences == len(BLOCKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_help_texts_and_figures_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert text == rendered(text), "run: python tests/readme_helpers.py"


def test_every_command_is_documented() -> None:
    assert documented() == set(COMMANDS)


def anchors(page: Path) -> set[str]:
    """Return the names by which GitHub links to the headings of ``page``."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))

    for link in links:
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_readme_leads_to_every_page() -> None:
    text = README.read_text(encoding="utf-8")

    missing = [page for page in PAGES[1:] if f"({page.relative_to(ROOT)}" not in text]
    assert missing == []


def test_ci_runs_the_readmes_test_command() -> None:
    text = README.read_text(encoding="utf-8")

    assert re.search(r"<!-- test command -->\n```sh\n[^\n]*-m pytest\n```", text)
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
