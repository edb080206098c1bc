"""Reads untrusted JSON within limits, and writes large JSON in pieces. Knows nothing of bodies or answers.

Parsing and writing JSON block all other threads. So entries are counted before JSON is parsed, and large JSON is
written a little at a time.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

__all__ = ["TooMuch", "Twice", "loads", "write_json"]

ENTRIES, MEMBERS = 2**18, 2**16  # limits over all lists and over all objects (about 50 ms to parse)
DEEPEST = 100  # limit of the nesting of lists and objects
_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_TOGETHER, _LONG = 64, 2**16  # written in one piece: entries of a long list, characters of a long text


class TooMuch(ValueError):
    """The JSON has too many entries or is nested too deep."""


class Twice(ValueError):
    """An object has two members of the same name. The argument is that name."""


def loads(text: bytes | str, once: bool = True, strict: bool = False) -> Any:
    """Parse JSON. Raises ``ValueError`` if it is invalid, and ``TooMuch`` if it exceeds the limits. With ``once``, also
    raises ``Twice`` if an object repeats a name, because it would be unclear which value is meant. With ``strict``,
    ``NaN`` and ``Infinity``, which Python reads, are invalid too."""
    if isinstance(text, bytes):
        text = text.decode()  # UTF-8 only: in other encodings the count below would be wrong
    entries, members = _counted(text)
    if entries > ENTRIES or members > MEMBERS:
        raise TooMuch(f"more than {ENTRIES} entries of lists, or {MEMBERS} members of objects")
    constant = _refuse_constant if strict else None
    try:
        value = json.loads(text, object_pairs_hook=_refuse_twice if once else None, parse_constant=constant)
    except RecursionError as error:
        raise TooMuch(f"{error}: it is nested more than {DEEPEST} deep") from None
    level: list[Any] = [[value]]
    for _ in range(DEEPEST + 1):
        inner = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in inner if isinstance(each, (dict, list))]
        if not level:
            return value
    raise TooMuch(f"it is nested more than {DEEPEST} deep")


def write_json(value: Any) -> Iterator[bytes]:
    """Write ``value`` as JSON in small pieces. An iterator in an object is written as a list; its entries are built
    when they are written."""
    if isinstance(value, dict):
        prefix = b"{"
        for name, each in value.items():
            yield prefix + _json(name) + b":"
            yield from write_json(each)
            prefix = b","
        yield b"}" if prefix == b"," else b"{}"
    elif isinstance(value, Iterator):
        prefix = b"["
        while items := list(islice(value, _TOGETHER)):
            yield prefix + _json(items)[1:-1]
            prefix = b","
        yield b"]" if prefix == b"," else b"[]"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, each in enumerate(value):
            yield b"," if number else b"["
            yield from write_json(each)
        yield b"]"
    elif isinstance(value, str) and len(value) > _LONG:
        yield b'"'
        for start in range(0, len(value), _LONG):
            yield _json(value[start : start + _LONG])[1:-1]
        yield b'"'
    else:
        yield _json(value)


def _json(value: Any) -> bytes:
    """Write in ASCII: a text may have half a surrogate pair, which UTF-8 cannot encode."""
    return json.dumps(value, separators=(",", ":")).encode()


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise Twice(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return members


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def _counted(data: str) -> tuple[int, int]:
    """Return upper bounds of the numbers of entries and members. Punctuation within texts counts too, unless the limits
    would be exceeded; then texts are left out, and the numbers are exact."""

    def punctuation(start: int = 0, end: int | None = None) -> tuple[int, int]:
        return sum(data.count(each, start, end) for each in ",[{"), data.count(":", start, end)

    entries, members = punctuation()
    if entries <= ENTRIES and members <= MEMBERS:
        return entries, members
    entries = members = position = 0
    for texts, text in enumerate(_TEXT.finditer(data), start=1):
        counts = punctuation(position, text.start())
        entries += counts[0]
        members += counts[1]
        position = text.end()
        if max(entries, texts) > ENTRIES + MEMBERS or members > MEMBERS:
            return ENTRIES + 1, members
    counts = punctuation(position)
    return entries + counts[0], members + counts[1]
