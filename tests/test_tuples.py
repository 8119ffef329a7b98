"""localkv's records behave as those of typing.NamedTuple do."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any

import pytest

from localkv import tuples


class Ours(tuples.NamedTuple):
    """A record."""

    name: str
    size: int
    kind: str = "full"
    parts: tuple[int, ...] = ()

    @property
    def double(self) -> int:
        """Return twice the size."""
        return 2 * self.size


class Standard(typing.NamedTuple):
    """The same record."""

    name: str
    size: int
    kind: str = "full"
    parts: tuple[int, ...] = ()

    @property
    def double(self) -> int:
        """Return twice the size."""
        return 2 * self.size


class Derived(Ours):
    """A record that adds no field."""


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (("a", 1), {}),
        (("a", 1, "swa"), {}),
        (("a", 1, "swa", (1,)), {}),
        (("a",), {"size": 2}),
        (("a",), {"parts": (3,), "size": 2}),
        ((), {"size": 1, "name": "b", "kind": "none"}),
    ],
)
def test_records_are_made_as_the_standard_ones(values: Any, named: Any) -> None:
    ours, standard = Ours(*values, **named), Standard(*values, **named)
    assert tuple(ours) == tuple(standard)
    assert ours._asdict() == standard._asdict()
    assert repr(ours) == repr(standard).replace("Standard", "Ours")
    assert ours.double == standard.double
    assert hash(ours) == hash(standard)
    assert tuple(ours._replace(size=7)) == tuple(standard._replace(size=7))
    assert Ours._make(ours) == ours
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert type(copy.deepcopy(ours)) is Ours
    assert Derived(*values, **named) == ours


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (("a",), {}),
        ((), {"name": "a"}),
        (("a", 1, "swa", (), 5), {}),
        (("a", 1), {"size": 2}),
        (("a", 1, "swa"), {"kind": "none"}),
        (("a", 1), {"colour": 1}),
    ],
)
def test_what_the_standard_ones_refuse_is_refused(values: Any, named: Any) -> None:
    for record in (Standard, Ours, Derived):
        with pytest.raises(TypeError):
            record(*values, **named)


def test_records_do_not_change() -> None:
    for record in (Standard("a", 1), Ours("a", 1)):
        with pytest.raises(AttributeError):
            record.name = "b"  # type: ignore[misc]
        with pytest.raises(AttributeError):
            record.colour = 1  # type: ignore[attr-defined]
        with pytest.raises((TypeError, ValueError)):
            record._replace(colour=1)  # type: ignore[call-arg]


def test_records_match_by_position_and_say_their_fields() -> None:
    assert Ours._fields == Standard._fields == Ours.__match_args__
    match Ours("a", 1):
        case Ours(name, size):
            assert (name, size) == ("a", 1)
