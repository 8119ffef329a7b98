"""What a server's memory is made of, in words: what grew, what is pinned, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.analysis.growth import SLACK, Explanation, explain, rest_now
from localkv.report.escape import code_span, escape_markdown
from localkv.report.page import size
from localkv.report.table import table
from localkv.snapshots import HostMemory, MemoryPart, Observed, Pinned
from localkv.units import format_bytes, plural

_SAVED = ("prompt cache", "context checkpoints")
_GROWN = {
    "compute buffers": "the compute buffers, which become resident with the first full batch",
    "samplers": "the samplers of slots that were used for the first time",
}
_LESS_OFTEN = "look more often (--interval) or give the server's log (--log FILE, -lv 4)"
#: Characters of sentences of ours.
_LONG = 1000


def growth_words(memory: HostMemory) -> list[str]:
    """Return the answer, sentence by sentence: did it grow, by what, and is that a leak?"""
    found = explain(memory)
    if found.verdict == "unknown":
        return [f"It is not taken apart: {found.why}."]
    if found.verdict == "shrunk":
        return [
            f"{format_bytes(-found.rest)} less than its parts add up to: swapped out, or a part "
            "was given back."
        ]
    grown = f"It grew by {format_bytes(found.grown)} since it was first seen."
    if found.verdict == "explained" and abs(found.grown) <= found.tolerance:
        return [f"It has not grown since it was first seen ({_signed(found.grown)})."]
    if found.verdict == "explained":
        return [grown, _explained(found, memory), *_rest(found)]
    words = [grown, _explained(found, memory)] if found.main else [grown]
    if found.verdict == "possible":
        return [
            *words,
            f"{format_bytes(found.rest)} more were not seen to be saved, but may be: prompts that "
            f"came and went between two looks. To be sure, {_LESS_OFTEN}.",
        ]
    return [
        *words,
        f"{format_bytes(found.rest)} are not explained. Record longer (-o FOLDER): if it keeps "
        "growing while the parts do not, report it with the server's log (-lv 4).",
    ]


def _explained(found: Explanation, memory: HostMemory) -> str:
    main = found.main
    if main is None:
        return "That is within what its parts can take."
    if main.name in _SAVED:
        also = [
            f"{_signed(part.grown)} {part.name}"
            for part in memory.parts
            if part.name in _SAVED and part is not main and part.grown
        ]
        more = f"; and {', '.join(also)}" if also else ""
        seen = "at least " if main.source == "slots" else ""
        return (
            f"Mostly the {main.name}, not a leak: {seen}{format_bytes(main.least)}, {main.note}"
            f"{more}."
        )
    return f"That is {_GROWN.get(main.name, 'the ' + main.name)}, not a leak."


def _rest(found: Explanation) -> list[str]:
    but = f"All but {format_bytes(found.rest)}" if found.rest > 0 else "All of it"
    words = [f"{but} is explained."]
    if found.rest > SLACK:
        words.append(
            "glibc keeps memory that the server freed; MALLOC_MMAP_THRESHOLD_=131072 in its "
            "environment gives it back."
        )
    return words


def part_rows(memory: HostMemory) -> list[tuple[str, str, str, str]]:
    """Return the rows of the account: part, size now, growth, note; the rest at the end."""
    rows = [
        (part.name, _size(part), _growth(part), part.note)
        for part in memory.parts
        if part.least or part.most or part.grown
    ]
    rest = rest_now(memory)
    if rest is not None:
        found = explain(memory)
        rows.append(
            ("the rest", format_bytes(rest), _signed(found.rest), "the program and its allocator")
        )
    return rows


def _size(part: MemoryPart) -> str:
    if part.source == "slots":
        return f"{format_bytes(part.least)} seen" if part.least else "none seen"
    if part.least == part.most:
        return format_bytes(part.most)
    return f"up to {format_bytes(part.most)}"


def _growth(part: MemoryPart) -> str:
    if part.source == "slots" or part.grown == part.grown_most:
        return _signed(part.grown)
    return f"up to {_signed(part.grown_most)}"


def _signed(count: int) -> str:
    return f"+{format_bytes(count)}" if count > 0 else format_bytes(count)


def pinned_words(pinned: Pinned) -> list[str]:
    """Return what is held while nothing runs: how much, how long still, how to free it."""
    parts = []
    if pinned.bytes is not None:
        parts.append(f"{format_bytes(pinned.bytes)} allocated")
    if pinned.told_bytes is not None:
        parts.append(f"{format_bytes(pinned.told_bytes)} by the server's own count")
    if pinned.kv_bytes is not None:
        parts.append(f"KV cache {format_bytes(pinned.kv_bytes)} reserved")
    if pinned.used_bytes is not None and pinned.tokens:
        parts.append(
            f"{format_bytes(pinned.used_bytes)} of it hold {plural(pinned.tokens, 'token')} of "
            "finished requests"
        )
    state = {True: "idle", False: "in use", None: ""}[pinned.idle]
    words = [", ".join([*([state] if state else []), *parts]) or "nothing is known of its size"]
    if pinned.seconds_left is not None:
        words.append(
            f"held for another {_duration(pinned.seconds_left)}, longer if a request comes"
        )
    elif pinned.until:
        words.append(f"held {pinned.until}" if not pinned.until.startswith("it ") else pinned.until)
    return [*words, *([pinned.note] if pinned.note else [])]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def memory_section(seen: Sequence[Observed]) -> list[str]:
    """Return the report's lines on pinned and hidden memory, from the last look that has some."""
    at = next((i for i in range(len(seen) - 1, -1, -1) if seen[i].memory or seen[i].pinned), None)
    if at is None:
        return []
    last = seen[at]
    # Nothing is pinned by a server that is gone, and a command to free it may hit another process.
    gone = any(each.error_kind == "unreachable" for each in seen[at + 1 :])
    held = () if gone else last.pinned
    lines = ["## Pinned while idle", ""] if held else []
    for pinned in held:
        words = escape_markdown("; ".join(pinned_words(pinned)), _LONG)
        lines.append(f"- {escape_markdown(pinned.name)}: {words}.")
        lines += [f"  - to free it: {code_span(command, _LONG)}" for command in pinned.free]
    if held:
        lines.append("")
    for memory in last.memory:
        lines += _account(memory, gone)
    return lines


def process_words(memory: HostMemory, gone: bool) -> str:
    """Return whose memory it is; the process of a server that is ``gone`` may be another now."""
    return f"process {memory.pid}" + (" when last seen" if gone else "")


def _account(memory: HostMemory, gone: bool) -> list[str]:
    lines = [
        f"## Host memory of {process_words(memory, gone)}",
        "",
        f"{escape_markdown(memory.model)}: {size(memory.measured)} allocated, "
        f"{size(memory.first)} when it was first seen. "
        + escape_markdown(" ".join(growth_words(memory)), _LONG),
        "",
    ]
    rows = [[escape_markdown(cell) for cell in row] for row in part_rows(memory)]
    if rows:
        lines += [*table(["part", "now", "grown", ""], rows, right=(1, 2)), ""]
    if memory.log:
        lines += [f"Read from its log, {code_span(memory.log)}.", ""]
    elif memory.parts:
        lines += ["No log was read: sizes by the rules, from what the slots showed.", ""]
    return lines
