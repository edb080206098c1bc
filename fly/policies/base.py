"""What an acceptance policy is, and the one function that applies it. Knows nothing of models, caches or ranks.

Shape legend: B rows, K longest draft, V vocabulary. Positions are 0-based here, papers count from 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fly.policies.conditions import Block, Condition
from fly.sampling import draw
from fly.types import Draft, Guarantee, Noise, Target, Verdict, Why

__all__ = ["AcceptancePolicy", "decide", "verify"]


class AcceptancePolicy(ABC):
    """Which drafted tokens may stand. Subclasses are frozen dataclasses of hyper-parameters: pure, no state,
    every row decided by itself, vectorised over the batch.

    A subclass gives ``accept_probs``; it may excuse mismatches (``relax``, or a ``relaxation`` made of
    conditions) and change the law of the correction (``residual``). ``verify`` does the rest.
    """

    guarantee: ClassVar[Guarantee] = Guarantee.HEURISTIC

    @property
    def relaxation(self) -> Condition | None:
        """The condition under which a mismatch is excused; None excuses none."""
        return None

    @abstractmethod
    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        """[B, K] float in [0, 1]: the chance of keeping token j, given that all before it stand."""

    def relax(self, target: Target, draft: Draft, agree_BK: Tensor) -> Tensor:
        """[B, K] bool: mismatches excused, given where the lossless core agreed (``agree_BK``, False on padding)."""
        if self.relaxation is None:
            return torch.zeros_like(agree_BK)
        return self.relaxation.holds(Block(target, draft, agree_BK))

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        """[B, V] law of the correction after a rejection, up to a factor: max(target - draft, 0).

        (Leviathan et al. 2023, eq. 2; Chen et al. 2023.) For a deterministic draft ``draft_BV`` is one-hot, which
        leaves the target without the rejected token.
        """
        return (target_BV - draft_BV).clamp_min(0)

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        """The decision on a block. A rule that judges whole blocks at once overrides this, and nothing else."""
        mask_BK = draft.mask_BK()
        agree_BK = (noise.accept_BK < self.accept_probs(target, draft)) & mask_BK
        if self.relaxation is None:
            clauses, excused_BK = {}, self.relax(target, draft, agree_BK)
        else:
            block = Block(target, draft, agree_BK)
            excused_BK = self.relaxation.holds(block)
            clauses = block.clauses
        return decide(self, target, draft, noise, agree_BK, excused_BK & mask_BK & ~agree_BK, clauses)


def decide(
    policy: AcceptancePolicy,
    target: Target,
    draft: Draft,
    noise: Noise,
    agree_BK: Tensor,
    excused_BK: Tensor,
    clauses: dict[str, Tensor] | None = None,
) -> Verdict:
    """The verdict that follows from which tokens stand: longest prefix, then correction or bonus."""
    stands_BK = agree_BK | excused_BK
    accepted_B = stands_BK.long().cumprod(-1).sum(-1)
    columns_K = torch.arange(agree_BK.shape[1], device=agree_BK.device)
    kept_BK = columns_K < accepted_B.unsqueeze(1)
    codes_BK = torch.where(excused_BK, int(Why.RELAXED), int(Why.MATCH))
    why_BK = torch.where(kept_BK, codes_BK, int(Why.REJECTED)).to(torch.int8)
    asked_BK = ~agree_BK & draft.mask_BK() & (columns_K <= accepted_B.unsqueeze(1))
    next_token_B = _next_token(policy, target, draft, noise, accepted_B)
    return Verdict(accepted_B, next_token_B, why_BK, asked_BK, clauses or {})


def _next_token(policy: AcceptancePolicy, target: Target, draft: Draft, noise: Noise, accepted_B: Tensor) -> Tensor:
    """The bonus from the target's own law, or the correction from the policy's residual law."""
    if target.all_greedy:
        return target.argmax_BK.gather(1, accepted_B.unsqueeze(1)).squeeze(1)
    rows_B = torch.arange(accepted_B.shape[0], device=accepted_B.device)
    target_BV = target.probs_BKV[rows_B, accepted_B]
    if draft.tokens_BK.shape[1]:
        at_B = accepted_B.clamp_max(draft.tokens_BK.shape[1] - 1)
        if draft.probs_BKV is None:
            draft_BV = torch.zeros_like(target_BV).scatter_(1, draft.tokens_BK[rows_B, at_B].unsqueeze(1), 1.0)
        else:
            draft_BV = draft.probs_BKV[rows_B, at_B]
        residual_BV = policy.residual(target_BV, draft_BV)
        # Equal laws leave no residual mass; a rejection is then a rounding matter, and the target's law is right.
        rejected_B = (accepted_B < draft.lengths_B) & (residual_BV.sum(-1) > 0)
        target_BV = torch.where(rejected_B.unsqueeze(1), residual_BV, target_BV)
    return draw(target_BV, noise.sample_B)


def verify(policy: AcceptancePolicy, target: Target, draft: Draft, noise: Noise) -> Verdict:
    """Apply ``policy`` to a block: flip the coins (``noise < accept_probs``, strictly), OR the relaxation, take the
    longest prefix, draw the correction or the bonus, and say why each token stands.

    Args:
        target: laws of K+1 positions. draft: [B, K] tokens. noise: one coin a drafted token, one draw a row.

    Raises:
        ValueError: the shapes of target, draft and noise do not belong together.
    """
    rows, longest = draft.tokens_BK.shape
    if target.logits_BKV.shape[:2] != (rows, longest + 1):
        raise ValueError(
            f"target covers {tuple(target.logits_BKV.shape[:2])} (rows, positions), "
            f"a draft of shape {(rows, longest)} needs {(rows, longest + 1)}"
        )
    if noise.accept_BK.shape != (rows, longest) or noise.sample_B.shape != (rows,):
        raise ValueError(
            f"noise has shapes {tuple(noise.accept_BK.shape)} and {tuple(noise.sample_B.shape)}, "
            f"a draft of shape {(rows, longest)} needs {(rows, longest)} and {(rows,)}"
        )
    return policy.verdict(target, draft, noise)
