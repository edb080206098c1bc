"""Draft strategies by name: texts that describe them, and plug-ins.

Reading a text executes nothing. ``module:Class`` imports only if the caller trusts the text.
"""

from __future__ import annotations

import ast
import inspect
from collections import abc
from pathlib import Path
from typing import Any, TypeGuard, get_args

import torch

from fly import drafts
from fly.drafts.base import DraftStrategy
from fly.expressions import CLASS_PATH, Registry, Text
from fly.late import Places
from fly.models.bundled import BUNDLED, HEADS, find_checkpoint, is_here, names_a_checkpoint
from fly.models.heads import EAGLE3, head_kind
from fly.policies import AcceptancePolicy, parse_policy

__all__ = ["checkpoint_type", "draft_types", "parse_draft"]

STRATEGIES: Registry = Registry(
    kind="draft",
    example="ngram(k=4)+fly-draft",
    # A word is a name, a path or a number. Quotes, brackets, commas, spaces and the signs + = : end it.
    word=rf"""{CLASS_PATH.pattern}|[^\s"'()\[\]{{}},+=:]+""",
    finished="strategy",
    groups={"fly.drafts": DraftStrategy},
    ours=Places(
        {
            "ngram": "fly.drafts.ngram:NGramDraft",
            "suffix": "fly.drafts.suffix:SuffixDraft",
            "model": "fly.drafts.model:SingleDraft",
            "tree": "fly.drafts.tree:TreeDraft",
            "eagle3": "fly.drafts.eagle:Eagle3Draft",
            "block": "fly.drafts.block:BlockDraft",
            "adaptive": "fly.drafts.adaptive:AdaptiveDraft",
            "choose": "fly.drafts.choose:ChooseDraft",
        }
    ),
    bases=(DraftStrategy,),
    wanted="a class that subclasses DraftStrategy",
    usable=lambda strategy: not inspect.isabstract(strategy),
    choices=lambda: {"strategies": ["none", *sorted(STRATEGIES.types)], "bundled checkpoints": [*BUNDLED, *HEADS]},
    more=", or a checkpoint: the path of a directory or GGUF file, or a name on the Hugging Face hub",
)


def draft_types() -> dict[str, type[DraftStrategy]]:
    """Return every strategy class by name: built-in ones, and plug-ins of the entry-point group ``fly.drafts``.

    Raises ``ValueError`` if two packages claim one name, or a plug-in is not a strategy.
    """
    return dict(STRATEGIES.types)


def parse_draft(
    text: str,
    *,
    trusted: bool = False,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
) -> DraftStrategy | None:
    """Return the strategy that a text describes; None for ``none``::

        ngram                            ngram(longest=3, k=8)
        fly-draft                        checkpoints/my-draft
        ngram+fly-tiny+fly-draft         ngram(k=4) + model("a path/of+mine", k=8)
        my_drafts:MyDraft(depth=3)       model(fly-draft, draft=ngram, policy="fly(theta=0.3)")

    A text that is the path of a directory or GGUF file is a checkpoint. Any other text is an expression of calls,
    parentheses and ``+``, as in Python, in which names may also hold dashes, dots and slashes:

    - A strategy is a registered name (``draft_types``), a call of one, or a checkpoint. A checkpoint is a bundled name,
      the path of a directory or GGUF file, or a name on the Hugging Face hub (``fly.models.hub``). Quote it if it
      contains spaces, brackets, quotes, commas or one of ``+ = :``. If ``name`` is the directory of a draft head, it
      means ``eagle3(name, reach=None)`` or ``block(name, reach=None)``, by its kind.
    - A checkpoint's bare name means the model with its best settings: it has prompt lookup, and stops by itself
      (``SingleDraft(name, NGramDraft(), reach=None)``). ``model(name)`` is the model alone.
    - ``a+b+c`` is a cascade, cheapest first: each level drafts for the next one, and the first has no draft. Below a
      block drafter stands a lookup alone (``LookupDraft``).
    - An argument is read as a strategy or a policy if its parameter is annotated so. For all other parameters a bare
      word is a string, as in ``model(fly-draft)``.

    Args:
        trusted: whether ``module:Class`` (or ``module:instance``) may import. Pass False for a text from the network.
        dtype, device, kernels: how to load and run checkpoints. They are passed to every class that has parameters of
            these names, unless the text gives them.

    Raises ``ValueError`` that names the wrong part and the choices (``CheckpointError`` if a checkpoint cannot be
    used).
    """
    if text.strip() == "none":
        return None
    loading: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels}
    if text.strip() not in STRATEGIES.types and is_here(text):
        return _of_checkpoint(text, loading)
    reader = _Reader(STRATEGIES, text, trusted, defaults=loading)
    return reader.read(reader.strategy)


class _Reader(Text):
    def strategy(self, node: ast.expr, level: bool = False) -> DraftStrategy:
        """Return the strategy that an expression describes. ``level`` tells that it is a level of a cascade."""
        levels: list[ast.expr] = []
        while _is_sum(node):  # no recursion, since sums may be long
            levels.append(node.right)
            node = node.left
        if levels:
            built = [self.strategy(level, level=True) for level in (node, *reversed(levels))]
            try:
                if len(built) == 2 and isinstance(built[1], drafts.BlockDraft):
                    return drafts.LookupDraft(*built)
                return drafts.CascadeDraft(built)
            except ValueError as error:
                raise self.error(str(error)) from error
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if isinstance(call.func, ast.Name):
            word = self.value(call.func)
            if word == "none":
                raise self.error("'none' stands alone: it is no part of another draft, and takes no parameters")
            registered = word in STRATEGIES.types or CLASS_PATH.fullmatch(word)
            if isinstance(node, ast.Call) or registered or not names_a_checkpoint(word):
                return self.call(self.find(word), word, call)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value
            if not names_a_checkpoint(word):
                raise self.error(
                    f"{word!r} is no checkpoint: neither a directory or .gguf file that exists, nor a name on the "
                    f"Hugging Face hub; bundled: {[*BUNDLED, *HEADS]}"
                )
        else:
            raise self.error(f"{self.source(node)!r} is no strategy")
        return _of_checkpoint(word, self.defaults, level)

    def argument(self, argument: ast.expr, hint: Any) -> Any:
        """Read an argument, as a strategy or a policy if its annotation says so. Lists and tuples may hold these."""
        if isinstance(argument, (ast.List, ast.Tuple)):
            items = [self.argument(item, hint) for item in argument.elts]
            return items if isinstance(argument, ast.List) else tuple(items)
        if isinstance(argument, ast.Call) or _is_sum(argument):
            return self.strategy(argument)
        value = self.value(argument)
        if isinstance(value, str) and _mentions(hint, DraftStrategy):
            return self.strategy(argument)
        if isinstance(value, str) and _mentions(hint, AcceptancePolicy):
            return parse_policy(value, trusted=self.trusted)
        return value


def _of_checkpoint(name: str, loading: abc.Mapping[str, Any], level: bool = False) -> DraftStrategy:
    """Return the strategy that drafts with a checkpoint. Prompt lookup drafts for a model, unless it is a ``level`` of
    a cascade: there the level before drafts for it."""
    kind = checkpoint_type(name)
    if kind is drafts.SingleDraft:
        return drafts.SingleDraft(name, None if level else drafts.NGramDraft(), reach=None, **loading)
    return kind(name, reach=None, **loading)


def checkpoint_type(name: str) -> type[drafts.SingleDraft | drafts.Eagle3Draft | drafts.BlockDraft]:
    """Return the class of strategy that drafts with a checkpoint: a head's, or a model's (on the hub always this)."""
    checkpoint = find_checkpoint(name)
    kind = head_kind(checkpoint) if isinstance(checkpoint, Path) else None
    if kind is None:
        return drafts.SingleDraft
    return drafts.Eagle3Draft if kind == EAGLE3 else drafts.BlockDraft


def _is_sum(node: ast.expr) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _mentions(hint: Any, wanted: type) -> bool:
    """Whether an annotation is ``wanted`` or contains it, as in ``wanted | None`` and ``list[wanted]``."""
    if isinstance(hint, type) and not get_args(hint):
        return issubclass(hint, wanted)
    return any(_mentions(part, wanted) for part in get_args(hint))
