"""Entropy of a distribution, and divergences between two. Knows nothing of policies.

Shape legend: V vocabulary, "..." any leading dimensions. Distributions have mass 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

__all__ = ["entropy", "jensen_shannon", "kl", "total_variation"]

_xlogy = torch.special.xlogy


def entropy(probs: Tensor) -> Tensor:
    """Return -sum(probs·ln probs) in nats, [...]. It is clamped at 0, so that rounding gives no negative entropy."""
    if has_torch_function_unary(probs):
        return handle_torch_function(entropy, (probs,), probs)
    return (-_xlogy(probs, probs).sum(-1)).clamp_min(0)


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) in nats, [...]; infinite if ``first`` has mass where ``second`` has none."""
    return (_xlogy(first, first) - _xlogy(first, second)).sum(-1)


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence in nats, [...]. It is at most ln 2."""
    half = ((first + second) / 2).clamp_min(torch.finfo(first.dtype).tiny)
    return (_xlogy(first, first / half) + _xlogy(second, second / half)).sum(-1) / 2


def total_variation(first: Tensor, second: Tensor) -> Tensor:
    """Return the total variation distance, [...], in [0, 1]."""
    return (first - second).abs().sum(-1) / 2
