"""How a page reaches the terminal: width, colour, tables and lines that fit."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.cli.terminal import (
    MIN_WIDTH,
    PLAIN_WIDTH,
    coloured,
    columns,
    cut,
    print_json,
    show,
    table,
    width,
    wrap,
)

#: Wide and combining characters among plain ones.
TEXTS = st.text(alphabet="ab c漢\u0301", max_size=60)


class Terminal(io.StringIO):
    """A stream that says it is a terminal, of no known size."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(
    ("stated", "expected"),
    [("60", 60), ("132", 132), ("7", MIN_WIDTH), ("100000", 200), ("0", PLAIN_WIDTH),
     ("-5", PLAIN_WIDTH), ("wide", PLAIN_WIDTH), ("", PLAIN_WIDTH), ("9" * 5000, 200)],
)  # fmt: skip
def test_columns_states_the_width(
    monkeypatch: pytest.MonkeyPatch, stated: str, expected: int
) -> None:
    monkeypatch.setenv("COLUMNS", stated)

    assert width(io.StringIO()) == expected


def test_a_terminal_tells_its_own_width() -> None:
    ours, theirs = pty.openpty()
    try:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 61, 0, 0))
        with open(theirs, "w", closefd=False) as stream:
            assert width(stream) == 61
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("environment", "terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
    ],
)
def test_colour_where_it_is_welcome(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], terminal: bool, expected: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert coloured(Terminal() if terminal else io.StringIO()) is expected


PAGE = ["A title", "label   1.00 MiB", "tokens   2.00 MiB*", "note: [b]not markup[/b] :smile:"]


def test_painted_lines_are_the_plain_ones_with_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    show(PAGE)
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    show(PAGE, {"smile": "bold green"})
    painted = capsys.readouterr().out

    assert plain == "".join(f"{line}\n" for line in PAGE)
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain
    assert "\x1b[1;32msmile" in painted
    assert "\x1b[1;31m2.00 MiB*" in painted


def test_plain_lines_load_no_rich() -> None:
    code = (
        "from localkv.cli.terminal import show as s; import sys; s('a'); s(map(str, sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "localkv.cli.terminal" in done.stdout.split()
    assert not {"rich", "json", "shutil"} & set(done.stdout.split())


@given(TEXTS, st.integers(1, 40))
def test_cut_text_fits(text: str, most: int) -> None:
    shorter = cut(text, most)

    assert columns(shorter) <= most
    assert shorter == text or shorter.endswith("…")


@given(TEXTS, st.integers(10, 40), st.sampled_from(["", "label  "]))
def test_wrapped_lines_fit_and_lose_nothing(text: str, most: int, indent: str) -> None:
    lines = wrap(text, most, indent, " " * len(indent))

    assert all(columns(line) <= most for line in lines)
    joined = "".join(line[len(indent) :] for line in lines)
    assert joined.replace(" ", "") == text.replace(" ", "")


def test_a_number_keeps_its_unit() -> None:
    assert wrap("takes 12.00\N{NO-BREAK SPACE}MiB", 14) == ["takes", "12.00 MiB"]


def test_wide_characters_take_two_columns() -> None:
    assert columns("漢a\u0301") == 3


HEADERS = ("name", "size", "note")
ROWS = [("a model with a long name", "1.00 GiB", "first"), ("short", "20.00 MiB", "second")]


def test_a_table_that_fits_lines_up() -> None:
    assert table(HEADERS, ROWS, 80, left=(0, 2)) == [
        "name                           size  note",
        "a model with a long name   1.00 GiB  first",
        "short                     20.00 MiB  second",
    ]


def test_a_narrow_table_drops_then_cuts_then_stacks() -> None:
    dropped = table(HEADERS, ROWS, 36, left=(0, 2), optional=(2,))
    assert dropped[1] == "a model with a long name   1.00 GiB"
    cut_short = table(HEADERS, ROWS, 30, left=(0,), optional=(2,))
    assert cut_short[1] == "a model with a lon…   1.00 GiB"
    stacked = table(HEADERS, ROWS, 16, left=(0,), optional=(2,))
    assert stacked == [
        "name  a model", "  with a long", "  name", "size  1.00 GiB", "",
        "name  short", "size  20.00 MiB",
    ]  # fmt: skip


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=4), st.integers(MIN_WIDTH, 100))
def test_no_table_is_wider_than_it_may_be(rows: list[tuple[str, str, str]], most: int) -> None:
    for line in table(HEADERS, rows, most, left=(0, 2), optional=(2,)):
        assert columns(line) <= most


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_printed_json_is_ascii_and_whole(value: object) -> None:
    import contextlib

    caught = io.StringIO()
    with contextlib.redirect_stdout(caught):
        print_json({"v": value})
    line = caught.getvalue()

    assert line.endswith("\n")
    assert line[:-1].isascii()
    assert line[:-1].isprintable()
    assert json.loads(line) == {"v": value}


def test_half_a_surrogate_pair_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"path": "a\udcffb \U0001f600 \\ud800\x7f"})

    assert json.loads(capsys.readouterr().out) == {"path": "a\ufffdb \U0001f600 \\ud800\x7f"}
