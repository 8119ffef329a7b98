"""typing.NamedTuple, made in a tenth of the time.

A command that answers from a header defines some forty records and ends. The standard library
compiles a constructor for each of them, which took a tenth of the whole command; here all share
one. A type checker sees the original. Modules that define records postpone their annotations.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would load typing
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from _collections import _tuplegetter

    class _Fields(type):
        """Turns the annotated names of a class body into the fields of its tuples."""

        def __new__(cls, name, bases, body):
            fields = tuple(body.get("__annotations__", ()))
            if fields:
                defaults = [body.pop(field) for field in fields if field in body]
                body["_required"] = required = len(fields) - len(defaults)
                body["_defaults"] = (None,) * required + tuple(defaults)
                body["_fields"] = body["__match_args__"] = fields
                for index, field in enumerate(fields):
                    body[field] = _tuplegetter(index, "")
            body["__slots__"] = ()
            return type.__new__(cls, name, bases, body)

    class NamedTuple(tuple, metaclass=_Fields):
        """A tuple whose items have names, as typing.NamedTuple describes it."""

        def __new__(cls, *values, **named):
            """Return the tuple of ``values``, then of what is ``named``, then of the defaults."""
            fields = cls._fields
            given = len(values)
            if named or given != len(fields):
                start = max(given, cls._required)
                try:
                    values += tuple(map(named.pop, fields[given:start]))
                except KeyError as missing:
                    raise TypeError(f"{cls.__name__}: {missing} is missing") from None
                values += tuple(map(named.pop, fields[start:], cls._defaults[start:]))
                if named or len(values) != len(fields):
                    raise TypeError(f"{cls.__name__} takes {fields}, not {values} and {named}")
            return tuple.__new__(cls, values)

        @classmethod
        def _make(cls, values):
            return cls(*values)

        def _replace(self, **changes):
            values = tuple(map(changes.pop, self._fields, self))
            if changes:
                raise TypeError(f"{type(self).__name__} has no {', '.join(changes)}")
            return tuple.__new__(type(self), values)

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self):
            named = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({named})"

        def __getnewargs__(self):
            return tuple(self)


__all__ = ["NamedTuple"]
