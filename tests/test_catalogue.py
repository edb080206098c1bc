"""The catalogue of acceptance rules against slow twins written from the formulas, and exact sums over all noise.

Twins are plain loops over Python floats. A comparison that hangs on less than float32 can tell is dropped.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, currently_in_test_context, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly.policies import (
    AcceptancePolicy,
    AdditiveSlack,
    BiLD,
    BlockVerification,
    Cactus,
    Cascade,
    Condition,
    Ears,
    Exact,
    ExactSample,
    Fuzzy,
    LogMargin,
    Mentored,
    Regret,
    Relaxed,
    RelaxedTopN,
    Thresholds,
    TopRatio,
    Typical,
    verify,
)
from fly.policies.registry import CATALOGUE, GATES
from fly.types import Draft, Guarantee, Noise, Target, Why

BatchSampling = list[float]
CLOSE = 2e-5  # what float32 sums cannot tell apart

POLICIES: list[AcceptancePolicy] = [
    *(ExactSample(), BlockVerification()),
    *(AdditiveSlack(), AdditiveSlack(0.5), Ears(), Ears(1.0)),
    *(Thresholds(), Thresholds(0.6), Thresholds(0.8, 0.4)),
    *(Typical(), Typical(0.3, 0.9), RelaxedTopN(), RelaxedTopN(2, 0.3), BiLD(), BiLD(1.0)),
    *(Fuzzy(), Fuzzy("kl", 0.5), Fuzzy("tv", 0.3), Fuzzy("tv", 0.7)),
    *(Cascade(), Cascade("chow", 0.4), Cascade("diff", 0.6)),
    *(Cactus(), Cactus(0.01), Mentored(), Mentored(1.0)),
    *(Exact() | LogMargin(), Exact() | LogMargin(1.5), Exact() | TopRatio(), Exact() | TopRatio(0.3)),
    *(Exact() | Regret(), Exact() | Regret(1.5, 0), Exact() | Regret(3.0, 1), Exact() | Regret(8.0, 2)),
]


# ------------------------------------------------------------------------------------------------ random blocks


@dataclass
class Row:
    """One row in Python floats: what a formula needs, and nothing else."""

    greedy: bool
    logits: list[BatchSampling]
    target: list[BatchSampling]  # processed
    tokens: list[int]
    draft: list[BatchSampling] | None
    coins: list[float]
    draw: float

    def raw(self, j: int) -> BatchSampling:
        return softmax(self.logits[j])

    def gate(self, j: int) -> BatchSampling:
        """The distribution a gate looks at."""
        return self.raw(j) if self.greedy else self.target[j]

    def distribution(self, j: int) -> BatchSampling:
        """The draft's distribution, one-hot for a deterministic draft."""
        return one_hot(self.tokens[j], len(self.logits[j])) if self.draft is None else self.draft[j]

    def best(self, j: int) -> int:
        return self.logits[j].index(max(self.logits[j]))


def softmax(logits: BatchSampling) -> BatchSampling:
    peak = max(logits)
    weights = [math.exp(z - peak) for z in logits]
    return [w / sum(weights) for w in weights]


def one_hot(x: int, vocab: int) -> BatchSampling:
    return [float(v == x) for v in range(vocab)]


def random_row(rng: random.Random, vocab: int, length: int, greedy: bool, stochastic: bool) -> Row:
    def distribution(logits: BatchSampling) -> BatchSampling:
        if greedy:
            return one_hot(logits.index(max(logits)), vocab)
        if rng.random() < 0.4:  # a cut such as top-k's
            cut = sorted(logits)[rng.randrange(vocab)]
            logits = [z if z >= cut else -math.inf for z in logits]
        return softmax(logits)

    logits, target, tokens, draft = [], [], [], []
    for j in range(length + 1):
        scale, shift = rng.choice([0.3, 1.0, 3.0]), rng.choice([-4.0, 1.0])
        z = [rng.gauss(0, scale) + shift for _ in range(vocab)]
        if rng.random() < 0.15:
            z[rng.randrange(vocab)] = -math.inf  # banned
        logits.append(z)
        target.append(distribution(z))
        if j < length:
            near = [min(max(v, -9.0), 9.0) + rng.gauss(0, rng.choice([0.1, 1.0])) for v in z]
            q = distribution(near)
            draft.append(q)
            x = rng.choices(range(vocab), q)[0] if stochastic or rng.random() < 0.5 else rng.randrange(vocab)
            tokens.append(x)
    coins = [rng.random() for _ in range(length)]
    return Row(greedy, logits, target, tokens, draft if stochastic else None, coins, rng.random())


def random_rows(rng: random.Random, temperature: str, stochastic: bool, lengths: list[int], vocab: int) -> list[Row]:
    rows = []
    for b, length in enumerate(lengths):
        greedy = {"zero": True, "positive": False, "mixed": b % 2 == 0}[temperature]
        rows.append(random_row(rng, vocab, length, greedy, stochastic))
    return rows


def tensors(rows: list[Row], lazy_greedy: bool = True, junk: float = math.nan) -> tuple[Target, Draft, Noise]:
    """The batch of rows; beyond a row's own length stands ``junk``."""
    count, longest, vocab = len(rows), max(len(r.tokens) for r in rows), len(rows[0].logits[0])
    logits = torch.full((count, longest + 1, vocab), junk)
    target, draft = logits.clone(), torch.full((count, longest, vocab), junk)
    tokens = torch.zeros(count, longest, dtype=torch.int64)
    coins = torch.zeros(count, longest)
    for b, row in enumerate(rows):
        n = len(row.tokens)
        logits[b, : n + 1], target[b, : n + 1] = torch.tensor(row.logits), torch.tensor(row.target)
        if n:
            tokens[b, :n], coins[b, :n] = torch.tensor(row.tokens), torch.tensor(row.coins)
            if row.draft is not None:
                draft[b, :n] = torch.tensor(row.draft)
    greedy = torch.tensor([row.greedy for row in rows])
    probs = None if lazy_greedy and all(row.greedy for row in rows) else target
    return (
        Target(logits, probs, greedy_B=greedy),
        Draft(tokens, torch.tensor([len(r.tokens) for r in rows]), None if rows[0].draft is None else draft),
        Noise(coins, torch.tensor([row.draw for row in rows])),
    )


# ------------------------------------------------------------------------------------------------ slow twins


def over(a: float, b: float) -> bool:
    """a > b; a comparison that rounding could turn drops the example (equal values are told apart by the caller)."""
    certain = abs(a - b) > CLOSE or a == b
    if currently_in_test_context():
        assume(certain)
    return a > b


def ratio(row: Row, j: int) -> float:
    return row.target[j][row.tokens[j]] / row.distribution(j)[row.tokens[j]]


def exact_chance(row: Row, j: int) -> float:
    return min(1.0, ratio(row, j))


def positive(a: BatchSampling, b: BatchSampling, scale: float = 1.0) -> BatchSampling:
    return [max(scale * x - y, 0.0) for x, y in zip(a, b)]


def kl(a: BatchSampling, b: BatchSampling) -> float:
    return sum(x * (math.log(x / y) if y else math.inf) for x, y in zip(a, b) if x)


def divergence(kind: str, target: BatchSampling, draft: BatchSampling) -> float:
    if kind == "tv":
        return sum(abs(p - q) for p, q in zip(target, draft)) / 2
    if kind == "kl":
        return kl(draft, target)
    middle = [(p + q) / 2 for p, q in zip(target, draft)]
    return (kl(target, middle) + kl(draft, middle)) / 2


def mentored(target: BatchSampling, draft: BatchSampling, budget: float) -> tuple[float, float]:
    """alpha and beta by two nested bisections."""
    if budget == 0:
        return 1.0, 1.0

    def held(alpha: float, beta: float) -> BatchSampling:
        return [min(max(q, p / beta), p / alpha) for p, q in zip(target, draft)]

    def beta_of(alpha: float) -> float:
        low, high = 0.0, 700.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(held(alpha, math.exp(middle))) > 1 else (low, middle)
        return math.exp(high)

    low, high = 0.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        distribution = held(math.exp(-middle), beta_of(math.exp(-middle)))
        low, high = (middle, high) if kl(distribution, target) <= budget + 1e-12 else (low, middle)
    return math.exp(-low), beta_of(math.exp(-low))


def cascade_defers(policy: Cascade, row: Row, j: int) -> bool:
    gate, draft = row.gate(j), row.distribution(j)
    sure = gate[row.tokens[j]] if row.greedy or max(draft) >= 1 else max(draft)
    limit = 1 - policy.alpha if policy.rule == "chow" else max(gate) - policy.alpha
    return over(limit, sure)


def chance(policy: AcceptancePolicy, row: Row, j: int) -> float:
    """The chance of keeping token j, from the rule's formula."""
    x, gate = row.tokens[j], row.gate(j)
    if gate[x] == 0:
        return 0.0
    own_choice = row.greedy and x == row.best(j)
    match policy:
        case ExactSample():
            return row.target[j][x]
        case AdditiveSlack(eps=eps):
            return min(1.0, ratio(row, j) + eps)
        case Ears(beta=beta):
            return min(1.0, ratio(row, j) + beta * (1 - max(row.target[j])))
        case Thresholds(threshold_acc=acc, threshold_single=single):
            return 1.0 if not over(single, gate[x]) else min(1.0, ratio(row, j) / acc)
        case Typical(eps=eps, delta=delta):
            entropy = -sum(p * math.log(p) for p in gate if p)
            return float(own_choice or over(gate[x], min(eps, delta * math.exp(-entropy))))
        case RelaxedTopN(n=n, delta=delta):
            among = sum(p > gate[x] for p in gate) < n
            return float(own_choice or (among and not over(max(gate) - delta, gate[x])))
        case BiLD(r=r):
            return float(x == row.best(j) or not over(-math.log(gate[x]), r))
        case Fuzzy(divergence=kind, threshold=threshold):
            return float(own_choice or not over(divergence(kind, gate, row.distribution(j)), threshold))
        case Cascade():
            return exact_chance(row, j) if cascade_defers(policy, row, j) else 1.0
        case Cactus():
            return min(1.0, raised(policy, row.target[j][x]) / row.distribution(j)[x])
        case Mentored(budget=budget):
            alpha, _ = mentored(row.target[j], row.distribution(j), budget)
            return min(1.0, ratio(row, j) / alpha)
    return exact_chance(row, j)


def raised(policy: Cactus, t: float) -> float:
    return min(1.0, t + math.sqrt(2 * policy.delta * t * (1 - t)))


def correction(policy: AcceptancePolicy, row: Row, j: int) -> BatchSampling:
    """The distribution of the correction at j, up to a factor."""
    x, target, draft = row.tokens[j], row.target[j], row.distribution(j)
    if row.greedy:
        return target
    match policy:
        case ExactSample():
            return [p if v != x else 0.0 for v, p in enumerate(target)]
        case Typical() | RelaxedTopN() | BiLD() | Fuzzy():
            return target
        case Cascade():
            if cascade_defers(policy, row, j):
                return positive(target, draft)
            return target  # only a token without mass is rejected: the target draws
        case Cactus():
            gamma = raised(policy, target[x])
            others = (1 - gamma) / (1 - target[x]) if target[x] < 1 else 0.0
            return positive([gamma if v == x else p * others for v, p in enumerate(target)], draft)
        case Mentored(budget=budget):
            return positive(target, draft, 1 / mentored(target, draft, budget)[1])
    return positive(target, draft)


def inverse(distribution: BatchSampling, u: float) -> int:
    """The token at u of the cumulative distribution; drops the example if u is too near a step."""
    total, reached = sum(distribution), 0.0
    at = u * total
    found = None
    for v, p in enumerate(distribution):
        reached += p
        assume(abs(at - reached) > CLOSE * total or p == 0)
        if found is None and at < reached:
            found = v
    assert found is not None
    return found


def block_chances(row: Row) -> tuple[list[float], list[float]]:
    """p_0.. p_n and h_1.. h_n of block verification."""
    n = len(row.tokens)
    reach = [1.0]
    for j in range(n):
        reach.append(min(1.0, reach[-1] * ratio(row, j)))
    chances = []
    for i in range(1, n + 1):
        if i == n:
            chances.append(reach[n])
            continue
        spare = sum(max(reach[i] * p - q, 0.0) for p, q in zip(row.target[i], row.distribution(i)))
        below = spare + 1 - reach[i]
        chances.append(spare / below if below > 1e-12 else 1.0)
    return reach, chances


def excused(policy: AcceptancePolicy, row: Row, j: int) -> bool:
    """The gate of ``Exact() | gate``."""
    if not isinstance(policy, Relaxed):
        return False
    z, x, best = row.logits[j], row.tokens[j], row.best(j)
    match policy.condition:
        case LogMargin(tau=tau):
            return over(tau, z[best] - z[x])
        case Regret(nats=nats, window=window):
            own = [max(row.logits[i]) for i in range(j, len(row.tokens))][: window + 1]
            said = [row.logits[i][row.tokens[i]] for i in range(j, len(row.tokens))][: window + 1]
            return len(said) == window + 1 and not over(sum(own) - sum(said), nats)
        case TopRatio(theta=theta):
            second = sorted(z)[-2]
            return x == best or (z[x] >= second and z[best] > 0 and over(z[x], theta * z[best]))
    raise AssertionError(policy)


def twin(policy: AcceptancePolicy, row: Row) -> tuple[int, int, list[int]]:
    """(accepted, next token, why) of a row."""
    length = len(row.tokens)
    if isinstance(policy, BlockVerification) and not row.greedy:
        reach, chances = block_chances(row)
        accepted = max([0, *(i + 1 for i in range(length) if over(chances[i], row.coins[i]))])
        distribution = row.target[accepted]
        if accepted < length and sum(positive(distribution, row.distribution(accepted), reach[accepted])) > 0:
            distribution = positive(distribution, row.distribution(accepted), reach[accepted])
        return accepted, inverse(distribution, row.draw), [Why.MATCH] * accepted + [Why.REJECTED] * (length - accepted)
    why: list[int] = []
    for j in range(length):
        if isinstance(policy, ExactSample) and not row.greedy:
            own = inverse(row.target[j], row.coins[j])
            if own != row.tokens[j]:
                return j, own, why + [Why.REJECTED] * (length - j)
            why.append(Why.MATCH)
            continue
        keep = over(chance(policy, row, j), row.coins[j])
        exact = keep if policy.core.guarantee is Guarantee.LOSSLESS else over(exact_chance(row, j), row.coins[j])
        if not keep and not excused(policy, row, j):
            distribution = correction(policy, row, j)
            if sum(distribution) == 0:
                distribution = row.target[j]
            return j, inverse(distribution, row.draw), why + [Why.REJECTED] * (length - j)
        why.append(Why.MATCH if exact else Why.RELAXED)
    return length, inverse(row.target[length], row.draw), why


TEMPERATURES = st.sampled_from(["zero", "positive", "mixed"])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    temperature=TEMPERATURES,
    stochastic=st.booleans(),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    vocab=st.integers(2, 6),
    lazy=st.booleans(),
)
def test_rule_equals_its_slow_twin(policy, seed, temperature, stochastic, lengths, vocab, lazy):
    rows = random_rows(random.Random(seed), temperature, stochastic, lengths, vocab)
    expected = [twin(policy, row) for row in rows]
    target, draft, noise = tensors(rows, lazy)
    verdict = verify(policy, target, draft, noise)
    for b, (accepted, token, why) in enumerate(expected):
        found = int(verdict.accepted_B[b]), int(verdict.next_token_B[b]), verdict.why_BK[b, : len(why)].tolist()
        assert found == (accepted, token, why), f"{policy}, row {rows[b]}"
        assert not verdict.why_BK[b, len(why) :].any()
        assert not verdict.asked_BK[b, len(why) :].any()


@pytest.mark.parametrize("policy", [p for p in POLICIES if not isinstance(p, BlockVerification)], ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), stochastic=st.booleans(), vocab=st.integers(2, 6))
def test_correction_equals_its_slow_twin(policy, seed, stochastic, vocab):
    """Wherever a token can be rejected, however unlikely: the distribution has mass, and is the formula's."""
    row = random_row(random.Random(seed), vocab, 4, False, stochastic)
    target, draft, _ = tensors([row])
    for j in range(4):
        if chance(policy, row, j) < 1 - 1e-3:
            found, wanted = (
                policy.correction(target, draft, torch.tensor([j]))[0],
                torch.tensor(correction(policy, row, j)),
            )
            assert float(found.sum()) > 0
            assert torch.allclose(found / found.sum(), wanted / wanted.sum(), atol=1e-3)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_row_alone_equals_row_in_padded_batch_and_inputs_stay(policy):
    rng = random.Random(5)
    for temperature, stochastic in itertools.product(["zero", "positive", "mixed"], [False, True]):
        rows = random_rows(rng, temperature, stochastic, [4, 0, 2, 5, 1, 3], 5)
        for junk in (math.nan, 7.0):
            target, draft, noise = tensors(rows, junk=junk)
            given_ = [target.logits_BKV, target.probs_BKV, draft.tokens_BK, noise.accept_BK, noise.sample_B]
            given_ += [] if draft.probs_BKV is None else [draft.probs_BKV]
            before = [tensor.clone() for tensor in given_]
            whole = verify(policy, target, draft, noise)
            chances = policy.accept_probs(target, draft)[draft.mask_BK()]
            assert bool(((chances >= 0) & (chances <= 1)).all())
            for tensor, copy in zip(given_, before):
                assert torch.equal(tensor.nan_to_num(9), copy.nan_to_num(9))
            for b, row in enumerate(rows):
                n = len(row.tokens)
                alone = verify(policy, *tensors([row]))
                assert int(alone.accepted_B) == int(whole.accepted_B[b])
                assert int(alone.next_token_B) == int(whole.next_token_B[b])
                assert torch.equal(alone.why_BK[0], whole.why_BK[b, :n])
                assert torch.equal(alone.asked_BK[0], whole.asked_BK[b, :n])


# ------------------------------------------------------------------------------------------------ exact sums


@dataclass
class Tree:
    """Target and draft distributions by prefix, and for a deterministic draft its token by prefix."""

    vocab: int
    k: int
    target: dict[tuple[int, ...], BatchSampling]
    draft: dict[tuple[int, ...], BatchSampling]
    stochastic: bool

    @staticmethod
    def random(seed: int, k: int, vocab: int, stochastic: bool) -> Tree:
        rng = random.Random(seed)
        prefixes = [p for n in range(k + 1) for p in itertools.product(range(vocab), repeat=n)]
        one = {p: random_row(rng, vocab, 1, False, True) for p in prefixes}
        target = {p: r.target[0] for p, r in one.items()}
        draft = {p: r.distribution(0) if stochastic else one_hot(r.tokens[0], vocab) for p, r in one.items()}
        return Tree(vocab, k, target, draft, stochastic)

    def drafts(self) -> Iterator[tuple[float, Row]]:
        """Every draft and its probability; coins and draw are left open."""
        for tokens in itertools.product(range(self.vocab), repeat=self.k):
            distributions = [self.draft[tokens[:j]] for j in range(self.k)]
            weight = math.prod(distribution[x] for distribution, x in zip(distributions, tokens))
            if weight:
                target = [self.target[tokens[:j]] for j in range(self.k + 1)]
                logits = [[math.log(p) if p else -1e3 for p in distribution] for distribution in target]
                yield (
                    weight,
                    Row(False, logits, target, list(tokens), distributions if self.stochastic else None, [], 0.0),
                )


def steps(policy: AcceptancePolicy, row: Row) -> list[list[float]]:
    """Where the verdict changes along each coin."""
    if isinstance(policy, ExactSample):
        return [list(itertools.accumulate(row.target[j]))[:-1] for j in range(len(row.tokens))]
    if isinstance(policy, BlockVerification):
        return [[h] for h in block_chances(row)[1]]
    return [[chance(policy, row, j)] for j in range(len(row.tokens))]


def following(policy: AcceptancePolicy, row: Row, n: int) -> BatchSampling:
    """The distribution of the token after n accepted ones, where the draw decides it."""
    if n == len(row.tokens) or isinstance(policy, ExactSample):
        return row.target[n]
    if isinstance(policy, BlockVerification):
        distribution = positive(row.target[n], row.distribution(n), block_chances(row)[0][n])
    else:
        distribution = correction(policy, row, n)
    return distribution if sum(distribution) > 1e-9 else row.target[n]


EDGE = 1e-5


def at(row: Row, coins: list[float], draw: float) -> Row:
    return Row(row.greedy, row.logits, row.target, row.tokens, row.draft, coins, draw)


def emissions(policy: AcceptancePolicy, tree: Tree) -> dict[tuple[int, ...], float]:
    """BatchSampling of what one round emits, summed over every draft and every cell of the noise cube.

    The cells come from the twins; that the verdict is the same in two opposite corners of each shows (it is monotone
    along every axis) that it is constant there.
    """
    cells: list[tuple[float, Row, list[tuple[float, float]]]] = []
    for weight, row in tree.drafts():
        edges = [[0.0, *[s for s in sorted(at) if EDGE < s < 1 - EDGE], 1.0] for at in steps(policy, row)]
        for cell in itertools.product(*(list(itertools.pairwise(e)) for e in edges)):
            if all(high - low > 3 * EDGE for low, high in cell):
                cells.append((weight * math.prod(high - low for low, high in cell), row, list(cell)))
    probes = [at(row, [(low + high) / 2 for low, high in cell], 0.5) for _, row, cell in cells]
    accepted = verify(policy, *tensors(probes)).accepted_B.tolist()
    parts: list[tuple[float, Row]] = []
    corners: list[tuple[Row, Row]] = []
    for (volume, row, cell), n in zip(cells, accepted):
        distribution = following(policy, row, n)
        ends = [0.0, *(s / sum(distribution) for s in itertools.accumulate(distribution))]
        for low, high in itertools.pairwise(ends):
            if high - low > 3 * EDGE:
                parts.append((volume * (high - low), row))
                first = at(row, [start + EDGE for start, _ in cell], low + EDGE)
                corners.append((first, at(row, [end - EDGE for _, end in cell], high - EDGE)))
    found = [verify(policy, *tensors([pair[i] for pair in corners])) for i in (0, 1)]
    assert torch.equal(found[0].accepted_B, found[1].accepted_B)
    assert torch.equal(found[0].next_token_B, found[1].next_token_B)
    distribution_: dict[tuple[int, ...], float] = {}
    for (weight, row), n, token in zip(parts, found[0].accepted_B.tolist(), found[0].next_token_B.tolist()):
        emitted = (*row.tokens[:n], token)
        distribution_[emitted] = distribution_.get(emitted, 0.0) + weight
    return distribution_


def completed(emitted: dict[tuple[int, ...], float], tree: Tree) -> dict[tuple[int, ...], float]:
    """BatchSampling of K+1 tokens: those emitted, the rest by the target."""
    distribution: dict[tuple[int, ...], float] = {}
    for string in itertools.product(range(tree.vocab), repeat=tree.k + 1):
        total = 0.0
        for n in range(1, tree.k + 2):
            rest = math.prod(tree.target[string[:j]][string[j]] for j in range(n, tree.k + 1))
            total += emitted.get(string[:n], 0.0) * rest
        distribution[string] = total
    return distribution


LOSSLESS: list[AcceptancePolicy] = [
    *(ExactSample(), BlockVerification(), Thresholds(1, 1), AdditiveSlack(0), Ears(0)),
    *(Cascade("chow", 0), Cactus(0), Mentored(0)),
]


@pytest.mark.parametrize("policy", LOSSLESS, ids=str)
@pytest.mark.parametrize(("k", "vocab"), [(1, 2), (1, 4), (2, 3), (3, 2)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_lossless_by_exact_sum(policy, k, vocab, stochastic):
    for seed in range(3):
        tree = Tree.random(seed, k, vocab, stochastic)
        distribution = completed(emissions(policy, tree), tree)
        for string, found in distribution.items():
            wanted = math.prod(tree.target[string[:j]][string[j]] for j in range(k + 1))
            assert found == pytest.approx(wanted, abs=5e-4), (string, tree)


@pytest.mark.parametrize(("k", "vocab"), [(1, 3), (2, 3), (3, 2)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_block_verification_accepts_no_less_than_token_wise(k, vocab, stochastic):
    gained = False
    for seed in range(4):
        tree = Tree.random(seed, k, vocab, stochastic)
        lengths = [
            sum(weight * len(emitted) for emitted, weight in emissions(policy, tree).items())
            for policy in (BlockVerification(), Exact())
        ]
        assert lengths[0] >= lengths[1] - 1e-3
        gained |= lengths[0] > lengths[1] + 1e-3
    assert gained == (stochastic and k > 1) or not stochastic


def emitted_distribution(
    policy: AcceptancePolicy, target: BatchSampling, draft: BatchSampling, token: int | None = None
) -> BatchSampling:
    """BatchSampling of one emitted token: sum over drafted tokens of keeping and correcting (``token`` is certain if
    given)."""
    vocab = len(target)
    tokens = list(range(vocab)) if token is None else [token]
    n = len(tokens)
    distribution = torch.tensor(target).expand(n, 2, vocab)
    logits = distribution.log().clamp_min(-1e3)
    probs = torch.tensor(draft).expand(n, 1, vocab) if token is None else None
    batch = Draft(torch.tensor(tokens).unsqueeze(1), torch.ones(n, dtype=torch.int64), probs)
    block = Target(logits, distribution)
    keep = policy.accept_probs(block, batch).double()[:, 0]
    fix = policy.correction(block, batch, torch.zeros(n, dtype=torch.int64)).double()
    mass = fix.sum(-1, keepdim=True)
    fix = torch.where(mass > 0, fix / mass.clamp_min(1e-300), distribution[:, 0].double())
    weight = torch.tensor(draft).double() if token is None else torch.ones(1).double()
    total = ((weight * (1 - keep)).unsqueeze(1) * fix).sum(0)
    total[torch.tensor(tokens)] += weight * keep
    return total.tolist()


def apart(measure: str, emitted: BatchSampling, target: BatchSampling) -> float:
    if measure == "tv":
        return sum(abs(a - b) for a, b in zip(emitted, target)) / 2
    return kl([a if a > 1e-9 else 0.0 for a in emitted], target)


BOUNDED = [p for p in POLICIES if p.guarantee is Guarantee.BOUNDED] + [Mentored(0.01), Mentored(4.0), AdditiveSlack(1)]


@pytest.mark.parametrize("policy", BOUNDED, ids=str)
@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 6), certain=st.booleans())
def test_bound_holds_by_exact_sum(policy, seed, vocab, certain):
    row = random_row(random.Random(seed), vocab, 1, False, True)
    distribution = emitted_distribution(policy, row.target[0], row.distribution(0), row.tokens[0] if certain else None)
    assert sum(distribution) == pytest.approx(1, abs=1e-5)
    assert policy.bound is not None
    assert apart(policy.bound.measure, distribution, row.target[0]) <= policy.bound.value + 1e-5


@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 6), budget=st.sampled_from([0.05, 0.2, 1.0]))
def test_mentored_uses_its_budget_and_keeps_most(seed, vocab, budget):
    rng = random.Random(seed)
    target, draft = (softmax([rng.gauss(0, 1.5) for _ in range(vocab)]) for _ in "td")
    distribution = emitted_distribution(Mentored(budget), target, draft)
    assert apart("kl", distribution, target) == pytest.approx(min(budget, kl(draft, target)), abs=1e-4)
    # No other distribution within the budget overlaps more with the draft's: try the best neighbours, pairs that trade
    # mass.
    kept = sum(min(a, q) for a, q in zip(distribution, draft))
    for v, w in itertools.permutations(range(vocab), 2):
        other = list(distribution)
        step = min(1e-3, other[w])
        other[v], other[w] = other[v] + step, other[w] - step
        if kl(other, target) <= budget:
            assert sum(min(a, q) for a, q in zip(other, draft)) <= kept + 1e-4


@pytest.mark.parametrize(("kind", "measure"), [("tv", "tv"), ("kl", "kl")])
@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 5), threshold=st.sampled_from([0.1, 0.3, 0.8]))
def test_fuzzy_stays_within_its_threshold_above_temperature_0(kind, measure, seed, vocab, threshold):
    row = random_row(random.Random(seed), vocab, 1, False, True)
    distribution = emitted_distribution(Fuzzy(kind, threshold), row.target[0], row.distribution(0))
    assert apart(measure, distribution, row.target[0]) <= threshold + 1e-4


def test_cactus_has_no_bound_on_the_emitted_distribution():
    """Unlikely tokens, each raised within the budget, add up: why the rule is declared heuristic."""
    delta, t = 0.5, 1e-5
    gamma = t + math.sqrt(2 * delta * t * (1 - t))
    count = math.ceil(1 / gamma)
    target, draft = [1 - count * t] + [t] * count, [0.0] + [1 / count] * count
    distribution = emitted_distribution(Cactus(delta), target, draft)
    assert distribution == pytest.approx(draft, abs=1e-6)
    assert kl(draft, target) > 10 * delta
    assert Cactus().guarantee is Guarantee.HEURISTIC


# ------------------------------------------------------------------------------------------------ parameters


def variants(policy: AcceptancePolicy) -> Iterator[tuple[AcceptancePolicy, AcceptancePolicy]]:
    """Pairs (accepts no more, accepts no less) by each parameter the rule calls monotone."""
    for name, direction in policy.monotone.items():
        values = {"n": [1, 2, 3, 9], "r": [0.0, 0.5, 2.0, 5.0]}.get(name, [0.05, 0.3, 0.7, 1.0])
        made = [type(policy)(**{**vars(policy), name: value}) for value in values]
        yield from itertools.pairwise(made if direction > 0 else made[::-1])


@pytest.mark.parametrize("policy", [p for p in POLICIES if p.monotone], ids=str)
def test_accept_probs_are_monotone_in_the_parameters_that_say_so(policy):
    rng = random.Random(3)
    for temperature, stochastic in itertools.product(["zero", "positive", "mixed"], [False, True]):
        target, draft, _ = tensors(random_rows(rng, temperature, stochastic, [5, 4, 5, 5, 2], 5))
        for less, more in variants(policy):
            assert bool((less.accept_probs(target, draft) <= more.accept_probs(target, draft) + 1e-6).all())


@pytest.mark.parametrize(("gate", "name"), [(LogMargin, "tau"), (Regret, "nats"), (TopRatio, "theta")])
def test_gates_open_wider_with_their_parameter(gate, name):
    direction = {"tau": 1, "nats": 1, "theta": -1}[name]
    target, draft, noise = tensors(random_rows(random.Random(1), "positive", False, [5] * 20, 4))
    accepted = [verify(Exact() | gate(value), target, draft, noise).accepted_B for value in (0.1, 0.4, 0.8, 1.0)]
    for less, more in itertools.pairwise(accepted[::direction]):
        assert bool((less <= more).all())
    assert not torch.equal(accepted[0], accepted[-1])


def bad(make: Callable[..., Any], *cases: tuple[str, object]) -> list[Any]:
    return [pytest.param(make, name, value, id=f"{make.__name__}-{name}-{value}") for name, value in cases]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        *bad(AdditiveSlack, ("eps", -0.1), ("eps", 1.1), ("eps", math.nan), ("eps", "0.1"), ("eps", True)),
        *bad(Ears, ("beta", -1), ("beta", 2), ("beta", None)),
        *bad(Thresholds, ("threshold_acc", 0), ("threshold_acc", 1.5), ("threshold_single", 0.0)),
        *bad(Typical, ("eps", -1), ("delta", 2.5)),
        *bad(RelaxedTopN, ("n", 0), ("n", 2.5), ("n", math.inf), ("delta", -0.5)),
        *bad(BiLD, ("r", -1.0), ("r", math.inf)),
        *bad(Fuzzy, ("divergence", "chi"), ("threshold", -2)),
        *bad(Cascade, ("rule", "opt"), ("alpha", 3)),
        *bad(Cactus, ("delta", -0.25)),
        *bad(Mentored, ("budget", -0.25), ("budget", math.nan)),
        *bad(LogMargin, ("tau", -0.3)),
        *bad(Regret, ("nats", -1), ("nats", math.inf), ("window", -1), ("window", 1.5)),
        *bad(TopRatio, ("theta", 1.3)),
    ],
)
def test_invalid_parameters_are_named(make, name, value):
    with pytest.raises(ValueError, match=name) as error:
        make(**{name: value})
    assert repr(value) in str(error.value)


def test_catalogue_lists_every_rule_once():
    assert all(issubclass(rule, AcceptancePolicy) for rule in CATALOGUE)
    assert all(issubclass(gate, Condition) for gate in GATES)
    made = [rule() for rule in (*CATALOGUE, *GATES)]
    names = [rule.name for rule in made]
    assert len(set(names)) == len(names)
    for rule in made:
        hash(rule)
        assert str(rule)


@pytest.mark.parametrize("rule", CATALOGUE)
def test_a_bound_is_stated_where_one_is_promised(rule):
    policy = rule()
    assert (policy.bound is not None) == (policy.guarantee is Guarantee.BOUNDED)


def test_thresholds_promise_depends_on_their_values():
    assert Thresholds().guarantee is Guarantee.LOSSLESS
    assert Thresholds(0.9).guarantee is Guarantee.HEURISTIC
    assert Thresholds(1.0, 0.9).guarantee is Guarantee.HEURISTIC


@pytest.mark.parametrize("policy", [ExactSample(), BlockVerification(), Ears(), Cactus(), Mentored()], ids=str)
def test_rules_that_are_exact_at_temperature_0(policy):
    rows = random_rows(random.Random(9), "zero", False, [5, 3, 4, 0], 4)
    exact, found = (verify(rule, *tensors(rows)) for rule in (Exact(), policy))
    assert torch.equal(exact.accepted_B, found.accepted_B)
    assert torch.equal(exact.next_token_B, found.next_token_B)


def test_exact_sample_draws_what_sampling_alone_would(policy=ExactSample()):  # noqa: B008
    """Whatever is drafted, the emitted tokens are those the same coins give without a draft."""
    for row in random_rows(random.Random(2), "positive", False, [4] * 12, 4):
        verdict = verify(policy, *tensors([row]))
        n = int(verdict.accepted_B)
        coins = [*row.coins, row.draw]
        emitted = [*row.tokens[:n], int(verdict.next_token_B)]
        for j, token in enumerate(emitted):
            distribution: Tensor = torch.tensor(row.target[j]).double().cumsum(0)
            assert token == int(
                torch.searchsorted(distribution, torch.tensor(coins[j] * float(distribution[-1])).double(), right=True)
            )
