"""When two values count as the same: if they hold the same. Python cannot hash some (a list), compares some by parts
(a tensor), and takes others for equal though they differ (1 and True, dataclasses with ``compare=False``)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

import numpy as np

__all__ = ["Keyed", "content_of"]

T = TypeVar("T", covariant=True)


class Keyed(Generic[T]):
    """A ``value`` as a key of dictionaries and caches: equal to any other value that holds the same, and has the same
    ``text``."""

    def __init__(self, value: T, text: str = "") -> None:
        self.value = value
        self._content = content_of(value), text
        self._hash = hash(self._content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self._content == other._content


class _Same:
    """An object that equals itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def content_of(value: object, around: tuple[int, ...] = ()) -> Hashable:
    """Return what a value holds, in a form that can be hashed.

    Values of different types differ. Lists, tuples, sets and dictionaries hold their items, and dataclasses all of
    their fields. A function holds its code and what it captured, so a lambda is the same each time its line runs. An
    object that Python cannot compare with others (a tensor, an array) is the same as itself alone.

    Args:
        around: the ids of the values that hold this one; for one of them, its number stands in its place.
    """
    if id(value) in around:
        return _Same, around.index(id(value))
    kind = type(value)

    def each(values: Any) -> tuple[Hashable, ...]:
        return tuple(content_of(part, (*around, id(value))) for part in values)

    if isinstance(value, (list, tuple)):
        return kind, each(value)
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(each(value))
    if isinstance(value, dict):
        return kind, each(value), each(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return kind, each(getattr(value, parameter.name, None) for parameter in fields(value))
    if isinstance(value, FunctionType):
        cells = map(_captured, value.__closure__ or ())
        parts = each([value.__defaults__, value.__kwdefaults__, *cells])
        return kind, value.__code__, _Same(value.__globals__), parts
    if isinstance(value, MethodType):
        return kind, each([value.__func__, value.__self__])
    if isinstance(value, partial):
        return kind, each([value.func, value.args, value.keywords])
    return (kind, value) if _can_compare(value) else _Same(value)


def _captured(cell: CellType) -> object:
    """Return what a function captured; the cell itself while that does not exist yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _can_compare(value: object) -> bool:
    try:
        hash(value)
        same: Any = value == value
        return isinstance(same, (bool, np.bool_)) and bool(same)  # a NaN, a tensor and an array do not equal themselves
    except Exception:  # a user's class may raise anything
        return False
