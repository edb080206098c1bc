"""The conformance kit passes our own rules, and refutes planted wrong ones by name of the fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly.policies import (
    AcceptancePolicy,
    AfterTokens,
    AgreeingWindow,
    Budget,
    Condition,
    ControlToken,
    EntropyGate,
    Exact,
    FLy,
    LossySampling,
    Phase,
    draft_log_probs,
    parse_policy,
    policy_types,
    verify,
)
from fly.policies.base import exact_accept_probs
from fly.policies.conditions import Block
from fly.runner.sampling import BatchSampling
from fly.testing import CHECKS, ConformanceError, check_policy, parametrize_with_checks
from fly.testing.blocks import make_block, markers_of, toy_vocabulary
from fly.testing.guarantees import check_guarantee
from fly.testing.policies import check_gates, check_monotone
from fly.testing.report import title
from fly.types import Draft, Guarantee, Noise, SamplingParams, Target, Verdict

OURS = [
    *(rule() for rule in policy_types().values()),
    FLy.reference(),
    FLy.paper(),
    FLy(theta=0.0, window=0, hold=0),
    Exact() | (EntropyGate(0.3) & AgreeingWindow(2) & ~ControlToken()) & AfterTokens(2) & Budget(0.1),
    LossySampling(5.0) | AgreeingWindow(1),
]


@parametrize_with_checks(OURS)
def test_our_rules_conform(policy: AcceptancePolicy, check: object) -> None:
    check(policy)  # type: ignore[operator]


@dataclass(frozen=True)
class Planted(Exact):
    """A copy of the exact rule to break in one place."""

    name = "planted"
    guarantee = Guarantee.LOSSLESS


@dataclass(frozen=True)
class NotStrict(Planted):
    """Accepts with <= : a coin of 0 keeps a token the target excludes."""

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        below = torch.nextafter(noise.accept_BK, torch.tensor(-1.0))
        return super().verdict(target, draft, Noise(below, noise.sample_B))


@dataclass(frozen=True)
class RawTarget(Planted):
    """Uses the target's distribution before temperature and top-k."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return exact_accept_probs(Target(target.logits_BKV, target.logits_BKV.softmax(-1)), draft)


@dataclass(frozen=True)
class DraftUnprocessed(Planted):
    """Ignores the distribution the draft was drawn from."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return exact_accept_probs(target, Draft(draft.tokens_BK, draft.lengths_B))


@dataclass(frozen=True)
class NoResidual(Planted):
    """Draws the correction from the target's distribution itself."""

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return target_BV


@dataclass(frozen=True)
class Unnormalised(Planted):
    """A residual that was shifted instead of clamped, and so has the wrong shares."""

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return (target_BV - draft_BV).clamp_min(0) + 0.05


@dataclass(frozen=True)
class NegativeResidual(Planted):
    """Forgot to clamp."""

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return target_BV - draft_BV


@dataclass(frozen=True)
class Leaking(Planted):
    """Judges every row by the mean over the batch."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        own = super().accept_probs(target, draft)
        return (0.5 * own + 0.5 * own.mean(0, keepdim=True)).clamp(0, 1)


@dataclass(frozen=True)
class OrderDependent(Planted):
    """Treats the first row of a batch differently."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        own = super().accept_probs(target, draft).clone()
        own[1:] *= 0.5
        return own


@dataclass(frozen=True)
class ReadsPadding(Planted):
    """Takes the width of the padded batch for the length of the draft."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        own = super().accept_probs(target, draft)
        last = torch.arange(own.shape[1]) >= own.shape[1] - 2
        return torch.where(last, own * 0.5, own)


@dataclass(frozen=True)
class Overwriting(Planted):
    """Processes the logits in place."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        own = super().accept_probs(target, draft)
        target.logits_BKV.mul_(0.5)
        return own


@dataclass(frozen=True)
class OwnCoins(Planted):
    """Flips coins of its own, so that ranks disagree."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        own = super().accept_probs(target, draft)
        return (own + 0.3 * torch.rand_like(own) - 0.15).clamp(0, 1)


@dataclass(frozen=True)
class BeyondOne(Planted):
    """Forgot min(1, ...)."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return 1.5 * super().accept_probs(target, draft)


@dataclass(frozen=True)
class FalselyMonotone(LossySampling):
    """Claims the opposite of what its parameter does."""

    name = "falsely_monotone"
    monotone = {"lenience": -1}  # noqa: RUF012


@dataclass(frozen=True)
class LenientButProud(LossySampling):
    name = "proud"
    guarantee = Guarantee.LOSSLESS


class NoDataclass(AcceptancePolicy):
    """Keeps its parameters where nobody can write them down."""

    def __init__(self) -> None:
        self.lenience = 2.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoDataclass)

    def __hash__(self) -> int:
        return 0

    def __str__(self) -> str:
        return "no dataclass"

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return exact_accept_probs(target, draft)


@dataclass(frozen=True)
class LookingAhead(AcceptancePolicy):
    """Keeps a token as surely as the exact rule would keep the one after it."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        own = exact_accept_probs(target, draft) * draft.mask_BK()
        return torch.cat([own[:, 1:], torch.ones_like(own[:, :1])], 1)


@dataclass(frozen=True)
class LookingBack(AcceptancePolicy):
    """Keeps only as many tokens as the exact rule would keep for sure."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return exact_accept_probs(target, draft).cumprod(-1)


@dataclass(frozen=True)
class KeepsState(Planted):
    """Stricter every other time, by a counter that freezing does not reach."""

    calls: tuple[list[int], ...] = ([],)

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        self.calls[0].append(1)
        return super().accept_probs(target, draft) * (1.0 if len(self.calls[0]) % 2 else 0.3)


@dataclass(frozen=True)
class TossesForEach(AcceptancePolicy):
    """A verdict that is no function of the noise has no end of steps."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return (torch.rand(draft.shape) < exact_accept_probs(target, draft)).float()


@dataclass(frozen=True)
class NotANumber(AcceptancePolicy):
    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return exact_accept_probs(target, draft) * float("nan")


@dataclass(frozen=True)
class ExcusesByChance(Exact):
    def relax(self, target: Target, draft: Draft, agree_BK: Tensor) -> Tensor:
        return exact_accept_probs(target, draft)


PLANTED = [
    (ExcusesByChance(), "shapes and ranges", "relax gave a torch.float32 tensor of [1, 1], not a bool tensor [B, K]"),
    (KeepsState(), "no hidden randomness", "asked again"),
    (TossesForEach(), "no hidden randomness", "ranks"),
    (NotANumber(), "shapes and ranges", "accept_probs is NaN: [[nan]]"),
    (
        LookingAhead(),
        "tokens judged alone",
        "position j depends on tokens after j: write a Condition or override verdict",
    ),
    (LookingBack(), "tokens judged alone", "position j depends on tokens before j"),
    (NotStrict(), "guarantee", "a coin of 0"),
    (RawTarget(), "guarantee", "raw logits"),
    (DraftUnprocessed(), "guarantee", "ignore the distribution that the draft"),
    (NoResidual(), "guarantee", "correction is not"),
    (Unnormalised(), "guarantee", "correction is not"),
    (NegativeResidual(), "correction is a distribution", "correction"),
    (Leaking(), "row alone equals row in batch", "row"),
    (OrderDependent(), "row alone equals row in batch", "row"),
    (ReadsPadding(), "padding is ignored", "padding"),
    (Overwriting(), "inputs untouched", "logits"),
    (OwnCoins(), "no hidden randomness", "ranks"),
    (BeyondOne(), "shapes and ranges", "[0, 1]"),
    (FalselyMonotone(), "monotone", "lenience"),
    (LenientButProud(), "guarantee", "not min(1, target/draft)"),
    (NoDataclass(), "written and read", "frozen dataclass"),
]


@pytest.mark.parametrize(("rule", "fault", "word"), PLANTED, ids=lambda value: type(value).__name__)
def test_planted_faults_are_named(rule: AcceptancePolicy, fault: str, word: str) -> None:
    (the_check,) = [one for one in CHECKS if title(one) == fault]
    with pytest.raises((ConformanceError, ValueError)) as caught:
        the_check(rule)
    assert word in f"{type(caught.value).__name__}: {caught.value}"


def test_what_a_rule_overwrites_spoils_no_other_check() -> None:
    """Blocks are kept from check to check; each check gets them as they were made."""
    logits_BKV = make_block(0).target.logits_BKV.clone()
    make_block(0).verdict(Overwriting())
    assert torch.equal(make_block(0).target.logits_BKV, logits_BKV)


def test_a_fault_is_named_among_all_checks() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_policy(BeyondOne())
    failed = dict(line[7:].split(": ", 1) for line in str(caught.value).splitlines() if line.startswith("  FAIL "))
    assert "[0, 1]" in failed["shapes and ranges"]


@dataclass(frozen=True)
class FromMarker(Condition):
    """Holds from a marker on, found in the texts of the vocabulary."""

    marker: str = "####"

    def evaluate(self, block: Block) -> Tensor:
        ids = {i for i, text in enumerate(self.vocabulary.texts) if self.marker in text}
        assert block.target.history is not None
        seen = [not ids.isdisjoint(tokens) for tokens in block.target.history]
        return torch.tensor(seen).unsqueeze(1).expand_as(block.agree_BK)


MARK = "Answer:"


@dataclass(frozen=True)
class FromWritten(FromMarker):
    """The same of a marker that its code names."""

    def evaluate(self, block: Block) -> Tensor:
        return FromMarker(MARK).bind(self.vocabulary).evaluate(block)


@dataclass(frozen=True)
class Starting(AcceptancePolicy):
    """Says that it is lossless, and keeps everything once the marker has come."""

    guarantee = Guarantee.LOSSLESS
    condition: Condition = FromMarker()

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return exact_accept_probs(target, draft)

    @property
    def relaxation(self) -> Condition:
        return self.condition


@pytest.mark.parametrize("condition", [FromMarker(), FromWritten(), ~FromMarker("</think>"), Phase("<a>", "<b>")])
def test_rules_that_start_at_a_marker_are_tried_on_texts_that_hold_it(condition: Condition) -> None:
    with pytest.raises(ConformanceError, match="declared lossless, but"):
        check_guarantee(Starting(condition))
    assert "NEVER OPENS" not in check_gates(Starting(condition))


def test_the_guarantee_tells_temperature_0_from_sums_above_it() -> None:
    cold = r"not lossless, as declared \(heuristic\): at temperature 0 (draft \[.*\] emits|no draft of up to 11 tokens)"
    for rule, warm in (
        (FLy(), r"no draft of up to 3 tokens moved the distribution of a block \(longer drafts may\)"),
        (LossySampling(5.0), r"drafts of up to 3 tokens move .* by up to 0\.\d+ in total .*more\), K=\d, .* emits .*"),
    ):
        assert re.fullmatch(f"{cold}.*; above temperature 0 {warm}", check_guarantee(rule))


def test_the_texts_that_a_rule_looks_for() -> None:
    assert markers_of(Exact() | FromWritten("x") & Phase("<a>", 3)) == ("x", "<a>", MARK)
    assert markers_of(FLy(entropy="normalized")) == markers_of(parse_policy("fly & ~token(digits)")) == ()
    vocabulary = toy_vocabulary(5, ("<a>", "<b>"))
    assert vocabulary.texts == ["<a>", "<b>", " word", "7", "<end>"]
    assert vocabulary.token_id("<b>") == 1 and vocabulary.encode("<b>") == [1] and 0 <= vocabulary.token_id("?") < 5


def test_the_counterexample_is_small() -> None:
    """A wrong residual is shown on one drafted token and two words of vocabulary, with the numbers."""
    report = check_policy(NoResidual(), raises=False)
    (detail,) = [f.detail for f in report.findings if f.check == "guarantee"]
    assert "K=1" in detail and "with probability" in detail


def test_a_policy_that_raises_is_a_finding() -> None:
    @dataclass(frozen=True)
    class Broken(Exact):
        def accept_probs(self, target: Target, draft: Draft) -> Tensor:
            raise KeyError("nothing here")

    report = check_policy(Broken(), raises=False)
    details = [finding.detail for finding in report.findings if not finding.passed]
    assert "KeyError" in details[0] and "test_conformance.py" in details[0] and "in accept_probs" in details[0]
    assert len(details) == 1 and details[0].endswith("nothing else was checked")


def test_an_error_inside_a_dataclass_names_the_line_of_the_rule() -> None:
    @dataclass(frozen=True)
    class Assigns(Exact):
        share: float = 0.5

        def accept_probs(self, target: Target, draft: Draft) -> Tensor:
            self.share = 1.0  # type: ignore[misc]  # what is tested
            return super().accept_probs(target, draft)

    assert "test_conformance.py" in str(check_policy(Assigns(), raises=False))


@dataclass(frozen=True)
class Gives(AcceptancePolicy):
    """A rule of one line."""

    what: Callable[[Tensor], object]

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return self.what(target.logits_BKV)  # type: ignore[return-value]  # what is tested

    def __str__(self) -> str:
        return "Gives"


@dataclass(frozen=True)
class Says(Condition):
    what: Callable[[Tensor], object]

    def evaluate(self, block: Block) -> Tensor:
        return self.what(block.target.logits_BKV)  # type: ignore[return-value]  # what is tested

    def __str__(self) -> str:
        return "Says"


WRONG: list[tuple[Callable[[Tensor], object], str]] = [
    (lambda logits: logits.softmax(-1).amax(-1), "a torch.float32 tensor of [3, 5]"),  # [B, K+1]
    (lambda logits: logits[:, 0, 0].sigmoid(), "a torch.float32 tensor of [3]"),  # would be spread over K
    (lambda logits: logits[:1, :-1, 0] > 0, "a torch.bool tensor of [1, 4]"),  # would be spread over B
    (lambda logits: logits[:, :-1, 0].numpy(), "array("),
    (lambda logits: None, "None"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("what", "words"), WRONG)
@pytest.mark.parametrize("tree", [False, True])
def test_what_is_no_tensor_of_the_drafts_shape_is_refused_where_it_is_used(
    what: Callable[[Tensor], object], words: str, tree: bool, temperature: float
) -> None:
    """Wherever a verdict is asked for, without the kit: nothing is spread over rows or places without a word."""
    case = make_block(1, 3, 4, 5, temperature)
    parents_BK = torch.arange(-1, 3).expand(3, 4) if tree else None
    draft = replace(case.draft, parents_BK=parents_BK)
    for rule, name in ((Gives(what), "Gives: accept_probs"), (Exact() | ~Says(what), "Says: evaluate")):
        if tree and name.startswith("Gives"):
            words = r"gave "  # places are asked one by one
        with pytest.raises(ValueError, match=f"{name} gave ") as raised:
            verify(rule, case.target, draft, case.noise)
        assert tree or words in str(raised.value)


def test_a_condition_of_numbers_is_refused() -> None:
    wrong = Exact() | Says(lambda logits: logits[:, :-1, 0])
    report = check_policy(wrong, raises=False)
    assert "float32" in str(report) and "not a bool tensor" in str(report) and len(report.findings) == 1


@dataclass(frozen=True)
class Likely(AcceptancePolicy):
    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return target.probs_of(draft.tokens_BK) > 0.3


def test_every_check_says_something() -> None:
    """What was measured, or else what holds: a name alone ("monotone") tells nobody what it is."""
    report = check_policy(Exact())
    assert [finding.check for finding in report.findings if not finding.detail] == []
    assert "inputs untouched: no input tensor is changed" in str(report)
    assert "a larger theta never accepts more" in check_monotone(FLy())


@dataclass(frozen=True)
class LikelyAndProud(Likely):
    guarantee = Guarantee.LOSSLESS


def test_a_rule_that_says_yes_or_no_and_promises_too_much_is_refuted() -> None:
    with pytest.raises(ConformanceError, match="FAIL guarantee: declared lossless, but"):
        check_policy(LikelyAndProud())


def test_a_rule_that_says_yes_or_no_passes() -> None:
    """A threshold needs no ``.float()``."""
    assert check_policy(Likely()).passed


@pytest.mark.parametrize("policy", OURS, ids=str)
@pytest.mark.parametrize("kind", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_decision_never_asks_the_host(policy: AcceptancePolicy, kind: str, stochastic: bool) -> None:
    """On the meta device there are shapes and no values: anything that needs one (item, a branch, a data-dependent
    shape) raises, and so does a tensor left on the host."""
    rows, longest, vocab = 3, 9, 600
    temperatures = {"greedy": [0.0] * rows, "sampled": [0.7] * rows, "mixed": [0.0, 0.7, 1.0]}[kind]
    params = [SamplingParams(temperature=t, top_k=5, top_p=0.9, min_p=0.1) for t in temperatures]
    logits, processed = torch.zeros(rows, longest + 1, vocab, device="meta"), BatchSampling.of(params, "meta")
    tokens, lengths = (torch.zeros(*shape, dtype=torch.int64, device="meta") for shape in ((rows, longest), (rows,)))
    draft = Draft(tokens, lengths, logits[:, :-1].softmax(-1) if stochastic and kind != "greedy" else None)
    noise = Noise(torch.zeros(rows, longest, device="meta"), torch.zeros(rows, device="meta"))
    for probs in (None,) if kind == "greedy" else (processed.on(logits), logits.softmax(-1)):
        target = Target(
            logits,
            probs,
            greedy_B=processed.greedy_B if kind == "mixed" else None,
            control_V=torch.zeros(vocab, dtype=torch.bool, device="meta"),
        )
        verdict = verify(policy, target, draft, noise)
        assert verdict.accepted_B.shape == verdict.next_token_B.shape == (rows,)
        assert verdict.accepted_B.device.type == "meta"


@given(
    st.tuples(st.floats(0, 0.999), st.just(1.0)) | st.tuples(st.just(0.0), st.floats(0.41, 1)),
    st.sampled_from(["heuristic", "lossless"]),
)
@settings(max_examples=6)
def test_a_rule_that_trusts_drafts_of_some_sureness_changes_the_text(sure: tuple[float, float], declared: str) -> None:
    """At temperature 0 the drafts of the exact sum are hardly sure to certain, so a threshold anywhere shows."""

    @dataclass(frozen=True)
    class Trusting(Exact):
        guarantee = Guarantee(declared)

        def accept_probs(self, target: Target, draft: Draft) -> Tensor:
            chance_BK = draft_log_probs(draft)[0].exp()
            trusts_BK = (chance_BK >= sure[0]) & (chance_BK <= sure[1]) & target.greedy_B.unsqueeze(1)
            return torch.where(trusts_BK, 1.0, super().accept_probs(target, draft))

    if declared == "lossless":
        with pytest.raises(ConformanceError, match="declared lossless, but at temperature 0 draft"):
            check_guarantee(Trusting())
    else:
        assert "at temperature 0 draft" in check_guarantee(Trusting())


def test_asking_the_host_is_noticed() -> None:
    @dataclass(frozen=True)
    class Asking(Exact):
        def accept_probs(self, target: Target, draft: Draft) -> Tensor:
            return super().accept_probs(target, draft) * (2.0 if bool(target.logits_BKV.sum() > 0) else 1.0)

    target = Target(torch.zeros(1, 2, 4, device="meta"))
    draft = Draft(torch.zeros(1, 1, dtype=torch.int64, device="meta"), torch.zeros(1, dtype=torch.int64, device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError)):
        verify(Asking(), target, draft, Noise(torch.zeros(1, 1, device="meta"), torch.zeros(1, device="meta")))
