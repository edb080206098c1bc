"""Conditions of schedule, budget and phase against literal twins, and through the engine's bookkeeping."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fly
from fly.drafts import DraftStrategy, SingleDraft, TreeDraft
from fly.policies import (
    AboveContext,
    AfterTokens,
    AtMost,
    Block,
    Budget,
    Condition,
    CostBudget,
    Exact,
    NatsBudget,
    Phase,
    RegretBudget,
    SuffixRegret,
    asd,
    raw_log_probs,
    verify,
)
from fly.policies.waits import find_wait
from fly.testing.blocks import toy_vocabulary
from fly.testing.policies import check_row_alone_equals_row_in_batch
from fly.types import Draft, Guarantee, Noise, Target, Why
from tests.toys import random_llama

VOCAB = 5


@dataclass(frozen=True)
class Always(Condition):
    """Holds everywhere, so that a schedule alone decides."""

    def evaluate(self, block: Block) -> Tensor:
        return torch.ones_like(block.agree_BK)

    def __str__(self) -> str:
        return "always"


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Target, Draft]:
    rows, longest = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    logits = torch.randn(rows, longest + 1, VOCAB, generator=generator) * 2
    tokens = torch.randint(0, VOCAB, (rows, longest), generator=generator)
    follow = torch.rand(rows, longest, generator=generator) < 0.5
    tokens = torch.where(follow, logits[:, :-1].argmax(-1), tokens)
    lengths = torch.randint(0, longest + 1, (rows,), generator=generator)
    history = [torch.randint(0, VOCAB, (draw(st.integers(1, 6)),), generator=generator).tolist() for _ in range(rows)]
    places = [sorted(draw(st.sets(st.integers(0, len(text) - 1)))) for text in history]
    target = Target(
        logits,
        relaxed_at=places,
        generated_B=torch.tensor([draw(st.integers(0, 20)) for _ in range(rows)]),
        relaxed_B=torch.tensor([draw(st.integers(0, 4)) for _ in range(rows)]),
        nats_B=(spent_B := torch.tensor([draw(st.floats(0, 4, width=32)) for _ in range(rows)])),
        spent=lambda _: spent_B,
        history=history,
    )
    return target, Draft(tokens, lengths)


def twin(condition: Condition, target: Target, draft: Draft, b: int) -> tuple[int, list[int]]:
    """Accepted length and relaxed positions of row ``b`` at temperature 0, decided token by token with state."""
    assert target.history is not None
    generated, relaxed, nats = int(target.generated_B[b]), int(target.relaxed_B[b]), float(target.nats_B[b])
    text, positions = list(target.history[b]), []
    for j in range(int(draft.lengths_B[b])):
        token = int(draft.tokens_BK[b, j])
        logits = target.logits_BKV[b, j].double()
        if token != int(logits.argmax()):
            cost = float(-(logits.softmax(-1)[token].log()))
            if isinstance(condition, AfterTokens):
                holds = generated >= condition.count
            elif isinstance(condition, AboveContext):
                holds = len(text) >= condition.position
            elif isinstance(condition, Budget):
                holds = relaxed + 1 <= condition.share * (generated + 1)
            elif isinstance(condition, AtMost):
                holds = (len(positions) if condition.per == "block" else relaxed) + 1 <= condition.count
            elif isinstance(condition, RegretBudget):
                cost = float(logits.max() - logits[token])
                holds = nats + cost <= condition.nats
            elif isinstance(condition, NatsBudget):
                holds = nats + cost <= condition.nats
            else:
                assert isinstance(condition, Phase)
                holds = condition.inside_first
                for earlier in text:
                    holds = earlier == condition.start if earlier in (condition.start, condition.end) else holds
                holds = holds and token not in (condition.start, condition.end)
            if not holds:
                return j, positions
            relaxed, nats = relaxed + 1, nats + cost
            positions.append(j)
        generated += 1
        text.append(token)
    return int(draft.lengths_B[b]), positions


schedules = st.one_of(
    st.builds(AfterTokens, st.integers(0, 25)),
    st.builds(AboveContext, st.integers(0, 14)),
    st.builds(Budget, st.sampled_from([0.0, 0.05, 0.125, 0.25, 0.5, 1.0])),
    st.builds(AtMost, st.integers(0, 7), st.sampled_from(["output", "block"])),
    st.builds(NatsBudget, st.floats(0, 12)),
    st.builds(RegretBudget, st.floats(0, 12)),
    st.builds(Phase, st.just(1), st.just(2), st.booleans()),
)


@given(blocks(), schedules)
def test_schedules_equal_a_stateful_twin(block: tuple[Target, Draft], condition: Condition) -> None:
    target, draft = block
    rows, longest = draft.tokens_BK.shape
    policy = Exact() | (Always() & condition)
    verdict = verify(policy, target, draft, Noise(torch.zeros(rows, longest), torch.zeros(rows)))
    for b in range(rows):
        accepted, positions = twin(condition, target, draft, b)
        if isinstance(condition, NatsBudget) and int(verdict.accepted_B[b]) != accepted:
            continue_at = min(int(verdict.accepted_B[b]), accepted)
            spent = float(target.nats_B[b]) + sum(
                float(-target.logits_BKV[b, j].log_softmax(-1)[draft.tokens_BK[b, j]])
                for j in range(continue_at + 1)
                if int(draft.tokens_BK[b, j]) != int(target.logits_BKV[b, j].argmax())
            )
            assert math.isclose(spent, condition.nats, abs_tol=1e-4)  # a rounding tie at the very edge
            continue
        assert int(verdict.accepted_B[b]) == accepted
        assert (verdict.why_BK[b] == Why.RELAXED).nonzero().flatten().tolist() == positions


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (AfterTokens, -1),
        (AfterTokens, 1.5),
        (AboveContext, True),
        (AtMost, -2),
        (Budget, 1.1),
        (Budget, -0.1),
        (NatsBudget, -1.0),
        (NatsBudget, math.inf),
        (RegretBudget, -1.0),
    ],
)
def test_bad_parameters_are_named(make: type, bad: object) -> None:
    with pytest.raises(ValueError, match=str(bad)):
        make(bad)


@pytest.mark.parametrize("per", ["request", 2, None])
def test_a_cap_is_per_output_or_per_block(per: object) -> None:
    with pytest.raises(ValueError, match="per"):
        AtMost(2, per)  # type: ignore[arg-type]


@given(blocks(), st.floats(0, 3), st.integers(0, 4), st.floats(0, 12))
def test_asd_is_the_longest_prefix_of_its_three_budgets(
    block: tuple[Target, Draft], gate: float, most: int, budget: float
) -> None:
    """The loop of the paper's reference code, token by token, at temperature 0."""
    target, draft = block
    rows, longest = draft.tokens_BK.shape
    policy = Exact() | (SuffixRegret(gate) & AtMost(most, "block") & RegretBudget(budget))
    verdict = verify(policy, target, draft, Noise(torch.zeros(rows, longest), torch.zeros(rows)))
    for b, length in enumerate(draft.lengths_B.tolist()):
        risk, count, accepted, close = float(target.nats_B[b]), 0, 0, False
        for j in range(length):
            logits, token = target.logits_BKV[b, j].double(), int(draft.tokens_BK[b, j])
            if token != int(logits.argmax()):
                regret = float(logits.max() - logits[token])
                risk, count = risk + regret, count + 1
                close |= abs(regret - gate * (length - j)) < 1e-4 or abs(risk - budget) < 1e-4
                strict = budget == 0 or gate == 0 or most == 0
                if strict or regret / (length - j) > gate or risk > budget or count > most:
                    break
            accepted = j + 1
        assert close or int(verdict.accepted_B[b]) == accepted
        if not close:
            assert int((verdict.why_BK[b] == Why.RELAXED).sum()) <= most


def test_phase_needs_markers_it_can_find() -> None:
    with pytest.raises(ValueError, match="same marker"):
        Phase(1, 1)
    with pytest.raises(ValueError, match="must be a token id"):
        Phase("", 2)
    llm = fly.LLM("fly-target", "fly-draft")
    with pytest.raises(ValueError, match="exactly one"):
        llm.generate(["Tom"], policy=Exact() | (Always() & Phase("two words", "<|end|>")))
    policy = Exact() | (Always() & Phase("<|user|>", "<|assistant|>"))
    assert llm.tokenizer is not None
    bound, ids = policy.bind(llm.vocabulary), [llm.tokenizer.token_id(text) for text in ("<|user|>", "<|assistant|>")]
    assert bound == policy and str(bound) == str(policy)
    phase = bound.relaxation.parts[1]  # type: ignore[union-attr]  # two conditions under &
    assert list(phase._markers) == ids
    with pytest.raises(ValueError, match="bound to no vocabulary"):
        Exact().__or__(Phase("a", "b")).verdict(
            Target(torch.zeros(1, 2, VOCAB), history=[[0]]),
            Draft(torch.ones(1, 1, dtype=torch.int64), torch.tensor([1])),
            Noise(torch.zeros(1, 1), torch.zeros(1)),
        )


@dataclass(frozen=True)
class Nats(CostBudget):
    """``NatsBudget`` once more, as a user would write it: the engine keeps account of it under its own text."""

    most: float = 9.0

    def cost(self, target: Target, draft: Draft, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        return -raw_log_probs(target, draft, rows_N, positions_N)[0]


@dataclass(frozen=True)
class Regret(CostBudget):
    """What the target's best token had more, in nats."""

    most: float = 4.0

    def cost(self, target: Target, draft: Draft, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        own_N, best_N = raw_log_probs(target, draft, rows_N, positions_N)
        return best_N - own_N


BRANCHING = TreeDraft(random_llama(1, layers=1), nodes=12, width=3, depth=5)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("draft", [SingleDraft(random_llama(1, layers=1)), BRANCHING])
def test_a_budget_of_any_quantity_holds_over_a_whole_generation(draft: DraftStrategy, temperature: float) -> None:
    """It is NatsBudget to the token where it counts nats, in chains and in trees, and other quantities add up alike."""
    llm = fly.LLM(random_llama(0), copy.deepcopy(draft), k=7)
    params = fly.SamplingParams(temperature=temperature, max_tokens=60, seed=5)

    def run(condition: Condition) -> fly.Output:
        return llm.generate([[1, 2, 3], [4, 4]], params, policy=Exact() | (Always() & condition))[0]

    ours, mine = run(NatsBudget(9.0)), run(Nats(9.0))
    assert mine.token_ids == ours.token_ids and mine.stats.relaxed == ours.stats.relaxed > 0
    assert mine.stats.spent["Nats(most=9.0)"] == pytest.approx(mine.stats.nats, abs=1e-3) and not ours.stats.spent
    both = run(Nats(1e9) & ~~Regret(4.0)).stats
    assert 0 < both.spent["Regret(most=4.0)"] <= 4.0 + 1e-3 and both.spent["Nats(most=1000000000.0)"] > 0
    assert both.relaxed < run(AfterTokens(0)).stats.relaxed
    assert (both + both).spent["Regret(most=4.0)"] == 2 * both.spent["Regret(most=4.0)"]


def test_a_graph_keeps_no_account_and_the_kit_varies_it() -> None:
    rule = Exact() | (Always() & Regret(0.3))
    assert "keeps account of what relaxed tokens cost" in str(find_wait(rule.bind(toy_vocabulary(32))))
    check_row_alone_equals_row_in_batch(rule)


def test_budgets_hold_over_a_whole_generation() -> None:
    """The engine carries what was spent from round to round."""
    target, draft = random_llama(0), random_llama(1, layers=1)
    params = fly.SamplingParams(temperature=0.0, max_tokens=60)
    llm = fly.LLM(target, SingleDraft(draft), k=7)

    def run(policy: object) -> fly.Output:
        return llm.generate([[1, 2, 3]], params, policy=policy)[0]  # type: ignore[arg-type]

    free = run(Exact() | Always())
    assert free.stats.relaxed > 20
    assert run(Exact() | (Always() & AtMost(5))).stats.relaxed == 5
    shared = run(Exact() | (Always() & Budget(0.25)))
    relaxed = 0
    for count, token in enumerate(shared.provenance, start=1):
        relaxed += token.why == Why.RELAXED
        assert relaxed <= 0.25 * count
    assert 5 <= relaxed <= 15
    spent = run(Exact() | (Always() & NatsBudget(9.0))).stats
    assert 0 < spent.nats <= 9.0 + 1e-3 < free.stats.nats
    loose = run(asd()).stats
    assert loose.relaxed > 0 and 0 < loose.spent["regret_budget(8.0)"] <= 8.0 + 1e-3
    for strict in (SuffixRegret(0.0), AtMost(0, "block"), RegretBudget(0.0)):
        rule = Exact() | (Always() & strict)
        assert run(rule).stats.relaxed == 0 and rule.guarantee is Guarantee.LOSSLESS
    late = run(Exact() | (Always() & AfterTokens(30)))
    assert all(token.why != Why.RELAXED for token in late.provenance[:30]) and late.stats.relaxed > 0
    plain = run(Exact())
    assert late.token_ids[:30] == plain.token_ids[:30]


@settings(max_examples=60)
@given(block=blocks(), ends=st.sets(st.integers(0, VOCAB - 1)))
def test_relaxed_tokens_are_counted_since_the_last_mark(block: tuple[Target, Draft], ends: set[int]) -> None:
    """By a walk over each text and its draft, token by token: every mismatch of the draft counts as relaxed, and a mark
    ends what came before it."""
    target, draft = block
    assert target.history is not None
    agree_BK = (draft.tokens_BK == target.argmax_BK[:, :-1]) & draft.mask_BK()
    marks_V = torch.zeros(VOCAB, dtype=torch.bool)
    marks_V[sorted(ends)] = True
    found_BK = Block(target, draft, agree_BK).relaxed_since(marks_V)
    for b, (text, places) in enumerate(zip(target.history, target.relaxed_at)):
        relaxed = [*(at in places for at in range(len(text))), *(~agree_BK[b]).tolist()]
        count = 0
        for at, (token, counts) in enumerate(zip([*text, *draft.tokens_BK[b].tolist()], relaxed)):
            count += counts
            if at >= len(text):
                assert int(found_BK[b, at - len(text)]) == count, (b, at)
            if token in ends:
                count = 0
    order = torch.arange(len(target.history)).flip(0)
    assert target.rows(order).relaxed_at == target.relaxed_at[::-1]
    with pytest.raises(ValueError, match="needs the text before the block"):
        Block(Target(target.logits_BKV), draft, agree_BK).relaxed_since(marks_V)
