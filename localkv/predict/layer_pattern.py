"""The kinds of a model's layers as a short text: ``(5 s, 1 F) x 4, 2 s``."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.model.shape import LayerSpec

#: Sign of a layer -> what it keeps.
SIGNS = {
    "F": "full attention",
    "s": "sliding window",
    "R": "recurrent state",
    "H": "attention and recurrent state",
    "=": "reads an earlier layer's cache",
    "-": "no cache",
}
_KINDS = {"full": "F", "sliding": "s", "recurrent": "R"}
#: A pattern is looked for up to this length; the longest known of a real model has 8 layers.
_LONGEST = 32


def layer_signs(layers: Sequence[LayerSpec]) -> str:
    """Return one sign of ``SIGNS`` per layer."""
    return "".join(map(_sign, layers))


def _sign(layer: LayerSpec) -> str:
    if layer.shared_with is not None:
        return "="
    if layer.kind in ("full", "sliding") and layer.state_width:
        return "H"
    return _KINDS.get(layer.kind, "-")


def pattern(signs: str) -> str:
    """Return ``signs`` with runs counted and repeated groups folded.

    >>> pattern("sssssFsssssFss")
    '(5 s, 1 F) x 2, 2 s'
    """
    parts = []
    at = 0
    while at < len(signs):
        size, times = _repeat(signs, at)
        group = _runs(signs[at : at + size])
        parts.append(f"({group}) x {times}" if size > 1 and times > 1 else f"{times} {group}")
        at += size * times
    return ", ".join(parts)


def _repeat(signs: str, at: int) -> tuple[int, int]:
    """Return the length and the repeats of the group at ``at`` that covers most; the shortest."""
    best = (1, 1)
    for size in range(1, min(_LONGEST, len(signs) - at) + 1):
        group, times = signs[at : at + size], 1
        while signs[at + size * times : at + size * (times + 1)] == group:
            times += 1
        if times > 1 and size * times > best[0] * best[1]:
            best = (size, times)
    return best


def _runs(group: str) -> str:
    """Return the runs of a group; a single sign alone, since its count stands before it."""
    if len(group) == 1:
        return group
    parts, at = [], 0
    while at < len(group):
        end = at
        while end < len(group) and group[end] == group[at]:
            end += 1
        parts.append(f"{end - at} {group[at]}")
        at = end
    return ", ".join(parts)
