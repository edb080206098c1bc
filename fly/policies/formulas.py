"""What the rules of the literature and of other engines have in common.

- A token to which the target gives no mass never stands, whatever a rule's formula says: bans, top-k and top-p bind
  every rule. "No mass" is 0 in the processed distribution, and a logit of -inf at temperature 0.
- At temperature 0 the processed distribution is one-hot. Rules that *reshape or bound* it take it as it is; rules that
  *gate* on how probable the token is look at the raw distribution softmax(logits) there, and keep the target's own
  choice in any case. A correction at temperature 0 is always the target's most likely token.
- A deterministic draft (no distribution) counts as one-hot on its token.

Shape legend: B rows, K longest draft, V vocabulary, N any leading shape. Positions are 0-based, papers count from 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fly.types import Draft, Target

__all__ = ["binary", "drafted", "gate_distribution", "gate_probs", "matches", "possible", "raw_log_probs"]


def drafted(chance_BK: Tensor, draft: Draft) -> Tensor:
    """Chances as float, 0 on padding (whatever stood there, NaN included)."""
    return torch.where(draft.mask_BK(), chance_BK.float(), 0.0)


def matches(target: Target, draft: Draft) -> Tensor:
    """[B, K] bool: the token is the target's most likely one."""
    return draft.tokens_BK == target.argmax_BK[:, :-1]


def possible(target: Target, draft: Draft) -> Tensor:
    """[B, K] bool: the target gives the token some mass."""
    allowed_BK = target.allowed(draft.tokens_BK)
    if target.all_greedy:
        return allowed_BK
    return torch.where(target.greedy_B.unsqueeze(1), allowed_BK, target.probs_of(draft.tokens_BK) > 0)


def gate_distribution(target: Target) -> Tensor:
    """[B, K, V] the distribution a gate looks at: processed, raw at temperature 0."""
    if not target.some_greedy:
        return target.probs_BKV[:, :-1]
    raw_BKV = target.logits_BKV[:, :-1].softmax(-1)
    if target.all_greedy:
        return raw_BKV
    return torch.where(target.greedy_B.view(-1, 1, 1), raw_BKV, target.probs_BKV[:, :-1])


def gate_probs(target: Target, draft: Draft) -> tuple[Tensor, Tensor]:
    """[B, K] twice, of the distribution a gate looks at: its probability of the token, and of the likeliest token."""
    tokens_BK, choice_BK = draft.tokens_BK, target.argmax_BK[:, :-1]
    if not target.some_greedy:
        return target.probs_of(tokens_BK), target.probs_of(choice_BK)
    places_N2 = torch.cartesian_prod(*(torch.arange(size, device=tokens_BK.device) for size in tokens_BK.shape))
    logs_N = raw_log_probs(target, draft, *places_N2.unbind(1))
    token_BK, peak_BK = (log_N.exp().view_as(tokens_BK) for log_N in logs_N)
    if target.all_greedy:
        return token_BK, peak_BK
    greedy_B1 = target.greedy_B.unsqueeze(1)
    return (
        torch.where(greedy_B1, token_BK, target.probs_of(tokens_BK)),
        torch.where(greedy_B1, peak_BK, target.probs_of(choice_BK)),
    )


def raw_log_probs(target: Target, draft: Draft, rows_N: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
    """[N] twice, of the unprocessed distribution at these positions: ln of its probability of the drafted token, and of
    the likeliest token. No softmax over the vocabulary."""
    peak_N = -target.log_mass(rows_N, positions_N)
    at = rows_N, positions_N
    gap_N = target.logits_BKV[(*at, draft.tokens_BK[at])] - target.logits_BKV[(*at, target.argmax_BK[at])]
    return gap_N + peak_N, peak_N


def binary(token_N: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 2] twice, a target that gives the token probability ``token_N`` and a draft that is one-hot on it: all other
    tokens count as one, which changes no divergence between the two."""
    target_N2 = torch.stack([token_N, (1 - token_N).clamp_min(0)], -1)
    return target_N2, torch.tensor([1.0, 0.0], dtype=token_N.dtype, device=token_N.device).expand_as(target_N2)
