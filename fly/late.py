"""Tables of names whose modules are imported when a name is first used.

A request needs few of the strategies, rules, heads, file formats and backends that there are. So a table has their
places, and one is imported where it is chosen. A package lists its names in imports under ``if TYPE_CHECKING``, for
type checkers and editors. These are never run, but the package's code has them, so ``find_late`` reads them there: an
installation may have no sources.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import dropwhile
from operator import attrgetter
from typing import Any

__all__ = ["Places", "find_late"]

_QUESTION = "LOAD_NAME", "TYPE_CHECKING"


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
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562), for the names that it imports under
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
    """Read where the names come from that a package imports after it asks for ``TYPE_CHECKING``."""
    spec: Any = sys.modules[package].__spec__
    instructions = dis.get_instructions(spec.loader.get_code(package))
    places: dict[str, str] = {}
    module = ""
    for instruction in dropwhile(lambda each: (each.opname, each.argval) != _QUESTION, instructions):
        name = str(instruction.argval)
        if instruction.opname == "IMPORT_NAME":
            module = name
        elif instruction.opname == "IMPORT_FROM":
            places[name] = f"{package}.{name}:" if module == package else f"{module}:{name}"
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
