"""Losslessness as an exact sum: what is emitted, over every draft and every outcome.

Shape legend: B rows, K longest draft, V vocabulary, N draft strings.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fly.policies import (
    AcceptancePolicy,
    Exact,
    FLy,
    LossySampling,
)
from fly.types import Draft, Target

Prefix = tuple[int, ...]


class Process:
    """A random conditional distribution of the next token for every prefix; zeros are common, temperature 0 is
    one-hot."""

    def __init__(self, vocab: int, seed: int, zeros: float = 0.3, greedy: bool = False) -> None:
        self.vocab, self.seed, self.zeros, self.greedy = vocab, seed, zeros, greedy
        self.distribution = cache(self._distribution)

    def _distribution(self, prefix: Prefix) -> Tensor:
        rng = random.Random(repr((self.seed, prefix)))
        mass = [0 if rng.random() < self.zeros else rng.randint(1, 9) for _ in range(self.vocab)]
        if self.greedy or not any(mass):
            best = rng.randrange(self.vocab)
            mass = [int(v == best) for v in range(self.vocab)]
        distribution = torch.tensor(mass, dtype=torch.float64)
        return distribution / distribution.sum()

    def joint(self, prefix: Prefix, length: int) -> Tensor:
        """Distribution [V, ..., V] of the ``length`` tokens after ``prefix``."""
        if not length:
            return torch.ones((), dtype=torch.float64)
        after = [self.joint((*prefix, v), length - 1) for v in range(self.vocab)]
        return torch.stack([p * distribution for p, distribution in zip(self.distribution(prefix), after)])


def drafts(drafter: Process, k: int, stop: int | None, deterministic: bool) -> list[tuple[Prefix, float]]:
    """Every string the drafter may propose and its probability; a stop token ends a draft."""
    done, open_ = [], [((), 1.0)]
    for _ in range(k):
        longer = []
        for string, p in open_:
            distribution = drafter.distribution(string)
            ways = (
                [(int(distribution.argmax()), 1.0)]
                if deterministic
                else [(v, float(q)) for v, q in enumerate(distribution) if q]
            )
            for v, q in ways:
                (done if v == stop else longer).append(((*string, v), p * q))
        open_ = longer
    return done + open_


def emitted_distribution(
    policy: AcceptancePolicy, target: Process, drafter: Process, k: int, stop: int | None, deterministic: bool
) -> Tensor:
    """Distribution of the first k+1 tokens when one block is judged by ``policy`` and the target goes on by itself."""
    vocab = target.vocab
    strings = drafts(drafter, k, stop, deterministic)
    lengths_N = torch.tensor([len(s) for s, _ in strings])
    tokens_NK = torch.tensor([list(s) + [0] * (k - len(s)) for s, _ in strings])
    probs_NKV = torch.stack(
        [torch.stack([target.distribution(s[: min(j, len(s))]) for j in range(k + 1)]) for s, _ in strings]
    )
    drafts_NKV = torch.stack(
        [torch.stack([drafter.distribution(s[: min(j, len(s))]) for j in range(k)]) for s, _ in strings]
    )
    block = Draft(tokens_NK, lengths_N, None if deterministic else drafts_NKV)
    greedy_N = torch.full((len(strings),), target.greedy)
    view = Target(probs_NKV.log(), probs_NKV, greedy_B=greedy_N)
    accept_NK = policy.accept_probs(view, block).double()
    assert ((accept_NK >= 0) & (accept_NK <= 1)).all()
    if deterministic:
        drafts_NKV = torch.nn.functional.one_hot(tokens_NK, vocab).double()
    distribution = torch.zeros([vocab] * (k + 1), dtype=torch.float64)
    for n, (string, p) in enumerate(strings):
        for j in range(len(string) + 1):
            if j < len(string):
                chance = p * (1 - float(accept_NK[n, j]))
                after_V = policy.residual(probs_NKV[n, j : j + 1], drafts_NKV[n, j : j + 1])[0]
                # no residual mass: by verify's rule the target's own distribution (a rejection has no chance then)
                after_V = after_V / after_V.sum() if after_V.sum() > 0 else probs_NKV[n, j]
            else:
                chance, after_V = p, probs_NKV[n, j]
            for v in range(vocab):
                if chance and after_V[v] > 0:
                    own = (*string[:j], v)
                    distribution[own] += chance * after_V[v] * target.joint(own, k + 1 - len(own))
            if j < len(string):
                p *= float(accept_NK[n, j])
    return distribution


def distance(policy: AcceptancePolicy, target: Process, drafter: Process, k: int, **how: object) -> float:
    """Largest error over the distribution of the first token and the joint distribution of the first k+1 tokens."""
    got, wanted = emitted_distribution(policy, target, drafter, k, **how), target.joint((), k + 1)  # type: ignore[arg-type]
    marginal = (got - wanted).flatten(1).sum(1).abs().max()
    return max(float(marginal), float((got - wanted).abs().max()))


@given(
    vocab=st.integers(2, 5),
    k=st.integers(1, 3),
    seeds=st.tuples(st.integers(0, 9999), st.integers(0, 9999)),
    zeros=st.sampled_from([0.0, 0.3, 0.7]),
    greedy=st.tuples(st.booleans(), st.booleans()),
    stops=st.booleans(),
    deterministic=st.booleans(),
)
def test_exact_emits_the_targets_distribution(
    vocab: int,
    k: int,
    seeds: tuple[int, int],
    zeros: float,
    greedy: tuple[bool, bool],
    stops: bool,
    deterministic: bool,
) -> None:
    vocab = min(vocab, 3) if k == 3 else vocab
    target, drafter = (Process(vocab, *args) for args in zip(seeds, (zeros, zeros), greedy))
    stop = 0 if stops else None
    for policy in (Exact(), LossySampling(1.0), FLy(theta=1e9)):
        assert distance(policy, target, drafter, k, stop=stop, deterministic=deterministic) < 1e-9


@pytest.mark.parametrize("deterministic", [False, True])
def test_exact_emits_the_targets_distribution_on_larger_trees(deterministic: bool) -> None:
    target, drafter = Process(5, 1), Process(5, 2)
    assert distance(Exact(), target, drafter, 3, stop=None, deterministic=deterministic) < 1e-9
    assert distance(Exact(), target, target, 2, stop=None, deterministic=deterministic) < 1e-9


@dataclass(frozen=True)
class Generous(Exact):
    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return (1.1 * super().accept_probs(target, draft)).clamp_max(1)


@dataclass(frozen=True)
class TargetResidual(Exact):
    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return target_BV


@dataclass(frozen=True)
class HalfResidual(Exact):
    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return (target_BV - 0.5 * draft_BV).clamp_min(0)


@dataclass(frozen=True)
class AbsoluteResidual(Exact):
    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return (target_BV - draft_BV).abs()


@dataclass(frozen=True)
class TwoDraws(Exact):
    """The reference code of FLy at T > 0: keep x if one of two target samples equals it, chance 2p - p^2."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        p = target.probs_BKV[:, :-1].gather(-1, draft.tokens_BK.unsqueeze(-1)).squeeze(-1)
        return 2 * p - p * p


@pytest.mark.parametrize(
    "wrong",
    [Generous(), TargetResidual(), HalfResidual(), AbsoluteResidual(), TwoDraws(), LossySampling(1.5)],
    ids=lambda policy: type(policy).__name__,
)
def test_wrong_rules_are_refuted_by_the_same_sum(wrong: AcceptancePolicy) -> None:
    errors = [
        distance(wrong, Process(4, seed, 0.1), Process(4, seed + 100, 0.1), k, stop=None, deterministic=False)
        for seed in range(4)
        for k in (1, 2)
    ]
    assert min(errors) > 1e-3
    if not isinstance(wrong, HalfResidual):  # which is right on a one-hot draft unless the target is rather sure
        error = distance(wrong, Process(4, 5, 0.1), Process(4, 6, 0.1), 2, stop=None, deterministic=True)
        assert error > 1e-3
