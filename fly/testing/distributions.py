"""What both kits do with distributions: make them certain, show them, and compare what was drawn with what was claimed.

Shape legend: N samples, V vocabulary, G groups of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TICK", "TOLERANCE", "chance", "dependence", "groups", "one_hot", "rounded"]

TOLERANCE = 1e-5  # of a probability: float32 distributions, and bisection to 2^-24
TICK = 2.0**-24  # the finest step of the engine's uniforms
_GROUPS = 6  # of tokens, and of noise, whose dependence is looked for


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """The distributions [..., V] of tokens [...] that are certain, of the shape and dtype of ``like``."""
    return torch.zeros_like(like).scatter_(-1, tokens.unsqueeze(-1), 1.0)


def rounded(values: Tensor) -> str:
    """Numbers [...] with four decimals, as a list is written."""
    return str([[round(v, 4) for v in row] if isinstance(row, list) else round(row, 4) for row in values.tolist()])


def chance(observed_G: Tensor, expected_G: Tensor) -> float:
    """Chance of counts at least as far from the expected ones, by Pearson's chi-square; rare outcomes count together.

    The expected counts may be sums over draws with different distributions, which makes the true chance larger only.
    """
    expected, order = expected_G.sort()
    observed = observed_G[order]
    if bool(((expected == 0) & (observed > 0)).any()):
        return 0.0
    # Cells of at least 25 expected counts: below, the tail of the chi-square is too thin for chances this small.
    rare = expected < 25
    together = -1 - (torch.where(rare, expected, 0.0).cumsum(0) / 25).long()
    kinds, cell = torch.where(rare, together, torch.arange(len(expected))).unique(return_inverse=True)
    found, wanted = (torch.zeros(len(kinds)).double().index_add_(0, cell, x) for x in (observed, expected))
    enough = wanted >= 5
    square = ((found - wanted)[enough] ** 2 / wanted[enough]).sum()
    freedom = int(enough.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), square / 2)) if freedom > 0 else 1.0


def groups(mass_V: Tensor) -> Tensor:
    """[V] int64: up to six groups of neighbouring tokens with about the same mass each."""
    before_V = mass_V.cumsum(0) - mass_V / 2
    return (before_V / mass_V.sum() * _GROUPS).long().clamp(0, _GROUPS - 1)


def dependence(bins_N: Tensor, tokens_N: Tensor, probs_NV: Tensor) -> float:
    """The chance that tokens drawn from their distributions, whatever their bins (0 to 5), fall on the bins as these
    did."""
    groups_V = groups(probs_NV.sum(0))
    probs_NG = probs_NV.new_zeros(len(tokens_N), _GROUPS).index_add_(1, groups_V, probs_NV)
    expected_GG = probs_NV.new_zeros(_GROUPS, _GROUPS).index_add_(0, bins_N, probs_NG)
    observed_GG = torch.bincount(bins_N * _GROUPS + groups_V[tokens_N], minlength=_GROUPS**2).double()
    return chance(observed_GG, expected_GG.flatten())
