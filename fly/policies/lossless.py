"""Lossless rules: the exact one, comparison with the target's own sample, and verification of whole blocks.

Shape legend: B rows, K longest draft, V vocabulary. Positions count from 0 here, and from 1 in papers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fly.ops import draw, pick, vectors_at
from fly.policies.base import (
    AcceptancePolicy,
    ExactCore,
    draw_next,
    exact_accept_probs,
    longest_prefix,
    mark_nan,
    verdict_of,
)
from fly.policies.formulas import drafted
from fly.types import Draft, Guarantee, Noise, Target, Verdict

__all__ = ["BlockVerification", "Exact", "ExactSample"]


@dataclass(frozen=True)
class Exact(ExactCore):
    """Lossless speculative sampling: keep x with probability min(1, target(x)/draft(x)), otherwise draw from
    norm(max(target - draft, 0)) (Leviathan et al. 2023, alg. 1; Chen et al. 2023, alg. 2).

    ``draft`` is the processed distribution that the draft was sampled from, one-hot for a deterministic draft. At
    temperature 0, x is kept if it is the target's argmax; otherwise the argmax is emitted.

    ``Exact() | condition`` excuses mismatches under the condition (``Relaxed``).
    """

    name: ClassVar[str] = "exact"
    guarantee = Guarantee.LOSSLESS


@dataclass(frozen=True)
class ExactSample(AcceptancePolicy):
    """Lossless by construction: keep x if it equals the target's own sample at that position. The first sample that
    differs is the correction. (llama.cpp and many engines with n-gram drafts use this rule.)

    Whatever the draft proposes, the emitted text is the same as if sampling without a draft used the same coins.
    Coin j draws the sample at position j by inverting the cumulative distribution; the bonus has its own coin. At
    temperature 0 this is exact match. A token is kept with probability target(x), so ``Exact`` keeps tokens more often
    unless the draft is deterministic. Sampling at all K positions takes K passes over the vocabulary.
    """

    name: ClassVar[str] = "sample"
    guarantee = Guarantee.LOSSLESS

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        """Return the probability that the target's sample is also x, which is target(x)."""
        return drafted(target.probs_of(draft.tokens_BK), draft)

    def correction(self, target: Target, draft: Draft, at_B: Tensor) -> Tensor:
        """Return the target's distribution without the rejected token, from which the sample is known to differ."""
        return super().correction(target, Draft(draft.tokens_BK, draft.lengths_B), at_B)

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        """Draw a token with each coin, and emit the first one that differs from the draft."""
        longest = draft.tokens_BK.shape[1]
        if target.all_greedy or not longest:
            return super().verdict(target, draft, noise)
        drawn_BK = draw(target.probs_BKV[:, :-1].flatten(0, 1), noise.accept_BK.flatten()).view(-1, longest)
        agree_BK = (drawn_BK == draft.tokens_BK) & draft.mask_BK()
        verdict = longest_prefix(self, target, draft, noise, agree_BK, agree_BK)
        rejected_B = verdict.accepted_B < draft.lengths_B
        drawn_B = pick(drawn_BK, verdict.accepted_B.clamp_max(longest - 1))
        return replace(verdict, next_token_B=torch.where(rejected_B, drawn_B, verdict.next_token_B))


@dataclass(frozen=True)
class BlockVerification(AcceptancePolicy):
    """Block verification (Sun et al., arXiv 2403.10444, alg. 2). It is lossless, and in expectation it accepts at least
    as many tokens as ``Exact``, since a late token may rescue an early one.

    Let w_0 = 1 and w_i = min(1, w_{i-1}·target(x_i)/draft(x_i)), the paper's p_i. Let S_j be the sum over v of
    max(w_j·target_{j+1}(v) - draft_{j+1}(v), 0), and h_j = S_j / (S_j + 1 - w_j), but h = w at the last drafted token.
    The first i tokens are kept if some coin j >= i falls below h_j. If n tokens are kept, the correction is drawn from
    max(w_n·target - draft, 0).

    A deterministic draft is one-hot. At temperature 0 this is exact match.
    """

    name: ClassVar[str] = "block"
    guarantee = Guarantee.LOSSLESS

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        """Return the chances of ``Exact``, since block verification has no chances for single tokens."""
        return drafted(exact_accept_probs(target, draft), draft)

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        mask_BK = draft.mask_BK()
        rows, longest = mask_BK.shape
        if target.all_greedy or not longest:
            return super().verdict(target, draft, noise)
        rows_B = torch.arange(rows, device=mask_BK.device)
        counts_K = torch.arange(1, longest + 1, device=mask_BK.device)
        target_BK = target.probs_of(draft.tokens_BK)
        # Compute w_1 .. w_K as running sums of logarithms, lowered to 0 wherever they would rise above it.
        log_BK = torch.where(mask_BK, (target_BK / draft.own_probs_BK()).double().log(), 0.0).cumsum(-1)
        reach_BK = (log_BK - log_BK.cummax(-1).values.clamp_min(0)).exp().to(target_BK.dtype)

        # Compute h_1 .. h_{K-1} from S_1 .. S_{K-1}. At each row's last drafted token, h = w.
        before_BK = reach_BK[:, :-1]
        if draft.probs_BKV is None:
            spare_BK = before_BK * (1 - target_BK[:, 1:]).clamp_min(0)
        else:
            spare_BK = (before_BK[..., None] * target.probs_BKV[:, 1:-1] - draft.probs_BKV[:, 1:]).clamp_min(0).sum(-1)
        below_BK = spare_BK + (1 - before_BK)
        # 0/0 means that both distributions are equal from here on, so keep the tokens.
        early_BK = torch.where(below_BK <= 0, 1.0, spare_BK / below_BK.clamp_min(torch.finfo(below_BK.dtype).tiny))
        last_BK = counts_K == draft.lengths_B.unsqueeze(1)
        chance_BK = torch.where(last_BK, reach_BK, torch.nn.functional.pad(early_BK, (0, 1)))

        # The last coin that is below its chance keeps its own token and all tokens before it.
        accepted_B = (counts_K * ((noise.accept_BK < chance_BK) & mask_BK)).amax(-1)
        at_B = accepted_B.clamp_max(longest - 1)
        reach_B = torch.where(accepted_B > 0, pick(reach_BK, (accepted_B - 1).clamp_min(0)), 1.0)
        residual_BV = target.probs_at(rows_B, accepted_B) * reach_B.unsqueeze(1)
        if draft.probs_BKV is None:
            residual_BV = residual_BV.scatter(1, draft.tokens_BK[rows_B, at_B].unsqueeze(1), 0.0)
        else:
            residual_BV = (residual_BV - vectors_at(draft.probs_BKV, rows_B, at_B)).clamp_min(0)
        next_token_B = draw_next(residual_BV, target, draft, noise, accepted_B)
        verdict = verdict_of(accepted_B, next_token_B, counts_K <= accepted_B.unsqueeze(1), draft)
        return mark_nan(verdict, chance_BK, draft)
