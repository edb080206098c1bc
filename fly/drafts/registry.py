"""Draft strategies by name: texts, and plug-ins.

Nothing in a text is executed; ``module:Class`` imports only where the caller trusts the source.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections import abc
from collections.abc import Callable
from inspect import BoundArguments
from typing import Any, get_args, get_origin

import torch

from fly.bundled import BUNDLED
from fly.drafts.adaptive import AdaptiveDraft
from fly.drafts.base import DraftStrategy
from fly.drafts.combine import RelayDraft, UnionDraft
from fly.drafts.model import CascadeDraft, SingleDraft
from fly.drafts.ngram import NGramDraft
from fly.drafts.skip import LayerSkipDraft
from fly.drafts.suffix import SuffixDraft
from fly.drafts.tree import RecyclingDraft, TreeDraft
from fly.expressions import CLASS_PATH, Registry, Text, check_type, hints_of
from fly.models import load_model
from fly.policies import AcceptancePolicy, parse_policy

__all__ = ["draft_types", "parse_draft"]

STRATEGIES = Registry(
    kind="draft",
    finished="strategy",
    group="fly.drafts",
    ours={
        "ngram": NGramDraft,
        "suffix": SuffixDraft,
        "recycling": RecyclingDraft,
        "model": SingleDraft,
        "tree": TreeDraft,
        "skip": LayerSkipDraft,
        "relay": RelayDraft,
        "union": UnionDraft,
        "adaptive": AdaptiveDraft,
    },
    bases=(DraftStrategy,),
    wanted="a class that subclasses DraftStrategy",
    usable=lambda strategy: not inspect.isabstract(strategy),
)
# Words are names, paths and numbers alike: whatever stands between quotes, brackets, commas and the signs + = :
_WORD = rf"""{CLASS_PATH.pattern}|[^\s"'()\[\]{{}},+=:]+"""


def draft_types() -> dict[str, type[DraftStrategy]]:
    """Every strategy class by name: ours, and those installed under the entry-point group ``fly.drafts``.

    Raises ``ValueError`` if two packages claim one name, or a plug-in is no strategy.
    """
    return dict(STRATEGIES.types)


def parse_draft(
    text: str,
    *,
    trusted: bool = False,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
    load: Callable[..., Any] = load_model,
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
        dtype, device, kernels, load: how checkpoints are loaded and run; for every class with parameters of these names
            that the text does not give.

    Raises ``ValueError`` (``CheckpointError`` where a checkpoint cannot be used) naming the part that is wrong, and the
    choices.
    """
    if text.strip() == "none":
        return None
    loading: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels, "load": load}
    if text.strip() not in draft_types() and os.path.isdir(text):
        return SingleDraft(text, **loading)
    reader = _Reader(text, trusted, loading)
    return reader.read(reader.strategy)


class _Reader(Text):
    """Reads one text; ``loading`` is how its checkpoints are loaded and run."""

    def __init__(self, text: str, trusted: bool, loading: dict[str, Any]) -> None:
        super().__init__(STRATEGIES, text, trusted, _WORD, "ngram(k=4)+fly-draft")
        self.loading = loading

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
                raise self.error(str(error)) from error
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if isinstance(call.func, ast.Name):
            word = self.value(call.func)
            if (make := self.find(word)) is not None:
                return self._call(make, word, call)
            if isinstance(node, ast.Name) and (word in BUNDLED or os.path.isdir(word)):
                return SingleDraft(word, **self.loading)
            more = ", or the path of a checkpoint's directory"
            raise self.unknown(word, more, strategies=["none", *sorted(draft_types())], bundled_checkpoints=BUNDLED)
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            raise self.error(f"{self.source(node)!r} is no strategy")
        if not os.path.isdir(node.value) and node.value not in BUNDLED:
            raise self.error(f"{node.value!r} is no directory of a checkpoint; bundled: {list(BUNDLED)}")
        return SingleDraft(node.value, **self.loading)

    def _call(self, make: Any, word: str, call: ast.Call) -> DraftStrategy:
        hints, first = {}, None
        if not isinstance(make, DraftStrategy):
            hints = hints_of(make.__init__)
            first = hints.get(next(iter(inspect.signature(make).parameters), ""))
        arguments: list[ast.expr] = call.args
        listed = len(arguments) == 1 and isinstance(arguments[0], ast.List)
        takes_list = get_origin(first) in (abc.Sequence, list, tuple) and _mentions(first, DraftStrategy)
        if arguments and takes_list and not listed:
            arguments = [ast.List(arguments, ast.Load())]

        def construct(bound: BoundArguments) -> DraftStrategy:
            parameters = bound.signature.parameters
            for name, given in bound.arguments.items():
                several, hint = parameters[name].kind is inspect.Parameter.VAR_POSITIONAL, hints.get(name, Any)
                values = [self._argument(name, node, hint) for node in (given if several else (given,))]
                bound.arguments[name] = tuple(values) if several else values[0]
            for name in self.loading.keys() & parameters.keys() - bound.arguments.keys():
                bound.arguments[name] = self.loading[name]
            return make(*bound.args, **bound.kwargs)

        options = {str(keyword.arg): keyword.value for keyword in call.keywords}
        return self.build(make, word, arguments, options, construct)

    def _argument(self, name: str, node: ast.expr, hint: Any) -> Any:
        """An argument, which must be what the annotation of its parameter says."""
        value = self._read(node, hint)
        check_type(name, value, hint)
        return value

    def _read(self, node: ast.expr, hint: Any) -> Any:
        if isinstance(node, (ast.List, ast.Tuple)):
            items = [self._read(item, hint) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, ast.Call) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
            return self.strategy(node)
        value = self.value(node)
        if isinstance(value, str) and _mentions(hint, DraftStrategy):
            return self.strategy(node)
        if isinstance(value, str) and _mentions(hint, AcceptancePolicy):
            return parse_policy(value, trusted=self.trusted)
        return value


def _mentions(hint: Any, wanted: type) -> bool:
    """Whether an annotation is ``wanted``, or holds it, as ``wanted | None`` and ``list[wanted]`` do."""
    if isinstance(hint, type) and not get_args(hint):
        return issubclass(hint, wanted)
    return any(_mentions(part, wanted) for part in get_args(hint))
