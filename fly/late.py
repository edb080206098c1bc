"""Tables of names whose modules are imported when a name is first used.

A request needs few of the strategies, rules, heads, file formats and backends that there are. So a table has their
places, and one is imported where it is chosen. A package lists its names in imports under ``if TYPE_CHECKING``, for
type checkers and editors; ``find_late`` reads the same lines.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

__all__ = ["Places", "find_late"]


class Places(Mapping[str, Any]):
    """A table of names, each with the place of what it stands for: ``module:name``, or ``module:`` for a module. To
    look a name up imports the module; to list or to search the names imports nothing."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> Any:
        path, _, attribute = self._places[name].partition(":")
        module = import_module(path)
        return attrgetter(attribute)(module) if attribute else module

    def __or__(self, others: Places) -> Places:
        return Places(self._places | others._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def find_late(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562), for the names that its source imports under
    ``if TYPE_CHECKING``. The package's modules are found by name, too."""
    places = _read_places(package)

    def find(name: str) -> Any:
        attribute = places[name] if name in places else _import_inside(package, name)
        setattr(sys.modules[package], name, attribute)
        return attribute

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, names


def _read_places(package: str) -> Places:
    """Read what the source of a package imports for type checkers alone."""
    places: dict[str, str] = {}
    for block in ast.parse(inspect.getsource(sys.modules[package])).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                assert isinstance(line, ast.ImportFrom) and line.module
                for alias in line.names:
                    place = f"{package}.{alias.name}:" if line.module == package else f"{line.module}:{alias.name}"
                    places[alias.name] = place
    return Places(places)


def _import_inside(package: str, name: str) -> Any:
    """Import the module of a package that has this name. Raises ``AttributeError`` if there is none, with the new place
    of one that has moved (``fly.moved``)."""
    path = f"{package}.{name}"
    missing = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(missing)
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # the module is there, and lacks something itself
            raise
        raise AttributeError(f"{missing} ({error})") from error
