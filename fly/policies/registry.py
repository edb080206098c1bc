"""Policies by name, in every form in which users write them: text, YAML or JSON, configuration fields, plug-ins.

``load_policy`` reads a text such as ``fly(theta=0.3) & after(2)``, a mapping such as ``{"name": "fly", "theta": 0.3}``,
or a policy. ``str(policy)`` and ``dump_policy(policy)`` write what it reads. Reading a text executes nothing, and
``module:Class`` imports only if the caller trusts the source.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf, PlainSerializer, ValidationInfo, WithJsonSchema

from fly.errors import PlacedError
from fly.expressions import CLASS_PATH, Registry, Source, Text
from fly.late import Places
from fly.policies.base import AcceptancePolicy, Relaxed
from fly.policies.conditions import All, AnyOf, Condition, Not

__all__ = [
    "CATALOGUE",
    "GATES",
    "PRESETS",
    "PolicyField",
    "condition_types",
    "dump_policy",
    "load_policy",
    "parse_policy",
    "policy_types",
    "read_policy",
]

Rule = AcceptancePolicy | Condition
PRESETS: Mapping[str, Callable[[], AcceptancePolicy]] = Places(
    {
        "fly.reference": "fly.policies.rules:FLy.reference",
        "fly.paper": "fly.policies.rules:FLy.paper",
        "fly.vllm": "fly.policies.rules:FLy.vllm",
        "asd": "fly.policies.rules:asd",
    }
)
_COMPOSITES: dict[str, type[Rule]] = {rule.name: rule for rule in (Relaxed, All, AnyOf, Not)}
# Rules of the literature and of other engines, besides ``Exact``, ``LossySampling`` and ``FLy``. Each stands under its
# ``name``, and all have defaults.
CATALOGUE = Places(
    {
        "sample": "fly.policies.lossless:ExactSample",
        "block": "fly.policies.lossless:BlockVerification",
        "slack": "fly.policies.loosened:AdditiveSlack",
        "ears": "fly.policies.loosened:Ears",
        "ensemble": "fly.policies.loosened:Ensemble",
        "thresholds": "fly.policies.loosened:Thresholds",
        "typical": "fly.policies.gates:Typical",
        "topn": "fly.policies.gates:RelaxedTopN",
        "near": "fly.policies.gates:Near",
        "bild": "fly.policies.gates:BiLD",
        "fuzzy": "fly.policies.gates:Fuzzy",
        "cascade": "fly.policies.loosened:Cascade",
        "cactus": "fly.policies.loosened:Cactus",
        "mentored": "fly.policies.loosened:Mentored",
    }
)
GATES = Places(
    {
        "margin": "fly.policies.gates:LogMargin",
        "regret": "fly.policies.gates:Regret",
        "suffix_regret": "fly.policies.gates:SuffixRegret",
        "mars": "fly.policies.gates:TopRatio",
    }
)
_OTHERS = Places(
    {
        "exact": "fly.policies.lossless:Exact",
        "lossy": "fly.policies.rules:LossySampling",
        "fly": "fly.policies.rules:FLy",
        "entropy": "fly.policies.conditions:EntropyGate",
        "window": "fly.policies.conditions:AgreeingWindow",
        "room": "fly.policies.conditions:Room",
        "control": "fly.policies.conditions:ControlToken",
        "after": "fly.policies.schedule:AfterTokens",
        "above": "fly.policies.schedule:AboveContext",
        "budget": "fly.policies.schedule:Budget",
        "at_most": "fly.policies.schedule:AtMost",
        "nats": "fly.policies.schedule:NatsBudget",
        "regret_budget": "fly.policies.schedule:RegretBudget",
        "phase": "fly.policies.schedule:Phase",
        "token": "fly.policies.texts:TokenText",
    }
)
RULES: Registry = Registry(
    kind="policy",
    example="fly(theta=0.3) & after(2)",
    word=rf"\b{CLASS_PATH.pattern}",
    finished="rule",
    groups={"fly.policies": AcceptancePolicy, "fly.conditions": Condition},
    ours=_OTHERS | CATALOGUE | GATES,
    bases=(AcceptancePolicy, Condition),
    wanted="a dataclass that subclasses AcceptancePolicy or Condition",
    usable=is_dataclass,
    choices=lambda: {"policies": sorted([*policy_types(), *PRESETS]), "conditions": sorted(condition_types())},
    presets=PRESETS,
)


def policy_types() -> dict[str, type[AcceptancePolicy]]:
    """Return every policy class by name: built-in ones, and plug-ins of the entry-point group ``fly.policies``.

    Raises ``ValueError`` if two packages use the same name, or a plug-in is not a policy.
    """
    return {name: rule for name, rule in RULES.types.items() if issubclass(rule, AcceptancePolicy)}


def condition_types() -> dict[str, type[Condition]]:
    """Return every condition class by name: built-in ones, and plug-ins of the group ``fly.conditions``."""
    return {name: rule for name, rule in RULES.types.items() if issubclass(rule, Condition)}


def parse_policy(text: str, *, trusted: bool = False) -> AcceptancePolicy:
    """Parse a policy in Python's grammar of names, calls, ``&``, ``|``, ``~`` and parentheses::

        exact                                        lossy(lenience=3)
        fly(theta=0.3, window=6) & after(2)          fly.reference
        exact | entropy(0.3) & window(6) & ~control  my_rules:MyRule(alpha=2)

    Args:
        trusted: whether ``module:Class`` may import. Pass False for texts from the network.

    Raises ``ValueError`` that names the wrong part and the choices.
    """
    return load_policy(text, trusted=trusted)


def load_policy(value: object, *, trusted: bool = False) -> AcceptancePolicy:
    """Read a policy from a text or a mapping (from YAML or JSON); return a policy unchanged.

    Raises ``ValueError`` like ``parse_policy``.
    """
    return value if isinstance(value, AcceptancePolicy) else read_policy(value, trusted=trusted)[0]


def read_policy(value: object, *, trusted: bool = False) -> tuple[AcceptancePolicy, set[str]]:
    """Read a policy. Also return the rules that the text or mapping names, which the policy itself does not show:
    ``fly & after(2)`` becomes a composition of conditions."""
    source = Text(RULES, value, trusted) if isinstance(value, str) else Source(RULES, value, trusted)
    if isinstance(source, Text):
        rule = source.read(functools.partial(_from_text, source))
        core = f": 'exact | {value}'"
    else:
        try:
            rule, core = _from_data(source), " under 'relaxed'"
        except RecursionError:
            raise ValueError("policy is a mapping that is nested too deeply") from None
    if not isinstance(rule, AcceptancePolicy):
        raise ValueError(f"policy {value!r} is a condition; attach it to a core{core}")
    return rule, source.named


def dump_policy(rule: Rule) -> dict[str, Any]:
    """Write the mapping that ``load_policy`` reads: the name and every parameter, including nested rules."""
    registered = type(rule) in (RULES.types.get(rule.name), *_COMPOSITES.values())
    name = rule.name if registered else f"{type(rule).__module__}:{type(rule).__qualname__}"
    parameters = fields(rule)  # type: ignore[arg-type]  # rules are dataclasses
    return {"name": name} | {f.name: _to_data(getattr(rule, f.name)) for f in parameters if f.init}


def _validate(value: object, info: ValidationInfo) -> AcceptancePolicy:
    return load_policy(value, trusted=bool(info.context and info.context.get("trusted")))


# A field of a pydantic model that holds a policy: it reads texts and mappings, and writes mappings. It imports a class
# path only if the validation context is {"trusted": True}.
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


def _from_data(source: Source) -> Any:
    value = source.description
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError(f"policy {value!r} is neither a text nor a mapping with a name")

    def part(item: object, *place: str | int) -> Any:
        if isinstance(item, (list, tuple)):
            return tuple(part(each, *place, number) for number, each in enumerate(item))
        if not isinstance(item, Mapping):
            return item
        try:
            return _from_data(Source(RULES, item, source.trusted, source.named))
        except ValueError as error:
            raise PlacedError(str(error), *place, *getattr(error, "place", ())) from error

    name = value["name"]
    options = {key: part(item, key) for key, item in value.items() if key != "name"}
    return source.build(_COMPOSITES.get(name) or source.find(name), name, (), options)


def _from_text(text: Text, node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = (_from_text(text, side) for side in (node.left, node.right))
        is_and = isinstance(node.op, ast.BitAnd)
        try:
            return left & right if is_and else left | right
        except TypeError as error:
            # Leave out Python's own message ("unsupported operand"), which explains nothing.
            reason = "" if "operand" in str(error) else f": {error}"
            raise text.error(f"cannot combine '{left}' {'&' if is_and else '|'} '{right}'{reason}") from None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        part = _from_text(text, node.operand)
        if not isinstance(part, Condition):
            raise text.error(f"only a condition can be negated, '{part}' is a policy")
        return ~part
    if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        raise text.error("conditions are combined by '&', '|' and '~', not by 'and', 'or' and 'not'")
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = text.source(call.func)
    return text.call(text.find(name), name, call)
