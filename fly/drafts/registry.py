"""Draft strategies by name: texts, and plug-ins.

Nothing in a text is executed; ``module:Class`` imports only where the caller trusts the source.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections import abc
from functools import cache
from importlib.metadata import entry_points
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from fly.bundled import BUNDLED
from fly.drafts.adaptive import AdaptiveDraft
from fly.drafts.base import DraftStrategy
from fly.drafts.combine import RelayDraft, UnionDraft
from fly.drafts.model import CascadeDraft, SingleDraft
from fly.drafts.ngram import NGramDraft
from fly.drafts.skip import LayerSkipDraft
from fly.drafts.suffix import SuffixDraft
from fly.drafts.tree import RecyclingDraft, TreeDraft
from fly.errors import explain, import_object, meant
from fly.policies import AcceptancePolicy, parse_policy

__all__ = ["CLASS_PATH", "draft_types", "parse_draft"]

_ENTRY_POINTS = "fly.drafts"
_OURS: dict[str, type[DraftStrategy]] = {
    "ngram": NGramDraft,
    "suffix": SuffixDraft,
    "recycling": RecyclingDraft,
    "model": SingleDraft,
    "tree": TreeDraft,
    "skip": LayerSkipDraft,
    "relay": RelayDraft,
    "union": UnionDraft,
    "adaptive": AdaptiveDraft,
}
CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Words are names, paths and numbers alike: whatever stands between quotes, brackets, commas and the signs + = :
_WORD = re.compile(
    rf"""(?P<quoted>"[^"]*"|'[^']*')|(?P<parameter>\w+)(?=\s*=)|(?P<word>{CLASS_PATH.pattern}|[^\s"'()\[\]{{}},+=:]+)"""
)


def draft_types() -> dict[str, type[DraftStrategy]]:
    """Every strategy class by name: ours, and those installed under the entry-point group ``fly.drafts``.

    Raises ``ValueError`` if two packages claim one name, or a plug-in is no strategy.
    """
    return dict(_types())


@cache
def _types() -> dict[str, type[DraftStrategy]]:
    types = dict(_OURS)
    for entry in entry_points(group=_ENTRY_POINTS):
        plugin = entry.load()
        source = f"entry point {entry.name} = {entry.value}"
        _check_class(plugin, source)
        if types.setdefault(entry.name, plugin) is not plugin:
            raise ValueError(f"{source}: the name is taken by {types[entry.name]!r}")
    return types


def parse_draft(
    text: str,
    *,
    trusted: bool = False,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
) -> DraftStrategy | None:
    """The strategy a text describes; None for ``none``::

        ngram                            ngram(longest=3, k=8)
        fly-draft                        checkpoints/my-draft
        ngram+fly-tiny+fly-draft         ngram(k=4) + model("a path/of+mine", k=8)
        my_drafts:MyDraft(depth=3)       model(fly-draft, draft=ngram, policy="fly(theta=0.3)")

    A text that is a directory as a whole is a checkpoint. Any other is an expression in Python's grammar of calls,
    parentheses and ``+``, in which names may also hold dashes, dots and slashes:

    - a strategy is a registered name (``draft_types``), a call of one, or a checkpoint: its bundled name or the path
      of its directory, in quotes if it holds spaces, brackets, quotes, commas or one of ``+ = :``;
    - ``a+b+c`` is a cascade, cheapest first: each drafts for the next;
    - a parameter that takes a strategy (by its annotation) reads its argument as one, a parameter that takes a policy
      as a policy; to all others a bare word is a string, as in ``model(fly-draft)``;
    - a class whose first parameter is a sequence of strategies takes them as positional arguments,
      ``union(ngram, fly-draft)``; what belongs to each goes with it in brackets, ``relay((ngram, 4), (fly-draft, 8))``.

    Args:
        trusted: whether ``module:Class`` (or ``module:instance``) may import. Never true for a text from the network.
        dtype, device, kernels: how checkpoints are loaded and run; for every class with parameters of these names
            that the text does not give.

    Raises ``ValueError`` (``CheckpointError`` where a checkpoint cannot be used) naming the part that is wrong, and the
    choices.
    """
    if text.strip() == "none":
        return None
    options = {"dtype": dtype, "device": device, "kernels": kernels}
    reader = _Reader(text, trusted, options)
    if text.strip() not in draft_types() and os.path.isdir(text):
        return reader.checkpoint(text)
    return reader.strategy(reader.parse())


class _Reader:
    """Reads one text. ``words`` are its bare words, by the name that stands for each in the parsed expression."""

    def __init__(self, text: str, trusted: bool, loading: dict[str, Any]) -> None:
        self.text, self.trusted, self.loading = text, trusted, loading
        self.words: dict[str, str] = {}

    def parse(self) -> ast.expr:
        try:
            return ast.parse(_WORD.sub(self._stand_in, self.text.strip()), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = f" ({error.msg})" if isinstance(error, SyntaxError) else ""
            raise self.error(f"is not an expression such as 'ngram(k=4)+fly-draft'{where}") from error

    def strategy(self, node: ast.expr) -> DraftStrategy:
        """What an expression describes, where a strategy is wanted."""
        levels: list[ast.expr] = []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):  # a loop: chains may be long
            levels.append(node.right)
            node = node.left
        if levels:
            built = [self.strategy(level) for level in (node, *reversed(levels))]
            try:
                return CascadeDraft(built)
            except ValueError as error:
                raise self.error(f": {error}") from error
        if isinstance(node, ast.Name):
            return self._named(self.words[node.id])
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if not os.path.isdir(node.value) and node.value not in BUNDLED:
                raise self.error(f": {node.value!r} is no directory of a checkpoint; bundled: {list(BUNDLED)}")
            return self.checkpoint(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._call(self.words[node.func.id], node)
        raise self.error(f": {self._source(node)!r} is no strategy")

    def checkpoint(self, path: str) -> DraftStrategy:
        return SingleDraft(path, **self.loading)

    def error(self, message: str) -> ValueError:
        return ValueError(f"draft {self.text!r}{'' if message.startswith(':') else ' '}{message}")

    def _stand_in(self, match: re.Match[str]) -> str:
        if (word := match["word"]) is None or _is_literal(word):
            return match[0]
        self.words[name := f"_word_{len(self.words)}"] = word
        return name

    def _source(self, node: ast.expr) -> str:
        return re.sub(r"_word_\d+", lambda match: self.words.get(match[0], match[0]), ast.unparse(node))

    def _named(self, word: str) -> DraftStrategy:
        if word in draft_types() or CLASS_PATH.fullmatch(word):
            return self._call(word, None)
        if word in BUNDLED or os.path.isdir(word):
            return self.checkpoint(word)
        raise self._unknown(word)

    def _unknown(self, word: str) -> ValueError:
        strategies = ["none", *sorted(draft_types())]
        return self.error(
            f": {word!r} is unknown{meant(word, [*strategies, *BUNDLED])}; strategies: {strategies}, bundled "
            f"checkpoints: {list(BUNDLED)}, or the path of a checkpoint's directory"
        )

    def _call(self, word: str, call: ast.Call | None) -> DraftStrategy:
        """The strategy ``word`` with the parameters of ``call``; None gives none."""
        if CLASS_PATH.fullmatch(word):
            if not self.trusted:
                raise self.error(f": {word!r} would import code, which is not allowed from here")
            make = _import(word)
        elif word in draft_types():
            make = draft_types()[word]
        else:
            raise self._unknown(word)
        if isinstance(make, DraftStrategy):  # an instance that a module keeps under a name
            if call is not None:
                raise self.error(f": {word} is a finished strategy and takes no parameters")
            return make
        return self._make(make, word, call or ast.Call(ast.Name(word), [], []))

    def _make(self, make: type[DraftStrategy], word: str, call: ast.Call) -> DraftStrategy:
        parameters = inspect.signature(make).parameters
        hints = _hints(make)
        try:
            named = {str(keyword.arg): keyword.value for keyword in call.keywords}
            if unknown := [name for name in named if name not in parameters]:
                raise ValueError(f"no parameter {unknown[0]!r}; choices: {list(parameters)}")
            given: list[ast.expr] = list(call.args)
            first = hints.get(next(iter(parameters), ""), None)
            listed = len(given) == 1 and isinstance(given[0], ast.List)
            if (
                given
                and not listed
                and get_origin(first) in (abc.Sequence, list, tuple)
                and _mentions(first, DraftStrategy)
            ):
                given = [ast.List(given, ast.Load())]
            bound = inspect.signature(make).bind(*given, **named)
            for name, nodes in bound.arguments.items():
                hint, several = hints.get(name, Any), parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
                values = [self._value(name, node, hint) for node in (nodes if several else (nodes,))]
                bound.arguments[name] = tuple(values) if several else values[0]
            for name in self.loading.keys() & parameters.keys() - bound.arguments.keys():
                bound.arguments[name] = self.loading[name]
            return make(*bound.args, **bound.kwargs)
        except (TypeError, ValueError) as error:
            if str(error).startswith(start := f"draft {self.text!r}"):  # of a strategy among the arguments
                raise
            raise ValueError(f"{start}: {word}: {error}") from error

    def _value(self, name: str, node: ast.expr, hint: Any) -> Any:
        """An argument, which must be what the annotation of its parameter says."""
        value = self._read(node, hint)
        try:
            adapter = TypeAdapter(_checkable(hint), config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        except (PydanticUserError, TypeError, NameError):  # an annotation that nothing can be checked against
            return value
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name} {value!r}: {explain(error)}") from error
        return value

    def _read(self, node: ast.expr, hint: Any) -> Any:
        strategies = _mentions(hint, DraftStrategy)
        if isinstance(node, ast.Call) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
            return self.strategy(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            items = [self._read(item, hint) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, ast.Name):
            word = self.words[node.id]
            value: Any = self._named(word) if strategies else word
        else:
            try:
                value = ast.literal_eval(node)
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                raise self.error(f": {self._source(node)!r} is not a plain value") from None
            if isinstance(value, str) and strategies:
                return self.strategy(node)
        if isinstance(value, str) and _mentions(hint, AcceptancePolicy):
            return parse_policy(value, trusted=self.trusted)
        return value


def _is_literal(word: str) -> bool:
    """Whether a word is a number, True, False or None."""
    try:
        ast.literal_eval(word)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _hints(make: type[DraftStrategy]) -> dict[str, Any]:
    """Annotations of the parameters; none if they name what only type checkers import."""
    try:
        return get_type_hints(make.__init__)
    except (NameError, TypeError):
        return {}


def _mentions(hint: Any, wanted: type) -> bool:
    """Whether an annotation is ``wanted``, or holds it, as ``wanted | None`` and ``list[wanted]`` do."""
    if isinstance(hint, type) and not get_args(hint):
        return issubclass(hint, wanted)
    return any(_mentions(part, wanted) for part in get_args(hint))


def _checkable(hint: Any) -> Any:
    """An annotation without its protocols, of which no text can give an instance; Any if there is nothing else."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kept = tuple(part for part in parts if not getattr(part, "_is_protocol", False))
    return Union[kept] if kept else Any  # noqa: UP007  # a union of a tuple


def _import(path: str) -> Any:
    found = import_object(path, "draft")
    if not isinstance(found, DraftStrategy):
        _check_class(found, path)
    return found


def _check_class(found: object, source: str) -> None:
    if not (isinstance(found, type) and issubclass(found, DraftStrategy)) or inspect.isabstract(found):
        raise ValueError(
            f"{source}: must be a class that subclasses DraftStrategy, or an instance of one, got {found!r}"
        )
