"""Conditions: how they combine, print and are read, and the errors of policies and conditions.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly.policies import (
    AcceptancePolicy,
    AfterTokens,
    AgreeingWindow,
    Block,
    BlockVerification,
    Condition,
    ControlToken,
    EntropyGate,
    Exact,
    ExactSample,
    FLy,
    LossySampling,
    Relaxed,
    Room,
    parse_policy,
    verify,
)
from fly.types import Draft, Noise, Target, Verdict
from tests.policy_cases import PRESETS, Case, cases, counts, entropies, flys, lossys, random_case, same, thetas


@dataclass(frozen=True)
class Column(Condition):
    """True at the columns whose bit is set."""

    bits: int

    def evaluate(self, block: Block) -> Tensor:
        columns_K = torch.arange(block.agree_BK.shape[1])
        return ((self.bits >> columns_K) & 1).bool().expand_as(block.agree_BK)

    def __str__(self) -> str:
        return f"c{self.bits}"


Meaning = tuple[Condition, Callable[[int], bool]]
leaves = st.integers(0, 255).map(lambda bits: (Column(bits), lambda j: bool(bits >> j & 1)))


def _combine(children: st.SearchStrategy[Meaning]) -> st.SearchStrategy[Meaning]:
    pairs = st.tuples(children, children)
    return st.one_of(
        pairs.map(lambda ab: (ab[0][0] & ab[1][0], lambda j: ab[0][1](j) and ab[1][1](j))),
        pairs.map(lambda ab: (ab[0][0] | ab[1][0], lambda j: ab[0][1](j) or ab[1][1](j))),
        children.map(lambda a: (~a[0], lambda j: not a[1](j))),
    )


@given(st.recursive(leaves, _combine, max_leaves=8))
def test_conditions_mean_what_they_say(meaning: Meaning) -> None:
    condition, truth = meaning
    logits, draft = torch.zeros(2, 9, 3), Draft(torch.ones(2, 8, dtype=torch.int64), torch.tensor([8, 8]))
    block = Block(Target(logits), draft, torch.zeros(2, 8, dtype=torch.bool))
    wanted = [truth(j) for j in range(8)]
    for got in (condition.evaluate(block), condition.holds(block)):
        assert got.tolist() == [wanted, wanted]
    accepted = next((j for j, ok in enumerate(wanted) if not ok), 8)
    verdict = verify(Exact() | condition, Target(logits), draft, Noise(torch.zeros(2, 8), torch.zeros(2)))
    assert verdict.accepted_B.tolist() == [accepted] * 2
    # the expression printed is the condition itself
    names = {f"c{bits}": Column(bits) for bits in range(256)}
    again = eval(str(condition), {}, names)
    assert again.evaluate(block).tolist() == [wanted, wanted]


def test_pythons_own_words_do_not_combine_conditions() -> None:
    """They would choose one of the two without a word."""
    for combine in (
        lambda: AgreeingWindow(2) and ControlToken(),
        lambda: AgreeingWindow(2) or ControlToken(),
        lambda: FLy() and not ControlToken(),
    ):
        with pytest.raises(TypeError, match="combine conditions by '&'"):
            combine()


def test_conditions_print_as_expressions() -> None:
    a, b, c = EntropyGate(0.3), AgreeingWindow(6), ~ControlToken()
    assert str(a & b & c) == "entropy(0.3) & window(6) & ~control"
    assert str((a | b) & Room(2)) == "(entropy(0.3) | window(6)) & room(2)"
    assert str(~(a | b)) == "~(entropy(0.3) | window(6))"
    assert str(Exact() | (a & b)) == "exact | entropy(0.3) & window(6)"
    assert Exact() | a | b == Relaxed(Exact(), a | b)
    assert (Exact() | a) & b == Relaxed(Exact(), a & b)
    assert FLy() | a == Relaxed(Exact(), FLy().relaxation | a) and FLy() & a == Relaxed(Exact(), FLy().relaxation & a)
    with pytest.raises(TypeError, match="exact"):
        Exact() & a


our_leaves = st.one_of(
    st.builds(EntropyGate, thetas, entropies, st.booleans()),
    st.builds(AgreeingWindow, counts),
    st.builds(Room, counts),
    st.just(ControlToken()),
)


def _ours(children: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
    pairs = st.tuples(children, children)
    return st.one_of(
        pairs.map(lambda ab: ab[0] & ab[1]), pairs.map(lambda ab: ab[0] | ab[1]), children.map(lambda a: ~a)
    )


@settings(max_examples=30)
@given(st.recursive(our_leaves, _ours, max_leaves=6), flys, lossys, cases)
def test_what_is_printed_is_what_is_read(condition: Condition, fly: FLy, lossy: LossySampling, case: Case) -> None:
    rows, longest = case.draft.tokens_BK.shape
    for policy in (Exact(), fly, lossy, Exact() | condition, fly | condition, fly & condition):
        again = parse_policy(str(policy))
        assert str(again) == str(policy)
        assert same(case.verify(again), case.verify(policy), list(range(rows)), longest)
    assert (parse_policy(str(fly)), parse_policy(str(lossy))) == (fly, lossy)


def test_clauses_name_the_leaves() -> None:
    case = random_case(3)
    clauses = case.verify(Exact() | (EntropyGate() & (Room(2) | ~ControlToken()) & ~(Room(1) | Room(9)))).clauses
    assert list(clauses) == ["entropy(0.3)", "room(2)", "~control", "room(1)", "room(9)"]


def test_policies_are_values() -> None:
    assert FLy() == FLy.vllm() and hash(FLy()) == hash(FLy.vllm()) and FLy.vllm() != FLy.reference()
    assert FLy.reference() == FLy("top3", 0.3, 5, 6, processed=False)
    assert FLy.paper() == FLy("normalized", 0.3, 6, 6, processed=False)
    assert len({Exact(), Exact(), LossySampling(1), LossySampling(1.0), FLy()}) == 3


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FLy(entropy="top4"), ("'top4'", "top3", "normalized")),  # type: ignore[arg-type]
        (lambda: EntropyGate(0.3, "full"), ("'full'", "top3", "normalized")),  # type: ignore[arg-type]
        (lambda: FLy(theta=-0.5), ("theta", "-0.5")),
        (lambda: FLy(theta=math.nan), ("theta", "nan")),
        (lambda: EntropyGate(math.inf), ("theta", "inf")),
        (lambda: EntropyGate("0.3"), ("theta", "'0.3'")),  # type: ignore[arg-type]
        (lambda: FLy(window=-1), ("window", "-1")),
        (lambda: AgreeingWindow(2.0), ("window", "2.0")),  # type: ignore[arg-type]
        (lambda: FLy(hold=-7), ("hold", "-7")),
        (lambda: Room(True), ("hold", "True")),
        (lambda: LossySampling(0.99), ("lenience", "0.99")),
        (lambda: LossySampling(math.inf), ("lenience", "inf")),
        (lambda: LossySampling(math.nan), ("lenience", "nan")),
    ],
)
def test_bad_parameters_are_named(make: Callable[[], object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("positions", "rows", "coins", "draws"),
    [(3, 2, (2, 3), 2), (5, 2, (2, 3), 2), (4, 1, (2, 3), 2), (4, 2, (2, 2), 2), (4, 2, (1, 3), 2), (4, 2, (2, 3), 1)],
)
def test_shapes_that_do_not_belong_together(positions: int, rows: int, coins: tuple[int, int], draws: int) -> None:
    draft = Draft(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 1]))
    verify(Exact(), Target(torch.zeros(2, 4, 5)), draft, Noise(torch.zeros(2, 3), torch.zeros(2)))
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        verify(Exact(), Target(torch.zeros(rows, positions, 5)), draft, Noise(torch.zeros(coins), torch.zeros(draws)))


def test_an_empty_draft_is_all_bonus() -> None:
    logits = torch.tensor([[[0.0, 2.0, 1.0]], [[3.0, 2.0, 1.0]]])
    for policy in (Exact(), *PRESETS, LossySampling(3)):
        verdict = verify(policy, Target(logits), Draft.empty(2), Noise(torch.zeros(2, 0), torch.zeros(2)))
        assert verdict.accepted_B.tolist() == [0, 0] and verdict.next_token_B.tolist() == [1, 0]
        assert verdict.why_BK.shape == verdict.asked_BK.shape == (2, 0)


@dataclass(frozen=True)
class OwnVerdict(Exact):
    """Decides on whole blocks."""

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        return super().verdict(target, draft, noise)


@dataclass(frozen=True)
class OwnVerdictOfFLy(FLy):
    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        return super().verdict(target, draft, noise)


@dataclass(frozen=True)
class OwnRelax(Exact):
    def relax(self, target: Target, draft: Draft, agree_BK: Tensor) -> Tensor:
        return ~agree_BK


@pytest.mark.parametrize("rule", [OwnVerdict(), OwnVerdictOfFLy(), BlockVerification(), ExactSample()], ids=str)
def test_a_rule_for_whole_blocks_is_not_composed_into_another(rule: AcceptancePolicy) -> None:
    for compose in (lambda: rule | AfterTokens(2), lambda: Relaxed(rule, AfterTokens(2))):
        with pytest.raises(TypeError, match=r"whole blocks \(its own 'verdict'\).*'exact \| after\(2\)'"):
            compose()
    with pytest.raises(TypeError, match=r"whole blocks"):
        _ = rule & AfterTokens(2)


def test_a_relax_of_its_own_is_not_replaced() -> None:
    with pytest.raises(TypeError, match=r"'relax' of its own, which '\| after\(2\)' would replace"):
        _ = OwnRelax() | AfterTokens(2)
