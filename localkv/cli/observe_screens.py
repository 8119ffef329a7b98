"""Where looks at a server go: JSON lines, a log, or a page that a terminal redraws."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from localkv.cli import observe_lines as lines
from localkv.cli.observe_memory import memory_lines
from localkv.cli.terminal import fold, painted, print_json, show, width
from localkv.observe.rates import Rates, rates
from localkv.report.escape import escape_terminal
from localkv.snapshots import Observed, RecordingInfo


class Screen(ABC):
    """Shows one look after the other; a context manager."""

    def __init__(self, info: RecordingInfo) -> None:
        self.info = info

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        return

    @abstractmethod
    def show(self, seen: Observed) -> None:
        """Show one look."""


class JsonScreen(Screen):
    """One line of JSON says what is watched, then one per look: a recording on standard output."""

    def __enter__(self) -> Screen:
        self._print(self.info.to_dict())
        return self

    def show(self, seen: Observed) -> None:
        """Print one look."""
        self._print(seen.to_dict())

    def _print(self, value: dict[str, Any]) -> None:
        print_json(value)
        sys.stdout.flush()


class _Text(Screen):
    """What both kinds of text need: the last answer, for speeds, and what is predicted now."""

    def __init__(self, info: RecordingInfo) -> None:
        super().__init__(info)
        self.predicted: Mapping[str, Any] = info.predicted
        self._answer: Observed | None = None

    def rates(self, seen: Observed) -> Rates:
        """Return the speeds since the last answer, and take ``seen`` as the last one."""
        self.predicted = self.predicted if seen.predicted is None else seen.predicted
        found = rates(self._answer, seen)
        if seen.snapshot is not None:
            self._answer = seen
        return found


class LogScreen(_Text):
    """A head, then one line per look; what is new is said once, memory at the end."""

    def __init__(self, info: RecordingInfo) -> None:
        super().__init__(info)
        self._begun = False
        self._warned: tuple[str, ...] = ()
        self._gone = False

    def __exit__(self, *_: object) -> None:
        if self._answer is not None:
            show(memory_lines(self._answer, width(), gone=self._gone))

    def show(self, seen: Observed) -> None:
        """Print one look."""
        rate = self.rates(seen)
        self._gone = seen.snapshot is None and (self._gone or seen.error_kind == "unreachable")
        if not self._begun:
            head = lines.head_lines(self.info, self.predicted, seen.snapshot, width())
            show(head)
        elif seen.predicted is not None:
            print(lines.predicted_line(self.predicted))
        self._begun = True
        for event in seen.events:
            print(f"event: {escape_terminal(event)}")
        warnings = seen.snapshot.warnings if seen.snapshot else self._warned
        if warnings != self._warned:
            self._warned = warnings
            for text in warnings:
                print(f"warning: {escape_terminal(text)}")
        print(lines.log_line(seen, rate, self.predicted), flush=True)


class LiveScreen(_Text):
    """A page that is drawn anew with every look."""

    def __init__(self, info: RecordingInfo) -> None:
        from rich.live import Live

        super().__init__(info)
        self._live = Live(auto_refresh=False)
        self._events: list[str] = []

    def __enter__(self) -> Screen:
        self._live.__enter__()
        return self

    def __exit__(self, *how: Any) -> None:
        self._live.__exit__(*how)

    def show(self, seen: Observed) -> None:
        """Draw the page."""
        from rich.text import Text

        rate = self.rates(seen)
        self._events = [*self._events, *seen.events][-lines.EVENTS :]
        most = width()
        page = lines.live_lines(self.info, self.predicted, seen, rate, self._events, most)
        page += [piece for line in memory_lines(seen, most) for piece in fold(line, most)]
        # One text of lines that fit: rich would look for the end of each, at every look.
        whole = Text("\n", no_wrap=True, overflow="ignore").join(painted(page, lines.STYLES))
        self._live.update(whole, refresh=True)
