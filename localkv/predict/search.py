"""The largest number that still fits, found by few questions."""

from __future__ import annotations

from collections.abc import Callable

Margin = Callable[[int], int]


def largest(margin: Margin, high: int, low: int = 1, rough: Margin | None = None) -> int:
    """Return an x in low..high with ``margin(x)`` >= 0 and ``margin(x + 1)`` < 0; 0 for none.

    That is ``high`` where it fits, and 0 where not even ``low`` does. Both ends of the answer are
    computed. Memory grows by nearly the same amount per slot or token, so that a line leads there:
    ``rough`` (cheaper, and never below ``margin``) says where it begins and how steep it is;
    without it the line is drawn between the two ends. Every third guess halves, for curves that
    are no line. ``margin`` need not fall everywhere: see the caller's own check.
    """
    fits, over = low - 1, high + 1
    guess, slope = (high, 0) if rough is None else _start(rough, high, low)
    ends: dict[int, int] = {}
    asked = 0
    while over - fits > 1:
        asked += 1
        guess = min(max(guess, fits + 1), over - 1)
        left = ends[guess] = margin(guess)
        if left >= 0:
            fits = guess
        else:
            over = guess
        if asked % 3 == 0:
            guess = (fits + over) // 2
        elif slope:
            guess += left // slope
        else:
            guess = _on_line(ends, fits, over)
    return fits if fits >= low else 0


def _start(rough: Margin, high: int, low: int) -> tuple[int, int]:
    """Return where ``rough`` ends, and by how much it falls per step."""
    top = rough(high)
    if top >= 0 or high == low:
        return high, 0
    bottom = rough(low)
    slope = (bottom - top) // (high - low)
    return (low + bottom // slope, slope) if slope else (high, 0)


def _on_line(ends: dict[int, int], fits: int, over: int) -> int:
    """Return where the line between what fits and what does not crosses zero."""
    below, above = ends.get(fits), ends.get(over)
    if below is None or above is None:
        return fits + 1 if below is None else over - 1
    return fits + (over - fits) * below // (below - above)
