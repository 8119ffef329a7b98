"""Strings from a file do nothing where they are shown."""

from __future__ import annotations

import re
import unicodedata
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from localkv.report.escape import (
    code_block,
    code_span,
    escape_markdown,
    escape_terminal,
    escape_xml,
    safe_filename,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "![x](http://evil.example/x.png)",
    "[click](javascript:alert(1))",
    "https://evil.example www.evil.example",
    "# heading",
    "- item",
    "1. item",
    "a | b",
    "`code` ``more``",
    "**bold** __bold__ ~~gone~~ $math$",
    "&lt;b&gt; &#60;",
    "<!-- comment",
    "line\nbreak\r\nand \x1b[31mred\x1b[0m \x07 \u202egnp.exe \u200b\ufeff",
    "---",
    "===",
    "> quote",
    "\\",
)


def html(text: str) -> str:
    return str(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


def shown(text: str) -> str:
    """What a reader sees of a page: its text without tags, entities decoded."""
    from html import unescape

    return " ".join(unescape(re.sub(r"<[^>]*>", "", html(text))).split())


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_the_characters_and_does_nothing(text: str) -> None:
    page = html(escape_markdown(text))
    assert re.sub(r"</?p>", "", page).count("<") == 0
    assert shown(escape_markdown(text)) == escape_terminal(text)


@given(st.text(max_size=300))
def test_markdown_of_any_text_is_one_plain_paragraph(text: str) -> None:
    page = html(f"x {escape_markdown(text)}").strip()
    assert page.startswith("<p>")
    assert "<" not in page.removeprefix("<p>").removesuffix("</p>")


@given(st.text(max_size=300) | st.text(alphabet="|`\\a ", max_size=12) | st.sampled_from(HOSTILE))
def test_a_table_cell_stays_one_cell(text: str) -> None:
    for cell in (escape_markdown(text), code_span(text)):
        page = html(f"| a | b |\n| --- | --- |\n| {cell} | end |\n")
        assert page.count("<td>") == 2
        assert "<td>end</td>" in page


@given(st.text())
def test_terminal_text_is_one_line_without_control(text: str) -> None:
    safe = escape_terminal(text, 40)
    assert len(safe) <= 40
    assert all(unicodedata.category(c)[0] != "C" for c in safe)
    assert safe.splitlines() in ([], [safe])


@given(st.text())
def test_xml_text_comes_back_as_it_is_shown(text: str) -> None:
    element = ET.fromstring(f'<t a="{escape_xml(text)}">{escape_xml(text)}</t>')
    assert (element.text or "") == element.get("a") == escape_terminal(text)


@given(st.text())
def test_file_names_are_tame(text: str) -> None:
    name = safe_filename(text)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,90}", name)
    assert ".." not in name
    assert not name.endswith(".")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("../../etc/passwd", "etc-passwd"),
        ("con", "model-con"),
        ("NUL.txt", "model-NUL.txt"),
        ("", "model"),
        ("\u202e", "model"),
        ("Qwen3 4B (Q4_K_M)", "Qwen3-4B-Q4_K_M"),
        ("a" * 300, "a" * 80),
    ],
)
def test_file_names_by_example(text: str, name: str) -> None:
    assert safe_filename(text) == name


@example(["`````", "`"])
@given(st.lists(st.text(alphabet="ab`~\n\x1b", max_size=20), max_size=5))
def test_a_code_block_cannot_be_left(lines: list[str]) -> None:
    page = html("\n".join([*code_block(lines, "sh"), "", "after"]))
    assert page.count("<pre>") == 1
    assert page.rstrip().endswith("<p>after</p>")


def test_long_names_end_in_an_ellipsis() -> None:
    assert escape_terminal("x" * 500) == "x" * 199 + "…"
