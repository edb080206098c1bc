"""Checks of a draft strategy's randomness: tokens come from the distribution that it claims, and no random number is
used twice.

These are chi-square tests over many seeds. The seeds are fixed, so that results repeat. A correct strategy fails one
comparison with a probability of 1e-9.

Shape legend: N samples, B rows, K longest draft, V vocabulary, G groups of tokens.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import torch
from torch import Tensor

from fly.ops import Stream, uniforms
from fly.testing.report import require
from fly.testing.stage import APART, PARAMS, DraftKit, Proposal

__all__ = ["check_claimed_distribution", "check_independent_of_the_verdict", "check_rounds_are_independent", "p_value"]

_CHANCE = 1e-9  # the probability that a correct strategy fails one comparison
_GROUPS = 6  # groups of tokens, and of noise, that are tested for dependence


def check_claimed_distribution(kit: DraftKit) -> str:
    """Claimed distributions give drafted tokens mass, and over many seeds the tokens are drawn from them.

    Drawn tokens must have a claimed distribution, and the length of a draft must not depend on the tokens drawn.
    """
    for p in (p for batch in kit.batches() for p in kit.fresh(*batch)):
        for j, (token, probs_V) in enumerate(zip(p.tokens, () if p.probs_KV is None else p.probs_KV)):
            total, least = float(probs_V.double().sum()), float(probs_V.min())
            sums = f"sums to {total:.4f} with a least entry of {least:.2g}"
            require(
                least >= 0 and abs(total - 1) <= APART, f"the distribution of drafted token {j} {sums}, for {p.asked}"
            )
            require(
                bool(probs_V[token]),
                f"token {token} at {j} was drafted, and its distribution excludes it, for {p.asked}",
            )
    chances = []
    for number, params in enumerate(PARAMS):
        proposals = kit.drawn(number)
        request_text = proposals[0].asked
        certain = sorted({tuple(p.tokens) for p in proposals if p.probs_KV is None})
        lengths = sorted({len(p.tokens) for p in proposals if p.parents is None})
        require(
            kit.learns or len(certain) < 2,
            f"the seed decides what is drafted, {[list(tokens) for tokens in certain[:2]]}, but the draft claims no "
            f"distribution (probs_BKV), for {request_text}",
        )
        require(
            kit.learns or len(lengths) < 2, f"the seed decides how much is drafted, {lengths} tokens: {request_text}"
        )
        for j, drawn in enumerate(_drawn_at(proposals, j) for j in range(3)):
            if drawn:
                counts_NV = torch.zeros_like(drawn.probs_NV).scatter_(1, drawn.tokens_N.unsqueeze(1), 1.0)
                observed_V, expected_V = counts_NV.sum(0), drawn.probs_NV.sum(0)
                worst_token = int((observed_V - expected_V).abs().argmax())
                share, claimed = (float(mass_V[worst_token]) / len(counts_NV) for mass_V in (observed_V, expected_V))
                conditions = f"{len(proposals)} seeds at temperature {params.temperature}, top_k {params.top_k}"
                finding = (
                    f"token {j} of the draft is {worst_token} in {share:.3f} of {conditions}; it claims {claimed:.3f}"
                )
                chances.append(_likely(p_value(observed_V, expected_V), finding, f", for {request_text}"))
    return _least(chances, "of what was drawn ", "nothing is drawn: all drafts are certain")


def check_rounds_are_independent(kit: DraftKit) -> str:
    """Tokens drawn with one seed at two positions are independent: no round repeats the randomness of another."""
    first_rounds, later_rounds = kit.drawn(0), kit.drawn(0, more=2)
    chances = []
    for pair_name, proposals, j in (
        ("one round and the first of a later round", later_rounds, 0),
        ("a round and the second of the same round", first_rounds, 1),
    ):
        pairs = zip(first_rounds, proposals)
        seeds = [i for i, (first_round, other_round) in enumerate(pairs) if first_round.drew(0) and other_round.drew(j)]
        first, other = _drawn_at([first_rounds[i] for i in seeds], 0), _drawn_at([proposals[i] for i in seeds], j)
        if first and other:
            bins_N = _groups(first.probs_NV.sum(0))[first.tokens_N]
            finding = (
                f"over {len(seeds)} seeds the first token of {pair_name} depend on each other more than they claim"
            )
            chances.append(_likely(_dependence(bins_N, other), finding, ": the same randomness is used twice"))
    return _least(chances)


def check_independent_of_the_verdict(kit: DraftKit) -> str:
    """Drawn tokens are independent of the coins and the draw of their own verdict."""
    proposals = kit.drawn(0)
    seeds_N, positions_N = torch.tensor([(p.row.seed, len(p.row.tokens)) for p in proposals]).unbind(1)
    chances = []
    for stream_name, stream, j in (
        ("coin 0", Stream.ACCEPT, 0),
        ("coin 1", Stream.ACCEPT, 1),
        ("the draw", Stream.SAMPLE, 0),
    ):
        if drawn := _drawn_at(proposals, j):
            noise_N = uniforms(seeds_N, positions_N, stream, j + 1)[drawn.at_N, j]
            finding = f"token {j} of the draft depends on {stream_name} of its own verdict"
            advice = ": draw with a seed of your own, fly.ops.derive(row.seed, len(row.tokens))"
            chances.append(_likely(_dependence((noise_N * _GROUPS).long(), drawn), finding, advice))
    return _least(chances)


class _Drawn(NamedTuple):
    """The tokens that were drawn at one position of some proposals."""

    tokens_N: Tensor
    probs_NV: Tensor  # the claimed distributions, float64
    at_N: Tensor  # the indices of the proposals, ascending


def _drawn_at(proposals: abc.Sequence[Proposal], j: int) -> _Drawn | None:
    """Return the tokens drawn at position ``j``; None if there are none."""
    numbers = [i for i, p in enumerate(proposals) if p.drew(j)]
    if not numbers:
        return None
    probs_NV = torch.stack([probs_KV[j] for i in numbers if (probs_KV := proposals[i].probs_KV) is not None]).double()
    tokens_N = torch.tensor([proposals[i].tokens[j] for i in numbers])
    return _Drawn(tokens_N, probs_NV / probs_NV.sum(-1, keepdim=True), torch.tensor(numbers))


def _likely(p: float, what: str, rest: str) -> float:
    """Return the p-value. Raises ``ConformanceError`` if it is too small to be an accident."""
    require(p >= _CHANCE, f"{what} (chance {p:.0e}){rest}")
    return p


def _least(chances: list[float], of: str = "", none: str = "nothing is drawn") -> str:
    return f"least chance {of}{min(chances):.2g}" if chances else none


def _groups(mass_V: Tensor) -> Tensor:
    """Divide tokens into up to six groups of neighbours with about the same mass. Returns each token's group number,
    [V] int64."""
    before_V = mass_V.cumsum(0) - mass_V / 2
    return (before_V / mass_V.sum() * _GROUPS).long().clamp(0, _GROUPS - 1)


def _dependence(bins_N: Tensor, drawn: _Drawn) -> float:
    """Return the p-value of the hypothesis that the tokens are independent of the bins (0 to 5) of their noise."""
    groups_V = _groups(drawn.probs_NV.sum(0))
    probs_NG = drawn.probs_NV.new_zeros(len(bins_N), _GROUPS).index_add_(1, groups_V, drawn.probs_NV)
    expected_GG = drawn.probs_NV.new_zeros(_GROUPS, _GROUPS).index_add_(0, bins_N, probs_NG)
    observed_GG = torch.bincount(bins_N * _GROUPS + groups_V[drawn.tokens_N], minlength=_GROUPS**2).double()
    return p_value(observed_GG, expected_GG.flatten())


def p_value(observed_G: Tensor, expected_G: Tensor) -> float:
    """Return the p-value of counts [G] by Pearson's chi-square test. Rare outcomes are counted together.

    The expected counts may be sums over draws from different distributions. The true p-value is then larger.
    """
    expected, order = expected_G.sort()
    observed = observed_G[order]
    if bool(((expected == 0) & (observed > 0)).any()):
        return 0.0
    # Each cell must expect at least 25 counts. With fewer, the chi-square tail is too thin for such small p-values.
    rare = expected < 25
    together = -1 - (torch.where(rare, expected, 0.0).cumsum(0) / 25).long()
    cells, cell = torch.where(rare, together, torch.arange(len(expected))).unique(return_inverse=True)
    observed_sums, expected_sums = (
        torch.zeros(len(cells)).double().index_add_(0, cell, x) for x in (observed, expected)
    )
    enough = expected_sums >= 5
    square = ((observed_sums - expected_sums)[enough] ** 2 / expected_sums[enough]).sum()
    freedom = int(enough.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), square / 2)) if freedom > 0 else 1.0
