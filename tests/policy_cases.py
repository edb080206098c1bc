"""Random blocks for acceptance policies, and a literal twin of ``verify`` written from the papers.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from fly.policies import (
    AcceptancePolicy,
    Exact,
    FLy,
    LossySampling,
    verify,
)
from fly.runner.sampling import BatchSampling
from fly.types import Draft, Noise, SamplingParams, Target, Verdict, Why

PRESETS = (FLy.reference(), FLy.paper(), FLy.vllm())


# --- random blocks ---------------------------------------------------------------------------------------


@dataclass
class Case:
    """A ragged block with everything ``verify`` takes, and what the twin needs beside."""

    logits_BKV: Tensor
    params: list[SamplingParams]
    draft: Draft
    noise: Noise
    control: frozenset[int]

    @property
    def target(self) -> Target:
        vocab = self.logits_BKV.shape[-1]
        control_V = torch.tensor([v in self.control for v in range(vocab)])
        if all(p.temperature == 0 for p in self.params):
            return Target(self.logits_BKV, control_V=control_V)
        distribution = BatchSampling.of(self.params)
        greedy_B = distribution.greedy_B if distribution.some_greedy else None
        return Target(self.logits_BKV, distribution.on(self.logits_BKV), greedy_B=greedy_B, control_V=control_V)

    def verify(self, policy: AcceptancePolicy) -> Verdict:
        return verify(policy, self.target, self.draft, self.noise)

    def pick(self, rows: list[int]) -> Case:
        index = torch.tensor(rows)
        return Case(
            self.logits_BKV[index],
            [self.params[b] for b in rows],
            self.draft.rows(index),
            self.noise.rows(index),
            self.control,
        )


def random_case(seed: int, rows: int = 4, longest: int = 12, temperatures: str = "mixed", vocab: int = 12) -> Case:
    """Peaky positions with some flat ones, drafts that mostly agree; all from ``seed``."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, longest + 1, vocab, generator=g)
    best = torch.randint(vocab, (rows, longest + 1, 1), generator=g)
    flat = torch.rand(rows, longest + 1, 1, generator=g) < 0.25
    logits = torch.where(flat, 0.3 * logits, logits.scatter_add(-1, best, torch.full_like(logits, 9.0)))
    banned = torch.rand(rows, longest + 1, vocab, generator=g) < rng.choice([0.0, 0.05])
    banned[..., 0] = False
    logits = logits.masked_fill(banned, -math.inf)
    choice = logits.argmax(-1)[:, :-1]
    other = torch.randint(vocab, choice.shape, generator=g)
    tokens = torch.where(torch.rand(choice.shape, generator=g) < 0.8, choice, other)
    lengths = torch.tensor([rng.choice([longest, rng.randint(0, longest)]) for _ in range(rows)])
    temperature = {"greedy": [0.0], "sampled": [0.5, 1.0, 1.7], "mixed": [0.0, 0.7, 1.0]}[temperatures]
    params = [
        SamplingParams(
            temperature=rng.choice(temperature), top_k=rng.choice([0, 0, 5]), top_p=rng.choice([1.0, 1.0, 0.9])
        )
        for _ in range(rows)
    ]
    probs = None
    if rng.random() < 0.5:
        mass = (
            logits[:, :-1].clamp_min(-20) * rng.uniform(0.5, 1)
            + 0.5 * torch.randn(choice.shape + (vocab,), generator=g)
        ).softmax(-1)
        drawn = torch.nn.functional.one_hot(tokens, vocab).bool()
        mass = mass.masked_fill((torch.rand(mass.shape, generator=g) < 0.2) & ~drawn, 0.0)
        one_hot = torch.tensor([p.temperature == 0 and rng.random() < 0.5 for p in params])
        mass = torch.where(one_hot.view(-1, 1, 1), drawn.float(), mass)
        probs = mass / mass.sum(-1, keepdim=True)
    noise = Noise(torch.rand(rows, longest, generator=g), torch.rand(rows, generator=g))
    control = frozenset(v for v in range(vocab) if rng.random() < 0.15)
    return Case(logits, params, Draft(tokens, lengths, probs), noise, control)


cases = st.builds(
    random_case,
    st.integers(0, 2**31),
    rows=st.integers(1, 5),
    longest=st.integers(0, 16),
    temperatures=st.sampled_from(["greedy", "sampled", "mixed"]),
    vocab=st.integers(2, 14),
)

counts = st.integers(0, 8)
entropies = st.sampled_from(["top3", "normalized"])
# Tensors hold no smaller numbers: 1e-172 would be 0 there, and more than 0 to the twin.
thetas = st.one_of(st.sampled_from([0.0, 0.1, 0.3]), st.floats(0, 1.25, width=32, allow_subnormal=False))
flys = st.one_of(st.sampled_from(PRESETS), st.builds(FLy, entropies, thetas, counts, counts, st.booleans()))
lossys = st.builds(LossySampling, st.one_of(st.sampled_from([1.0, 2, 5.0]), st.floats(1, 20)))


# --- the literal twin ------------------------------------------------------------------------------------

Excuse = Callable[[int, int], bool]


def softmax(zs: list[float]) -> list[float]:
    mass = [math.exp(z - max(zs)) for z in zs]
    return [m / sum(mass) for m in mass]


class Twin:
    """``verify`` position by position and row by row; positions count from 1 as in the papers."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.distributions = case.target.probs_BKV.tolist()
        self.raw = [[softmax(zs) for zs in block] for block in case.logits_BKV.tolist()]
        self.tokens, self.lengths = case.draft.tokens_BK.tolist(), case.draft.lengths_B.tolist()
        self.q = None if case.draft.probs_BKV is None else case.draft.probs_BKV.tolist()
        self.u, self.last = case.noise.accept_BK.tolist(), case.noise.sample_B.tolist()

    def greedy(self, b: int) -> bool:
        return self.case.params[b].temperature == 0

    def entropy(self, b: int, j: int, kind: str, processed: bool) -> float:
        distribution = (self.distributions if processed and not self.greedy(b) else self.raw)[b][j - 1]
        if kind == "top3":
            distribution = sorted(distribution, reverse=True)[:3]
        nats = -sum(p * math.log(p) for p in distribution if p > 0)
        return nats if kind == "top3" else nats / math.log(len(distribution))

    def agrees(self, b: int, j: int, lenience: float = 1.0) -> bool:
        """D_j."""
        if not 1 <= j <= self.lengths[b]:
            return False
        x, distribution = self.tokens[b][j - 1], self.distributions[b][j - 1]
        if self.greedy(b):
            raw = self.raw[b][j - 1]
            return x == distribution.index(1.0) or (lenience > 1 and raw[x] >= max(raw) / lenience)
        q = 1.0 if self.q is None else self.q[b][j - 1][x]
        return self.u[b][j - 1] < min(1.0, lenience * distribution[x] / q)

    def fly(self, rule: FLy, b: int, j: int) -> bool:
        """What stands besides D_j: gate, window, room, no control token."""
        gate = self.entropy(b, j, rule.entropy, rule.processed) >= rule.theta
        window = all(self.agrees(b, j + i) for i in range(1, rule.window + 1))
        room = j + rule.hold <= self.lengths[b]
        return gate and window and room and self.tokens[b][j - 1] not in self.case.control

    def row(self, b: int, lenience: float, excuse: Excuse) -> tuple[int, int, list[int], list[bool]]:
        """accepted, next token, why, asked."""
        n, why, asked, length = 0, [], [], self.lengths[b]
        for j in range(1, length + 1):
            agrees, exact = self.agrees(b, j, lenience), self.agrees(b, j)
            asked.append(not exact)
            possible = self.case.logits_BKV[b, j - 1, self.tokens[b][j - 1]] > -math.inf
            if not agrees and not (possible and excuse(b, j)):
                break
            why.append(Why.MATCH if exact else Why.RELAXED)
            n += 1
        distribution = self.distributions[b][n]
        if n < length:
            x = self.tokens[b][n]
            q = [float(v == x) for v in range(len(distribution))] if self.q is None else self.q[b][n]
            distribution = [max(p - d, 0.0) for p, d in zip(distribution, q)]
            if not any(
                distribution
            ):  # the draft's distribution swallows the target's, up to rounding: the target's own is right
                distribution = self.distributions[b][n]
        cumulative = list(itertools.accumulate(distribution))
        token = next(v for v, reached in enumerate(cumulative) if reached > self.last[b] * cumulative[-1])
        pad = len(self.tokens[b])
        return n, token, why + [Why.REJECTED] * (pad - len(why)), asked + [False] * (pad - len(asked))

    def check(self, policy: AcceptancePolicy, lenience: float, excuse: Excuse) -> Verdict:
        got = self.case.verify(policy)
        for b in range(len(self.tokens)):
            wanted = self.row(b, lenience, excuse)
            accepted, token = int(got.accepted_B[b]), int(got.next_token_B[b])
            assert (accepted, token, got.why_BK[b].tolist(), got.asked_BK[b].tolist()) == wanted, (b, policy)
        return got


def never(b: int, j: int) -> bool:
    return False


policies = st.one_of(st.just(Exact()), lossys, flys)


def same(a: Verdict, b: Verdict, rows: list[int], longest: int) -> bool:
    """Whether ``a`` is the verdict ``b`` on ``rows``, up to ``longest`` columns."""
    return (
        torch.equal(a.accepted_B, b.accepted_B[rows])
        and torch.equal(a.next_token_B, b.next_token_B[rows])
        and torch.equal(a.why_BK[:, :longest], b.why_BK[rows, :longest])
        and torch.equal(a.asked_BK[:, :longest], b.asked_BK[rows, :longest])
    )
