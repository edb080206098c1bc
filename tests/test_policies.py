"""``verify`` against a literal twin, and what a verdict may depend on.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from fly.policies import (
    AcceptancePolicy,
    AgreeingWindow,
    Block,
    ControlToken,
    EntropyGate,
    Exact,
    FLy,
    LossySampling,
    Room,
    verify,
)
from fly.policies.base import accepts_exactly
from fly.runner.sampling import BatchSampling
from fly.types import Draft, Guarantee, Noise, SamplingParams, Target, Verdict, Why
from tests.policy_cases import PRESETS, Case, Twin, cases, flys, lossys, never, policies, random_case, same


def test_guarantees_are_declared() -> None:
    assert Exact().guarantee is Guarantee.LOSSLESS
    for policy in (*PRESETS, LossySampling(), Exact() | Room(1)):
        assert policy.guarantee is Guarantee.HEURISTIC


@given(cases)
def test_exact_equals_its_twin(case: Case) -> None:
    got = Twin(case).check(Exact(), 1.0, never)
    assert not got.clauses


@given(cases, lossys)
def test_lossy_sampling_equals_its_twin(case: Case, policy: LossySampling) -> None:
    Twin(case).check(policy, policy.lenience, never)


@given(cases, flys)
def test_fly_equals_its_twin(case: Case, policy: FLy) -> None:
    twin = Twin(case)
    got = twin.check(policy, 1.0, lambda b, j: twin.fly(policy, b, j))
    event(f"relaxed: {bool((got.why_BK == Why.RELAXED).any())}")
    assert len(got.clauses) == 4 or not got.asked_BK.any()
    relaxed_BK = got.why_BK == Why.RELAXED
    for held_BK in got.clauses.values():
        assert held_BK[relaxed_BK].all()


@given(st.integers(0, 2**32), st.one_of(st.just(Exact()), flys, flys.map(lambda rule: Exact() | rule.relaxation)))
def test_comparing_ids_is_the_verdict_at_temperature_0(seed: int, policy: AcceptancePolicy) -> None:
    case = random_case(seed, temperatures="greedy")
    assert accepts_exactly(policy)
    got, wanted = case.verify(policy), policy.verdict(case.target, case.draft, case.noise)
    for name in ("accepted_B", "next_token_B", "why_BK", "asked_BK"):
        mine, theirs = getattr(got, name), getattr(wanted, name)
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
    asked_BK = wanted.asked_BK
    if asked_BK.any():
        assert list(got.clauses) == list(wanted.clauses)
        assert all(torch.equal(got.clauses[name][asked_BK], wanted.clauses[name][asked_BK]) for name in got.clauses)


def test_what_else_a_rule_does_is_no_matter_of_ids() -> None:
    class Looser(Exact):
        def accept_probs(self, target: Target, draft: Draft) -> Tensor:
            return torch.ones(draft.tokens_BK.shape)

    class Excuses(Exact):
        def relax(self, target: Target, draft: Draft, agree_BK: Tensor) -> Tensor:
            return ~agree_BK

    class Whole(Exact):
        def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
            return super().verdict(target, draft, noise)

    for rule in (Looser(), Excuses(), Whole(), LossySampling(), Looser() | EntropyGate()):
        assert not accepts_exactly(rule)
    for seed in range(20):
        case = random_case(seed, temperatures="greedy")
        for rule in (Looser(), Excuses()):
            banned = case.target.logits_BKV[:, :-1].gather(-1, case.draft.tokens_BK[..., None]).isinf().any()
            if not banned:  # which nothing excuses
                assert torch.equal(case.verify(rule).accepted_B, case.draft.lengths_B)


@pytest.mark.parametrize("temperatures", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("policy", [*PRESETS, FLy(theta=0.2, window=2, hold=2)], ids=str)
def test_relaxation_does_happen_on_such_blocks(policy: FLy, temperatures: str) -> None:
    relaxed = rejected = 0
    for seed in range(40):
        case = random_case(seed, temperatures=temperatures)
        twin = Twin(case)
        got = twin.check(policy, 1.0, lambda b, j, twin=twin: twin.fly(policy, b, j))  # type: ignore[misc]
        relaxed += int((got.why_BK == Why.RELAXED).sum())
        rejected += int((got.accepted_B < case.draft.lengths_B).sum())
    assert relaxed >= 5 and rejected >= 20


# --- what a verdict may depend on ------------------------------------------------------------------------


@given(cases, policies, st.integers(0, 2**31))
def test_padding_never_matters(case: Case, policy: AcceptancePolicy, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows, longest = case.draft.tokens_BK.shape
    vocab = case.logits_BKV.shape[-1]
    mask_BK = case.draft.mask_BK()
    beyond = torch.arange(longest + 1) > case.draft.lengths_B.unsqueeze(1)
    other = random_case(seed, rows, longest, vocab=vocab)
    probs = case.draft.probs_BKV
    if probs is not None:
        noise = torch.rand(probs.shape, generator=g) * torch.randint(2, probs.shape, generator=g)
        probs = torch.where(mask_BK.unsqueeze(-1), probs, noise)
    changed = Case(
        torch.where(beyond.unsqueeze(-1), other.logits_BKV, case.logits_BKV),
        case.params,
        Draft(torch.where(mask_BK, case.draft.tokens_BK, other.draft.tokens_BK), case.draft.lengths_B, probs),
        Noise(torch.where(mask_BK, case.noise.accept_BK, other.noise.accept_BK), case.noise.sample_B),
        case.control,
    )
    assert same(changed.verify(policy), case.verify(policy), list(range(rows)), longest)


@given(cases, policies)
def test_a_row_alone_is_the_row_in_its_batch(case: Case, policy: AcceptancePolicy) -> None:
    whole = case.verify(policy)
    for b, n in enumerate(case.draft.lengths_B.tolist()):
        alone = case.pick([b])
        probs = alone.draft.probs_BKV
        alone.logits_BKV = alone.logits_BKV[:, : n + 1]
        alone.draft = Draft(
            alone.draft.tokens_BK[:, :n], alone.draft.lengths_B, None if probs is None else probs[:, :n]
        )
        alone.noise = Noise(alone.noise.accept_BK[:, :n], alone.noise.sample_B)
        assert same(alone.verify(policy), whole, [b], n)


@given(cases, policies, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(case: Case, policy: AcceptancePolicy, rng: random.Random) -> None:
    order = list(range(len(case.params)))
    rng.shuffle(order)
    longest = case.draft.tokens_BK.shape[1]
    whole = case.verify(policy)
    assert same(case.pick(order).verify(policy), whole, order, longest)
    some = order[: max(1, len(order) // 2)]
    index = torch.tensor(some)
    part = verify(policy, case.target.rows(index), case.draft.rows(index), case.noise.rows(index))
    assert same(part, whole, some, longest)


@given(cases, policies)
def test_inputs_stay_untouched(case: Case, policy: AcceptancePolicy) -> None:
    target = case.target
    values = [case.logits_BKV, target.probs_BKV, target.greedy_B, target.control_V, case.draft.tokens_BK]
    values += [case.draft.lengths_B, case.noise.accept_BK, case.noise.sample_B]
    values += [] if case.draft.probs_BKV is None else [case.draft.probs_BKV]
    before = [v.clone() for v in values if v is not None]
    verify(policy, target, case.draft, case.noise)
    assert all(torch.equal(a, b) for a, b in zip(before, values, strict=True) if b is not None)


@given(cases, policies)
def test_one_distribution_greedy_or_spelled_out(case: Case, policy: AcceptancePolicy) -> None:
    """A greedy batch that never builds its distribution gives what the one-hot distribution gives."""
    case.params = [SamplingParams(temperature=0)] * len(case.params)
    rows, longest = case.draft.tokens_BK.shape
    spelled = Target(
        case.logits_BKV,
        case.target.probs_BKV,
        greedy_B=torch.ones(rows, dtype=torch.bool),
        control_V=case.target.control_V,
    )
    assert same(verify(policy, spelled, case.draft, case.noise), case.verify(policy), list(range(rows)), longest)


@given(cases, policies)
def test_one_distribution_worked_out_where_asked_or_everywhere(case: Case, policy: AcceptancePolicy) -> None:
    rows, longest = case.draft.tokens_BK.shape
    lazy = case.target
    spelled = Target(case.logits_BKV, lazy.probs_BKV, greedy_B=lazy.greedy_B, control_V=lazy.control_V)
    if not lazy.all_greedy:
        assert same(verify(policy, spelled, case.draft, case.noise), case.verify(policy), list(range(rows)), longest)


# --- distributions of FLy and of lenience -------------------------------------------------------------------------


@given(cases, flys)
def test_fly_relaxes_exact_and_nothing_else(case: Case, policy: FLy) -> None:
    rows, longest = case.draft.tokens_BK.shape
    exact, relaxed = case.verify(Exact()), case.verify(policy)
    assert (relaxed.accepted_B >= exact.accepted_B).all()
    equal = [b for b in range(rows) if relaxed.accepted_B[b] == exact.accepted_B[b]]
    assert torch.equal(relaxed.next_token_B[equal], exact.next_token_B[equal])
    closed = replace(policy, theta=1.2)  # above 3/e nats, and above 1
    assert same(case.verify(closed), exact, list(range(rows)), longest)
    for j, b in itertools.product(range(longest), range(rows)):
        if relaxed.why_BK[b, j] == Why.RELAXED:
            assert int(case.draft.tokens_BK[b, j]) not in case.control


@given(cases, flys)
def test_fly_is_its_composition(case: Case, policy: FLy) -> None:
    gate = EntropyGate(policy.theta, policy.entropy, policy.processed)
    composed = Exact() | (gate & AgreeingWindow(policy.window) & Room(policy.hold) & ~ControlToken())
    rows, longest = case.draft.tokens_BK.shape
    mine, theirs = case.verify(policy), case.verify(composed)
    assert same(mine, theirs, list(range(rows)), longest)
    assert list(mine.clauses) == list(theirs.clauses)
    assert all(torch.equal(a, b) for a, b in zip(mine.clauses.values(), theirs.clauses.values()))
    assert composed.relaxation == policy.relaxation


def test_control_and_banned_tokens_are_never_relaxed() -> None:
    """The gate is wide open and everything else allows it."""
    logits = torch.zeros(1, 3, 5)
    logits[0, 0, 0] = 1.0
    draft = Draft(torch.tensor([[2, 0]]), torch.tensor([2]))
    noise = Noise(torch.zeros(1, 2), torch.zeros(1))
    rule = FLy(theta=0, window=1, hold=1)
    assert verify(rule, Target(logits), draft, noise).accepted_B.tolist() == [2]
    control_V = torch.tensor([False, False, True, False, False])
    assert verify(rule, Target(logits, control_V=control_V), draft, noise).accepted_B.tolist() == [0]
    banned = logits.clone()
    banned[0, 0, 2] = -math.inf  # min_tokens forbids this end: no rule may let it pass
    for policy in (rule, Exact() | Room(0), LossySampling(1e6)):
        verdict = verify(policy, Target(banned), draft, noise)
        assert verdict.accepted_B.tolist() == [0] and verdict.next_token_B.tolist() == [0]


@given(cases)
def test_no_lenience_is_exact(case: Case) -> None:
    rows, longest = case.draft.tokens_BK.shape
    assert same(case.verify(LossySampling(1)), case.verify(Exact()), list(range(rows)), longest)


def test_no_lenience_is_exact_among_equals() -> None:
    """Two tokens as likely as each other: the target's choice is the lower id, and exact keeps only that."""
    case = Case(
        torch.zeros(1, 2, 3),
        [SamplingParams(temperature=0)],
        Draft(torch.tensor([[1]]), torch.tensor([1])),
        Noise(torch.zeros(1, 1), torch.zeros(1)),
        frozenset(),
    )
    assert case.verify(Exact()).accepted_B.tolist() == case.verify(LossySampling(1)).accepted_B.tolist() == [0]
    assert case.verify(LossySampling(1.01)).accepted_B.tolist() == [1]


@given(cases, st.lists(st.floats(1, 30), min_size=2, max_size=4))
def test_lenience_is_monotone(case: Case, leniences: list[float]) -> None:
    accepted = [case.verify(LossySampling(lenience)).accepted_B for lenience in sorted(leniences)]
    assert all((more >= less).all() for less, more in itertools.pairwise(accepted))


@pytest.mark.parametrize(("lenience", "stands"), [(1.9, 0), (2.1, 1), (3.9, 1), (4.1, 2)])
def test_lenience_at_temperature_zero_by_hand(lenience: float, stands: int) -> None:
    distributions = torch.tensor([[[0.5, 0.25, 0.25], [0.8, 0.2, 0.0], [1.0, 0.0, 0.0]]])
    draft = Draft(torch.tensor([[1, 1]]), torch.tensor([2]))
    verdict = verify(
        LossySampling(lenience), Target(distributions.log()), draft, Noise(torch.zeros(1, 2), torch.zeros(1))
    )
    assert verdict.accepted_B.tolist() == [stands]


# --- window and room by hand -----------------------------------------------------------------------------


def by_hand(mismatches: set[int], rule: FLy, k: int = 8) -> int:
    """Accepted length of a block whose mismatches (1-based) all lie where the target is undecided."""
    logits = torch.zeros(1, k + 1, 6)
    logits[..., 0] = 0.1
    draft = Draft(torch.tensor([[int(j in mismatches) for j in range(1, k + 1)]]), torch.tensor([k]))
    return int(verify(rule, Target(logits), draft, Noise(torch.zeros(1, k), torch.zeros(1))).accepted_B)


@pytest.mark.parametrize(
    ("mismatches", "vllm", "reference"),
    [
        (set(), 8, 8),
        ({1}, 8, 8),  # tokens 2..7 agree, 1 + 6 <= 8
        ({2}, 8, 8),  # tokens 3..8 agree, 2 + 6 <= 8: just room enough
        ({3}, 2, 2),  # 3 + 6 > 8
        ({1, 8}, 7, 7),  # the window ends before the second mismatch, which has no room
        ({1, 7}, 0, 6),  # six following tokens reach the second mismatch, five do not
        ({1, 6}, 0, 0),
        ({1, 2}, 0, 0),
        ({8}, 7, 7),
    ],
)
def test_window_and_room_by_hand(mismatches: set[int], vllm: int, reference: int) -> None:
    assert by_hand(mismatches, FLy.vllm()) == vllm
    assert by_hand(mismatches, FLy.paper()) == vllm
    assert by_hand(mismatches, FLy.reference()) == reference


def test_room_counts_the_rows_own_length() -> None:
    assert [by_hand({1}, FLy(window=2, hold=h), k) for h, k in ((3, 4), (4, 4), (2, 3), (3, 3))] == [4, 0, 3, 0]
    assert by_hand({1}, FLy(window=4, hold=0), 4) == 0  # only three tokens follow
    assert by_hand({1, 2, 3}, FLy(window=0, hold=0), 3) == 3


def test_entropy_by_hand() -> None:
    """Four equal tokens of eight: top-3 entropy 3/4 ln 4 nats, normalized ln 4 / ln 8."""
    logits = torch.tensor([[[0.0] * 4 + [-math.inf] * 4] * 2])
    block = Block(Target(logits), Draft(torch.tensor([[1]]), torch.tensor([1])), torch.tensor([[False]]))
    for kind, value in (("top3", 0.75 * math.log(4)), ("normalized", 2 / 3)):
        assert EntropyGate(value - 1e-4, kind).evaluate(block).item()  # type: ignore[arg-type]
        assert not EntropyGate(value + 1e-4, kind).evaluate(block).item()  # type: ignore[arg-type]


def test_the_gate_is_taken_on_the_distribution_it_names() -> None:
    """Cold sampling decides what the raw logits leave open; at temperature 0 the raw logits rule in any case."""
    logits = torch.tensor([[[2.0, 1.0, 0.5, 0.0]] * 2] * 2)
    distribution = BatchSampling.of([SamplingParams(temperature=0.05), SamplingParams(temperature=0)])
    target = Target(logits, distribution.probs(logits), greedy_B=distribution.greedy_B)
    block = Block(target, Draft(torch.tensor([[1], [1]]), torch.tensor([1, 1])), torch.zeros(2, 1, dtype=torch.bool))
    assert EntropyGate(0.3, processed=True).evaluate(block).flatten().tolist() == [False, True]
    assert EntropyGate(0.3, processed=False).evaluate(block).flatten().tolist() == [True, True]
