"""The checks of a draft strategy that concern chance: what is drawn has the distribution that is claimed, and uses no
randomness twice.

That is tested over many seeds, by sums of squares over the claimed distributions. The seeds are fixed, so a verdict
repeats; the threshold is such that a right strategy fails in one of a billion.

Shape legend: N samples, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import torch
from torch import Tensor

from fly.ops import Stream, uniforms
from fly.testing.distributions import chance, dependence, groups
from fly.testing.report import require
from fly.testing.stage import APART, PARAMS, DraftKit, Proposal, show

__all__ = ["check_claimed_distribution", "check_independent_of_the_verdict", "check_rounds_are_independent"]

_CHANCE = 1e-9  # of a right strategy to fail one comparison


def check_claimed_distribution(kit: DraftKit) -> str:
    """Claimed distributions are distributions, drafted tokens have mass in them, and over many seeds are drawn from
    them.

    What is drawn at random must claim its distribution; how much is drafted must not depend on what was drawn.
    """
    for rows, max_len in kit.batches():
        for row, most, proposal in zip(rows, max_len, kit.fresh(rows, max_len)):
            claims = () if proposal.distributions is None else proposal.distributions
            for j, (token, probs_V) in enumerate(zip(proposal.tokens, claims)):
                total, least = float(probs_V.double().sum()), float(probs_V.min())
                require(
                    least >= 0 and abs(total - 1) <= APART,
                    f"the distribution of drafted token {j} sums to {total:.4f} with a least entry of {least:.2g}, for "
                    f"{show(row, most)}",
                )
                require(
                    bool(probs_V[token]),
                    f"token {token} at {j} was drafted, and its distribution excludes it, for {show(row, most)}",
                )
    chances = []
    for number, params in enumerate(PARAMS):
        proposals = kit.drawn(number)
        asked = show(kit.row(kit.texts(9)[5], params), 3)
        certain = sorted({tuple(p.tokens) for p in proposals if p.distributions is None})
        lengths = sorted({len(p.tokens) for p in proposals if p.parents is None})
        few = [list(tokens) for tokens in certain[:2]]
        message = f"drafts {few} by the seed, but claims no distribution (probs_BKV), for {asked}"
        require(kit.learns or len(certain) < 2, message)
        message = f"the seed decides how much is drafted, {lengths} tokens: {asked}"
        require(kit.learns or len(lengths) < 2, message)
        for j in range(3):
            tokens_N, probs_NV, _ = _drawn_at(proposals, j)
            if not len(tokens_N):
                continue
            expected_V = probs_NV.sum(0)
            observed_V = torch.bincount(tokens_N, minlength=kit.vocab).double()
            worst = int((observed_V - expected_V).abs().argmax())
            share, claimed = (float(counts[worst]) / len(tokens_N) for counts in (observed_V, expected_V))
            what = f"token {j} of the draft is {worst} in {share:.3f} of {len(proposals)} seeds"
            how = f"temperature {params.temperature}, top_k {params.top_k}; it claims {claimed:.3f}"
            chances.append(_likely(chance(observed_V, expected_V), f"{what} at {how}", f", for {asked}"))
    return _least(chances, "of what was drawn ", "nothing is drawn: all drafts are certain")


def check_rounds_are_independent(kit: DraftKit) -> str:
    """What is drawn with one seed at two positions is independent: no round repeats the randomness of another."""
    here, there = kit.drawn(0), kit.drawn(0, more=2)
    first = _drawn_at(here, 0)
    chances = []
    for which, other in (
        ("one round and the first of a later round", _drawn_at(there, 0)),
        ("a round and the second of the same round", _drawn_at(here, 1)),
    ):
        both = first.at_N[torch.isin(first.at_N, other.at_N)]
        if not len(both):
            continue
        at_first, at_other = (torch.searchsorted(drawn.at_N, both) for drawn in (first, other))
        groups_V = groups(first.probs_NV[at_first].sum(0))
        found = dependence(groups_V[first.tokens_N[at_first]], other.tokens_N[at_other], other.probs_NV[at_other])
        what = f"over {len(both)} seeds the first token of {which} depend on each other more than they claim"
        chances.append(_likely(found, what, ": the same randomness is used twice"))
    return _least(chances)


def check_independent_of_the_verdict(kit: DraftKit) -> str:
    """What is drawn is independent of the coins and the draw that the verdict on it will use."""
    proposals, position = kit.drawn(0), len(kit.texts(9)[5])
    seeds_N = torch.arange(len(proposals))
    coins, draws = (
        uniforms(seeds_N, torch.full_like(seeds_N, position), stream, 2) for stream in (Stream.ACCEPT, Stream.SAMPLE)
    )
    chances = []
    for which, j, noise_N in (("coin 0", 0, coins[:, 0]), ("coin 1", 1, coins[:, 1]), ("the draw", 0, draws[:, 0])):
        tokens_N, probs_NV, at_N = _drawn_at(proposals, j)
        if len(tokens_N):
            found = dependence((noise_N[at_N] * 6).long(), tokens_N, probs_NV)
            advice = ": draw with a seed of your own, fly.sampling.derive(row.seed, len(row.tokens))"
            what = f"token {j} of the draft depends on {which} of its own verdict"
            chances.append(_likely(found, what, advice))
    return _least(chances)


class _Drawn(NamedTuple):
    """The proposals that drew a token at one place."""

    tokens_N: Tensor
    probs_NV: Tensor  # claimed, float64
    at_N: Tensor  # numbers of the proposals, ascending


def _drawn_at(proposals: abc.Sequence[Proposal], j: int) -> _Drawn:
    """What was drawn as token ``j``.

    Of a tree that is its first token alone: how the others came about, their distributions do not say.
    """
    found = [
        (p.tokens[j], p.distributions[j], i)
        for i, p in enumerate(proposals)
        if len(p.tokens) > j and p.distributions is not None and (p.parents is None or j == 0)
    ]
    if not found:
        return _Drawn(*(torch.zeros(0, dtype=torch.int64) for _ in range(3)))
    tokens, distributions, at = zip(*found)
    probs_NV = torch.stack(distributions).double()
    return _Drawn(torch.tensor(tokens), probs_NV / probs_NV.sum(-1, keepdim=True), torch.tensor(at))


def _likely(found: float, what: str, rest: str) -> float:
    """The chance ``found``, unless it is too small to have come about by chance."""
    require(found >= _CHANCE, f"{what} (chance {found:.0e}){rest}")
    return found


def _least(chances: list[float], of: str = "", none: str = "nothing is drawn") -> str:
    return f"least chance {of}{min(chances):.2g}" if chances else none
