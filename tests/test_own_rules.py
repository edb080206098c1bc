"""Rules that a user writes: what they return is checked by name, and what they hold tells them apart, in batches too.

Shape legend: B rows, K longest draft, N selected positions, V vocabulary.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fly
from fly.drafts import SingleDraft
from fly.policies import (
    AboveContext,
    AcceptancePolicy,
    AfterTokens,
    Block,
    Condition,
    ControlToken,
    CostBudget,
    Exact,
    ExactCore,
    Phase,
    exact_accept_probs,
    parse_policy,
    verify,
)
from fly.testing import check_policy
from fly.testing.blocks import TOLERANCE
from fly.testing.guarantees import _late_tokens, check_guarantee
from fly.testing.policies import check_no_hidden_randomness, check_written_and_read
from fly.testing.report import ConformanceError
from fly.types import IMPOSSIBLE, Draft, Guarantee, Noise, SamplingParams, Target, Verdict
from tests.kernels import VARIANTS
from tests.test_cuda import device
from tests.test_same_rule import NEAR, TARGET, VOCAB, compiled, decode, make_rows, on_cuda, said, through_pytorch

# ------------------------------------------------------------------------------------------------ what they return


@dataclass(frozen=True)
class Own(AcceptancePolicy):
    """A rule whose methods return what a function makes of the right value."""

    chances_of: Callable[[Tensor], Any] = lambda chance_BK: chance_BK
    residual_of: Callable[[Tensor], Any] = lambda residual_BV: residual_BV

    def accept_probs(self, target: Target, draft: Draft) -> Any:
        return self.chances_of(exact_accept_probs(target, draft))

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Any:
        return self.residual_of(super().residual(target_BV, draft_BV))


@dataclass(frozen=True)
class OwnVerdict(Own):
    verdict_of: Callable[[Verdict], Any] = lambda verdict: verdict

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Any:
        return self.verdict_of(super().verdict(target, draft, noise))


@dataclass(frozen=True)
class Measured(Condition):
    measure_of: Callable[[Tensor], Any]

    def evaluate(self, block: Block) -> Tensor:
        return block.at_mismatches(lambda rows_N, positions_N: self.measure_of(rows_N >= 0))


@dataclass(frozen=True)
class Costly(CostBudget):
    cost_of: Callable[[Tensor], Any]
    most: float = 3.0

    def cost(self, target: Target, draft: Draft, rows_N: Tensor, positions_N: Tensor) -> Any:
        return self.cost_of(1.0 + positions_N % 2)


def own_verdict(**parts: Callable[[Tensor], Any]) -> AcceptancePolicy:
    def change(verdict: Verdict) -> Verdict:
        return replace(verdict, **{name: made(getattr(verdict, name)) for name, made in parts.items()})

    return OwnVerdict(verdict_of=change)


WRONG: dict[str, tuple[AcceptancePolicy, str]] = {
    "complex": (Own(lambda x_BK: x_BK.to(torch.complex64)), r"accept_probs gave a torch.complex64 tensor"),
    "one chance": (Own(lambda x_BK: x_BK[:, :1]), r"accept_probs gave .* not a tensor \[B, K\]"),
    "one column": (Own(residual_of=lambda x_BV: x_BV[:, :1]), r"the correction is .* not a tensor \[B, V\]"),
    "no rows": (Own(residual_of=lambda x_BV: x_BV.sum(0)), r"the correction is .* not a tensor \[B, V\]"),
    "a list": (Own(residual_of=lambda x_BV: x_BV.tolist()), r"the correction is \[\["),
    "one measure": (Exact() | Measured(lambda x_N: x_N[:1]), r"measure gave .* not a tensor \[N\]"),
    "one cost": (Exact() | Costly(lambda x_N: x_N[:1]), r"cost gave .* not a tensor \[N\]"),
    "a number": (Exact() | Costly(lambda x_N: 1.0), r"cost gave 1.0, not a tensor \[N\]"),
    "no verdict": (OwnVerdict(verdict_of=lambda verdict: None), r"verdict gave None, not a Verdict"),
    "a float": (own_verdict(accepted_B=Tensor.float), r"accepted_B of its verdict is a torch.float32"),
    "a column": (own_verdict(next_token_B=lambda x_B: x_B.unsqueeze(1)), r"next_token_B of its verdict is"),
    "a short line": (own_verdict(why_BK=lambda x_BK: x_BK[:, :1]), r"why_BK of its verdict is"),
    "a clause": (own_verdict(clauses=lambda _: {"x": torch.ones(1)}), r"clauses\['x'\] of its verdict is"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_or_kind_is_an_error_by_name(name: str) -> None:
    """Where a tensor was broadcast, the text was another one in silence: a correction [B, 1] is a uniform
    distribution. The request is refused when it begins, and the kit says the same."""
    rule, message = WRONG[name]
    rule_name = "Own|OwnVerdict|Costly|Measured"
    llm = fly.LLM(TARGET, SingleDraft(NEAR), k=4)
    with pytest.raises(ValueError, match=rf"the rule '.*({rule_name}).*' fails on a trial block: .*{message}"):
        llm.generate([[1, 2, 3]], temperature=0.8, max_tokens=9, policy=rule)
    report = str(check_policy(rule, raises=False))
    assert "FAIL" in report and message.split(" ")[0].split("\\")[0] in report


@pytest.mark.parametrize("run", [through_pytorch, *([compiled] if VARIANTS else [])])
@pytest.mark.parametrize(
    "parts",
    [
        {"accepted_B": lambda x_B: x_B + 9},
        {"accepted_B": lambda x_B: x_B - 1 - x_B},
        {"next_token_B": lambda x_B: 0 * x_B + VOCAB},
        {"next_token_B": lambda x_B: 0 * x_B - 7},
    ],
)
def test_an_impossible_verdict_is_the_error_of_its_request_alone(run: Any, parts: Any) -> None:
    """A count of -1 was once taken for the last token but one."""
    rule = own_verdict(**parts)
    rows = make_rows([rule], 0.0, 3)
    with pytest.raises(ValueError, match=r"the verdict of the policy 'OwnVerdict.*' keeps more tokens than"):
        decode(run, rows)
    draft, logits_BJV = Draft.of([[1, 2]]), torch.eye(4)[:3].unsqueeze(0)
    noise = Noise(torch.zeros(1, 2), torch.zeros(1))
    verdict = verify(own_verdict(accepted_B=lambda x_B: x_B + 9), Target(logits_BJV), draft, noise)
    assert (verdict.accepted_B.tolist(), verdict.next_token_B.tolist()) == ([2], [IMPOSSIBLE])


@pytest.mark.parametrize("run", [through_pytorch, *([compiled] if VARIANTS else [])])
def test_a_correction_below_zero_is_an_error_and_rounding_is_none(run: Any) -> None:
    """What was drawn from it depended on the number of rows. It is drawn from as soon as a token is rejected."""
    rows = make_rows([Own(residual_of=lambda x_BV: x_BV - 0.5) | Gap(0.0)], 0.8, 3)
    with pytest.raises(ValueError, match=r"the policy .Own.* gave NaN for .* \(a correction below 0 is one\)"):
        decode(run, rows)
    rounded, exact = (make_rows([Own(residual_of=of)], 0.8, 3) for of in (lambda x_BV: x_BV - 1e-9, lambda x_BV: x_BV))
    decode(run, rounded)
    decode(run, exact)
    assert rounded[0].tokens == exact[0].tokens


# ------------------------------------------------------------------------------------------------ what they hold


@dataclass(frozen=True)
class Gap(Condition):
    """At most ``gap`` below the target's best logit. ``more`` is not used."""

    gap: float
    more: Any = ()

    def evaluate(self, block: Block) -> Tensor:
        logits_BKV = block.target.logits_BKV[:, :-1]
        own_BK = logits_BKV.gather(-1, block.draft.tokens_BK.unsqueeze(-1)).squeeze(-1)
        return logits_BKV.amax(-1) - own_BK <= self.gap


@dataclass
class Unhashable(Condition):
    gaps: list[float]

    def evaluate(self, block: Block) -> Tensor:
        return Gap(self.gaps[0]).evaluate(block)


@dataclass(frozen=True)
class Hidden(Condition):
    """Rules with different functions are equal, and have the same hash."""

    function: Callable[[Block], Tensor] = field(compare=False)

    def evaluate(self, block: Block) -> Tensor:
        return self.function(block)


@dataclass(frozen=True)
class Marked(Condition):
    """Holds a tensor, which Python cannot compare."""

    mask_V: Tensor

    def evaluate(self, block: Block) -> Tensor:
        return self.mask_V.to(block.draft.tokens_BK.device)[block.draft.tokens_BK]


def all_or_none(holds: bool) -> Callable[[Block], Tensor]:
    return lambda block: torch.full_like(block.agree_BK, holds)


MAKERS: dict[str, Callable[[bool], Condition]] = {
    "unhashable": lambda holds: Unhashable([9.0 if holds else 0.0]),
    "a list": lambda holds: Gap(9.0 if holds else 0.0, [1, {2: {3}}]),
    "a hidden function": lambda holds: Hidden(all_or_none(holds)),
    "a tensor": lambda holds: Marked(torch.full((VOCAB,), holds)),
    "a module": lambda holds: Gap(9.0 if holds else 0.0, torch.nn.Linear(2, 1)),
    "one or true": lambda holds: Gap(9.0, True) if holds else Gap(0.0, 1),
}


@pytest.mark.parametrize("run", [through_pytorch, *([compiled] if VARIANTS else [])])
@pytest.mark.parametrize("kind", MAKERS)
def test_rules_in_one_batch_are_told_apart_by_all_they_hold(kind: str, run: Any) -> None:
    """Beside each other and beside other rules, two rules of a class decide as they do alone, and no step is taken
    again for each request alone (which Python's ``hash`` and ``==`` once made it)."""
    rules = [Exact() | MAKERS[kind](holds) for holds in (True, False, True)]
    alone = [make_rows([Exact()] * b + [rule], 0.0, 5)[-1:] for b, rule in enumerate(rules)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in alone:
            decode(run, rows)
        together = make_rows([*rules, parse_policy("exact | regret(2, 1)")], 0.0, 5)
        decode(run, together)
    assert [said(row) for row in together[:3]] == [said(rows[0]) for rows in alone]
    assert together[0].stats.relaxed and not together[1].stats.relaxed


@pytest.mark.parametrize("kind", MAKERS)
def test_calls_one_after_another_get_their_own_rule(kind: str) -> None:
    llm = fly.LLM(TARGET, SingleDraft(NEAR), k=4)
    params = SamplingParams(temperature=0, max_tokens=24)
    relaxed = [
        llm.generate([[1, 2, 3]], params, policy=Exact() | MAKERS[kind](holds))[0].stats.relaxed
        for holds in (False, True, False)
    ]
    assert relaxed[1] and not relaxed[0] and not relaxed[2]


def test_conditions_that_are_written_alike_are_refused() -> None:
    """The result of one was once taken for that of the other."""
    one, other = (Gap(1.0, torch.nn.Linear(2, 1)) for _ in range(2))
    for combine in (lambda: one & other, lambda: one | ~Gap(2.0) | other, lambda: Exact() | one & Gap(2.0) | other):
        with pytest.raises(ValueError, match=r"two different conditions are both written 'Gap\(gap=1.0, more=Linear"):
            combine()
    assert str(one & Gap(2.0) & one)  # the same one twice is no fault


def test_budgets_and_rules_without_a_hash_are_the_same_on_a_cuda_device() -> None:
    """What relaxed tokens cost was once never counted there, so that no budget was ever used up; and a rule without a
    hash sent its batch the plain way."""
    rules = [
        parse_policy("exact | regret(6, 0) & regret_budget(2)"),
        Exact() | Unhashable([6.0]) & Costly(lambda x_N: x_N),
    ]
    want, rows = make_rows(rules, 0.0, 11), make_rows(rules, 0.0, 11)
    decode(through_pytorch, want, stretch=0)
    with device():
        decode(on_cuda, rows)
    assert [said(row) for row in rows] == [said(row) for row in want]
    for row, most in zip(rows, (2.0, 3.0)):
        (spent,) = row.stats.spent.values()
        assert 0 < spent <= most


# ------------------------------------------------------------------------------------------------ what they promise


@dataclass(frozen=True)
class Proud(ExactCore):
    """Declares itself lossless, whatever it excuses."""

    guarantee = Guarantee.LOSSLESS
    condition: Condition

    @property
    def relaxation(self) -> Condition:  # type: ignore[override]
        return self.condition


@dataclass(frozen=True)
class Ids(Condition):
    """The token is one of these."""

    ids: Any

    def evaluate(self, block: Block) -> Tensor:
        return torch.isin(block.draft.tokens_BK, torch.tensor(self.ids))


@dataclass(frozen=True)
class Written(Condition):
    """The token is one that stands in the code."""

    def evaluate(self, block: Block) -> Tensor:
        return block.draft.tokens_BK == 4711


@dataclass(frozen=True)
class Spent(Condition):
    """Something was spent before."""

    what: str

    def evaluate(self, block: Block) -> Tensor:
        target = block.target
        places_B = torch.tensor([len(places) for places in target.relaxed_at])
        known = {"relaxed": target.relaxed_B, "nats": target.nats_B, "spent": target.spent("x"), "places": places_B}
        return (known[self.what] > 0).unsqueeze(1).expand_as(block.agree_BK)


@pytest.mark.parametrize(
    "condition",
    [
        *(AfterTokens(5), AfterTokens(100), AboveContext(300), Phase(3, 4), Phase(3001, 3002), ControlToken()),
        *(Ids([1000, 2000]), Ids((17,)), Written()),
        *map(Spent, ("relaxed", "nats", "spent", "places")),
    ],
    ids=str,
)
def test_a_rule_that_breaks_its_promise_late_or_at_some_tokens_is_caught(condition: Condition) -> None:
    """The sums over short drafts begin a text, over two or three tokens, and saw none of these. What one token of a
    text is in place of the target's follows from its chance and its correction (Leviathan et al. 2023, appendix A.1).
    A rule that promises nothing is told the truth too."""
    gaps = [late.gap for late in _late_tokens(Proud(condition))]
    assert max(gaps) > 0.1
    assert max(late.gap for late in _late_tokens(Exact())) < TOLERANCE


def test_the_report_says_where_a_promise_breaks() -> None:
    with pytest.raises(ConformanceError, match="declared lossless, but after 600 tokens of a text, 8 of them relaxed"):
        check_guarantee(Proud(AfterTokens(100)))
    assert "of a text's first block, but after 600 tokens" in check_guarantee(Exact() | AfterTokens(100))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Exact() | Unhashable([1.0]), r"Unhashable is no frozen dataclass: write @dataclass\(frozen=True\)"),
        (Exact() | Gap(1.0, [1, 2]), r"\(a list is read as a tuple\)"),
        (Exact() | Gap(1.0, (1, (2,))), "is the same rule"),
        (Exact() | Marked(torch.ones(3)), r"note: only Python can make this rule.*Tensor is not JSON"),
        (Exact() | Hidden(all_or_none(True)), r"note: only Python can make this rule.*function is not JSON"),
    ],
)
def test_the_kit_says_which_rules_a_file_can_hold(rule: AcceptancePolicy, said: str) -> None:
    try:
        report = str(check_written_and_read(rule))
    except ConformanceError as error:
        report = str(error)
    assert re.search(said, report)


def test_the_kit_takes_rules_with_modules_and_lambdas() -> None:
    """Their copies are other objects, which is no fault; that they cannot be pickled is a note."""
    assert check_no_hidden_randomness(Exact() | Gap(1.0, torch.nn.Linear(2, 1))) is None
    assert "note: it cannot be pickled" in str(check_no_hidden_randomness(Exact() | Hidden(all_or_none(True))))
