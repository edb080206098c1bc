"""Text that knows who wrote each of its characters. Knows nothing of templates or tokens.

A rendered template mixes the template's own writing with that of messages, and only the template may write control
tokens. So a ``Traced`` text carries a writer for each character beside its value, which is exactly the plain text:
comparisons, lengths and tests see nothing else. Operations that make a text of texts keep the writers. A text whose
writers are not known has the writer ``UNKNOWN``; so has every plain ``str``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, SupportsIndex

from markupsafe import Markup, escape

__all__ = [
    "EMPTY",
    "END",
    "MESSAGES",
    "OTHER",
    "ROLE",
    "TEMPLATE",
    "UNKNOWN",
    "Traced",
    "TracedMarkup",
    "common_writer",
    "dump_json",
    "end_of",
    "escape_text",
    "message_number",
    "message_writer",
    "rewritten_writers",
    "text_of",
    "trace",
    "writers_of",
]

# Who wrote a character. A writer is itself one character, so that the writers of a text are a string of equal length.
TEMPLATE = "\0"
UNKNOWN = "\1"  # the template or a message: an operation has lost it
ROLE = "\2"  # the role of a message, if it is a plain name: templates build control tokens from roles
OTHER = "\3"  # messages, tools, documents and variables, except the content of messages
END = "\4"  # the end of the content that an answer continues: its last character, and whitespace after it
_FIRST = 5
MESSAGES = re.compile(f"[^{TEMPLATE}{ROLE}{UNKNOWN}]+")  # writers of characters that are surely a message's


def message_writer(number: int) -> str:
    """Return the writer of the content of message ``number``."""
    return chr(_FIRST + number)


def message_number(writer: str) -> int:
    """Return the number of the message whose content ``writer`` wrote."""
    return ord(writer) - _FIRST


class Traced(str):
    """A text with the writer of each character. It behaves as its plain value does.

    ``end`` is the place in it at which the content ends that an answer continues. Only cutting and joining keep it. It
    matters if a template leaves no character of the content: thinking that a content has may end with it.
    """

    __slots__ = ("_end", "_writers")  # templates cannot read names that begin with "_"
    _writers: str
    _end: int | None

    def __new__(cls, text: str, writers: str, end: int | None = None) -> Traced:
        traced = super().__new__(cls, text)
        traced._writers, traced._end = writers, end
        return traced

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> Traced:
        end = None
        if self._end is not None and isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            end = self._end - start if start <= self._end <= stop and step == 1 else None
        return Traced(str.__getitem__(self, key), self._writers[key], end)

    def __iter__(self) -> Iterator[str]:
        return map(Traced, str.__iter__(self), self._writers)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str) and not isinstance(other, Markup):
            end = end_of(other)
            end = self._end if end is None else len(self) + end
            return Traced(str.__add__(self, other), self._writers + writers_of(other), end)
        # Markup and undefined values add themselves. Anything else is an error, which ``str`` words best.
        adds = hasattr(type(other), "__radd__") and not isinstance(other, (int, float))
        return NotImplemented if adds else str.__add__(self, other)

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str):
            end = None if self._end is None else len(other) + self._end
            return Traced(str.__add__(other, self), writers_of(other) + self._writers, end)
        return NotImplemented

    def __mul__(self, count: SupportsIndex) -> Traced:
        return Traced(str.__mul__(self, count), self._writers * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> Traced:
        text = str.__mod__(self, values)
        with suppress(TypeError, ValueError, LookupError):  # a form that the pattern below does not read
            if (traced := EMPTY.join(_conversions(self, values))) == text:
                return traced
        return Traced(text, common_writer(self, values) * len(text))

    def join(self, texts: Iterable[str]) -> Traced:
        texts = list(texts)
        joined = Traced(str.join(self, texts), self._writers.join(map(writers_of, texts)))
        for number in reversed(range(len(texts))):
            if (end := end_of(texts[number])) is not None:
                joined._end = end + sum(map(len, texts[:number])) + number * len(self)
                break
        return joined

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._cut(str.splitlines(self, keepends), None)

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, between, _ = map(len, str.partition(self, sep))
        return self[:before], self[before : before + between], self[before + between :]

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, between, _ = map(len, str.rpartition(self, sep))
        return self[:before], self[before : before + between], self[before + between :]

    def strip(self, chars: str | None = None) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Traced:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> Traced:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str) -> Traced:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> Traced:
        return self[: len(str.removesuffix(self, suffix))]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Traced:
        text, most = str.replace(self, old, new, count), int(count)
        if old:
            lengths = list(map(len, str.split(self, old, most)))
        else:  # ``new`` is put before each character and at the end
            times = len(self) + 1 if most < 0 else min(most, len(self) + 1)
            lengths = [0, *[1] * (times - 1), len(self)] if times else [len(self)]
        pieces, start = [], 0
        for length in lengths:
            pieces.append(self._writers[start : start + length])
            start += length + len(old)
        return Traced(text, writers_of(new).join(pieces))

    def ljust(self, width: SupportsIndex, *fillchar: str) -> Traced:
        return self._padded(str.ljust(self, width, *fillchar), 0, *fillchar)

    def rjust(self, width: SupportsIndex, *fillchar: str) -> Traced:
        text = str.rjust(self, width, *fillchar)
        return self._padded(text, len(text) - len(self), *fillchar)

    def center(self, width: SupportsIndex, *fillchar: str) -> Traced:
        text = str.center(self, width, *fillchar)
        missing = len(text) - len(self)
        return self._padded(text, missing // 2 + (missing & int(width) & 1), *fillchar)  # as CPython divides it

    def zfill(self, width: SupportsIndex) -> Traced:
        text = str.zfill(self, width)
        sign = self[: 1 if self.startswith(("+", "-")) else 0]
        digits = self[len(sign) :]
        return Traced(text, writers_of(sign) + TEMPLATE * (len(text) - len(self)) + writers_of(digits))

    def lower(self) -> Traced:
        return self._rewritten(str.lower(self), lambda part: len(str.lower(part)))

    def upper(self) -> Traced:
        return self._rewritten(str.upper(self), lambda part: len(str.upper(part)))

    def casefold(self) -> Traced:
        return self._rewritten(str.casefold(self), lambda part: len(str.casefold(part)))

    def swapcase(self) -> Traced:
        return self._rewritten(str.swapcase(self), lambda part: len(str.swapcase(part)))

    def capitalize(self) -> Traced:
        return self._rewritten(str.capitalize(self))

    def title(self) -> Traced:
        return self._rewritten(str.title(self))

    def expandtabs(self, tabsize: SupportsIndex = 8) -> Traced:
        return self._rewritten(str.expandtabs(self, tabsize))

    def translate(self, table: Any) -> Traced:
        text = str.translate(self, table)
        return Traced(text, common_writer(self, table) * len(text))

    def _cut(self, parts: list[str], sep: str | None) -> list[str]:
        """Return ``parts``, which follow each other in this text, with their writers. Between them is ``sep``, or
        whitespace if it is None: then a part does not begin with what is before it."""
        cut, start = list[str](), 0
        for part in parts:
            if sep is None:
                start = str.find(self, part, start)
            cut.append(self[start : start + len(part)])
            start += len(part) + len(sep or "")
        return cut

    def _padded(self, text: str, left: int, *fillchar: str) -> Traced:
        """Return ``text``, this text with padding, with its writers. ``left`` characters of padding stand before it."""
        filler = writers_of(*fillchar) if fillchar else TEMPLATE  # the template pads
        return Traced(text, filler * left + self._writers + filler * (len(text) - len(self) - left))

    def _rewritten(self, text: str, length_of: Callable[[str], int] = lambda part: 0) -> Traced:
        return Traced(text, rewritten_writers(self, text, length_of))


class TracedMarkup(Markup):
    """Markup with the writer of each character. It behaves as ``Markup`` does, which escapes the texts that it takes
    in. ``format``, ``%``, ``translate`` and padding lose the writers."""

    __slots__ = ("_writers",)
    _writers: str

    def __new__(cls, text: Any = "", writers: str | None = None) -> TracedMarkup:
        traced = super().__new__(cls, text)
        traced._writers = UNKNOWN * len(traced) if writers is None else writers
        return traced

    def __str__(self) -> str:
        return Traced(str.__str__(self), self._writers)

    def __html__(self) -> TracedMarkup:
        return self

    def __repr__(self) -> str:
        return f"Markup({str.__repr__(self)})"

    def __iter__(self) -> Iterator[str]:
        return iter(str(self))

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str) or hasattr(other, "__html__"):
            return _marked(str(self) + str(escape_text(other)))
        return NotImplemented

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str) or hasattr(other, "__html__"):
            return escape_text(other) + self
        return NotImplemented

    def join(self, texts: Iterable[Any]) -> TracedMarkup:
        return _marked(str(self).join(str(escape_text(text)) for text in texts))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> TracedMarkup:
        return _marked(str(self).replace(old, str(escape_text(new)), count))


def _marked(value: Any) -> Any:
    """Return the text or the texts ``value`` as markup."""
    if isinstance(value, str):
        return TracedMarkup(value, writers_of(value))
    return type(value)(map(_marked, value))


def _operation_on_markup(name: str) -> Callable[..., Any]:
    """Return a method of ``Traced``, which takes in no text, as one of ``TracedMarkup``."""

    def operate(self: TracedMarkup, *args: Any, **named: Any) -> Any:
        return _marked(getattr(str(self), name)(*args, **named))

    return operate


for _name in (
    "__getitem__", "__mul__", "__rmul__", "capitalize", "casefold", "expandtabs", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "rpartition", "rsplit", "rstrip", "split", "splitlines", "strip", "swapcase",
    "title", "upper", "zfill",
):  # fmt: skip
    setattr(TracedMarkup, _name, _operation_on_markup(_name))


EMPTY = Traced("", "")


def writers_of(text: str) -> str:
    """Return the writers of the characters of any text."""
    return text._writers if isinstance(text, (Traced, TracedMarkup)) else UNKNOWN * len(text)


def end_of(text: str) -> int | None:
    """Return the place in any text at which the content ends that an answer continues, or None."""
    return text._end if isinstance(text, Traced) else None


def trace(value: Any, writer: str) -> Any:
    """Return ``value`` with ``writer`` as the writer of all texts in it, keys of mappings included. Mappings and
    subclasses of ``str`` become plain ones, except that markup stays markup."""
    if isinstance(value, Markup):
        return TracedMarkup(str.__str__(value), writer * len(value))
    if isinstance(value, str):
        return Traced(str.__str__(value), writer * len(value))
    if isinstance(value, Mapping):
        return {trace(key, writer): trace(item, writer) for key, item in value.items()}
    if isinstance(value, list):
        return [trace(item, writer) for item in value]
    if isinstance(value, tuple):
        return tuple(trace(item, writer) for item in value)
    return value


def common_writer(*values: Any) -> str:
    """Return the writer of all characters in ``values``, or ``UNKNOWN`` if there are several. Numbers are the
    template's: a message cannot spell a control token with them."""
    writers = set[str]()
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            writers.update(writers_of(value))
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            pending += value
        elif value is not None and not isinstance(value, (int, float)):
            writers.add(UNKNOWN)
    return TEMPLATE if not writers else writers.pop() if len(writers) == 1 else UNKNOWN


def text_of(value: Any) -> str:
    """Return ``str(value)`` with its writers."""
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, (int, float)):
        return trace(str(value), TEMPLATE)
    if type(value) in (list, tuple, dict):
        return _trace_literals(str(value), value, repr)
    return str(value)


def dump_json(value: Any, **options: Any) -> Traced:
    """Return ``json.dumps(value, **options)`` with its writers. Punctuation and numbers count as a message's."""

    def write(text: str) -> str:
        return json.dumps(text, ensure_ascii=options.get("ensure_ascii", True))

    return _trace_literals(json.dumps(value, **options), value, write, options.get("sort_keys", False), json.dumps)


def escape_text(value: Any) -> TracedMarkup:
    """Return ``markupsafe.escape(value)`` with its writers."""
    if hasattr(value, "__html__"):
        html = value.__html__()
        return TracedMarkup(html, writers_of(html))
    text = text_of(value)
    escaped = escape(text)
    return TracedMarkup(escaped, rewritten_writers(text, escaped, lambda part: len(escape(part))))


def rewritten_writers(source: str, text: str, length_of: Callable[[str], int]) -> str:
    """Return the writers of ``text``, in which ``length_of(part)`` characters stand for each part of ``source``. If
    both have the same length, each character must stand for one."""
    writers = writers_of(source)
    if len(writers) == len(text):
        return writers
    if len(set(writers)) == 1:
        return writers[0] * len(text)
    parts = (run.span() for run in _RUN.finditer(writers))
    stretched = "".join(writers[start] * length_of(str.__getitem__(source, slice(start, end))) for start, end in parts)
    return stretched if len(stretched) == len(text) else UNKNOWN * len(text)


def _trace_literals(
    text: str,
    value: Any,
    write: Callable[[str], str],
    sort_keys: bool = False,
    name_of: Callable[[Any], str] | None = None,
) -> Traced:
    """Return ``text``, which shows ``value`` and its strings as ``write`` writes them, with its writers. ``name_of``
    gives the string that a key of another type becomes; if it is None, keys are written like values.

    The text between the strings has no quotes, so the next place where a string's literal occurs is its own.
    """
    writers, start = list[str](), 0
    try:
        for string in _strings(value, sort_keys, name_of):
            literal = write(string)
            at = text.index(literal, start)
            inside = rewritten_writers(string, literal[1:-1], lambda part: len(write(part)) - 2)
            writers += [OTHER * (at + 1 - start), inside, OTHER]
            start = at + len(literal)
    except (TypeError, ValueError):
        return Traced(text, common_writer(value) * len(text))
    return Traced(text, "".join([*writers, OTHER * (len(text) - start)]))


def _strings(value: Any, sort_keys: bool, name_of: Callable[[Any], str] | None) -> Iterator[str]:
    """Yield the strings in ``value`` in the order in which they are written. Raises ``TypeError`` for a value that has
    a form of its own."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in sorted(value.items()) if sort_keys else value.items():
            if isinstance(key, str) or name_of is None:
                yield from _strings(key, sort_keys, name_of)
            else:
                yield trace(name_of(key), TEMPLATE)
            yield from _strings(item, sort_keys, name_of)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item, sort_keys, name_of)
    elif value is not None and not isinstance(value, (int, float)):
        raise TypeError(f"{type(value).__name__} is no plain data")


_RUN = re.compile(r"(.)\1*", re.DOTALL)
# A conversion of the operator ``%``, except those whose width is an argument.
_CONVERSION = re.compile(r"%(?:\(([^()]*)\))?([#0\- +]*\d*(?:\.\d+)?)[hlL]?([a-zA-Z%])")


def _conversions(form: Traced, values: Any) -> Iterator[str]:
    """Yield the pieces of ``form % values``. Raises ``TypeError`` or ``ValueError`` for a form that it misreads."""
    last, arguments = 0, iter(values if isinstance(values, tuple) else (values,))
    for match in _CONVERSION.finditer(form):
        key, flags, kind = match.groups()
        yield form[last : match.start()]
        last = match.end()
        if kind == "%":
            yield form[last - 1 : last]
            continue
        value = next(arguments, None) if key is None else values[key]
        if kind == "s" and not flags:
            yield text_of(value)
        else:
            yield trace(f"%{flags}{kind}" % (value,), common_writer(value))
    yield form[last:]
