"""The pages of ``localkv capacity`` as plain lines that mean the same without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localkv.cli.memory import Given, sizes_text
from localkv.cli.terminal import columns, table, wrap
from localkv.report.escape import escape_terminal as safe
from localkv.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    from localkv.predict.capacity import Capacity
    from localkv.predict.commands import Command
    from localkv.predict.contexts import LargestContext, Needed
    from localkv.predict.levers import Lever
    from localkv.predict.paged_capacity import PagedCapacity
    from localkv.predict.server_memory import ServerMemory

#: Kind -> its letter in the bar and its name in the list under it.
_KINDS = {
    "weights": ("W", "weights"),
    "kv": ("K", "KV cache"),
    "recurrent": ("R", "recurrent state"),
    "compute": ("C", "compute buffers"),
    "output": ("O", "output buffer"),
    "allowance": ("A", "activations, driver"),
    "reserve": ("x", "reserve"),
    "free": (".", "free"),
}
_MOST_BAR = 72


class Beside:
    """What is told beside the number of slots; empty where only an engine knows.

    ``levers`` None: they were not asked for.
    """

    def __init__(self, asked: Needed | None = None) -> None:
        self.asked = asked
        self.server: ServerMemory | None = None
        self.contexts: tuple[LargestContext, ...] = ()
        self.levers: tuple[Lever, ...] | None = ()
        self.commands: tuple[Command, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that stand beside the capacity's own."""
        return {
            "needed": self.asked.to_dict() if self.asked else None,
            "host_memory": self.server.to_dict() if self.server else None,
            "contexts": [row.to_dict() for row in self.contexts],
            "levers": [lever.to_dict() for lever in self.levers or ()],
            "commands": {command.key: command.text for command in self.commands},
        }


def bar(parts: Mapping[str, int], width: int) -> str:
    """Return ``parts`` as a bar of ``width`` letters, each kind by its own.

    A kind that is there at all gets one letter at least; what is over goes off the largest.
    """
    sizes = {kind: size for kind, size in parts.items() if size > 0}
    total = sum(sizes.values())
    if not total:
        return ""
    counts = {kind: max(1, size * width // total) for kind, size in sizes.items()}
    largest = max(counts, key=lambda kind: counts[kind])
    counts[largest] += width - sum(counts.values())
    return "".join(_KINDS[kind][0] * count for kind, count in counts.items())


def part_lines(parts: Mapping[str, int], total: int, width: int) -> list[str]:
    """Return the bar and, one line each, what its letters stand for."""
    lines = [f"[{bar(parts, min(width, _MOST_BAR) - 2)}]"]
    for kind, size in parts.items():
        if size:
            letter, name = _KINDS[kind] if size > 0 else ("!", "missing")
            share = f"{abs(size) / total:.1%}"
            lines.append(f"{letter} {name:<20}{format_bytes(abs(size)):>12} {share:>7}")
    return lines


def slots_page(capacity: Capacity, given: Given, beside: Beside, width: int) -> list[str]:
    """Return the page of a program with slots."""
    from localkv.cli.server_pages import server_lines
    from localkv.predict.capacity import parts

    lines = _answer(capacity, given, width)
    if beside.asked:
        lines += _needed(beside.asked, width)
    lines += ["", f"Memory with {plural(capacity.config.n_seq_max, 'request')}:"]
    lines += part_lines(parts(capacity), capacity.memory_bytes, width)
    if capacity.budget.on_gpus:
        lines += _devices(capacity)
    if beside.contexts:
        lines += ["", *_contexts(beside.contexts, width)]
    if beside.levers is not None:
        levers = [lever.to_dict() for lever in beside.levers]
        lines += lever_lines(levers, capacity.program, capacity.max_slots, width)
    elif capacity.limit != "engine":  # which no lever moves
        lines += lever_lines(None, capacity.program, capacity.max_slots, width)
    if beside.server:
        lines += [line for text in server_lines(beside.server) for line in _hung(text, width)]
        if not capacity.budget.on_gpus and beside.server.cache_ram != 0:
            lines += wrap(
                "note: where the memory above is the machine's RAM, this comes out of it too: "
                "bound it with --cache-ram, or keep a --reserve for it",
                width,
                "",
                "  ",
            )
    lines += _commands([c for c in beside.commands if c.key == capacity.program])
    return lines + _notes(capacity.notes, width)


def _commands(commands: Sequence[Command]) -> list[str]:
    """Return commands as they are: a line that is broken cannot be pasted."""
    lines = []
    for command in commands:
        lines += ["", f"To run it with {command.program}:", *command.lines]
        if command.note:
            lines.append(f"note: {command.note}")
    return lines


def _answer(capacity: Capacity, given: Given, width: int) -> list[str]:
    name = safe(capacity.estimate.model["name"])
    context = format_count(capacity.ctx_per_slot)
    where = "GPU memory" if capacity.budget.on_gpus else "memory for everything together"
    asked = f"{sizes_text(capacity.budget.sizes)} of {where}, {context} tokens per request"
    verdict = f"{plural(capacity.max_slots, 'request')} at once, as {capacity.program} runs them"
    if not capacity.fits:
        verdict = f"Not even one request fits, as {capacity.program} runs it"
    lines = [f"{name} ({safe(capacity.estimate.model['architecture'])})"]
    lines += wrap(asked, width)
    if given.source:
        lines += wrap(safe(given.source, 400), width)
    lines += ["", verdict]
    lines += wrap(f"limit: {capacity.limit} ({capacity.why})", width, "", "  ")
    return lines


def _needed(asked: Needed, width: int) -> list[str]:
    sizes = sizes_text(asked.memory_bytes)
    fits = "fits" if asked.fits else "does not fit"
    text = (
        f"{plural(asked.users, 'request')} of {format_count(asked.ctx_per_slot)} tokens: {fits}, "
        f"{sizes} needed with the reserve"
    )
    if asked.host_bytes:
        text += f", and {format_bytes(asked.host_bytes)} on the host"
    return wrap(text, width)


def _devices(capacity: Capacity) -> list[str]:
    budget = capacity.budget
    used = budget.used(capacity.estimate.devices)
    lines = [
        f"{name:<6}{format_bytes(held):>12} of {format_bytes(size)}"
        for name, held, size in zip(budget.names, used, budget.sizes, strict=True)
    ]
    return [*lines, f"{'host':<6}{format_bytes(capacity.host_bytes):>12} beside the GPUs"]


def _contexts(rows: Sequence[LargestContext], width: int) -> list[str]:
    types = list(dict.fromkeys(row.cache_type for row in rows))
    cells = {(row.slots, row.cache_type): _cell(row) for row in rows}
    slots = list(dict.fromkeys(row.slots for row in rows))
    lines = table(
        ["slots", *types],
        [[str(count), *(cells[count, kind] for kind in types)] for count in slots],
        width,
        left=(),
    )
    reasons = dict.fromkeys(row.why for row in rows if row.ctx_per_slot is None)
    if any(row.limit == "training context" for row in rows):
        lines.append("t: as long as the model was trained for")
    for why in reasons:
        lines += wrap(f"-: {safe(why, 400)}", width, "", "   ")
    return [*wrap("Largest context per slot, in tokens, by slots and cache type:", width), *lines]


def _cell(row: LargestContext) -> str:
    if row.ctx_per_slot is None:
        return "-"
    if not row.ctx_per_slot:
        return "none "
    return format_count(row.ctx_per_slot) + ("t" if row.limit == "training context" else " ")


def _hung(text: str, width: int) -> list[str]:
    """Return a line of ``name  figure  words`` with the words below each other."""
    lead = text[: len(text) - len(text.lstrip())]
    return wrap(text.lstrip(), width, lead, lead + " " * 4) if columns(text) > width else [text]


def lever_lines(
    levers: Sequence[Mapping[str, Any]] | None, program: str, now: int, width: int
) -> list[str]:
    """Return what to change: bytes saved, requests above ``now``, ``program``'s flag, the price.

    None: nobody asked, so it is said how to.
    """
    if levers is None:
        return ["", "What would let more in: add --levers"]
    if not levers:
        return []
    lines = ["", "What to change, by what it saves against what it costs:"]
    for lever in levers:
        up_to = "up to " if lever.get("bound") else ""
        worth = []
        if lever["saves_bytes"]:
            worth.append(f"saves {up_to}{format_bytes(lever['saves_bytes'])}")
        if lever["max_slots"] is not None:
            more = lever["max_slots"] > now
            worth.append(
                f"then {plural(lever['max_slots'], 'request')}" if more else "no more requests"
            )
        lines += wrap(f"- {safe(lever['change'], 400)}: {', '.join(worth)}", width, "", "  ")
        flag = lever["flags"].get(program)
        if flag:
            lines += wrap(safe(flag, 400), width, "    ", "    ")
        lines += wrap(safe(lever["price"], 400), width, "  ", "  ")
    return lines


def _notes(notes: Sequence[str], width: int) -> list[str]:
    return [line for note in notes for line in wrap(f"note: {safe(note, 400)}", width, "", "  ")]


def paged_page(
    capacity: PagedCapacity,
    given: Given,
    asked: Mapping[str, Any] | None,
    levers: Sequence[Mapping[str, Any]] | None,
    commands: Sequence[Command],
    width: int,
) -> list[str]:
    """Return the page of a vLLM."""
    lines = _paged_answer(capacity, given, width)
    if asked:
        fits = "fit" if asked["fits"] else "do not fit"
        need = format_bytes(asked["memory_bytes"])
        lines += wrap(
            f"{plural(asked['users'], 'request')} {fits}: {need} of GPU memory needed", width
        )
    if capacity.max_model_len:
        longest = format_count(capacity.max_model_len)
        lines += wrap(f"longest single request (--max-model-len): {longest} tokens", width)
    parts, total = capacity.parts(), sum(capacity.setup.sizes)
    lines += ["", "GPU memory:", *part_lines(parts, total, width)]
    plan = capacity.plan
    if plan:
        lines += wrap(
            f"{format_count(plan.num_blocks)} blocks of {plan.block_size} tokens, "
            f"{format_bytes(plan.block_bytes)} each; {format_count(plan.tokens)} tokens; "
            f"{plan.max_concurrency:.2f}x of {format_count(capacity.ctx_per_slot)}",
            width,
        )
    lines += lever_lines(levers, "vllm", capacity.max_slots, width)
    return lines + _commands(commands) + _notes(capacity.notes, width)


def _paged_answer(capacity: PagedCapacity, given: Given, width: int) -> list[str]:
    setup, shape = capacity.setup, capacity.shape
    lines = [f"{safe(shape.name)} ({safe(shape.architecture)}), as vLLM serves it"]
    lines += wrap(
        f"{sizes_text(setup.sizes)} of GPU memory, {setup.utilization:.0%} of it taken, "
        f"{format_count(capacity.ctx_per_slot)} tokens per request",
        width,
    )
    if given.source:
        lines += wrap(safe(given.source, 400), width)
    verdict = f"{plural(capacity.max_slots, 'request')} at once, every one of them full"
    lines += ["", verdict if capacity.fits else "Not even one request fits"]
    return lines + wrap(f"limit: {capacity.limit} ({capacity.why})", width, "", "  ")
