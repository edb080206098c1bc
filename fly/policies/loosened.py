"""Rules that loosen the test of ``Exact``: by a slack, by a threshold, or by another distribution than the target's.
``fly.policies.formulas`` describes what all rules share.

Shape legend: B rows, K longest draft, V vocabulary, N any leading shape. Positions count from 0 here, from 1 in papers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fly.expressions import Amount, Checked, Share
from fly.ops import pick, vectors_at
from fly.policies.base import AcceptancePolicy, Bound, exact_accept_probs
from fly.policies.formulas import binary, drafted, gate_probs, possible
from fly.types import Draft, Guarantee, Target

__all__ = ["AdditiveSlack", "Cactus", "Cascade", "Ears", "Ensemble", "Mentored", "Thresholds"]


def _with_slack(target: Target, draft: Draft, slack: Tensor | float) -> Tensor:
    """Return min(1, target(x)/draft(x) + slack), [B, K], and 0 for tokens that the target excludes."""
    loose_BK = (exact_accept_probs(target, draft) + slack).clamp_max(1)
    return drafted(torch.where(possible(target, draft), loose_BK, 0.0), draft)


@dataclass(frozen=True)
class AdditiveSlack(AcceptancePolicy, Checked):
    """Additive slack: keep x with probability min(1, target(x)/draft(x) + eps), otherwise draw from the exact residual.

    ``eps`` in [0, 1]; 0 is ``Exact``. Bounded: with the same coins, this rule differs from ``Exact`` only if a coin
    falls into the slack, so TV(emitted, target) <= eps per token. At temperature 0 the target's distribution is
    one-hot, and a mismatch is kept with probability eps.
    """

    name: ClassVar[str] = "slack"
    monotone: ClassVar[Mapping[str, int]] = {"eps": 1}
    guarantee = Guarantee.BOUNDED
    eps: Share = 0.1

    @property
    def bound(self) -> Bound:
        return Bound("tv", float(self.eps))

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return _with_slack(target, draft, self.eps)


@dataclass(frozen=True)
class Ears(AcceptancePolicy, Checked):
    """EARS, adaptive rejection sampling (arXiv 2512.13194): keep x if target(x)/draft(x) >= u - beta·(1 - max target),
    that is, with probability min(1, target(x)/draft(x) + beta·(1 - max target)). Otherwise draw from the exact
    residual.

    ``beta`` in [0, 1], usually 0.3 to 0.5; 0 is ``Exact``. Bounded like ``AdditiveSlack``, with a slack that shrinks as
    the target becomes certain: TV(emitted, target) <= beta·(1 - max target) <= beta. At temperature 0 the target is
    certain, so this is exact match, as in the authors' patch of vLLM.
    """

    name: ClassVar[str] = "ears"
    monotone: ClassVar[Mapping[str, int]] = {"beta": 1}
    guarantee = Guarantee.BOUNDED
    beta: Share = 0.3

    @property
    def bound(self) -> Bound:
        return Bound("tv", float(self.beta))

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return _with_slack(target, draft, self.beta * (1 - target.probs_of(target.argmax_BK[:, :-1])).clamp_min(0))


@dataclass(frozen=True)
class Ensemble(AcceptancePolicy, Checked):
    """Static ensemble (DIVERSED, arXiv 2604.07622; ``assistant_ensemble_weight`` of transformers): speculative sampling
    against the mixture weight·target + (1 - weight)·draft instead of the target.

    Keep x with probability min(1, mixture(x)/draft(x)), which is weight times the exact chance plus 1 - weight; a token
    that the target excludes is rejected. Otherwise draw from the exact residual, as mixture - draft is
    weight·(target - draft). ``weight`` in [0, 1]; 1 is ``Exact``. At temperature 0 this is exact match.

    Bounded: with a chance of ``weight`` the rule does as ``Exact``, so TV(emitted, target) <= 1 - weight per token. (It
    is (1 - weight)·TV(draft, target) if the target excludes no token that the draft may propose.)
    """

    name: ClassVar[str] = "ensemble"
    monotone: ClassVar[Mapping[str, int]] = {"weight": -1}
    guarantee = Guarantee.BOUNDED
    weight: Share = 0.8

    @property
    def bound(self) -> Bound:
        return Bound("tv", 1 - float(self.weight))

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        exact_BK = exact_accept_probs(target, draft)
        kept_BK = (possible(target, draft) & ~target.greedy_B.unsqueeze(1)) | (exact_BK >= 1)
        return drafted(self.weight * exact_BK + (1 - self.weight) * kept_BK, draft)


@dataclass(frozen=True)
class Thresholds(AcceptancePolicy, Checked):
    """SGLang's ``speculative_accept_threshold_acc`` and ``_single``: keep x with probability
    min(1, target(x)/(draft(x)·threshold_acc)), and always if target(x) >= threshold_single; otherwise draw from the
    exact residual.

    Both are in (0, 1]. With 1 and 1 the rule is ``Exact``, and lossless; other values have no stated bound. At
    temperature 0, x is kept if it is the target's argmax or if raw target(x) >= threshold_single; threshold_acc has no
    effect there.
    """

    name: ClassVar[str] = "thresholds"
    monotone: ClassVar[Mapping[str, int]] = {"threshold_acc": -1, "threshold_single": -1}
    threshold_acc: Annotated[float, Field(gt=0, le=1)] = 1.0
    threshold_single: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def guarantee(self) -> Guarantee:  # type: ignore[override]  # depends on the parameters
        lossless = self.threshold_acc == 1 and self.threshold_single == 1
        return Guarantee.LOSSLESS if lossless else Guarantee.HEURISTIC

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        chance_BK = (exact_accept_probs(target, draft) / self.threshold_acc).clamp_max(1)
        if self.threshold_single < 1:  # at 1 the test above keeps the token already
            token_BK, _ = gate_probs(target, draft)
            chance_BK = torch.where(token_BK >= self.threshold_single, 1.0, chance_BK)
        return drafted(chance_BK, draft)


class _Reshaped(AcceptancePolicy, Checked):
    """Speculative sampling against a distribution other than the target's. Keep x with probability
    min(1, distribution(x)/draft(x)), otherwise draw from max(distribution - draft, 0)."""

    @abstractmethod
    def reshape(self, target_NV: Tensor, draft_NV: Tensor, token_N: Tensor) -> Tensor:
        """Return the distribution [N, V] to aim at. Not called at temperature 0, where it is the target's."""

    def correction(self, target: Target, draft: Draft, at_B: Tensor) -> Tensor:
        """Return max(distribution - draft, 0). For a deterministic draft this is the target's distribution without the
        rejected token, for all rules of this module."""
        if draft.probs_BKV is None:
            return super().correction(target, draft, at_B)
        rows_B = torch.arange(at_B.shape[0], device=at_B.device)
        target_BV, draft_BV = target.probs_at(rows_B, at_B), vectors_at(draft.probs_BKV, rows_B, at_B)
        probs_BV = self.reshape(target_BV, draft_BV, draft.tokens_BK[rows_B, at_B])
        return (torch.where(target.greedy_B.unsqueeze(1), target_BV, probs_BV) - draft_BV).clamp_min(0)


@dataclass(frozen=True)
class Cascade(_Reshaped):
    """Speculative cascades (Narasimhan et al., arXiv 2405.19261). Where the draft model should defer to the target,
    this is speculative sampling against the target. Elsewhere it is speculative sampling against the draft's own
    distribution, which keeps x.

    ``rule`` ``"chow"`` defers if max draft < 1 - alpha; ``"diff"`` if max draft < max target - alpha. ``alpha`` in
    [0, 1], usually 0.2; chow with 0 always defers and is ``Exact``.

    max draft estimates the probability that the draft model is right, but for a one-hot draft it is always 1. So for a
    one-hot draft, and at temperature 0, target(x) replaces it (the paper's token-specific rule). At temperature 0 this
    is the raw target(x).
    """

    name: ClassVar[str] = "cascade"
    monotone: ClassVar[Mapping[str, int]] = {"alpha": 1}
    rule: Literal["chow", "diff"] = "diff"
    alpha: Share = 0.2

    def defers(self, sure_N: Tensor, peak_N: Tensor) -> Tensor:
        """Return whether to defer, bool [N], given the draft's certainty and the target's largest probability."""
        return sure_N < ((1.0 if self.rule == "chow" else peak_N) - self.alpha)

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        sure_BK, peak_BK = gate_probs(target, draft)
        if draft.probs_BKV is not None:
            draft_BK = draft.probs_BKV.amax(-1)
            sure_BK = torch.where(target.greedy_B.unsqueeze(1) | (draft_BK >= 1), sure_BK, draft_BK)
        exact_BK = exact_accept_probs(target, draft)
        kept_BK = possible(target, draft).to(exact_BK.dtype)
        return drafted(torch.where(self.defers(sure_BK, peak_BK), exact_BK, kept_BK), draft)

    def reshape(self, target_NV: Tensor, draft_NV: Tensor, token_N: Tensor) -> Tensor:
        sure_N = draft_NV.amax(-1)
        sure_N = torch.where(sure_N >= 1, pick(target_NV, token_N), sure_N)
        defers_N1 = self.defers(sure_N, target_NV.amax(-1)).unsqueeze(-1)
        # Move the draft's mass on tokens that the target excludes to the target's distribution.
        outside_N1 = torch.where(target_NV > 0, 0.0, draft_NV).sum(-1, keepdim=True)
        kept_NV = torch.where(target_NV > 0, draft_NV + outside_N1 * target_NV, 0.0)
        return torch.where(defers_N1, target_NV, kept_NV)


@dataclass(frozen=True)
class Cactus(_Reshaped):
    """Cactus, constrained acceptance (arXiv 2604.04987): speculative sampling against a distribution h. It raises the
    probability of the drafted x from t = target(x) to gamma = min(1, t + sqrt(2·delta·t·(1 - t))), and scales the other
    tokens down.

    Keep x with probability min(1, gamma/draft(x)), otherwise draw from max(h - draft, 0). ``delta`` >= 0, usually 1; 0
    is ``Exact``. At temperature 0 the target is certain, gamma = t, and this is exact match.

    HEURISTIC: the paper's budget KL(h || target) <= delta holds only to second order. Also, it bounds h, which depends
    on x, but not the emitted distribution, since many unlikely tokens, each raised within the budget, add up. (Take n
    tokens of target probability t, with n·sqrt(2·delta·t) near 1. Then the rule emits the draft's distribution
    unchanged, at a divergence near ln(2·delta/t)/2, which has no limit.)
    """

    name: ClassVar[str] = "cactus"
    monotone: ClassVar[Mapping[str, int]] = {"delta": 1}
    delta: Amount = 1.0

    def raised(self, token_N: Tensor) -> Tensor:
        """Return gamma, given the target's probability of the token."""
        return (token_N + (2 * self.delta * token_N * (1 - token_N).clamp_min(0)).sqrt()).clamp_max(1)

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        gamma_BK = self.raised(target.probs_of(draft.tokens_BK))
        return drafted((gamma_BK / draft.own_probs_BK()).clamp_max(1), draft)

    def reshape(self, target_NV: Tensor, draft_NV: Tensor, token_N: Tensor) -> Tensor:
        token_N1 = token_N.unsqueeze(-1)
        before_N1 = target_NV.gather(-1, token_N1)
        gamma_N1 = self.raised(before_N1)
        scale_N1 = (1 - gamma_N1) / (1 - before_N1).clamp_min(torch.finfo(target_NV.dtype).tiny)
        return (target_NV * scale_N1).scatter(-1, token_N1, gamma_N1)


_STEPS = 24  # steps of the bisection, which give about the precision of float32
_MAX_RAISE = 30.0  # the largest -ln alpha; a token e^30 times as likely in the draft as in the target is always cut
_TINY = 1e-300  # keeps float64 quotients finite


@dataclass(frozen=True)
class Mentored(_Reshaped):
    """Mentored decoding (Tran-Thien 2023, huggingface.co/blog/vivien/optimal-lossy-variant-of-speculative-decoding):
    the distribution that keeps most drafted tokens while its divergence from the target is at most ``budget``.

    Keep x with probability min(1, target(x)/(alpha·draft(x))), otherwise draw from max(target/beta - draft, 0), where
    alpha <= 1 <= beta. So the emitted distribution is the draft's, clamped between target/beta and target/alpha.
    Bisection finds the least alpha within the budget; beta follows from it because the mass is 1. ``budget`` is in
    nats, usually 0.1 to 0.5; 0 is ``Exact``. If the draft's own distribution is within the budget, every token is kept.

    Bounded: KL(emitted || target) <= budget per token, by construction. (The blog bounds KL(target || emitted) instead,
    for which the best distribution has the same form. The direction used here stays finite, and ``Bound`` states it.)
    At temperature 0 only the target's distribution is within a finite budget, so this is exact match. The rule sorts
    the vocabulary at each position, except for deterministic drafts.
    """

    name: ClassVar[str] = "mentored"
    monotone: ClassVar[Mapping[str, int]] = {"budget": 1}
    guarantee = Guarantee.BOUNDED
    budget: Amount = 0.2

    @property
    def bound(self) -> Bound:
        return Bound("kl", float(self.budget))

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        if target.all_greedy:
            return drafted(exact_accept_probs(target, draft), draft)
        token_BK = target.probs_of(draft.tokens_BK).double()
        draft_BKV = draft.probs_BKV
        alpha_BK, _ = self._limits(*(binary(token_BK) if draft_BKV is None else (target.probs_BKV[:, :-1], draft_BKV)))
        return drafted((token_BK / (alpha_BK * draft.own_probs_BK().double())).clamp_max(1), draft)

    def reshape(self, target_NV: Tensor, draft_NV: Tensor, token_N: Tensor) -> Tensor:
        alpha_N, beta_N = self._limits(target_NV, draft_NV)
        exact_NV = target_NV.double()
        probs_NV = draft_NV.double().maximum(exact_NV / beta_N.unsqueeze(-1)).minimum(exact_NV / alpha_N.unsqueeze(-1))
        return probs_NV.to(target_NV.dtype)

    def _limits(self, target_NV: Tensor, draft_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Find alpha and beta [N], float64.

        Tokens are sorted by target/draft, so every sum is a difference of prefix sums. A step of the bisection then
        takes two binary searches instead of a pass over the vocabulary.
        """
        # Normalise in float64: a float32 rounding of 1e-7 would look like a divergence.
        target_NV, draft_NV = (probs.double() / probs.double().sum(-1, keepdim=True) for probs in (target_NV, draft_NV))
        ratio_NV, order_NV = (target_NV / draft_NV.clamp_min(_TINY)).sort(-1)
        target_NV, draft_NV = target_NV.gather(-1, order_NV), draft_NV.gather(-1, order_NV)
        # The terms draft·ln(draft/target) of the divergence.
        terms_NV = torch.special.xlogy(draft_NV, draft_NV / target_NV.clamp_min(_TINY))

        def prefix_sums(values_NV: Tensor) -> Tensor:
            """Return the sums over the tokens before each, and at the end over all tokens, [N, V + 1]."""
            return torch.nn.functional.pad(values_NV.cumsum(-1), (1, 0))

        targets, drafts = prefix_sums(target_NV), prefix_sums(draft_NV)
        divergences = prefix_sums(torch.where(target_NV > 0, terms_NV, 0.0))
        all_targets, all_drafts = targets[..., -1:], drafts[..., -1:]
        # Minus the mass of max(target/beta - draft, 0), for beta equal to each token's ratio. It rises in this order.
        rising_NV = (all_drafts - drafts[..., :-1]) - (all_targets - targets[..., :-1]) / ratio_NV

        def evaluate(raise_N1: Tensor) -> tuple[Tensor, Tensor]:
            """Return ln beta and the divergence of the emitted distribution for alpha = exp(-raise)."""
            low_N1 = torch.searchsorted(ratio_NV, (-raise_N1).exp())  # tokens before it are cut to target/alpha
            cut_N1 = targets.gather(-1, low_N1) * raise_N1.exp()
            missing_N1 = (drafts.gather(-1, low_N1) - cut_N1).clamp_min(0)
            high_N1 = torch.searchsorted(rising_NV, -missing_N1)  # tokens from it on are lifted to target/beta
            top_N1 = all_targets - targets.gather(-1, high_N1)
            topped_N1 = missing_N1 + all_drafts - drafts.gather(-1, high_N1)
            lifts_N1 = (top_N1 > 0) & (topped_N1 > 0)  # otherwise no mass is missing and no token is lifted
            drop_N1 = torch.where(lifts_N1, top_N1.log() - topped_N1.log(), -math.log(_TINY))
            between_N1 = divergences.gather(-1, high_N1) - divergences.gather(-1, low_N1)
            return drop_N1, cut_N1 * raise_N1 + between_N1 - torch.where(lifts_N1, topped_N1 * drop_N1, 0.0)

        low_N1, high_N1 = torch.zeros_like(all_targets), torch.full_like(all_targets, _MAX_RAISE)
        for _ in range(_STEPS):  # the divergence grows with raise; the lower end stays within the budget
            middle_N1 = (low_N1 + high_N1) / 2
            within_N1 = evaluate(middle_N1)[1] <= self.budget
            low_N1, high_N1 = torch.where(within_N1, middle_N1, low_N1), torch.where(within_N1, high_N1, middle_N1)
        return (-low_N1).exp().squeeze(-1), evaluate(low_N1)[0].exp().squeeze(-1)
