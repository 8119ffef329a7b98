"""What a person sees while something takes time: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from localkv.cli import one_line, say
from localkv.sweep.runner import Progress
from localkv.units import format_bytes, plural

#: Seconds between two lines about a wait that nothing else shows.
_SAY_EVERY_S = 3.0


def duration(seconds: float) -> str:
    """Return ``seconds`` as a person says them: 8 s, 2 min 05 s, 1 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def describe(progress: Progress) -> str:
    """Return the point of ``progress`` in words."""
    config = progress.point.config
    types = {config.cache_type_k, config.cache_type_v}
    parts = [f"n_ctx {config.n_ctx}", plural(config.n_seq_max, "slot")]
    if types != {"f16"}:
        parts.append("/".join(dict.fromkeys((config.cache_type_k, config.cache_type_v))))
    if config.kv_unified:
        parts.append("unified")
    if config.swa_full:
        parts.append("swa_full")
    return ", ".join(parts)


@contextmanager
def sweep_progress(total: int) -> Iterator[Callable[[Progress], None]]:
    """Yield an observer of a sweep of ``total`` runs."""
    if not sys.stderr.isatty():
        yield _plain
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=total, left="")

        def observe(progress: Progress) -> None:
            if progress.record is not None:
                bar.console.print(one_line(_result(progress)), markup=False, highlight=False)
            bar.update(
                task,
                completed=progress.index + (progress.record is not None),
                description=f"{describe(progress)} {progress.phase}".strip(),
                left=f"about {duration(progress.seconds_left)} left",
            )

        yield observe


def _plain(progress: Progress) -> None:
    if progress.record is not None:
        left = f"; about {duration(progress.seconds_left)} left" if progress.seconds_left else ""
        say(f"[{progress.index + 1}/{progress.total}] {_result(progress)}{left}")


def _result(progress: Progress) -> str:
    record = progress.record
    assert record is not None
    if record.outcome != "ok":
        return f"{describe(progress)}: {record.outcome}: {record.reason}"
    peak = record.peak.get("rss")
    said = f", process at most {format_bytes(peak.value)}" if peak and peak.value else ""
    return f"{describe(progress)}: ok{said}"


@contextmanager
def download_progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a callback ``(done_bytes, total_bytes, label)`` that draws a download.

    Nothing is drawn before the first call: a model that is already there is silent.
    """
    if not sys.stderr.isatty():
        said: set[str] = set()

        def tell(done: int, total: int, label: str) -> None:
            if label not in said:
                said.add(label)
                say(f"{label} ({format_bytes(total)})")

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def draw(done: int, total: int, label: str) -> None:
        if not tasks:
            bar.start()
        if label not in tasks:
            tasks[label] = bar.add_task(label, total=total)
        bar.update(tasks[label], completed=done, total=total)

    try:
        yield draw
    finally:
        if tasks:
            bar.stop()


def planning_progress() -> Callable[[int, float], None]:
    """Return a callback ``(points, share_done)`` that says a line now and then of a long wait."""
    start = last = time.monotonic()

    def tell(points: int, share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _SAY_EVERY_S or share >= 1:
            return
        last = now
        left = duration((now - start) / share * (1 - share))
        say(f"planning {plural(points, 'point')}: {share:.0%}, about {left} left")

    return tell
