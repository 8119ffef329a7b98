"""The page that a terminal redraws."""

from __future__ import annotations

import io
import re

import pytest

from localkv.cli import observe_lines
from localkv.cli.observe_memory import memory_lines
from localkv.cli.observe_screens import LiveScreen
from localkv.observe.rates import Rates
from localkv.snapshots import Observed, Pinned, RecordingInfo, Snapshot

INFO = RecordingInfo(server="llama-server", url="http://127.0.0.1:8080", predicted={"why": "not"})


def test_a_live_page_is_the_plain_lines_and_keeps_what_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=60, height=40, color_system="standard")
    monkeypatch.setattr("rich.live.get_console", lambda: console)
    monkeypatch.setenv("COLUMNS", "60")
    command = f"curl -X POST 'http://127.0.0.1:8080/slots/{'1' * 70}?action=erase'"
    pinned = Pinned(name="m", bytes=5, until="the end", free=(command,))
    look = Observed(2.0, 0.1, snapshot=Snapshot("llama-server", used_tokens=3), pinned=(pinned,))
    with LiveScreen(INFO) as screen:
        screen.show(look)
        written = text.getvalue()
    assert "\x1b[1;31m" in written or "\x1b[1m" in written
    shown = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*\w", "", written).splitlines()]
    assert all(len(line) <= 60 for line in shown)
    page = observe_lines.live_lines(INFO, INFO.predicted, look, Rates(), [], 60)
    page += memory_lines(look, 60)
    whole = [line for line in page if len(line) <= 60]
    assert len(whole) == len(page) - 1
    assert [line for line in shown if line in whole] == whole
    assert command.replace(" ", "") in "".join(shown).replace(" ", "")
