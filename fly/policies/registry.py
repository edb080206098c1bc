"""Policies by name, in every form people write them: text, YAML or JSON, configuration fields, plug-ins.

A policy is one thing in all of them. ``load_policy`` reads a text such as ``fly(theta=0.3) & after(2)``, a mapping
such as ``{"name": "fly", "theta": 0.3}``, or a policy itself; ``str(policy)`` and ``dump_policy(policy)`` write what
it reads. Nothing in a text is executed; ``module:Class`` imports only where the caller trusts the source.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, get_type_hints

from pydantic import (
    BeforeValidator,
    ConfigDict,
    InstanceOf,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)

from fly.errors import explain, import_object, meant
from fly.policies.base import AcceptancePolicy, Relaxed
from fly.policies.catalogue import CATALOGUE, GATES
from fly.policies.conditions import AgreeingWindow, All, AnyOf, Condition, ControlToken, EntropyGate, Not, Room
from fly.policies.rules import Exact, FLy, LossySampling
from fly.policies.schedule import AboveContext, AfterTokens, AtMost, Budget, NatsBudget, Phase

__all__ = [
    "PRESETS",
    "PolicyField",
    "check_types",
    "condition_types",
    "dump_policy",
    "load_policy",
    "parse_policy",
    "policy_types",
]

# A colon is no part of an expression, so class paths are replaced before parsing; quoted texts keep theirs.
_CLASS_PATH = re.compile(r"""(?P<quoted>"[^"]*"|'[^']*')|\b[A-Za-z_][\w.]*:[A-Za-z_]\w*""")
Rule = AcceptancePolicy | Condition
_ENTRY_POINTS = "fly.policies"
PRESETS: dict[str, Callable[[], AcceptancePolicy]] = {
    "fly.reference": FLy.reference,
    "fly.paper": FLy.paper,
    "fly.vllm": FLy.vllm,
}
_COMPOSITES: tuple[type, ...] = (Relaxed, All, AnyOf, Not)


def policy_types() -> dict[str, type[AcceptancePolicy]]:
    """Every policy class by name: ours, and those installed under the entry-point group ``fly.policies``.

    Raises ``ValueError`` if two packages claim one name, or a plug-in is no policy.
    """
    return {name: rule for name, rule in _types().items() if issubclass(rule, AcceptancePolicy)}


def condition_types() -> dict[str, type[Condition]]:
    """Every condition class by name; plug-ins as in ``policy_types``."""
    return {name: rule for name, rule in _types().items() if issubclass(rule, Condition)}


@cache
def _types() -> dict[str, Any]:
    ours: tuple[Any, ...] = (
        *(Exact, LossySampling, FLy),
        *(EntropyGate, AgreeingWindow, Room, ControlToken),
        *CATALOGUE,
        *GATES,
        *(AfterTokens, AboveContext, Budget, AtMost, NatsBudget, Phase),
    )
    types: dict[str, Any] = {rule.name: rule for rule in ours}
    for entry in entry_points(group=_ENTRY_POINTS):
        rule = entry.load()
        _check_rule_class(rule, f"entry point {entry.name} = {entry.value}")
        if types.setdefault(entry.name, rule) is not rule:
            raise ValueError(f"entry point {entry.name} = {entry.value}: the name is taken by {types[entry.name]!r}")
    return types


def parse_policy(text: str, *, trusted: bool = False) -> AcceptancePolicy:
    """The policy a text describes, in Python's own grammar of names, calls, ``&``, ``|``, ``~`` and parentheses::

        exact                                        lossy(lenience=3)
        fly(theta=0.3, window=6) & after(2)          fly.reference
        exact | entropy(0.3) & window(6) & ~control  my_rules:MyRule(alpha=2)

    Args:
        trusted: whether ``module:Class`` may import. Never true for a text from the network.

    Raises ``ValueError`` naming the part that is wrong, and the choices.
    """
    imports: dict[str, str] = {}

    def stand_in(match: re.Match[str]) -> str:
        if match["quoted"]:
            return match[0]
        imports[name := f"_import_{len(imports)}"] = match[0]
        return name

    try:
        tree = ast.parse(_CLASS_PATH.sub(stand_in, text.strip()), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f" ({error.msg})" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"policy {text!r} is not an expression such as 'fly(theta=0.3) & after(2)'{where}") from error
    try:
        rule = _build(tree.body, text, imports, trusted)
    except RecursionError:
        raise ValueError(f"policy of {len(text)} characters is nested too deeply: {text[:40]!r}...") from None
    if not isinstance(rule, AcceptancePolicy):
        raise ValueError(f"policy {text!r} is a condition; attach it to a core: 'exact | {rule}'")
    return rule


def load_policy(value: object, *, trusted: bool = False) -> AcceptancePolicy:
    """A policy from its text, its mapping (as YAML or JSON give it), or itself.

    Raises ``ValueError`` naming the bad part and the choices.
    """
    if isinstance(value, AcceptancePolicy):
        return value
    if isinstance(value, str):
        return parse_policy(value, trusted=trusted)
    rule = _from_data(value, trusted)
    if not isinstance(rule, AcceptancePolicy):
        raise ValueError(f"policy {value!r} is a condition; attach it to a core under 'relaxed'")
    return rule


def dump_policy(rule: Rule) -> dict[str, Any]:
    """The mapping that ``load_policy`` reads: the name and every parameter, nested rules included."""
    known = _types().get(rule.name) is type(rule) or isinstance(rule, _COMPOSITES)
    name = rule.name if known else f"{type(rule).__module__}:{type(rule).__qualname__}"
    parameters = fields(rule)  # type: ignore[arg-type]  # rules are dataclasses
    return {"name": name} | {f.name: _to_data(getattr(rule, f.name)) for f in parameters if f.init}


def _validate(value: object, info: ValidationInfo) -> AcceptancePolicy:
    return load_policy(value, trusted=bool(info.context and info.context.get("trusted")))


# A field of a pydantic model that holds a policy: reads texts and mappings, writes mappings. It imports a class path
# only where the validation context says {"trusted": True}.
PolicyField = Annotated[
    InstanceOf[AcceptancePolicy],
    BeforeValidator(_validate),
    PlainSerializer(dump_policy),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object", "required": ["name"]}]}),
]


def _to_data(value: Any) -> Any:
    if isinstance(value, (AcceptancePolicy, Condition)):
        return dump_policy(value)
    return [_to_data(item) for item in value] if isinstance(value, (tuple, list)) else value


def _from_data(value: object, trusted: bool) -> Rule:
    if isinstance(value, str):
        return parse_policy(value, trusted=trusted)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError(f"policy {value!r} is neither a text nor a mapping with a name")
    options: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            options[key] = _from_data(item, trusted)
        elif isinstance(item, (list, tuple)):
            options[key] = tuple(_from_data(i, trusted) if isinstance(i, Mapping) else i for i in item)
        else:
            options[key] = item
    name = options.pop("name")
    composite = {kind.name: kind for kind in _COMPOSITES}.get(name)  # type: ignore[attr-defined]
    return _make(composite or _look_up(name, repr(value), trusted), name, (), options, repr(value))


def _build(node: ast.expr, text: str, imports: dict[str, str], trusted: bool) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = (_build(side, text, imports, trusted) for side in (node.left, node.right))
        try:
            return left & right if isinstance(node.op, ast.BitAnd) else left | right
        except TypeError as error:
            symbol = "&" if isinstance(node.op, ast.BitAnd) else "|"
            # Python's own words for operands that are no rules ("unsupported operand") would add nothing.
            reason = "" if "operand" in str(error) else f": {error}"
            raise ValueError(f"policy {text!r}: cannot combine '{left}' {symbol} '{right}'{reason}") from None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        part = _build(node.operand, text, imports, trusted)
        if not isinstance(part, Condition):
            raise ValueError(f"policy {text!r}: only a condition can be negated, '{part}' is a policy")
        return ~part
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = ast.unparse(call.func)
    name = imports.get(name, name)
    make = _look_up(name, repr(text), trusted)
    arguments = [_literal(argument, text) for argument in call.args]
    options = {str(keyword.arg): _literal(keyword.value, text) for keyword in call.keywords}
    return _make(make, name, arguments, options, repr(text))


def _literal(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return node.id  # a bare word is a string: entropy=normalized
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"policy {text!r}: {ast.unparse(node)!r} is not a plain value") from None


def _look_up(name: str, source: str, trusted: bool) -> Callable[..., Any] | Rule:
    if _CLASS_PATH.fullmatch(name):
        if not trusted:
            raise ValueError(f"policy {source}: {name!r} would import code, which is not allowed from here")
        return _import(name)
    make = PRESETS.get(name) or _types().get(name)
    if make is None:
        policies, conditions = sorted([*policy_types(), *PRESETS]), sorted(condition_types())
        raise ValueError(
            f"policy {source}: {name!r} is unknown{meant(name, policies + conditions)}; policies: {policies}, "
            f"conditions: {conditions}"
        )
    return make


def _make(make: Callable[..., Any] | Rule, name: str, arguments: Any, options: dict[str, Any], source: str) -> Any:
    if isinstance(make, (AcceptancePolicy, Condition)):  # an instance that a module keeps under a name
        if arguments or options:
            raise ValueError(f"policy {source}: {name} is a finished rule, '{make}', and takes no parameters")
        return make
    known = list(inspect.signature(make).parameters)
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"policy {source}: {name} has no parameter {unknown[0]!r}; choices: {known}")
    try:
        rule = make(*arguments, **options)
        check_types(rule)
        return rule
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy {source}: {name}: {error}") from error


def check_types(rule: Rule) -> None:
    """Whether the parameters of a rule are what its annotations say (an integer may stand for a float).

    Raises ``ValueError`` naming the parameter, the value and the annotation. Annotations that cannot be read, such as
    names that are imported for type checkers only, are not checked.
    """
    try:
        hints = get_type_hints(type(rule))
    except (NameError, TypeError):
        return
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    for parameter in fields(rule):  # type: ignore[arg-type]  # rules are dataclasses
        hint, value = hints[parameter.name], getattr(rule, parameter.name)
        try:
            TypeAdapter(hint, config=config).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{parameter.name} {value!r}: {explain(error)}") from error


def _import(path: str) -> Any:
    rule = import_object(path, "policy")
    if not isinstance(rule, (AcceptancePolicy, Condition)):
        _check_rule_class(rule, path)
    return rule


def _check_rule_class(rule: object, source: str) -> None:
    if not (isinstance(rule, type) and issubclass(rule, (AcceptancePolicy, Condition)) and is_dataclass(rule)):
        raise ValueError(
            f"{source}: must be a dataclass that subclasses AcceptancePolicy or Condition, or an instance of one, "
            f"got {rule!r}"
        )
