"""Policies as text, mappings, configuration fields and plug-ins: one thing in every form."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fly import expressions
from fly.policies import (
    AboveContext,
    AcceptancePolicy,
    AfterTokens,
    AgreeingWindow,
    AtMost,
    Block,
    Budget,
    Condition,
    ControlToken,
    EntropyGate,
    Exact,
    FLy,
    LossySampling,
    NatsBudget,
    Phase,
    PolicyField,
    Room,
    condition_types,
    dump_policy,
    load_policy,
    parse_policy,
    policy_types,
)
from fly.policies.base import exact_accept_probs
from fly.policies.registry import RULES
from fly.testing import check_policy
from fly.types import Draft, Guarantee, Target

counts = st.integers(0, 9)
shares = st.floats(0, 1)
markers = st.one_of(st.integers(0, 50), st.sampled_from(["<think>", "</think>", "a:b", 'say "x"', "word", "it's"]))
leaves: st.SearchStrategy[Condition] = st.one_of(
    st.builds(EntropyGate, st.floats(0, 3), st.sampled_from(["top3", "normalized"]), st.booleans()),
    st.builds(AgreeingWindow, counts),
    st.builds(Room, counts),
    st.just(ControlToken()),
    st.builds(AfterTokens, counts),
    st.builds(AboveContext, counts),
    st.builds(Budget, shares),
    st.builds(AtMost, counts),
    st.builds(NatsBudget, st.floats(0, 100)),
    st.tuples(markers, markers).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: Phase(*pair)),
)
conditions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda part: ~part),
    ),
    max_leaves=6,
)
cores: st.SearchStrategy[AcceptancePolicy] = st.one_of(
    st.just(Exact()),
    st.builds(LossySampling, st.floats(1, 9)),
    st.builds(FLy, theta=st.floats(0, 2), window=counts, hold=counts, processed=st.booleans()),
)
policies = st.one_of(
    cores,
    st.tuples(cores, conditions).map(lambda pair: pair[0] | pair[1]),
    st.tuples(st.just(FLy()), conditions).map(lambda pair: pair[0] & pair[1]),
)


class Config(pydantic.BaseModel):
    policy: PolicyField


@given(policies)
def test_every_form_gives_the_policy_back(policy: AcceptancePolicy) -> None:
    assert parse_policy(str(policy)) == policy
    assert load_policy(json.loads(json.dumps(dump_policy(policy)))) == policy
    config = Config(policy=policy)
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert Config(policy=str(policy)) == config  # type: ignore[arg-type]


def test_yaml_gives_the_policy_back() -> None:
    yaml = pytest.importorskip("yaml")
    policy = FLy(theta=0.5) & AfterTokens(2) & Phase("<think>", "</think>")
    assert load_policy(yaml.safe_load(yaml.safe_dump(dump_policy(policy)))) == policy


def test_presets_and_operators_mean_what_python_means() -> None:
    assert parse_policy("fly") == FLy() == FLy.vllm()
    assert parse_policy("fly.reference") == FLy.reference()
    assert parse_policy("fly(theta=0.3, window=6) & after(2)") == FLy() & AfterTokens(2)
    gate = EntropyGate(0.3) & AgreeingWindow(6) & ~ControlToken()
    assert parse_policy("exact | entropy(0.3) & window(6) & ~control") == Exact() | gate
    assert (FLy() & AfterTokens(2)).relaxation == FLy().relaxation & AfterTokens(2)
    assert (FLy() | AtMost(1)).relaxation == FLy().relaxation | AtMost(1)
    assert (FLy() | AtMost(1)).core == Exact()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("flx", ["'flx'", "did you mean 'fly'?"]),
        ("qqqqq", ["'qqqqq'", "exact", "fly.paper", "entropy"]),
        ("fly(thta=1)", ["'thta'", "did you mean 'theta'?"]),
        ("fly(zzz=1)", ["'zzz'", "theta", "window"]),
        ("fly(theta=-1)", ["theta", "-1"]),
        ("fly(window=1.5)", ["window", "1.5"]),
        ("after(2)", ["condition", "exact | after(2)"]),
        ("exact & after(2)", ["exact", "nothing to restrict"]),
        ("fly | exact", ["cannot combine", "fly", "exact", "both are policies"]),
        ("exact | fly", ["both are policies", "entropy(0.3) & window(6)"]),
        ("entropy(0.3) | exact", ["policy stands first", "exact | entropy(0.3)"]),
        ("exact & entropy(0.3) &", ["expression", "invalid syntax"]),
        ("~fly", ["negated", "fly"]),
        ("exact or window(2)", ["'|'", "'or'"]),
        ("fly and not control", ["'&'", "'and'"]),
        ("fly & (not control)", ["'~'", "'not'"]),
        ("fly(", ["expression"]),
        ("", ["expression"]),
        ("fly(theta=[x for x in y])", ["plain value"]),
        ("__import__('os')", ["'__import__'", "unknown"]),
        ("fly.theta", ["'fly.theta'", "unknown"]),
        ("(lambda: 1)()", ["unknown"]),
        ("phase(3, 3)", ["same marker", "3"]),
    ],
)
def test_a_wrong_text_is_named_with_the_choices(text: str, names: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_policy(text)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize("value", [3, None, [], {}, {"name": 3}, {"name": "fly", "colour": 1}, {"name": "after"}])
def test_a_wrong_mapping_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="polic"):
        load_policy(value)


@given(st.text(max_size=30))
def test_any_text_is_a_policy_or_a_value_error(text: str) -> None:
    try:
        assert isinstance(parse_policy(text), AcceptancePolicy)
    except ValueError as error:
        assert "policy" in str(error)


def test_a_field_reports_a_bad_policy() -> None:
    with pytest.raises(pydantic.ValidationError, match="flx"):
        Config(policy="flx")  # type: ignore[arg-type]
    assert "policy" in Config.model_json_schema()["properties"]


RULE_FILE = """
from dataclasses import dataclass
from fly.policies import AcceptancePolicy, Exact

@dataclass(frozen=True)
class Mine(AcceptancePolicy):
    alpha: float = 0.5
    def accept_probs(self, target, draft):
        return Exact().accept_probs(target, draft)

class NoRule:
    pass
"""


def test_class_paths_import_only_where_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_rules.py").write_text(RULE_FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for value in ("planted_rules:Mine", "fly | planted_rules:Mine", {"name": "planted_rules:Mine"}):
        with pytest.raises(ValueError, match="not allowed"):
            load_policy(value)
    assert "planted_rules" not in sys.modules
    with pytest.raises(pydantic.ValidationError, match="not allowed"):
        Config(policy="planted_rules:Mine")  # type: ignore[arg-type]
    rule: Any = parse_policy("planted_rules:Mine(alpha=0.25)", trusted=True)
    assert type(rule).__name__ == "Mine" and rule.alpha == 0.25
    assert dump_policy(rule) == {"name": "planted_rules:Mine", "alpha": 0.25}
    assert load_policy(dump_policy(rule), trusted=True) == rule
    for path in ("planted_rules:NoRule", "planted_rules:Absent", "no_such_module_here:Mine"):
        with pytest.raises(ValueError, match=path):
            parse_policy(path, trusted=True)


@dataclass(frozen=True)
class PluggedGate(Condition):
    """Holds everywhere."""

    name = "plugged_gate"

    def evaluate(self, block: Block) -> Tensor:
        return torch.ones_like(block.agree_BK)


@dataclass(frozen=True)
class Plugged(Exact):
    name = "plugged"
    guarantee = Guarantee.LOSSLESS


def forget() -> None:
    """Entry points are looked for anew."""
    vars(RULES).pop("types", None)


def install(monkeypatch: pytest.MonkeyPatch, **groups: dict[str, str]) -> None:
    """Let packages have installed these: by group, names and what they are here."""

    def found(group: str) -> list[EntryPoint]:
        assert group in ("fly.policies", "fly.conditions")
        installed = groups.get(group.removeprefix("fly."), {})
        return [EntryPoint(name, f"{__name__}:{value}", group) for name, value in installed.items()]

    monkeypatch.setattr(expressions, "entry_points", found)
    forget()


def test_entry_points_join_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        install(monkeypatch, policies={"plugged": "Plugged"}, conditions={"plugged_gate": "PluggedGate"})
        assert policy_types()["plugged"] is Plugged and condition_types()["plugged_gate"] is PluggedGate
        assert "plugged" not in condition_types() and "plugged_gate" not in policy_types()
        rule = Plugged() | PluggedGate() & AfterTokens(3)
        assert parse_policy("plugged | plugged_gate & after(3)") == rule == parse_policy(str(rule))
        install(monkeypatch, policies={"fly": "Plugged"})
        with pytest.raises(ValueError, match="taken"):
            policy_types()
        install(monkeypatch, policies={"x": "Config"})
        with pytest.raises(ValueError, match=r"must be a dataclass .*, got <class"):
            policy_types()
        install(monkeypatch, policies={"x": "FINISHED"})
        path = f"{__name__}:FINISHED"  # which texts may name
        with pytest.raises(ValueError, match=f"must be a dataclass .* is an instance: name '{path}'"):
            policy_types()
        assert parse_policy(path, trusted=True) == FINISHED
        for wrong, right, value in (("policies", "conditions", "PluggedGate"), ("conditions", "policies", "Plugged")):
            install(monkeypatch, **{wrong: {"x": value}})
            with pytest.raises(ValueError, match=f"'fly.{wrong}', .* stands in 'fly.{right}'"):
                condition_types()
    finally:
        forget()


@dataclass(frozen=True)
class Typed(AcceptancePolicy):
    """Checks nothing itself; its annotations are checked for it."""

    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    count: int = 1

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return exact_accept_probs(target, draft)


FINISHED = Typed(0.25) | AfterTokens(3)


def test_the_parameters_of_a_plug_in_have_the_types_it_declares() -> None:
    path = f"{__name__}:Typed"
    assert parse_policy(f"{path}(share=1, kind=b)", trusted=True) == Typed(1, "b")
    for text in ("share='x'", "kind=c", "count=1.5", "count=True", "share=None"):
        name, value = text.split("=")
        with pytest.raises(ValueError, match=name) as caught:
            parse_policy(f"{path}({text})", trusted=True)
        assert value.strip("'") in str(caught.value)
    report = check_policy(Typed(share="x"), raises=False)  # type: ignore[arg-type]  # what is tested
    assert [finding.passed for finding in report.findings] == [False] and "share" in str(report)


def test_a_module_may_keep_finished_rules() -> None:
    path = f"{__name__}:FINISHED"
    assert parse_policy(path, trusted=True) == FINISHED
    assert parse_policy(f"{path} & control", trusted=True) == FINISHED & ControlToken()
    with pytest.raises(ValueError, match="not allowed"):
        parse_policy(path)
    with pytest.raises(ValueError, match="finished rule"):
        parse_policy(f"{path}(3)", trusted=True)
    with pytest.raises(ValueError, match="instance of one"):
        parse_policy(f"{__name__}:pytest", trusted=True)


def test_every_registered_rule_works_with_its_defaults_and_has_a_docstring() -> None:
    for name, rule in policy_types().items():
        assert rule().name == name and (rule.__doc__ or "").strip()
    for name, condition in condition_types().items():
        assert condition.name == name and (condition.__doc__ or "").strip()
