"""Acceptance rules of the literature and of other engines, beside ``Exact``, ``LossySampling`` and ``FLy``.

What they have in common:

- A token to which the target gives no mass never stands, whatever a rule's formula says: bans, top-k and top-p bind
  every rule. "No mass" is 0 in the processed distribution, and a logit of -inf at temperature 0.
- At temperature 0 the processed distribution is one-hot. Rules that *reshape or bound* it take it as it is; rules that
  *gate* on how probable the token is look at the raw distribution softmax(logits) there, and keep the target's own
  choice in any case. A correction at temperature 0 is always the target's most likely token.
- A deterministic draft (no distribution) counts as one-hot on its token.

``CATALOGUE`` and ``GATES`` list the policies and the conditions; all can be built with their defaults.

Shape legend: B rows, K longest draft, V vocabulary, N any leading shape. Positions are 0-based, papers count from 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fly.ops import draw, pick, top
from fly.policies.base import AcceptancePolicy, Bound, exact_accept_probs, verdict_of
from fly.policies.conditions import Block, Condition
from fly.types import Draft, Guarantee, Noise, Target, Verdict

__all__ = [
    "CATALOGUE",
    "GATES",
    "AdditiveSlack",
    "BiLD",
    "BlockVerification",
    "Cactus",
    "Cascade",
    "Ears",
    "ExactSample",
    "Fuzzy",
    "LogMargin",
    "Mentored",
    "RelaxedTopN",
    "Thresholds",
    "TopRatio",
    "Typical",
]


# ---- what rules share ------------------------------------------------------------------------------------------


def _check(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """``value`` must be a finite number in [low, high], or in (low, high] if ``above``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not (number and (low < value if above else low <= value) and value <= high):  # type: ignore[operator]
        upper = f"{high:g}]" if math.isfinite(high) else "inf)"
        raise ValueError(f"{name} {value!r} must be a finite number in {'(' if above else '['}{low:g}, {upper}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is unknown; choices: {list(choices)}")


def _drafted(chance_BK: Tensor, draft: Draft) -> Tensor:
    """Chances as float, 0 on padding (whatever stood there, NaN included)."""
    return torch.where(draft.mask_BK(), chance_BK.float(), 0.0)


def _per_row(target: Target) -> Tensor:
    return target.greedy_B.unsqueeze(1)


def _matches(target: Target, draft: Draft) -> Tensor:
    """[B, K] bool: the token is the target's most likely one."""
    return draft.tokens_BK == target.argmax_BK[:, :-1]


def _possible(target: Target, draft: Draft) -> Tensor:
    """[B, K] bool: the target gives the token some mass."""
    open_BK = pick(target.logits_BKV[:, :-1], draft.tokens_BK) > -torch.inf
    if target.all_greedy:
        return open_BK
    return torch.where(_per_row(target), open_BK, target.probs_of(draft.tokens_BK) > 0)


def _gate_distribution(target: Target) -> Tensor:
    """[B, K, V] the distribution a gate looks at: processed, raw at temperature 0."""
    if not target.some_greedy:
        return target.probs_BKV[:, :-1]
    raw_BKV = target.logits_BKV[:, :-1].softmax(-1)
    if target.all_greedy:
        return raw_BKV
    return torch.where(target.greedy_B.view(-1, 1, 1), raw_BKV, target.probs_BKV[:, :-1])


def _gate_probs(target: Target, draft: Draft) -> tuple[Tensor, Tensor]:
    """[B, K] twice, of the distribution a gate looks at: its probability of the token, and of the likeliest token."""
    tokens_BK, choice_BK = draft.tokens_BK, target.argmax_BK[:, :-1]
    if not target.some_greedy:
        return target.probs_of(tokens_BK), target.probs_of(choice_BK)
    logits_BKV = target.logits_BKV[:, :-1]
    highest_BK = pick(logits_BKV, choice_BK)
    rows, longest = tokens_BK.shape
    rows_N = torch.arange(rows, device=tokens_BK.device).repeat_interleave(longest)
    positions_N = torch.arange(longest, device=tokens_BK.device).repeat(rows)
    total_BK = target.log_mass(rows_N, positions_N).view(rows, longest)
    token_BK = (pick(logits_BKV, tokens_BK) - highest_BK - total_BK).exp()
    peak_BK = (-total_BK).exp()
    if target.all_greedy:
        return token_BK, peak_BK
    greedy_B1 = _per_row(target)
    return (
        torch.where(greedy_B1, token_BK, target.probs_of(tokens_BK)),
        torch.where(greedy_B1, peak_BK, target.probs_of(choice_BK)),
    )


class _Gate(AcceptancePolicy):
    """Rules that do not weigh the target's distribution against the draft's: after a rejection the target draws
    afresh."""

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        """The target's own distribution."""
        return target_BV

    def keep(self, target: Target, draft: Draft, stands_BK: Tensor) -> Tensor:
        """Chances from a gate: its own verdict, and the target's choice at temperature 0 in any case."""
        return _drafted(stands_BK | (_per_row(target) & _matches(target, draft)), draft)


class _Reshaped(AcceptancePolicy):
    """Speculative sampling against another distribution than the target's: keep x with probability min(1,
    distribution(x)/draft(x)), else draw from max(distribution - draft, 0)."""

    @abstractmethod
    def reshape(self, target_NV: Tensor, draft_NV: Tensor, token_N: Tensor) -> Tensor:
        """[N, V] the distribution aimed at (not at temperature 0, where it is the target's own)."""

    def correction(self, target: Target, draft: Draft, at_B: Tensor) -> Tensor:
        """max(distribution - draft, 0). For a deterministic draft every reshaped distribution here leaves the target
        without the rejected token."""
        if draft.probs_BKV is None:
            return super().correction(target, draft, at_B)
        rows_B = torch.arange(at_B.shape[0], device=at_B.device)
        target_BV, draft_BV = target.probs_at(rows_B, at_B), draft.probs_BKV[rows_B, at_B]
        probs_BV = self.reshape(target_BV, draft_BV, draft.tokens_BK[rows_B, at_B])
        return (torch.where(_per_row(target), target_BV, probs_BV) - draft_BV).clamp_min(0)


# ---- lossless --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExactSample(AcceptancePolicy):
    """Lossless by construction: x stands iff it equals the target's own sample at that position, drawn from the
    row's random stream; the first sample that differs is the correction. (The rule of llama.cpp's and of many
    n-gram engines: sample from the target, compare.)

    Whatever the draft proposes, the emitted text is the one that sampling without a draft would give from the same
    coins. Coin j draws position j by inverting the cumulative distribution; the bonus has its own. At temperature 0:
    exact match. Accepts with probability target(x), so less often than ``Exact`` unless the draft is deterministic.
    Draws at all K positions: costs K passes over the vocabulary.
    """

    name: ClassVar[str] = "sample"
    guarantee = Guarantee.LOSSLESS

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        """target(x), the chance that the target draws x as well."""
        return _drafted(exact_accept_probs(target, Draft(draft.tokens_BK, draft.lengths_B)), draft)

    def correction(self, target: Target, draft: Draft, at_B: Tensor) -> Tensor:
        """The target without the rejected token: the distribution of its sample, given that it was another one."""
        return super().correction(target, Draft(draft.tokens_BK, draft.lengths_B), at_B)

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        if target.all_greedy:
            return super().verdict(target, draft, noise)
        rows, longest = draft.tokens_BK.shape
        probs_BKV = target.probs_BKV
        own_BK = draw(probs_BKV[:, :-1].flatten(0, 1), noise.accept_BK.flatten()).view(rows, longest)
        agree_BK = (own_BK == draft.tokens_BK) & draft.mask_BK()
        accepted_B = agree_BK.long().cumprod(-1).sum(-1)
        bonus_B = draw(probs_BKV[torch.arange(rows, device=probs_BKV.device), accepted_B], noise.sample_B)
        own_BJ = torch.cat([own_BK, bonus_B.unsqueeze(1)], dim=1)
        next_token_B = torch.where(accepted_B < draft.lengths_B, pick(own_BJ, accepted_B), bonus_B)
        return verdict_of(accepted_B, next_token_B, agree_BK, draft)


@dataclass(frozen=True)
class BlockVerification(AcceptancePolicy):
    """Block verification (Sun et al., arXiv 2403.10444, alg. 2): lossless, and it accepts at least as many tokens in
    expectation as the token-wise rule, since a late token may rescue an early one.

    With p_0 = 1 and p_i = min(1, p_{i-1}·target(x_i)/draft(x_i)), the first i tokens stand if some coin j >= i falls
    below h_j: S_j = sum over v of max(p_j·target_{j+1}(v) - draft_{j+1}(v), 0), h_j = S_j / (S_j + 1 - p_j), and
    h = p at the row's last token. After n tokens the correction is drawn from max(p_n·target - draft, 0).

    A deterministic draft is one-hot. At temperature 0 this is exact match. ``block | condition`` excuses mismatches
    of the token-wise rule, which is what ``accept_probs`` gives.
    """

    name: ClassVar[str] = "block"
    guarantee = Guarantee.LOSSLESS

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        """Those of the token-wise rule; the block's own are no chances of single tokens."""
        return _drafted(exact_accept_probs(target, draft), draft)

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        if target.all_greedy:
            return super().verdict(target, draft, noise)
        mask_BK = draft.mask_BK()
        rows, longest = mask_BK.shape
        rows_B = torch.arange(rows, device=mask_BK.device)
        target_BK, draft_BK = target.probs_of(draft.tokens_BK), draft.own_probs_BK()

        reach_B = torch.ones_like(noise.sample_B, dtype=target_BK.dtype)  # p_i
        reaches = [reach_B]
        for j in range(longest):
            reach_B = torch.where(mask_BK[:, j], (reach_B * target_BK[:, j] / draft_BK[:, j]).clamp_max(1), reach_B)
            reaches.append(reach_B)
        reach_BJ = torch.stack(reaches, dim=1)

        own_BK = reach_BJ[:, 1:]  # p after the token of each column
        if draft.probs_BKV is None:
            spare_BK = own_BK[:, :-1] * (1 - target_BK[:, 1:]).clamp_min(0)
        else:
            probs_BKV = target.probs_BKV
            spare_BK = (own_BK[:, :-1, None] * probs_BKV[:, 1:-1] - draft.probs_BKV[:, 1:]).clamp_min(0).sum(-1)
        below_BK = spare_BK + (1 - own_BK[:, :-1])
        # Nothing to spare and nothing short (0/0): the distributions are equal from here, and keeping on is right.
        early_BK = torch.where(below_BK > 0, spare_BK / below_BK.clamp_min(torch.finfo(below_BK.dtype).tiny), 1.0)
        last_BK = torch.arange(1, longest + 1, device=mask_BK.device) == draft.lengths_B.unsqueeze(1)
        chance_BK = torch.where(last_BK, own_BK, torch.nn.functional.pad(early_BK, (0, 1))[:, :longest])

        stands_BK = (noise.accept_BK < chance_BK) & mask_BK
        # an accepted column carries all before it
        kept_BK = stands_BK.flip(-1).cummax(-1).values.flip(-1) if longest else stands_BK
        accepted_B = kept_BK.long().sum(-1)
        probs_BV = target.probs_at(rows_B, accepted_B)
        if longest:
            at_B = accepted_B.clamp_max(longest - 1)
            scaled_BV = probs_BV * pick(reach_BJ, accepted_B).unsqueeze(1)
            if draft.probs_BKV is None:
                residual_BV = scaled_BV.scatter(1, draft.tokens_BK[rows_B, at_B].unsqueeze(1), 0.0)
            else:
                residual_BV = (scaled_BV - draft.probs_BKV[rows_B, at_B]).clamp_min(0)
            rejected_B = (accepted_B < draft.lengths_B) & (residual_BV.sum(-1) > 0)
            probs_BV = torch.where(rejected_B.unsqueeze(1), residual_BV, probs_BV)
        return verdict_of(accepted_B, draw(probs_BV, noise.sample_B), kept_BK, draft)


# ---- the token-wise test, loosened -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AdditiveSlack(AcceptancePolicy):
    """Additive slack: keep x with probability min(1, target(x)/draft(x) + eps), else the exact residual.

    ``eps`` in [0, 1]; 0 is ``Exact``. Bounded: with the same coins it differs from ``Exact`` only where a coin falls
    into the slack, a chance of at most eps, so TV(emitted, target) <= eps a token. At temperature 0 the same on the
    one-hot distribution: a mismatch stands with probability eps.
    """

    name: ClassVar[str] = "slack"
    monotone: ClassVar[Mapping[str, int]] = {"eps": 1}
    guarantee = Guarantee.BOUNDED
    eps: float = 0.1

    def __post_init__(self) -> None:
        _check("eps", self.eps, 0, 1)

    @property
    def bound(self) -> Bound:
        return Bound("tv", float(self.eps))

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        loose_BK = (exact_accept_probs(target, draft) + self.eps).clamp_max(1)
        return _drafted(torch.where(_possible(target, draft), loose_BK, 0.0), draft)


@dataclass(frozen=True)
class Ears(AcceptancePolicy):
    """EARS, adaptive rejection sampling (arXiv 2512.13194): keep x if target(x)/draft(x) >= u - beta·(1 - max target),
    so with probability min(1, target(x)/draft(x) + beta·(1 - max target)); else the exact residual.

    ``beta`` in [0, 1], usually 0.3 to 0.5; 0 is ``Exact``. Bounded like ``AdditiveSlack``, by a slack that the
    target's certainty shrinks: TV(emitted, target) <= beta·(1 - max target) <= beta. At temperature 0 the target is
    certain and this is exact match, as in the authors' patch of vLLM.
    """

    name: ClassVar[str] = "ears"
    monotone: ClassVar[Mapping[str, int]] = {"beta": 1}
    guarantee = Guarantee.BOUNDED
    beta: float = 0.3

    def __post_init__(self) -> None:
        _check("beta", self.beta, 0, 1)

    @property
    def bound(self) -> Bound:
        return Bound("tv", float(self.beta))

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        exact_BK = exact_accept_probs(target, draft)
        if target.all_greedy:
            return _drafted(exact_BK, draft)
        slack_BK = self.beta * (1 - target.probs_of(target.argmax_BK[:, :-1])).clamp_min(0)
        loose_BK = (exact_BK + slack_BK).clamp_max(1)
        return _drafted(torch.where(_possible(target, draft), loose_BK, 0.0), draft)


@dataclass(frozen=True)
class Thresholds(AcceptancePolicy):
    """SGLang's ``speculative_accept_threshold_acc`` and ``_single``: keep x with probability
    min(1, target(x)/(draft(x)·threshold_acc)), and in any case if target(x) >= threshold_single; else the exact
    residual.

    Both in (0, 1]; 1 and 1 are ``Exact`` and lossless, other values carry no stated bound (so ``guarantee`` is a
    property of the instance). At temperature 0: exact match, or raw target(x) >= threshold_single; threshold_acc
    changes nothing there.
    """

    name: ClassVar[str] = "thresholds"
    monotone: ClassVar[Mapping[str, int]] = {"threshold_acc": -1, "threshold_single": -1}
    threshold_acc: float = 1.0
    threshold_single: float = 1.0

    def __post_init__(self) -> None:
        _check("threshold_acc", self.threshold_acc, 0, 1, above=True)
        _check("threshold_single", self.threshold_single, 0, 1, above=True)

    @property
    def guarantee(self) -> Guarantee:  # type: ignore[override]  # a value of the instance, not of the class
        lossless = self.threshold_acc == 1 and self.threshold_single == 1
        return Guarantee.LOSSLESS if lossless else Guarantee.HEURISTIC

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        chance_BK = (exact_accept_probs(target, draft) / self.threshold_acc).clamp_max(1)
        if self.threshold_single < 1:  # at 1 the token is certain, and the test above keeps it
            token_BK, _ = _gate_probs(target, draft)
            chance_BK = torch.where(token_BK >= self.threshold_single, 1.0, chance_BK)
        return _drafted(chance_BK, draft)


# ---- gates on the target's distribution
# ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Typical(_Gate):
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): keep x if target(x) > min(eps, delta·exp(-H)),
    H the entropy of the target in nats; else the target draws afresh.

    Usual values: eps 0.09, delta 0.3 (Medusa: delta = sqrt(eps)). At temperature 0 on the raw distribution, and the
        argmax
    stands in any case.
    """

    name: ClassVar[str] = "typical"
    monotone: ClassVar[Mapping[str, int]] = {"eps": -1, "delta": -1}
    eps: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        _check("eps", self.eps, 0, 1)
        _check("delta", self.delta, 0, 1)

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        probs_BKV = _gate_distribution(target)
        entropy_BK = -torch.special.xlogy(probs_BKV, probs_BKV).sum(-1)
        threshold_BK = (self.delta * (-entropy_BK).exp()).clamp_max(self.eps)
        return self.keep(target, draft, pick(probs_BKV, draft.tokens_BK) > threshold_BK)


@dataclass(frozen=True)
class RelaxedTopN(_Gate):
    """Relaxed acceptance (TensorRT-LLM, ``relaxed_topk`` and ``relaxed_delta``): keep x if it is among the target's
    ``n`` most likely tokens and target(x) >= max target - delta; else the target draws afresh.

    Usual values: n 10, delta 0.6, there only while a model thinks. Tokens as likely as the n-th count as among them.
    At temperature 0 on the raw distribution, and the argmax stands in any case.
    """

    name: ClassVar[str] = "topn"
    monotone: ClassVar[Mapping[str, int]] = {"n": 1, "delta": 1}
    n: int = 10
    delta: float = 0.6

    def __post_init__(self) -> None:
        _check("n", self.n, 1)
        if not isinstance(self.n, int):
            raise ValueError(f"n {self.n!r} must be an integer of at least 1")
        _check("delta", self.delta, 0, 1)

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        token_BK, peak_BK = _gate_probs(target, draft)
        logits_BKV = target.logits_BKV[:, :-1]  # their order is that of the distribution, without a softmax
        among_BK = pick(logits_BKV, draft.tokens_BK) >= top(logits_BKV, self.n).values[..., -1]
        near_BK = (token_BK >= peak_BK - self.delta) & (token_BK > 0)
        return self.keep(target, draft, among_BK & near_BK)


@dataclass(frozen=True)
class BiLD(_Gate):
    """BiLD's rollback (Kim et al., arXiv 2302.07863): reject x if -ln target(x) > r and x is not the target's most
    likely token; else keep it. After a rejection the target draws afresh.

    ``r`` >= 0, usually 2 to 5; 0 keeps only tokens the target is certain of, and its choice. When the drafter hands
    over (its fallback policy) is the strategy's business. At temperature 0 on the raw distribution.
    """

    name: ClassVar[str] = "bild"
    monotone: ClassVar[Mapping[str, int]] = {"r": 1}
    r: float = 3.0

    def __post_init__(self) -> None:
        _check("r", self.r, 0)

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        token_BK, _ = _gate_probs(target, draft)
        return self.keep(target, draft, (-token_BK.log() <= self.r) | (_matches(target, draft) & (token_BK > 0)))


@dataclass(frozen=True)
class Fuzzy(_Gate):
    """Fuzzy speculative decoding (arXiv 2502.20704): keep x, whatever it is, where the target's and the draft's
    distributions are near, divergence <= threshold; else the target draws afresh.

    ``divergence``: ``"js"`` (Jensen-Shannon, at most ln 2), ``"kl"`` (KL(draft || target), infinite where the draft
    may propose what the target excludes) in nats, or ``"tv"`` (total variation). ``threshold`` is tuned for a pair.

    Above temperature 0 a token's emitted distribution is the draft's where the two are near, else the target's, so
    within the threshold of it; at temperature 0 the raw distribution is measured against the draft's, with no such
    promise: HEURISTIC. The argmax stands there in any case.
    """

    name: ClassVar[str] = "fuzzy"
    monotone: ClassVar[Mapping[str, int]] = {"threshold": 1}
    divergence: Literal["js", "kl", "tv"] = "js"
    threshold: float = 0.3

    def __post_init__(self) -> None:
        _check_choice("divergence", self.divergence, ("js", "kl", "tv"))
        _check("threshold", self.threshold, 0)

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        if draft.probs_BKV is None:
            token_BK, _ = _gate_probs(target, draft)
            apart_BK = self._from_one_hot(token_BK)
        else:
            apart_BK = self._between(_gate_distribution(target), draft.probs_BKV)
        return self.keep(target, draft, (apart_BK <= self.threshold) & _possible(target, draft))

    def _between(self, target_NV: Tensor, draft_NV: Tensor) -> Tensor:
        xlogy, tiny = torch.special.xlogy, torch.finfo(target_NV.dtype).tiny
        if self.divergence == "tv":
            return (target_NV - draft_NV).abs().sum(-1) / 2
        if self.divergence == "kl":
            return (xlogy(draft_NV, draft_NV) - xlogy(draft_NV, target_NV)).sum(-1)
        half_NV = ((target_NV + draft_NV) / 2).clamp_min(tiny)
        return (xlogy(target_NV, target_NV / half_NV) + xlogy(draft_NV, draft_NV / half_NV)).sum(-1) / 2

    def _from_one_hot(self, token_N: Tensor) -> Tensor:
        """The same for a draft that is one-hot on a token of target probability ``token_N``."""
        if self.divergence == "tv":
            return 1 - token_N
        if self.divergence == "kl":
            return -token_N.log()
        shared_N = torch.special.xlogy(token_N, 2 * token_N / (1 + token_N)) + (2 / (1 + token_N)).log()
        return ((1 - token_N) * math.log(2) + shared_N) / 2


# ---- reshaped distributions
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cascade(_Reshaped):
    """Speculative cascades (Narasimhan et al., arXiv 2405.19261): speculative sampling against the target where the
    drafter should defer to it, against the draft's own distribution (so keep x) where not.

    ``rule`` ``"chow"`` defers if max draft < 1 - alpha, ``"diff"`` if max draft < max target - alpha. ``alpha`` in
    [0, 1], usually 0.2; chow with 0 always defers and is ``Exact``.

    max draft stands for how likely the drafter is to be right. A one-hot draft's certainty says nothing about that,
    so there, and at temperature 0, it is target(x) itself that is compared (the paper's token-specific rule), on the
    raw distribution at temperature 0.
    """

    name: ClassVar[str] = "cascade"
    monotone: ClassVar[Mapping[str, int]] = {"alpha": 1}
    rule: Literal["chow", "diff"] = "diff"
    alpha: float = 0.2

    def __post_init__(self) -> None:
        _check_choice("rule", self.rule, ("chow", "diff"))
        _check("alpha", self.alpha, 0, 1)

    def defers(self, sure_N: Tensor, peak_N: Tensor) -> Tensor:
        """[N] bool, given how sure the drafter is and the target's largest probability."""
        return sure_N < ((1.0 if self.rule == "chow" else peak_N) - self.alpha)

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        sure_BK, peak_BK = _gate_probs(target, draft)
        if draft.probs_BKV is not None:
            draft_BK = draft.probs_BKV.amax(-1)
            sure_BK = torch.where(_per_row(target) | (draft_BK >= 1), sure_BK, draft_BK)
        exact_BK = exact_accept_probs(target, draft)
        kept_BK = _possible(target, draft).to(exact_BK.dtype)
        return _drafted(torch.where(self.defers(sure_BK, peak_BK), exact_BK, kept_BK), draft)

    def reshape(self, target_NV: Tensor, draft_NV: Tensor, token_N: Tensor) -> Tensor:
        sure_N = draft_NV.amax(-1)
        sure_N = torch.where(sure_N >= 1, pick(target_NV, token_N), sure_N)
        defers_N1 = self.defers(sure_N, target_NV.amax(-1)).unsqueeze(-1)
        # What the draft puts on tokens that the target excludes, the target draws.
        outside_N1 = torch.where(target_NV > 0, 0.0, draft_NV).sum(-1, keepdim=True)
        kept_NV = torch.where(target_NV > 0, draft_NV + outside_N1 * target_NV, 0.0)
        return torch.where(defers_N1, target_NV, kept_NV)


@dataclass(frozen=True)
class Cactus(_Reshaped):
    """Cactus, constrained acceptance (arXiv 2604.04987): speculative sampling against the distribution h that gives the
    drafted x more, gamma = min(1, t + sqrt(2·delta·t·(1 - t))) with t = target(x), and scales the others down.

    Keep x with probability min(1, gamma/draft(x)), else draw from max(h - draft, 0). ``delta`` >= 0, usually 1; 0 is
    ``Exact``. At temperature 0 the target is certain, gamma = t, and this is exact match.

    HEURISTIC: the paper's budget KL(h || target) <= delta is a second-order approximation, and it is one of h, which
    changes with x, not of the emitted distribution: many unlikely tokens, each raised within the budget, add up. (With
        n
    tokens of target probability t and n·sqrt(2·delta·t) near 1 the draft's distribution is emitted untouched, at a
    divergence near ln(2·delta/t)/2, which has no limit.)
    """

    name: ClassVar[str] = "cactus"
    monotone: ClassVar[Mapping[str, int]] = {"delta": 1}
    delta: float = 1.0

    def __post_init__(self) -> None:
        _check("delta", self.delta, 0)

    def raised(self, token_N: Tensor) -> Tensor:
        """gamma, from the target's probability of the token."""
        return (token_N + (2 * self.delta * token_N * (1 - token_N).clamp_min(0)).sqrt()).clamp_max(1)

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        if target.all_greedy:
            return _drafted(exact_accept_probs(target, draft), draft)
        gamma_BK = self.raised(target.probs_of(draft.tokens_BK))
        return _drafted((gamma_BK / draft.own_probs_BK()).clamp_max(1), draft)

    def reshape(self, target_NV: Tensor, draft_NV: Tensor, token_N: Tensor) -> Tensor:
        token_N1 = token_N.unsqueeze(-1)
        before_N1 = target_NV.gather(-1, token_N1)
        gamma_N1 = self.raised(before_N1)
        scale_N1 = (1 - gamma_N1) / (1 - before_N1).clamp_min(torch.finfo(target_NV.dtype).tiny)
        return (target_NV * scale_N1).scatter(-1, token_N1, gamma_N1)


_STEPS = 24  # of a bisection, about the precision of float32
_MOST = 30.0  # of -ln alpha: a token of which the draft makes e^30 times as much as the target is cut in any case
_LEAST = 1e-300  # keeps float64 quotients finite


def _normalised(probs_NV: Tensor) -> Tensor:
    """float64 with mass 1: a float32 distribution's error of 1e-7 would pass for a divergence."""
    probs_NV = probs_NV.double()
    return probs_NV / probs_NV.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Mentored(_Reshaped):
    """Mentored decoding (Tran-Thien 2023, huggingface.co/blog/vivien/optimal-lossy-variant-of-speculative-decoding):
    the distribution that keeps most drafted tokens while its divergence from the target is at most ``budget``.

    Keep x with probability min(1, target(x)/(alpha·draft(x))), else draw from max(target/beta - draft, 0), with
    alpha <= 1 <= beta: the emitted distribution is the draft's, held between target/beta and target/alpha. beta follows
    from alpha (mass 1), alpha is the least for which the divergence keeps to the budget, by bisection. ``budget`` in
    nats, usually 0.1 to 0.5; 0 is ``Exact``, and where the draft's own distribution is within the budget every token
    stands.

    Bounded: KL(emitted || target) <= budget a token, by construction. (The blog measures KL(target || emitted). The
    best distribution has the same form, and this direction stays finite, and is what ``Bound`` states.) At temperature
    0 no other distribution than the target's is within a finite budget: exact match. Costs a sort of the vocabulary a
    position, except for deterministic drafts.
    """

    name: ClassVar[str] = "mentored"
    monotone: ClassVar[Mapping[str, int]] = {"budget": 1}
    guarantee = Guarantee.BOUNDED
    budget: float = 0.2

    def __post_init__(self) -> None:
        _check("budget", self.budget, 0)

    @property
    def bound(self) -> Bound:
        return Bound("kl", float(self.budget))

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        if target.all_greedy:
            return _drafted(exact_accept_probs(target, draft), draft)
        token_BK = target.probs_of(draft.tokens_BK).double()
        if draft.probs_BKV is None:
            return _drafted(self._raised(token_BK), draft)
        alpha_BK, _ = self._limits(target.probs_BKV[:, :-1], draft.probs_BKV)
        return _drafted((token_BK / (alpha_BK * draft.own_probs_BK().double())).clamp_max(1), draft)

    def reshape(self, target_NV: Tensor, draft_NV: Tensor, token_N: Tensor) -> Tensor:
        alpha_N, beta_N = self._limits(target_NV, draft_NV)
        exact_NV = target_NV.double()
        probs_NV = draft_NV.double().maximum(exact_NV / beta_N.unsqueeze(-1)).minimum(exact_NV / alpha_N.unsqueeze(-1))
        return probs_NV.to(target_NV.dtype)

    def _raised(self, token_N: Tensor) -> Tensor:
        """For a one-hot draft: the largest a >= t with a·ln(a/t) + (1-a)·ln((1-a)/(1-t)) <= budget."""
        xlogy = torch.special.xlogy
        low_N, high_N, rest_N = token_N, torch.ones_like(token_N), (1 - token_N).clamp_min(_LEAST)
        for _ in range(_STEPS):
            a_N = (low_N + high_N) / 2
            apart_N = xlogy(a_N, a_N / token_N.clamp_min(_LEAST)) + xlogy(1 - a_N, (1 - a_N) / rest_N)
            within_N = (apart_N <= self.budget) & (token_N > 0)
            low_N, high_N = torch.where(within_N, a_N, low_N), torch.where(within_N, high_N, a_N)
        return low_N

    def _limits(self, target_NV: Tensor, draft_NV: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and beta [N], float64. With tokens in the order of target/draft, all sums are differences of prefix
        sums, so a step of the bisection is two binary searches and no pass over the vocabulary."""
        target_NV, draft_NV = _normalised(target_NV), _normalised(draft_NV)
        ratio_NV, order_NV = (target_NV / draft_NV.clamp_min(_LEAST)).sort(-1)
        target_NV, draft_NV = target_NV.gather(-1, order_NV), draft_NV.gather(-1, order_NV)
        apart_NV = torch.special.xlogy(draft_NV, draft_NV / target_NV.clamp_min(_LEAST))

        def prefix(values_NV: Tensor) -> Tensor:
            return torch.nn.functional.pad(values_NV.cumsum(-1), (1, 0))

        targets, drafts = prefix(target_NV), prefix(draft_NV)
        aparts = prefix(torch.where(target_NV > 0, apart_NV, 0.0))
        all_targets, all_drafts = targets[..., -1:], drafts[..., -1:]
        # mass that max(target/beta - draft, 0) has when beta is the ratio of each token: falls along the order
        lifted_NV = (all_targets - targets[..., :-1]) / ratio_NV - (all_drafts - drafts[..., :-1])
        rising_NV = -lifted_NV

        def at(raise_N1: Tensor) -> tuple[Tensor, Tensor]:
            """ln beta, and the divergence of the distribution that alpha = exp(-raise) gives."""
            low_N1 = torch.searchsorted(ratio_NV, (-raise_N1).exp())  # tokens before it are cut to target/alpha
            cut_N1 = targets.gather(-1, low_N1) * raise_N1.exp()
            missing_N1 = (drafts.gather(-1, low_N1) - cut_N1).clamp_min(0)
            high_N1 = torch.searchsorted(rising_NV, -missing_N1)  # tokens from it on are lifted to target/beta
            top_N1 = all_targets - targets.gather(-1, high_N1)
            topped_N1 = missing_N1 + all_drafts - drafts.gather(-1, high_N1)
            lifts_N1 = (top_N1 > 0) & (topped_N1 > 0)  # else nothing is missing, and no token lifted
            drop_N1 = torch.where(lifts_N1, top_N1.log() - topped_N1.log(), -math.log(_LEAST))
            between_N1 = aparts.gather(-1, high_N1) - aparts.gather(-1, low_N1)
            return drop_N1, cut_N1 * raise_N1 + between_N1 - torch.where(lifts_N1, topped_N1 * drop_N1, 0.0)

        low_N1, high_N1 = torch.zeros_like(all_targets), torch.full_like(all_targets, _MOST)
        for _ in range(_STEPS):  # the divergence grows with raise; the lower end always keeps to the budget
            middle_N1 = (low_N1 + high_N1) / 2
            within_N1 = at(middle_N1)[1] <= self.budget
            low_N1, high_N1 = torch.where(within_N1, middle_N1, low_N1), torch.where(within_N1, high_N1, middle_N1)
        return (-low_N1).exp().squeeze(-1), at(low_N1)[0].exp().squeeze(-1)


# ---- conditions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogMargin(Condition):
    """The target barely prefers another token: its largest logit is less than ``tau`` above the drafted token's.

    The gate of llama.cpp's FLy (there 0.3 nats, so at least 74 % as likely as the first choice). On the raw logits;
    a banned token never passes. ``Exact() | LogMargin(0.3)`` is a policy.
    """

    name: ClassVar[str] = "margin"
    tau: float = 0.3

    def __post_init__(self) -> None:
        _check("tau", self.tau, 0)

    def evaluate(self, block: Block) -> Tensor:
        logits_BKV = block.target.logits_BKV[:, :-1]
        peak_BK = pick(logits_BKV, block.target.argmax_BK[:, :-1])
        return peak_BK - pick(logits_BKV, block.draft.tokens_BK) < self.tau


@dataclass(frozen=True)
class TopRatio(Condition):
    """MARS's margin (arXiv 2601.15498): the drafted token is the target's first choice, or its second with a logit
    above ``theta`` times the first.

    ``theta`` in [0, 1], usually 0.9. A ratio of logits changes with a constant added to all of them (``LogMargin`` is
    the safer gate), and means nothing unless the largest is positive, so otherwise only the first choice passes.
    Tokens that tie for second count as second.
    """

    name: ClassVar[str] = "mars"
    theta: float = 0.9

    def __post_init__(self) -> None:
        _check("theta", self.theta, 0, 1)

    def evaluate(self, block: Block) -> Tensor:
        logits_BKV = block.target.logits_BKV[:, :-1]
        top_BK2 = top(logits_BKV, 2).values
        first_BK, second_BK = top_BK2[..., 0], top_BK2[..., -1]
        token_BK = pick(logits_BKV, block.draft.tokens_BK)
        runner_up_BK = (token_BK >= second_BK) & (token_BK > self.theta * first_BK)  # never if first <= 0
        return runner_up_BK | _matches(block.target, block.draft)


CATALOGUE: tuple[type[AcceptancePolicy], ...] = (
    ExactSample,
    BlockVerification,
    AdditiveSlack,
    Ears,
    Thresholds,
    Typical,
    RelaxedTopN,
    BiLD,
    Fuzzy,
    Cascade,
    Cactus,
    Mentored,
)
GATES: tuple[type[Condition], ...] = (LogMargin, TopRatio)
