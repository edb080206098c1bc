"""Formulas that the rules of the literature and of other engines share.

- No rule keeps a token without mass in the target, so bans, top-k and top-p bind every rule. "Without mass" means
  probability 0 in the processed distribution, or a logit of -inf at temperature 0.
- At temperature 0 the processed distribution is one-hot. Rules that *reshape or bound* a distribution use this one.
  Rules that *gate* on a token's probability use the raw distribution softmax(logits) instead, and always keep the
  target's argmax. A correction at temperature 0 is always the target's argmax.
- A deterministic draft, which has no distributions, counts as one-hot on its tokens.

Shape legend: B rows, K longest draft, V vocabulary, N any leading shape. Positions count from 0 here, from 1 in papers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fly.ops import pick
from fly.types import Draft, Target

__all__ = [
    "binary",
    "by_temperature",
    "draft_log_probs",
    "drafted",
    "gate_distribution",
    "gate_probs",
    "matches",
    "possible",
    "raw_log_probs",
    "raw_regret",
]


def drafted(chance_BK: Tensor, draft: Draft) -> Tensor:
    """Return the chances as float, with 0 on padding, even where the padding is NaN."""
    return torch.where(draft.mask_BK(), chance_BK.float(), 0.0)


def matches(target: Target, draft: Draft) -> Tensor:
    """Return whether each drafted token is the target's argmax, bool [B, K]."""
    return draft.tokens_BK == target.argmax_BK[:, :-1]


def by_temperature(target: Target, greedy: Tensor, sampled: Callable[[], Tensor]) -> Tensor:
    """Take ``greedy`` for rows at temperature 0 and ``sampled()`` for the others, [B, ...] each."""
    if target.all_greedy:
        return greedy
    return torch.where(target.greedy_B.view(-1, *[1] * (greedy.dim() - 1)), greedy, sampled())


def possible(target: Target, draft: Draft) -> Tensor:
    """Return whether the target gives each drafted token any mass, bool [B, K]."""
    tokens_BK = draft.tokens_BK
    return by_temperature(target, target.allowed(tokens_BK), lambda: target.probs_of(tokens_BK) > 0)


def gate_distribution(target: Target) -> Tensor:
    """Return the distribution [B, K, V] that gates use: the processed one, or at temperature 0 the raw one."""
    if not target.some_greedy:
        return target.probs_BKV[:, :-1]
    return by_temperature(target, target.logits_BKV[:, :-1].softmax(-1), lambda: target.probs_BKV[:, :-1])


def gate_probs(target: Target, draft: Draft) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the drafted token and of the likeliest token, [B, K] each, in the distribution that
    gates use (``gate_distribution``), without building it."""
    tokens_BK, choice_BK = draft.tokens_BK, target.argmax_BK[:, :-1]
    if not target.some_greedy:
        return target.probs_of(tokens_BK), target.probs_of(choice_BK)
    places_N2 = torch.cartesian_prod(*(torch.arange(size, device=tokens_BK.device) for size in tokens_BK.shape))
    logs_N = raw_log_probs(target, draft, *places_N2.unbind(1))
    token_BK, peak_BK = (log_N.exp().view_as(tokens_BK) for log_N in logs_N)
    return (
        by_temperature(target, token_BK, lambda: target.probs_of(tokens_BK)),
        by_temperature(target, peak_BK, lambda: target.probs_of(choice_BK)),
    )


def raw_log_probs(target: Target, draft: Draft, rows_N: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the drafted token and of the likeliest token, [N] each, in the raw distribution
    at these positions, without a softmax over the vocabulary."""
    peak_N = -target.log_mass(rows_N, positions_N)
    at = rows_N, positions_N
    gap_N = target.logits_BKV[(*at, draft.tokens_BK[at])] - target.logits_BKV[(*at, target.argmax_BK[at])]
    return gap_N + peak_N, peak_N


def draft_log_probs(draft: Draft) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the drafted token and of the draft model's likeliest token, [B, K] each, in the
    draft model's raw distribution, at every temperature: how sure the draft was. (``Draft.own_probs_BK`` is 1 at
    temperature 0.)

    Raises ``ValueError`` if the draft has no logits. The engine supplies them to a rule that calls this function.
    """
    if draft.logits_BKV is None:
        raise ValueError("draft_log_probs needs draft.logits_BKV, and this draft has none")
    log_BKV = draft.logits_BKV.log_softmax(-1)
    return pick(log_BKV, draft.tokens_BK), log_BKV.amax(-1)


def raw_regret(target: Target, draft: Draft) -> Tensor:
    """Return how much the target's largest logit exceeds the drafted token's, in nats, [B, K]."""
    logits_BKV = target.logits_BKV[:, :-1]
    return pick(logits_BKV, target.argmax_BK[:, :-1]) - pick(logits_BKV, draft.tokens_BK)


def binary(token_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's and the one-hot draft's distribution, [N, 2] each, with all tokens but the drafted one merged
    into one. This changes no divergence between them. ``token_N`` is the target's probability of the drafted token."""
    target_N2 = torch.stack([token_N, (1 - token_N).clamp_min(0)], -1)
    draft_N2 = torch.zeros_like(target_N2)
    draft_N2[..., 0] = 1.0
    return target_N2, draft_N2
