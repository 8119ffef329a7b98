"""ggml's graph allocator, for graphs written down as recipes.

A recipe lists what a part of the graph allocates, in the order in which the engine runs it::

    q  Q: h        a tensor q of width Q, made from h
    -: q m         q and m are read here and nothing is allocated (in place, or a view's write)
    |: x a         in the last block only the output rows of x and a go on
    !:             here inputs of the graph go that no later block reads

A name that a later line gives again is another tensor. ``x`` is what comes in and, at the end,
what goes out. Source: ggml_gallocr_alloc_graph_impl and ggml_dyn_tallocr_alloc in
ggml/src/ggml-alloc.c.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    class Widths(Protocol):
        """The bytes of each width that a recipe names."""

        def __getitem__(self, width: str, /) -> int: ...


#: TENSOR_ALIGNMENT in ggml/src/ggml-impl.h; devices align to 128, which changes nothing that shows.
ALIGNMENT = 64
_ENDLESS = 1 << 62  # what the last hole begins with; it never gets small
#: Slots of steps that allocate nothing: plain reads, and those that give inputs of the graph back.
_READ, _INPUTS, _PICKS = -1, -2, -3

Block = tuple[int, int]  # (offset, bytes)
#: A line of a recipe: width and slot of what it allocates, the slots that die, outputs alone?
Step = tuple[str, int, tuple[int, ...], bool]


class Allocator:
    """Offsets in one buffer: the best fitting hole first, else the end grows. Sizes in bytes."""

    def __init__(self) -> None:
        """Start with an empty buffer."""
        self.peak = 0
        self._holes: list[list[int]] = [[0, _ENDLESS]]  # [offset, bytes], by offset

    def take(self, size: int) -> Block:
        """Return a block of ``size`` bytes: ggml_dyn_tallocr_alloc."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        holes = self._holes
        best = holes[-1]
        if len(holes) > 1:
            best_size = _ENDLESS - 1
            for hole in holes:
                if size <= hole[1] <= best_size:
                    best, best_size = hole, hole[1]
        offset = best[0]
        best[0] = end = offset + size
        best[1] -= size
        if not best[1]:
            holes.remove(best)
        if end > self.peak:
            self.peak = end
        return offset, size

    def free(self, block: Block) -> None:
        """Give ``block`` back and join it with the holes beside it: ggml_dyn_tallocr_free_bytes."""
        offset, size = block
        if not size:
            return
        holes = self._holes
        index = 0
        while holes[index][0] < offset:
            index += 1
        after = holes[index]
        before = holes[index - 1] if index else None
        if before and before[0] + before[1] == offset:
            before[1] += size
            if before[0] + before[1] == after[0]:
                before[1] += after[1]
                del holes[index]
        elif offset + size == after[0]:
            after[0] = offset
            after[1] += size
        else:
            holes.insert(index, [offset, size])


class Program:
    """A recipe with lives worked out: slot 0 comes in, ``out`` goes on."""

    def __init__(self, steps: Iterable[Step], slots: int, out: int) -> None:
        self.steps = tuple(steps)
        self.slots = slots
        self.out = out

    def run(
        self,
        memory: Allocator,
        sizes: Widths,
        tail: Widths,
        block: Block,
        inputs: Iterable[Block] = (),
        picks: Iterable[Block] = (),
    ) -> Block:
        """Allocate and free as the recipe says.

        ``sizes`` are bytes by width, ``tail`` those of the output rows alone; ``block`` is what
        comes in; ``inputs`` are what no later block reads, ``picks`` the numbers of output rows.
        """
        held: list[Block] = [(0, 0)] * self.slots
        held[0] = block
        # Walked some hundred times for one answer, hence unpacked rather than read by name.
        for width, slot, dying, of_outputs in self.steps:
            if width:
                held[slot] = memory.take((tail if of_outputs else sizes)[width])
            elif slot != _READ:
                for taken in inputs if slot == _INPUTS else picks:
                    memory.free(taken)
            for dead in dying:
                memory.free(held[dead])
        return held[self.out]


@lru_cache(maxsize=1024)
def compiled(recipe: str, *, last: bool = False) -> Program:
    """Return ``recipe`` as a program; ``last``: of the block after which only outputs go on."""
    lines: list[Step] = []
    slots = {"x": 0}
    count = 1
    tail = False
    for name, width, uses in _parsed(recipe):
        if name == "|":
            if last:
                tail = True
                for use in uses:
                    lines.append(("E", count, (slots[use],), True))
                    slots[use] = count
                    count += 1
                lines.append(("", _PICKS, (), tail))
            continue
        reads = tuple(slots[use] for use in uses)
        if name == "!":
            lines.append(("", _INPUTS, (), tail))
        elif name == "-":
            lines.append(("", _READ, reads, tail))
        elif name == "=":
            slots["x"] = reads[0]
        else:
            lines.append((width, count, reads, tail))
            slots[name] = count
            count += 1
    return Program(_with_lives(lines, slots["x"]), count, slots["x"])


def _parsed(recipe: str) -> Iterable[tuple[str, str, list[str]]]:
    for line in recipe.replace(";", "\n").splitlines():
        head, colon, tail = line.partition(":")
        if colon:
            name, _, width = head.strip().partition(" ")
            yield name, width.strip(), tail.split()


def _with_lives(lines: list[Step], out: int) -> Iterable[Step]:
    last_read = {slot: number for number, line in enumerate(lines) for slot in line[2]}
    for number, (width, slot, reads, tail) in enumerate(lines):
        dying = [read for read in dict.fromkeys(reads) if last_read[read] == number and read != out]
        if width and slot not in last_read and slot != out:
            dying.append(slot)
        yield width, slot, tuple(dying), tail
