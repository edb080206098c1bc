"""Policies as text: what ``str(policy)`` prints is what ``parse_policy`` reads. Nothing in a text is executed.

The grammar is Python's own for names, calls with literal arguments, ``&``, ``|``, ``~`` and parentheses::

    exact                                        lossy(lenience=3)
    fly(theta=0.3, window=6)                     fly.reference
    exact | entropy(0.3) & window(6) & ~control
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from fly.policies.base import AcceptancePolicy
from fly.policies.conditions import AgreeingWindow, Condition, ControlToken, EntropyGate, Room
from fly.policies.rules import Exact, FLy, LossySampling

__all__ = ["parse_policy"]

POLICIES: dict[str, Callable[..., AcceptancePolicy]] = {
    "exact": Exact,
    "lossy": LossySampling,
    "fly": FLy,
    "fly.reference": FLy.reference,
    "fly.paper": FLy.paper,
    "fly.vllm": FLy.vllm,
}
CONDITIONS: dict[str, Callable[..., Condition]] = {
    "entropy": EntropyGate,
    "window": AgreeingWindow,
    "room": Room,
    "control": ControlToken,
}


def parse_policy(text: str) -> AcceptancePolicy:
    """The policy a text describes.

    Raises ``ValueError`` naming the part that is wrong, and the choices.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"policy {text!r} is not an expression such as 'fly(theta=0.3)'") from error
    value = _build(tree.body, text)
    if not isinstance(value, AcceptancePolicy):
        raise ValueError(f"policy {text!r} is a condition; attach it to a core: 'exact | ({text})'")
    return value


def _build(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = _build(node.left, text), _build(node.right, text)
        try:
            return left & right if isinstance(node.op, ast.BitAnd) else left | right
        except TypeError:
            symbol = "&" if isinstance(node.op, ast.BitAnd) else "|"
            raise ValueError(f"policy {text!r}: cannot combine '{left}' {symbol} '{right}'") from None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        part = _build(node.operand, text)
        if not isinstance(part, Condition):
            raise ValueError(f"policy {text!r}: only a condition can be negated, '{part}' is a policy")
        return ~part
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = ast.unparse(call.func)
    make = POLICIES.get(name) or CONDITIONS.get(name)
    if make is None:
        raise ValueError(
            f"policy {text!r}: {name!r} is unknown; policies: {list(POLICIES)}, conditions: {list(CONDITIONS)}"
        )
    arguments = [_literal(argument, text) for argument in call.args]
    options = {str(keyword.arg): _literal(keyword.value, text) for keyword in call.keywords}
    known = list(inspect.signature(make).parameters)
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"policy {text!r}: {name} has no parameter {unknown[0]!r}; choices: {known}")
    try:
        return make(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy {text!r}: {name}: {error}") from error


def _literal(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name) and node.id in ("top3", "normalized"):
        return node.id  # so that printed expressions need no quotes
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"policy {text!r}: {ast.unparse(node)!r} is not a plain value") from None
