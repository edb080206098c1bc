"""Decisions by compiled code against the tensor rule: the same about chains, at any temperature, for rules whose
conditions it knows. Skipped as a whole where the library was not built.

Shape legend: B rows, K longest draft, J positions of a row, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections import abc

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly.backends.cpu import available, why_not
from fly.backends.cpu.host import Blocks, HostDistribution, clauses_of, decide_compiled, is_compiled, lay_rules
from fly.backends.cpu.library import CRules, clause_kinds, fast_call, variant_number
from fly.policies import Exact, condition_types, parse_policy, policy_types
from fly.policies.conditions import Clause
from fly.policies.registry import PRESETS
from fly.policies.verification import add_costs
from fly.runner.executor import Batch, Executor, RoundRow, Scores
from fly.runner.sampling import BatchSampling
from fly.testing.blocks import toy_vocabulary
from fly.types import Decision, Draft, SamplingParams, Target
from tests.commands import run

pytestmark = pytest.mark.skipif(available() == ["torch"], reason=why_not() or "compiled kernels are here")

VARIANTS = [name for name in available() if name != "torch"]
VOCAB = 11
RULES = [
    "exact",
    "exact | margin(0.5)",
    "exact | regret(1.5, 2)",
    "exact | ~regret(0.5, 0) & regret(4, 1) & mars(0.3)",
    "exact | suffix_regret(0.25) & ~mars(0.9)",
    "exact | suffix_regret(0)",
    "exact | margin(2) & after(4)",
    "exact | margin(2) & ~above(7) & room(1)",
    "exact | margin(9) & budget(0.4)",
    "exact | margin(9) & at_most(3)",
    "exact | ~at_most(1, per=block) & room(0)",
    "exact | margin(9) & at_most(1, per=block)",
    "exact | nats(6)",
    "exact | regret_budget(3)",
    "exact | regret_budget(0)",
    "exact | margin(2) & regret_budget(3.5) & ~regret_budget(1.25)",
    "exact | phase(1, 2)",
    "exact | margin(3) & ~phase(3, 0, inside_first=True)",
    "asd",
    "near(0.5)",
    "near(1)",
    "near(0)",
    "topn(3, 0.4)",
    "topn(1, 1)",
    "bild(1.5)",
    "bild(0)",
    "near(0.5) | margin(1)",
    "fly(theta=0.5, window=1)",
    "exact | entropy(0.9)",
    "exact | entropy(0.9, processed=False) & ~control",
    "exact | ~entropy(1.0) & window(1) & room(1)",
    "exact | ~room(2)",
    "exact | window(0) & control",
    "exact | entropy(0.3, entropy=normalized) & margin(1)",
    "exact | entropy(0.2, entropy=normalized, processed=False)",
    "exact | margin(3) & ~token(digits)",
    "exact | token(letters) & ~token(capitals) & ~token(digits) & ~token(capitals)",
    "exact | phase('7', ' w1')",
    "typical(0.3, 0.9)",
    "typical(1, 0.4)",
    "exact | window(1) | room(2)",
    "exact | margin(1) & (window(1) | ~regret(2, 1)) | control",
    "exact | ~(margin(0.5) | ~room(1)) & after(2)",
    "exact | margin(1) & ~(margin(1) | window(1))",
    "exact | margin(9) & after(0) & after(1) & above(0) & room(0) & ~room(7) & ~margin(0)",
    "exact | margin(9) & after(0) & after(1) & above(0) & room(0) & (room(2) | margin(1))",
]


class Plain(Executor):
    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        raise NotImplementedError


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Target, Draft, list[int], list[int]]:
    count, longest, vocab = draw(st.integers(1, 3)), draw(st.integers(0, 6)), draw(st.sampled_from([VOCAB, 40, 97]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits_BJV = 2 * torch.randn(count, longest + 1, vocab, generator=generator)
    if draw(st.booleans()):  # ties, and costs that reach a limit exactly
        logits_BJV = (4 * logits_BJV).round() / 4
    if draw(st.booleans()):  # bans
        logits_BJV[torch.rand(logits_BJV.shape, generator=generator) < 0.2] = -torch.inf
        logits_BJV[..., 0] = 0.0
    if draw(st.integers(0, 3)) == 0:
        logits_BJV[torch.rand(logits_BJV.shape[:2], generator=generator) < 0.1] = torch.nan
    likely_BJ = logits_BJV.nan_to_num(0).argmax(-1)
    chance_BJ = torch.randint(0, vocab, likely_BJ.shape, generator=generator)
    tokens_BJ = torch.where(torch.rand(likely_BJ.shape, generator=generator) < 0.6, likely_BJ, chance_BJ)
    chains = [row[: draw(st.integers(0, longest))] for row in tokens_BJ.tolist()]
    longest = max(map(len, chains))
    logits_BJV = logits_BJV[:, : longest + 1]
    drawn = draw(st.integers(0, 2)) == 0
    draft = Draft.of(chains)
    temperatures = draw(st.lists(st.sampled_from([0.0, 0.7, 1.3]), min_size=count, max_size=count))
    probs, greedy_B = None, None
    if any(temperatures):
        top_k, min_p = draw(st.sampled_from([0, 4])), draw(st.sampled_from([0.0, 0.05]))
        asked = [SamplingParams(temperature=t, top_k=top_k, min_p=min_p) for t in temperatures]
        sampling = BatchSampling.of(asked)
        probs, greedy_B = HostDistribution(sampling, logits_BJV), sampling.greedy_B
        if drawn:
            probs_BKV = torch.randn(count, longest, vocab, generator=generator).softmax(-1)
            draft = Draft(draft.tokens_BK, draft.lengths_B, probs_BKV)
    control_V = torch.arange(vocab) % 3 == 0
    seeds = [draw(st.integers(-(2**63), 2**63 - 1)) for _ in chains]
    starts = [draw(st.integers(1, 9)) for _ in chains]
    spent = [draw(st.integers(0, 8)) / 4 for _ in chains]
    target = Target(
        logits_BJV,
        probs,
        greedy_B=greedy_B if 0.0 in temperatures else None,
        control_V=control_V,
        generated_B=torch.tensor([draw(st.integers(0, start)) for start in starts]),
        relaxed_B=torch.tensor([draw(st.integers(0, 3)) for _ in chains]),
        nats_B=torch.tensor(spent),
        spent=lambda label: torch.tensor(spent) / (2 if "3.5" in label else 1),
        history=[torch.randint(0, 5, (start,), generator=generator).tolist() for start in starts],
    )
    return target, draft, seeds, starts


def told(decision: Decision) -> tuple[object, ...]:
    """What must be the same: of the choices, those that somebody reads; of an open decision, that it is open."""
    if decision.next_token < 0:
        return ("undecided",)
    path = [*decision.path]
    choices = [decision.choices[place] for place in (0, *(node + 1 for node in path))]
    asked = [(one.node, one.relaxed, dict(one.held)) for one in decision.mismatches]
    return decision.drafted, path, decision.next_token, decision.bonus, choices, asked


@settings(max_examples=600)
@given(case=blocks(), rule=st.sampled_from(RULES), variant=st.sampled_from(VARIANTS or ["none"]))
def test_compiled_decisions_are_those_of_the_tensor_rule(
    case: tuple[Target, Draft, list[int], list[int]], rule: str, variant: str
) -> None:
    target, draft, seeds, starts = case
    policy = parse_policy(rule).bind(toy_vocabulary(target.logits_BKV.shape[-1]))
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fly.backends.cpu.host.default_number", lambda: variant_number(variant))
        wanted = Plain().decide_group(policy, target, draft, seeds, starts)
        budgets = () if policy.relaxation is None else policy.relaxation.budgets
        wanted = [add_costs(budgets, target, draft, b, decision) for b, decision in enumerate(wanted)]
        found = decide_compiled(policy, target, draft, seeds, starts)
        event(f"compiled {found is not None}, drawn {draft.probs_BKV is not None}, greedy {target.all_greedy}")
        if found is None:  # a NaN, or what only tensors know
            return
    for one, other in zip(found, wanted, strict=True):
        assert told(one) == told(other)
        for mine, theirs in zip(one.mismatches, other.mismatches):
            assert mine.nats == pytest.approx(theirs.nats, rel=1e-4, abs=1e-5)
            assert mine.costs == pytest.approx(theirs.costs)


@pytest.mark.parametrize(
    "rule", ["exact", "fly", "fly.reference", "fly.paper", "asd", "exact | regret(2.3, 4)", "near", "topn", "bild"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_known_rules_are_compiled(rule: str, temperature: float) -> None:
    logits_BJV, draft = torch.randn(2, 4, VOCAB), Draft.of([[1, 2, 3], [4]])
    params = [SamplingParams(temperature=temperature)] * 2
    probs = HostDistribution(BatchSampling.of(params), logits_BJV) if temperature else None
    assert is_compiled(parse_policy(rule), greedy=not temperature)
    found = decide_compiled(parse_policy(rule), Target(logits_BJV, probs), draft, [1, 2], [5, 6])
    assert found is not None and [one.drafted for one in found] == draft.chains


def decide_one(rules: CRules) -> None:
    """Call the library with a block of no tokens."""
    block = Blocks(1, 3, 1, 4)
    fast_call("fly_decide")(ctypes.byref(rules), ctypes.byref(block.c), array("q", [9]), torch.zeros(1, 4, VOCAB), None)


def laid(rule: str, rows: int = 1) -> CRules:
    policy = parse_policy(rule).bind(toy_vocabulary(VOCAB))
    return lay_rules([(policy, True, 0, RoundRow([1], 1, 1, (), policy, 0, True))] * rows, None, None, VOCAB)


def test_the_command_marks_what_is_compiled() -> None:
    listed = run("policies", env={"COLUMNS": "400"}).output.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in listed if line.startswith("│ ")]
    marks = {cell[0].partition("(")[0]: cell[-2] == "yes" for cell in cells if cell[0]}
    for name, rule in {**policy_types(), **PRESETS}.items():
        policy = rule()
        if name == "asd":  # a composition is listed under no policy
            continue
        assert marks[name] == (is_compiled(policy, greedy=False) and clauses_of(policy) is not None), name
    needed = {"phase": (1, 2), "token": ("digits",)}
    for name, kind in condition_types().items():
        condition = kind(*needed.get(name, ())).bind(toy_vocabulary(VOCAB))
        assert marks[name] == (condition.compiled is not None), name


def call(blocks: Blocks, logits_BJV: Tensor, rule: str = "exact", rows: int = 1) -> None:
    rules = laid(rule, rows)
    fast_call("fly_decide")(ctypes.byref(rules), ctypes.byref(blocks.c), array("q", [9] * rows), logits_BJV, None)


def test_sizes_and_numbers_are_checked_by_the_call() -> None:
    def made(tokens: list[int], choice: int = 0, asks: int = 4) -> Blocks:
        found = Blocks(1, 3, 1, asks)
        found.count[0] = len(tokens)
        for n, token in enumerate(tokens[:3]):
            found.drafted[n] = token
        found.choice[0] = choice
        return found

    whole = torch.zeros(1, 4, VOCAB)
    call(made([1, 2]), whole)
    with pytest.raises(ValueError, match="bytes of 'logits'"):
        call(made([1, 2]), whole[:, :3].contiguous())
    with pytest.raises(ValueError, match="bytes of 'drafted'"):
        call(made([1, 2]), whole.expand(2, -1, -1).contiguous(), rows=2)
    with pytest.raises(ValueError, match="drafted tokens is 4, not 0 to 3"):
        call(made([1, 2, 3, 4]), whole)
    with pytest.raises(IndexError, match="a drafted token is 11, not 0 to 10"):
        call(made([VOCAB]), whole)
    with pytest.raises(ValueError, match="a choice is 11"):
        call(made([1], choice=VOCAB), whole)
    with pytest.raises(ValueError, match="bytes of 'mismatch'"):
        call(made([1], asks=2), whole, "fly")


def read_clauses(rule: str) -> list[Clause]:
    return clauses_of(parse_policy(rule).bind(toy_vocabulary(VOCAB))) or []


def test_rules_here_have_each_kind_of_clause_that_the_library_lists() -> None:
    """So each kind is compared with the tensor rule, and hands over exactly the values that the library names."""
    compared = {clause.kind: clause for rule in RULES for clause in read_clauses(rule)}
    assert sorted(compared) == sorted(clause_kinds()), "a kind without a rule in RULES, or one that nothing compiles"
    for kind, (_, names) in clause_kinds().items():
        assert sorted(compared[kind].values) == sorted(names), kind


def test_a_kind_that_the_library_lacks_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: listed for kind, listed in clause_kinds().items() if kind not in ("regret", "near")}
    monkeypatch.setattr("fly.backends.cpu.host.clause_kinds", lambda: known)
    target, draft = Target(torch.zeros(1, 3, VOCAB)), Draft.of([[1, 2]])
    assert not is_compiled(parse_policy("near"), greedy=True)
    for rule, is_left in (("exact | regret(9, 1)", True), ("exact | margin(1)", False), ("near", True)):
        assert (decide_compiled(parse_policy(rule), target, draft, [0], [9]) is None) == is_left


@pytest.mark.parametrize("kind", [len(clause_kinds()), -1, 2**31 - 1])
def test_a_kind_of_clause_that_compiled_code_does_not_know_is_refused(kind: int) -> None:
    rules = laid("fly")
    vars(rules)["clause"][2].kind = kind
    with pytest.raises(ValueError, match=f"the kind of a clause is {kind}, not 0 to {len(clause_kinds()) - 1}"):
        decide_one(rules)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sizes_that_users_reach(temperature: float) -> None:
    """A vocabulary of 151,936 tokens, 64 rows and 32 drafted tokens at temperature 0; two rows above it. The logits are
    0 but for a few, so that memory stays small and ties are many."""
    rows, longest, vocab = (2 if temperature else 64), 32, 151_936
    generator = torch.Generator().manual_seed(0)
    logits_BJV = torch.zeros(rows, longest + 1, vocab)
    likely_BJ = torch.randint(0, vocab, (rows, longest + 1), generator=generator)
    second_BJ = torch.randint(0, vocab, (rows, longest + 1), generator=generator)
    logits_BJV.scatter_(2, second_BJ.unsqueeze(2), 15.5).scatter_(2, likely_BJ.unsqueeze(2), 16.0)
    takes_second_BJ = torch.arange(longest + 1) % 5 == 4
    draft = Draft.of(torch.where(takes_second_BJ, second_BJ, likely_BJ)[:, :longest].tolist())
    params = [SamplingParams(temperature=temperature)] * rows
    probs = HostDistribution(BatchSampling.of(params), logits_BJV) if temperature else None
    history = [[2] * 40 for _ in range(rows)]
    target = Target(logits_BJV, probs, choices=likely_BJ.tolist(), history=history)
    costs = "at_most(3) & regret_budget(9) & nats(99)"
    policy = parse_policy(f"exact | regret(2.5, 4) & mars(0.5) & ~phase(1, 2) & {costs}")
    found = decide_compiled(policy, target, draft, range(rows), [40] * rows)
    assert found is not None
    assert temperature or {len(one.path) for one in found} == {19}  # the fourth mismatch
    few = [0, rows - 1]
    index_B = torch.tensor(few)
    wanted = Plain().decide_group(policy, target.rows(index_B, few), draft.rows(index_B, few), few, [40, 40])
    assert [told(found[b]) for b in few] == [told(one) for one in wanted]


@pytest.mark.parametrize("number", [-1, 2, 2.0**31, math.inf, math.nan])
def test_a_mask_that_is_not_there_is_refused(number: float) -> None:
    rules = laid("exact | token(digits) & ~token(letters)")
    vars(rules)["clause"][1].value[1] = number
    with pytest.raises(ValueError, match=r"the number of a mask is -1|bytes of 'mask'"):
        decide_one(rules)


def test_a_mask_of_another_width_is_refused() -> None:
    policy = parse_policy("exact | token(digits)").bind(toy_vocabulary(VOCAB + 1))
    with pytest.raises(ValueError, match=f"a condition's mask has {VOCAB + 1} tokens, and the logits have {VOCAB}"):
        decide_compiled(policy, Target(torch.zeros(1, 2, VOCAB)), Draft.of([[1]]), [0], [9])


def test_what_compiled_code_would_misread_is_left_to_tensors() -> None:
    """Trees, distributions of another width or type, ids that are none; strides are no matter."""
    logits_BJV = torch.randn(1, 3, 40, generator=torch.Generator().manual_seed(0))
    sampling = BatchSampling.of([SamplingParams()])

    def decide(draft: Draft, logits_BJV: Tensor = logits_BJV) -> list[Decision] | None:
        target = Target(logits_BJV, HostDistribution(sampling, logits_BJV))
        return decide_compiled(Exact(), target, draft, [1], [9])

    tokens_BK, lengths_B = torch.tensor([[3, 5]]), torch.tensor([2])
    plain = Draft(tokens_BK, lengths_B)
    for draft in (
        Draft(tokens_BK, lengths_B, torch.full((1, 2, 30), 1 / 30)),
        Draft(tokens_BK, lengths_B, torch.full((1, 2, 40), 1 / 40, dtype=torch.float64)),
        Draft(torch.tensor([[3, 40]]), lengths_B),
        Draft(torch.tensor([[3, -1]]), lengths_B),
        Draft(tokens_BK, lengths_B, parents_BK=torch.tensor([[-1, -1]])),
    ):
        assert decide(draft) is None
    across_BJV = logits_BJV.transpose(1, 2).contiguous().transpose(1, 2)
    assert decide(plain, across_BJV) == decide(plain) is not None
