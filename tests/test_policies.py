"""Acceptance policies: losslessness as an exact sum, and ``verify`` against a literal twin written from METHODS.md.

Shape legend: B rows, K longest draft, V vocabulary, N draft strings.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly.policies import (
    AcceptancePolicy,
    AfterTokens,
    AgreeingWindow,
    Block,
    BlockVerification,
    Condition,
    ControlToken,
    EntropyGate,
    Exact,
    ExactSample,
    FLy,
    LossySampling,
    Relaxed,
    Room,
    parse_policy,
    verify,
)
from fly.policies.base import accepts_exactly
from fly.runtime.sampling import BatchSampling
from fly.types import Draft, Guarantee, Noise, SamplingParams, Target, Verdict, Why

PRESETS = (FLy.reference(), FLy.paper(), FLy.vllm())


# --- losslessness: the distribution of what is emitted, summed over every draft and every outcome -------------------

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
        """BatchSampling [V, ..., V] of the ``length`` tokens after ``prefix``."""
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
    """BatchSampling of the first k+1 tokens when one block is judged by ``policy`` and the target goes on by itself."""
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


def test_guarantees_are_declared() -> None:
    assert Exact().guarantee is Guarantee.LOSSLESS
    for policy in (*PRESETS, LossySampling(), Exact() | Room(1)):
        assert policy.guarantee is Guarantee.HEURISTIC


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
thetas = st.one_of(st.sampled_from([0.0, 0.1, 0.3]), st.floats(0, 1.2))
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


@given(cases)
def test_exact_equals_its_twin(case: Case) -> None:
    got = Twin(case).check(Exact(), 1.0, never)
    assert not got.clauses


@given(cases, lossys)
def test_lossy_sampling_equals_its_twin(case: Case, policy: LossySampling) -> None:
    Twin(case).check(policy, policy.lenience, never)


@given(cases, flys)
def test_fly_equals_its_twin(case: Case, policy: FLy) -> None:
    twin = Twin(case)
    got = twin.check(policy, 1.0, lambda b, j: twin.fly(policy, b, j))
    event(f"relaxed: {bool((got.why_BK == Why.RELAXED).any())}")
    assert len(got.clauses) == 4 or not got.asked_BK.any()
    relaxed_BK = got.why_BK == Why.RELAXED
    for held_BK in got.clauses.values():
        assert held_BK[relaxed_BK].all()


@given(st.integers(0, 2**32), st.one_of(st.just(Exact()), flys, flys.map(lambda rule: Exact() | rule.relaxation)))
def test_comparing_ids_is_the_verdict_at_temperature_0(seed: int, policy: AcceptancePolicy) -> None:
    case = random_case(seed, temperatures="greedy")
    assert accepts_exactly(policy)
    got, wanted = case.verify(policy), policy.verdict(case.target, case.draft, case.noise)
    for name in ("accepted_B", "next_token_B", "why_BK", "asked_BK"):
        mine, theirs = getattr(got, name), getattr(wanted, name)
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
    asked_BK = wanted.asked_BK
    if asked_BK.any():
        assert list(got.clauses) == list(wanted.clauses)
        assert all(torch.equal(got.clauses[name][asked_BK], wanted.clauses[name][asked_BK]) for name in got.clauses)


def test_what_else_a_rule_does_is_no_matter_of_ids() -> None:
    class Looser(Exact):
        def accept_probs(self, target: Target, draft: Draft) -> Tensor:
            return torch.ones(draft.tokens_BK.shape)

    class Excuses(Exact):
        def relax(self, target: Target, draft: Draft, agree_BK: Tensor) -> Tensor:
            return ~agree_BK

    class Whole(Exact):
        def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
            return super().verdict(target, draft, noise)

    for rule in (Looser(), Excuses(), Whole(), LossySampling(), Looser() | EntropyGate()):
        assert not accepts_exactly(rule)
    for seed in range(20):
        case = random_case(seed, temperatures="greedy")
        for rule in (Looser(), Excuses()):
            banned = case.target.logits_BKV[:, :-1].gather(-1, case.draft.tokens_BK[..., None]).isinf().any()
            if not banned:  # which nothing excuses
                assert torch.equal(case.verify(rule).accepted_B, case.draft.lengths_B)


@pytest.mark.parametrize("temperatures", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("policy", [*PRESETS, FLy(theta=0.2, window=2, hold=2)], ids=str)
def test_relaxation_does_happen_on_such_blocks(policy: FLy, temperatures: str) -> None:
    relaxed = rejected = 0
    for seed in range(40):
        case = random_case(seed, temperatures=temperatures)
        twin = Twin(case)
        got = twin.check(policy, 1.0, lambda b, j, twin=twin: twin.fly(policy, b, j))  # type: ignore[misc]
        relaxed += int((got.why_BK == Why.RELAXED).sum())
        rejected += int((got.accepted_B < case.draft.lengths_B).sum())
    assert relaxed >= 5 and rejected >= 20


# --- what a verdict may depend on ------------------------------------------------------------------------

policies = st.one_of(st.just(Exact()), lossys, flys)


def same(a: Verdict, b: Verdict, rows: list[int], longest: int) -> bool:
    """Whether ``a`` is the verdict ``b`` on ``rows``, up to ``longest`` columns."""
    return (
        torch.equal(a.accepted_B, b.accepted_B[rows])
        and torch.equal(a.next_token_B, b.next_token_B[rows])
        and torch.equal(a.why_BK[:, :longest], b.why_BK[rows, :longest])
        and torch.equal(a.asked_BK[:, :longest], b.asked_BK[rows, :longest])
    )


@given(cases, policies, st.integers(0, 2**31))
def test_padding_never_matters(case: Case, policy: AcceptancePolicy, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows, longest = case.draft.tokens_BK.shape
    vocab = case.logits_BKV.shape[-1]
    mask_BK = case.draft.mask_BK()
    beyond = torch.arange(longest + 1) > case.draft.lengths_B.unsqueeze(1)
    other = random_case(seed, rows, longest, vocab=vocab)
    probs = case.draft.probs_BKV
    if probs is not None:
        noise = torch.rand(probs.shape, generator=g) * torch.randint(2, probs.shape, generator=g)
        probs = torch.where(mask_BK.unsqueeze(-1), probs, noise)
    changed = Case(
        torch.where(beyond.unsqueeze(-1), other.logits_BKV, case.logits_BKV),
        case.params,
        Draft(torch.where(mask_BK, case.draft.tokens_BK, other.draft.tokens_BK), case.draft.lengths_B, probs),
        Noise(torch.where(mask_BK, case.noise.accept_BK, other.noise.accept_BK), case.noise.sample_B),
        case.control,
    )
    assert same(changed.verify(policy), case.verify(policy), list(range(rows)), longest)


@given(cases, policies)
def test_a_row_alone_is_the_row_in_its_batch(case: Case, policy: AcceptancePolicy) -> None:
    whole = case.verify(policy)
    for b, n in enumerate(case.draft.lengths_B.tolist()):
        alone = case.pick([b])
        probs = alone.draft.probs_BKV
        alone.logits_BKV = alone.logits_BKV[:, : n + 1]
        alone.draft = Draft(
            alone.draft.tokens_BK[:, :n], alone.draft.lengths_B, None if probs is None else probs[:, :n]
        )
        alone.noise = Noise(alone.noise.accept_BK[:, :n], alone.noise.sample_B)
        assert same(alone.verify(policy), whole, [b], n)


@given(cases, policies, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(case: Case, policy: AcceptancePolicy, rng: random.Random) -> None:
    order = list(range(len(case.params)))
    rng.shuffle(order)
    longest = case.draft.tokens_BK.shape[1]
    whole = case.verify(policy)
    assert same(case.pick(order).verify(policy), whole, order, longest)
    some = order[: max(1, len(order) // 2)]
    index = torch.tensor(some)
    part = verify(policy, case.target.rows(index), case.draft.rows(index), case.noise.rows(index))
    assert same(part, whole, some, longest)


@given(cases, policies)
def test_inputs_stay_untouched(case: Case, policy: AcceptancePolicy) -> None:
    target = case.target
    values = [case.logits_BKV, target.probs_BKV, target.greedy_B, target.control_V, case.draft.tokens_BK]
    values += [case.draft.lengths_B, case.noise.accept_BK, case.noise.sample_B]
    values += [] if case.draft.probs_BKV is None else [case.draft.probs_BKV]
    before = [v.clone() for v in values if v is not None]
    verify(policy, target, case.draft, case.noise)
    assert all(torch.equal(a, b) for a, b in zip(before, values, strict=True) if b is not None)


@given(cases, policies)
def test_one_distribution_greedy_or_spelled_out(case: Case, policy: AcceptancePolicy) -> None:
    """A greedy batch that never builds its distribution gives what the one-hot distribution gives."""
    case.params = [SamplingParams(temperature=0)] * len(case.params)
    rows, longest = case.draft.tokens_BK.shape
    spelled = Target(
        case.logits_BKV,
        case.target.probs_BKV,
        greedy_B=torch.ones(rows, dtype=torch.bool),
        control_V=case.target.control_V,
    )
    assert same(verify(policy, spelled, case.draft, case.noise), case.verify(policy), list(range(rows)), longest)


@given(cases, policies)
def test_one_distribution_worked_out_where_asked_or_everywhere(case: Case, policy: AcceptancePolicy) -> None:
    rows, longest = case.draft.tokens_BK.shape
    lazy = case.target
    spelled = Target(case.logits_BKV, lazy.probs_BKV, greedy_B=lazy.greedy_B, control_V=lazy.control_V)
    if not lazy.all_greedy:
        assert same(verify(policy, spelled, case.draft, case.noise), case.verify(policy), list(range(rows)), longest)


# --- distributions of FLy and of lenience -------------------------------------------------------------------------


@given(cases, flys)
def test_fly_relaxes_exact_and_nothing_else(case: Case, policy: FLy) -> None:
    rows, longest = case.draft.tokens_BK.shape
    exact, relaxed = case.verify(Exact()), case.verify(policy)
    assert (relaxed.accepted_B >= exact.accepted_B).all()
    equal = [b for b in range(rows) if relaxed.accepted_B[b] == exact.accepted_B[b]]
    assert torch.equal(relaxed.next_token_B[equal], exact.next_token_B[equal])
    closed = replace(policy, theta=1.2)  # above 3/e nats, and above 1
    assert same(case.verify(closed), exact, list(range(rows)), longest)
    for j, b in itertools.product(range(longest), range(rows)):
        if relaxed.why_BK[b, j] == Why.RELAXED:
            assert int(case.draft.tokens_BK[b, j]) not in case.control


@given(cases, flys)
def test_fly_is_its_composition(case: Case, policy: FLy) -> None:
    gate = EntropyGate(policy.theta, policy.entropy, policy.processed)
    composed = Exact() | (gate & AgreeingWindow(policy.window) & Room(policy.hold) & ~ControlToken())
    rows, longest = case.draft.tokens_BK.shape
    mine, theirs = case.verify(policy), case.verify(composed)
    assert same(mine, theirs, list(range(rows)), longest)
    assert list(mine.clauses) == list(theirs.clauses)
    assert all(torch.equal(a, b) for a, b in zip(mine.clauses.values(), theirs.clauses.values()))
    assert composed.relaxation == policy.relaxation


def test_control_and_banned_tokens_are_never_relaxed() -> None:
    """The gate is wide open and everything else allows it."""
    logits = torch.zeros(1, 3, 5)
    logits[0, 0, 0] = 1.0
    draft = Draft(torch.tensor([[2, 0]]), torch.tensor([2]))
    noise = Noise(torch.zeros(1, 2), torch.zeros(1))
    rule = FLy(theta=0, window=1, hold=1)
    assert verify(rule, Target(logits), draft, noise).accepted_B.tolist() == [2]
    control_V = torch.tensor([False, False, True, False, False])
    assert verify(rule, Target(logits, control_V=control_V), draft, noise).accepted_B.tolist() == [0]
    banned = logits.clone()
    banned[0, 0, 2] = -math.inf  # min_tokens forbids this end: no rule may let it pass
    for policy in (rule, Exact() | Room(0), LossySampling(1e6)):
        verdict = verify(policy, Target(banned), draft, noise)
        assert verdict.accepted_B.tolist() == [0] and verdict.next_token_B.tolist() == [0]


@given(cases)
def test_no_lenience_is_exact(case: Case) -> None:
    rows, longest = case.draft.tokens_BK.shape
    assert same(case.verify(LossySampling(1)), case.verify(Exact()), list(range(rows)), longest)


def test_no_lenience_is_exact_among_equals() -> None:
    """Two tokens as likely as each other: the target's choice is the lower id, and exact keeps only that."""
    case = Case(
        torch.zeros(1, 2, 3),
        [SamplingParams(temperature=0)],
        Draft(torch.tensor([[1]]), torch.tensor([1])),
        Noise(torch.zeros(1, 1), torch.zeros(1)),
        frozenset(),
    )
    assert case.verify(Exact()).accepted_B.tolist() == case.verify(LossySampling(1)).accepted_B.tolist() == [0]
    assert case.verify(LossySampling(1.01)).accepted_B.tolist() == [1]


@given(cases, st.lists(st.floats(1, 30), min_size=2, max_size=4))
def test_lenience_is_monotone(case: Case, leniences: list[float]) -> None:
    accepted = [case.verify(LossySampling(lenience)).accepted_B for lenience in sorted(leniences)]
    assert all((more >= less).all() for less, more in itertools.pairwise(accepted))


@pytest.mark.parametrize(("lenience", "stands"), [(1.9, 0), (2.1, 1), (3.9, 1), (4.1, 2)])
def test_lenience_at_temperature_zero_by_hand(lenience: float, stands: int) -> None:
    distributions = torch.tensor([[[0.5, 0.25, 0.25], [0.8, 0.2, 0.0], [1.0, 0.0, 0.0]]])
    draft = Draft(torch.tensor([[1, 1]]), torch.tensor([2]))
    verdict = verify(
        LossySampling(lenience), Target(distributions.log()), draft, Noise(torch.zeros(1, 2), torch.zeros(1))
    )
    assert verdict.accepted_B.tolist() == [stands]


# --- window and room by hand -----------------------------------------------------------------------------


def by_hand(mismatches: set[int], rule: FLy, k: int = 8) -> int:
    """Accepted length of a block whose mismatches (1-based) all lie where the target is undecided."""
    logits = torch.zeros(1, k + 1, 6)
    logits[..., 0] = 0.1
    draft = Draft(torch.tensor([[int(j in mismatches) for j in range(1, k + 1)]]), torch.tensor([k]))
    return int(verify(rule, Target(logits), draft, Noise(torch.zeros(1, k), torch.zeros(1))).accepted_B)


@pytest.mark.parametrize(
    ("mismatches", "vllm", "reference"),
    [
        (set(), 8, 8),
        ({1}, 8, 8),  # tokens 2..7 agree, 1 + 6 <= 8
        ({2}, 8, 8),  # tokens 3..8 agree, 2 + 6 <= 8: just room enough
        ({3}, 2, 2),  # 3 + 6 > 8
        ({1, 8}, 7, 7),  # the window ends before the second mismatch, which has no room
        ({1, 7}, 0, 6),  # six following tokens reach the second mismatch, five do not
        ({1, 6}, 0, 0),
        ({1, 2}, 0, 0),
        ({8}, 7, 7),
    ],
)
def test_window_and_room_by_hand(mismatches: set[int], vllm: int, reference: int) -> None:
    assert by_hand(mismatches, FLy.vllm()) == vllm
    assert by_hand(mismatches, FLy.paper()) == vllm
    assert by_hand(mismatches, FLy.reference()) == reference


def test_room_counts_the_rows_own_length() -> None:
    assert [by_hand({1}, FLy(window=2, hold=h), k) for h, k in ((3, 4), (4, 4), (2, 3), (3, 3))] == [4, 0, 3, 0]
    assert by_hand({1}, FLy(window=4, hold=0), 4) == 0  # only three tokens follow
    assert by_hand({1, 2, 3}, FLy(window=0, hold=0), 3) == 3


def test_entropy_by_hand() -> None:
    """Four equal tokens of eight: top-3 entropy 3/4 ln 4 nats, normalized ln 4 / ln 8."""
    logits = torch.tensor([[[0.0] * 4 + [-math.inf] * 4] * 2])
    block = Block(Target(logits), Draft(torch.tensor([[1]]), torch.tensor([1])), torch.tensor([[False]]))
    for kind, value in (("top3", 0.75 * math.log(4)), ("normalized", 2 / 3)):
        assert EntropyGate(value - 1e-4, kind).evaluate(block).item()  # type: ignore[arg-type]
        assert not EntropyGate(value + 1e-4, kind).evaluate(block).item()  # type: ignore[arg-type]


def test_the_gate_is_taken_on_the_distribution_it_names() -> None:
    """Cold sampling decides what the raw logits leave open; at temperature 0 the raw logits rule in any case."""
    logits = torch.tensor([[[2.0, 1.0, 0.5, 0.0]] * 2] * 2)
    distribution = BatchSampling.of([SamplingParams(temperature=0.05), SamplingParams(temperature=0)])
    target = Target(logits, distribution.probs(logits), greedy_B=distribution.greedy_B)
    block = Block(target, Draft(torch.tensor([[1], [1]]), torch.tensor([1, 1])), torch.zeros(2, 1, dtype=torch.bool))
    assert EntropyGate(0.3, processed=True).evaluate(block).flatten().tolist() == [False, True]
    assert EntropyGate(0.3, processed=False).evaluate(block).flatten().tolist() == [True, True]


# --- the algebra -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column(Condition):
    """True at the columns whose bit is set."""

    bits: int

    def evaluate(self, block: Block) -> Tensor:
        columns_K = torch.arange(block.agree_BK.shape[1])
        return ((self.bits >> columns_K) & 1).bool().expand_as(block.agree_BK)

    def __str__(self) -> str:
        return f"c{self.bits}"


Meaning = tuple[Condition, Callable[[int], bool]]
leaves = st.integers(0, 255).map(lambda bits: (Column(bits), lambda j: bool(bits >> j & 1)))


def _combine(children: st.SearchStrategy[Meaning]) -> st.SearchStrategy[Meaning]:
    pairs = st.tuples(children, children)
    return st.one_of(
        pairs.map(lambda ab: (ab[0][0] & ab[1][0], lambda j: ab[0][1](j) and ab[1][1](j))),
        pairs.map(lambda ab: (ab[0][0] | ab[1][0], lambda j: ab[0][1](j) or ab[1][1](j))),
        children.map(lambda a: (~a[0], lambda j: not a[1](j))),
    )


@given(st.recursive(leaves, _combine, max_leaves=8))
def test_conditions_mean_what_they_say(meaning: Meaning) -> None:
    condition, truth = meaning
    logits, draft = torch.zeros(2, 9, 3), Draft(torch.ones(2, 8, dtype=torch.int64), torch.tensor([8, 8]))
    block = Block(Target(logits), draft, torch.zeros(2, 8, dtype=torch.bool))
    wanted = [truth(j) for j in range(8)]
    for got in (condition.evaluate(block), condition.holds(block)):
        assert got.tolist() == [wanted, wanted]
    accepted = next((j for j, ok in enumerate(wanted) if not ok), 8)
    verdict = verify(Exact() | condition, Target(logits), draft, Noise(torch.zeros(2, 8), torch.zeros(2)))
    assert verdict.accepted_B.tolist() == [accepted] * 2
    # the expression printed is the condition itself
    names = {f"c{bits}": Column(bits) for bits in range(256)}
    again = eval(str(condition), {}, names)
    assert again.evaluate(block).tolist() == [wanted, wanted]


def test_pythons_own_words_do_not_combine_conditions() -> None:
    """They would choose one of the two without a word."""
    for combine in (
        lambda: AgreeingWindow(2) and ControlToken(),
        lambda: AgreeingWindow(2) or ControlToken(),
        lambda: FLy() and not ControlToken(),
    ):
        with pytest.raises(TypeError, match="combine conditions by '&'"):
            combine()


def test_conditions_print_as_expressions() -> None:
    a, b, c = EntropyGate(0.3), AgreeingWindow(6), ~ControlToken()
    assert str(a & b & c) == "entropy(0.3) & window(6) & ~control"
    assert str((a | b) & Room(2)) == "(entropy(0.3) | window(6)) & room(2)"
    assert str(~(a | b)) == "~(entropy(0.3) | window(6))"
    assert str(Exact() | (a & b)) == "exact | entropy(0.3) & window(6)"
    assert Exact() | a | b == Relaxed(Exact(), a | b)
    assert (Exact() | a) & b == Relaxed(Exact(), a & b)
    assert FLy() | a == Relaxed(Exact(), FLy().relaxation | a) and FLy() & a == Relaxed(Exact(), FLy().relaxation & a)
    with pytest.raises(TypeError, match="exact"):
        Exact() & a


our_leaves = st.one_of(
    st.builds(EntropyGate, thetas, entropies, st.booleans()),
    st.builds(AgreeingWindow, counts),
    st.builds(Room, counts),
    st.just(ControlToken()),
)


def _ours(children: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
    pairs = st.tuples(children, children)
    return st.one_of(
        pairs.map(lambda ab: ab[0] & ab[1]), pairs.map(lambda ab: ab[0] | ab[1]), children.map(lambda a: ~a)
    )


@settings(max_examples=30)
@given(st.recursive(our_leaves, _ours, max_leaves=6), flys, lossys, cases)
def test_what_is_printed_is_what_is_read(condition: Condition, fly: FLy, lossy: LossySampling, case: Case) -> None:
    rows, longest = case.draft.tokens_BK.shape
    for policy in (Exact(), fly, lossy, Exact() | condition, fly | condition, fly & condition):
        again = parse_policy(str(policy))
        assert str(again) == str(policy)
        assert same(case.verify(again), case.verify(policy), list(range(rows)), longest)
    assert (parse_policy(str(fly)), parse_policy(str(lossy))) == (fly, lossy)


def test_clauses_name_the_leaves() -> None:
    case = random_case(3)
    clauses = case.verify(Exact() | (EntropyGate() & (Room(2) | ~ControlToken()) & ~(Room(1) | Room(9)))).clauses
    assert list(clauses) == ["entropy(0.3)", "room(2)", "~control", "room(1)", "room(9)"]


def test_policies_are_values() -> None:
    assert FLy() == FLy.vllm() and hash(FLy()) == hash(FLy.vllm()) and FLy.vllm() != FLy.reference()
    assert FLy.reference() == FLy("top3", 0.3, 5, 6, processed=False)
    assert FLy.paper() == FLy("normalized", 0.3, 6, 6, processed=False)
    assert len({Exact(), Exact(), LossySampling(1), LossySampling(1.0), FLy()}) == 3


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FLy(entropy="top4"), ("'top4'", "top3", "normalized")),  # type: ignore[arg-type]
        (lambda: EntropyGate(0.3, "full"), ("'full'", "top3", "normalized")),  # type: ignore[arg-type]
        (lambda: FLy(theta=-0.5), ("theta", "-0.5")),
        (lambda: FLy(theta=math.nan), ("theta", "nan")),
        (lambda: EntropyGate(math.inf), ("theta", "inf")),
        (lambda: EntropyGate("0.3"), ("theta", "'0.3'")),  # type: ignore[arg-type]
        (lambda: FLy(window=-1), ("window", "-1")),
        (lambda: AgreeingWindow(2.0), ("window", "2.0")),  # type: ignore[arg-type]
        (lambda: FLy(hold=-7), ("hold", "-7")),
        (lambda: Room(True), ("hold", "True")),
        (lambda: LossySampling(0.99), ("lenience", "0.99")),
        (lambda: LossySampling(math.inf), ("lenience", "inf")),
        (lambda: LossySampling(math.nan), ("lenience", "nan")),
    ],
)
def test_bad_parameters_are_named(make: Callable[[], object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("positions", "rows", "coins", "draws"),
    [(3, 2, (2, 3), 2), (5, 2, (2, 3), 2), (4, 1, (2, 3), 2), (4, 2, (2, 2), 2), (4, 2, (1, 3), 2), (4, 2, (2, 3), 1)],
)
def test_shapes_that_do_not_belong_together(positions: int, rows: int, coins: tuple[int, int], draws: int) -> None:
    draft = Draft(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 1]))
    verify(Exact(), Target(torch.zeros(2, 4, 5)), draft, Noise(torch.zeros(2, 3), torch.zeros(2)))
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        verify(Exact(), Target(torch.zeros(rows, positions, 5)), draft, Noise(torch.zeros(coins), torch.zeros(draws)))


def test_an_empty_draft_is_all_bonus() -> None:
    logits = torch.tensor([[[0.0, 2.0, 1.0]], [[3.0, 2.0, 1.0]]])
    for policy in (Exact(), *PRESETS, LossySampling(3)):
        verdict = verify(policy, Target(logits), Draft.empty(2), Noise(torch.zeros(2, 0), torch.zeros(2)))
        assert verdict.accepted_B.tolist() == [0, 0] and verdict.next_token_B.tolist() == [1, 0]
        assert verdict.why_BK.shape == verdict.asked_BK.shape == (2, 0)


@dataclass(frozen=True)
class OwnVerdict(Exact):
    """Decides on whole blocks."""

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        return super().verdict(target, draft, noise)


@dataclass(frozen=True)
class OwnVerdictOfFLy(FLy):
    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        return super().verdict(target, draft, noise)


@dataclass(frozen=True)
class OwnRelax(Exact):
    def relax(self, target: Target, draft: Draft, agree_BK: Tensor) -> Tensor:
        return ~agree_BK


@pytest.mark.parametrize("rule", [OwnVerdict(), OwnVerdictOfFLy(), BlockVerification(), ExactSample()], ids=str)
def test_a_rule_for_whole_blocks_is_not_composed_into_another(rule: AcceptancePolicy) -> None:
    for compose in (lambda: rule | AfterTokens(2), lambda: Relaxed(rule, AfterTokens(2))):
        with pytest.raises(TypeError, match=r"whole blocks \(its own 'verdict'\).*'exact \| after\(2\)'"):
            compose()
    with pytest.raises(TypeError, match=r"whole blocks"):
        _ = rule & AfterTokens(2)


def test_a_relax_of_its_own_is_not_replaced() -> None:
    with pytest.raises(TypeError, match=r"'relax' of its own, which '\| after\(2\)' would replace"):
        _ = OwnRelax() | AfterTokens(2)
