"""Texts that name and build objects, in Python's grammar of names, calls and operators.

A text is read and never executed. ``module:Class`` imports only if the caller trusts the source. This file knows
neither policies nor drafts: a ``Registry`` has the names of one kind of object, and whoever calls ``Text.read`` says
what operators mean.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import threading
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, lru_cache
from importlib.metadata import entry_points
from inspect import Parameter
from itertools import chain, product
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from fly.errors import PlacedError, did_you_mean, explain, suggest

__all__ = [
    "CLASS_PATH",
    "Amount",
    "Checked",
    "Count",
    "Registry",
    "Share",
    "Source",
    "Text",
    "check_parameters",
    "grid",
    "hints_of",
]

T = TypeVar("T")
# Annotations for parameters.
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # any finite one
Share = Annotated[float, Field(ge=0, le=1)]
CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MOST = 2**31 - 1
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)  # what ast raises for malformed texts
_KEPT = r"""(?P<quoted>"[^"]*"|'[^']*')|(?P<parameter>\w+)(?=\s*=)|"""
# In Python 3.11 all threads share one counter of depth in ast.parse, so parsing in two threads at once fails.
_PARSING = threading.Lock()


@dataclass(frozen=True, eq=False)
class Registry:
    """The objects that texts of one kind may name: our own classes, and those that other packages install as entry
    points. ``groups`` has the groups of entry points, each with the base of its classes."""

    kind: str  # the kind of text, for errors: "policy", "draft"
    example: str  # a text of this kind
    word: str  # a regular expression for single words that Python does not read as names
    finished: str  # what errors call an instance
    groups: Mapping[str, type]
    ours: Mapping[str, type]
    bases: tuple[type, ...]
    wanted: str  # the requirements on a class (``bases`` and ``usable``) in words
    usable: Callable[[type], bool]
    choices: Callable[[], Mapping[str, Iterable[str]]]  # the names that an error lists, by title
    more: str = ""  # further possible names, in words
    presets: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # functions without parameters, by name

    @cached_property
    def types(self) -> Mapping[str, Any]:
        """All classes by name; one of ours is imported when it is looked up. Raises ``ValueError`` if two packages use
        a name, or a plug-in is of a wrong kind."""
        plugins: dict[str, Any] = {}
        # A chain of mappings writes to the first alone.
        types: Mapping[str, Any] = ChainMap(plugins, self.ours)  # type: ignore[arg-type]
        for group, base in self.groups.items():
            for entry in entry_points(group=group):
                plugin, source = entry.load(), f"entry point {entry.name} = {entry.value}"
                if isinstance(plugin, self.bases):
                    raise ValueError(f"{source}: must be {self.wanted}; {plugin} is an instance: name {entry.value!r}")
                self._check(plugin, source, self.wanted)
                if not issubclass(plugin, base):
                    right_group = next(name for name, other in self.groups.items() if issubclass(plugin, other))
                    raise ValueError(
                        f"{source} stands in the group {group!r}, which takes a subclass of {base.__name__}; a "
                        f"{self.groups[right_group].__name__} stands in {right_group!r}"
                    )
                if entry.name in types and types[entry.name] is not plugin:
                    raise ValueError(f"{source}: the name is taken by {types[entry.name]!r}")
                plugins[entry.name] = plugin
        return types

    def load(self, path: str) -> Any:
        """Import the class or instance that ``module:name`` names. If that fails with any error, raises ``ValueError``
        with the reason."""
        module, _, name = path.partition(":")
        try:
            attribute = getattr(importlib.import_module(module), name)
        except Exception as error:
            error_prefix = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
            raise ValueError(f"{self.kind} {path!r} cannot be imported: {error_prefix}{error}") from error
        if not isinstance(attribute, self.bases):
            self._check(attribute, path, f"{self.wanted}, or an instance of one")
        return attribute

    def _check(self, kind: object, source: str, wanted: str) -> None:
        """Raise ``ValueError`` unless ``kind`` is a class that texts may name."""
        if not (isinstance(kind, type) and issubclass(kind, self.bases) and self.usable(kind)):
            raise ValueError(f"{source}: must be {wanted}, got {kind!r}")


@dataclass
class Source:
    """Reads a ``description`` of a policy or a draft: a mapping, or a text (``Text``). Its errors begin with that."""

    registry: Registry
    description: Any
    trusted: bool  # whether ``module:Class`` may import
    named: set[str] = field(default_factory=set)  # collects the names that are looked up
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values for parameters with these names

    def error(self, message: str, *place: str) -> ValueError:
        """Return an error of the text, or of the parameter of its call at ``place``."""
        return PlacedError(f"{self._start}: {message}", *place)

    @property
    def _start(self) -> str:
        return f"{self.registry.kind} {self.description!r}"

    def find(self, name: str) -> Any:
        """Return the class, preset or finished instance of a name or a class path.

        Raises ``ValueError`` for a class path from a source that is not trusted, and for an unknown name.
        """
        self.named.add(name)
        if CLASS_PATH.fullmatch(name):
            if not self.trusted:
                raise self.error(f"{name!r} would import code, which is not allowed from here")
            return self.registry.load(name)
        if entry := self.registry.presets.get(name) or self.registry.types.get(name):
            return entry
        choices = self.registry.choices()
        hint = did_you_mean(name, [choice for names in choices.values() for choice in names])
        choices_text = ", ".join(f"{title}: {list(names)}" for title, names in choices.items())
        yours = ", or one of yours, as 'module:Class'" if self.trusted else ""
        raise self.error(f"{name!r} is unknown{hint or f'; {choices_text}{self.registry.more}{yours}'}")

    def argument(self, argument: Any, hint: Any) -> Any:
        """Return the value of an argument whose parameter has the annotation ``hint``."""
        return argument

    def build(self, make: Any, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Check the types of the arguments, and call the class or function ``make`` with them. If ``make`` is an
        instance already, return it.

        Raises ``ValueError`` for a parameter that does not exist or has a wrong value.
        """
        if isinstance(make, self.registry.bases):  # a module may keep an instance under a name
            if arguments or options:
                raise self.error(f"{name} is a finished {self.registry.finished} and takes no parameters")
            return make
        signature, hints = inspect.signature(make), _hints(make)
        parameters = signature.parameters
        takes_keywords = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
        if unknown := [option for option in options if option not in parameters and not takes_keywords]:
            raise self.error(f"{name} has no parameter {unknown[0]!r}{suggest(unknown[0], parameters)}", unknown[0])
        place: tuple[str, ...] = ()
        try:
            bound = signature.bind(*arguments, **options)
            for parameter, argument in bound.arguments.items():
                place = (parameter,)
                hint, kind = hints.get(parameter, Any), parameters[parameter].kind
                takes_several, takes_keywords = kind is Parameter.VAR_POSITIONAL, kind is Parameter.VAR_KEYWORD
                values = tuple(
                    self.argument(part, hint)
                    for part in (argument.values() if takes_keywords else argument if takes_several else (argument,))
                )
                for value in values:
                    _check_parameter(make, parameter, value)
                bound.arguments[parameter] = (
                    dict(zip(argument, values)) if takes_keywords else values if takes_several else values[0]
                )
            place = ()
            for parameter in self.defaults.keys() & parameters.keys() - bound.arguments.keys():
                bound.arguments[parameter] = self.defaults[parameter]
            return make(*bound.args, **bound.kwargs)
        except (TypeError, ValueError, OverflowError) as error:
            if str(error).startswith(self._start):  # an error of a part, which names the text already
                raise
            raise self.error(f"{name}: {error}", *place) from error


class Text(Source):
    """Reads a text as a syntax tree. Some words are not names in Python: before parsing, each is replaced by a
    stand-in, unless it is in quotes or the name of a parameter."""

    def read(self, build: Callable[[ast.expr], T]) -> T:
        """Parse the text, and return what ``build`` makes of its tree. Raises ``ValueError`` if the text is not an
        expression, or is nested too deeply."""
        self._words: dict[str, str] = {}
        word = rf"(?P<word>{self.registry.word}|\b_word_\w*)"
        try:
            tree = _parse(re.sub(_KEPT + word, self._stand_in, self.description.strip()))
        except _UNREADABLE as error:
            reason = f" ({error.msg})" if isinstance(error, SyntaxError) else ""
            raise ValueError(f"{self._start} is not an expression such as {self.registry.example!r}{reason}") from error
        try:
            return build(tree)
        except RecursionError:
            start = f"{self.registry.kind} of {len(self.description)} characters"
            raise ValueError(f"{start} is nested too deeply: {self.description[:40]!r}...") from None

    def source(self, node: ast.expr) -> str:
        """Return the part of the text that became ``node``, except for spaces."""
        return re.sub(r"\b_word_\d+\b", lambda match: self._words.get(match[0], match[0]), ast.unparse(node))

    def call(self, make: Any, name: str, call: ast.Call) -> Any:
        """Call ``build`` with the arguments of a call."""
        return self.build(make, name, call.args, {str(keyword.arg): keyword.value for keyword in call.keywords})

    def argument(self, argument: ast.expr, hint: Any) -> Any:
        return self.value(argument)

    def value(self, node: ast.expr) -> Any:
        """Read a plain value; a bare word is a string, as in ``entropy=normalized``."""
        if isinstance(node, ast.Name):
            return self._words.get(node.id, node.id)
        try:
            return ast.literal_eval(node)
        except _UNREADABLE:
            raise self.error(f"{self.source(node)!r} is not a plain value") from None

    def _stand_in(self, match: re.Match[str]) -> str:
        if (word := match["word"]) is None or _is_literal(word):
            return match[0]
        self._words[name := f"_word_{len(self._words)}"] = word
        return name


def grid(text: str) -> list[str]:
    """Return a text for each combination of the values in braces: ``fly(theta={0.1, 0.3}, window={2, 6})`` gives four.
    Raises ``ValueError`` for a missing value."""
    parts = re.split(r"\{([^{}]*)\}", text)
    choices = [[value.strip() for value in values.split(",")] for values in parts[1::2]]
    if not all(all(values) for values in choices):
        raise ValueError(f"{text!r}: a value is missing in braces, as in 'fly(theta={{0.1, 0.3}})'")
    filled = product(*choices)
    return ["".join(chain.from_iterable(zip(parts[::2], (*values, "")))) for values in filled]


def _parse(text: str) -> ast.expr:
    with _PARSING:
        return ast.parse(text, mode="eval").body


def _is_literal(word: str) -> bool:
    """Return whether a word is a number, True, False or None."""
    try:
        ast.literal_eval(_parse(word))
    except _UNREADABLE:
        return False
    return True


def hints_of(make: Any) -> dict[str, Any]:
    """Return the annotations of the parameters of a class or function; none if they use names that only type checkers
    import."""
    is_plain_class = isinstance(make, type) and not is_dataclass(make)
    try:
        return get_type_hints(make.__init__ if is_plain_class else make, include_extras=True)
    except (NameError, TypeError):
        return {}


_hints = lru_cache(256)(hints_of)


class Checked:
    """A base for dataclasses whose parameters are checked when an instance is made."""

    def __post_init__(self) -> None:
        check_parameters(self)


def check_parameters(instance: Any) -> None:
    """Check the parameters of a dataclass against its annotations: types, choices and ranges.

    An integer may stand for a float, but must fit into 32 bits, so that tensors can hold results. An annotation that
    cannot be checked is skipped. Raises ``ValueError`` with the parameter, the value and the annotation.
    """
    for parameter in fields(instance):
        _check_parameter(type(instance), parameter.name, getattr(instance, parameter.name))


def _check_parameter(make: Any, name: str, value: object) -> None:
    for part in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(part, int) and not -_MOST <= part <= _MOST:
            number_text = f"of {part.bit_length()} bits" if part.bit_length() > 200 else f"{part}"
            raise ValueError(f"{name} {number_text}: integers are between -{_MOST} and {_MOST} here")
    try:
        _adapter(make, name).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name} {value!r}: {explain(error)}") from error
    except (PydanticUserError, TypeError, NameError):
        return


@lru_cache(1024)
def _adapter(make: Any, name: str) -> TypeAdapter[Any]:
    """Return what checks one parameter of a class or function. A text cannot give an instance of a protocol, so
    protocols are left out of the annotation."""
    hint = _hints(make).get(name, Any)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain_parts = tuple(part for part in parts if not getattr(part, "_is_protocol", False))
    checked: Any = Union[plain_parts] if plain_parts else Any  # noqa: UP007  # a union of a tuple
    return TypeAdapter(checked, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
