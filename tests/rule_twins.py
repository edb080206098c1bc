"""Slow twins of the catalogue's rules, written from the formulas, and random rows to compare on.

Twins are plain loops over Python floats. A comparison that hangs on less than float32 can tell is dropped.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from hypothesis import assume, currently_in_test_context

from fly.policies import (
    AcceptancePolicy,
    AdditiveSlack,
    BiLD,
    BlockVerification,
    Cactus,
    Cascade,
    Ears,
    Ensemble,
    Exact,
    ExactSample,
    Fuzzy,
    LogMargin,
    Mentored,
    Near,
    Regret,
    Relaxed,
    RelaxedTopN,
    SuffixRegret,
    Thresholds,
    TopRatio,
    Typical,
)
from fly.types import Draft, Guarantee, Noise, Target, Why

Distribution = list[float]
CLOSE = 2e-5  # what float32 sums cannot tell apart

POLICIES: list[AcceptancePolicy] = [
    *(ExactSample(), BlockVerification()),
    *(AdditiveSlack(), AdditiveSlack(0.5), Ears(), Ears(1.0), Ensemble(), Ensemble(0.25)),
    *(Thresholds(), Thresholds(0.6), Thresholds(0.8, 0.4)),
    *(Typical(), Typical(0.3, 0.9), RelaxedTopN(), RelaxedTopN(2, 0.3), BiLD(), BiLD(1.0)),
    *(Near(), Near(0.1)),
    *(Fuzzy(), Fuzzy("kl", 0.5), Fuzzy("tv", 0.3), Fuzzy("tv", 0.7)),
    *(Cascade(), Cascade("chow", 0.4), Cascade("diff", 0.6)),
    *(Cactus(), Cactus(0.01), Mentored(), Mentored(1.0)),
    *(Exact() | LogMargin(), Exact() | LogMargin(1.5), Exact() | TopRatio(), Exact() | TopRatio(0.3)),
    *(Exact() | Regret(), Exact() | Regret(1.5, 0), Exact() | Regret(3.0, 1), Exact() | Regret(8.0, 2)),
    *(Exact() | SuffixRegret(), Exact() | SuffixRegret(1.0), Exact() | SuffixRegret(0.0)),
]


# ------------------------------------------------------------------------------------------------ random blocks


@dataclass
class Row:
    """One row in Python floats: what a formula needs, and nothing else."""

    greedy: bool
    logits: list[Distribution]
    target: list[Distribution]  # processed
    tokens: list[int]
    draft: list[Distribution] | None
    coins: list[float]
    draw: float

    def raw(self, j: int) -> Distribution:
        return softmax(self.logits[j])

    def gate(self, j: int) -> Distribution:
        """The distribution a gate looks at."""
        return self.raw(j) if self.greedy else self.target[j]

    def distribution(self, j: int) -> Distribution:
        """The draft's distribution, one-hot for a deterministic draft."""
        return one_hot(self.tokens[j], len(self.logits[j])) if self.draft is None else self.draft[j]

    def best(self, j: int) -> int:
        return self.logits[j].index(max(self.logits[j]))


def softmax(logits: Distribution) -> Distribution:
    peak = max(logits)
    weights = [math.exp(z - peak) for z in logits]
    return [w / sum(weights) for w in weights]


def one_hot(x: int, vocab: int) -> Distribution:
    return [float(v == x) for v in range(vocab)]


def random_row(rng: random.Random, vocab: int, length: int, greedy: bool, stochastic: bool) -> Row:
    def distribution(logits: Distribution) -> Distribution:
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


def positive(a: Distribution, b: Distribution, scale: float = 1.0) -> Distribution:
    return [max(scale * x - y, 0.0) for x, y in zip(a, b)]


def kl(a: Distribution, b: Distribution) -> float:
    return sum(x * (math.log(x / y) if y else math.inf) for x, y in zip(a, b) if x)


def divergence(kind: str, target: Distribution, draft: Distribution) -> float:
    if kind == "tv":
        return sum(abs(p - q) for p, q in zip(target, draft)) / 2
    if kind == "kl":
        return kl(draft, target)
    middle = [(p + q) / 2 for p, q in zip(target, draft)]
    return (kl(target, middle) + kl(draft, middle)) / 2


def mentored(target: Distribution, draft: Distribution, budget: float) -> tuple[float, float]:
    """alpha and beta by two nested bisections."""
    if budget == 0:
        return 1.0, 1.0

    def held(alpha: float, beta: float) -> Distribution:
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
        case Ensemble(weight=weight):
            exact = exact_chance(row, j)
            return exact if row.greedy else weight * exact + 1 - weight
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
        case Near(share=share):
            return float(own_choice or not over(share * max(gate), gate[x]))
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


def correction(policy: AcceptancePolicy, row: Row, j: int) -> Distribution:
    """The distribution of the correction at j, up to a factor."""
    x, target, draft = row.tokens[j], row.target[j], row.distribution(j)
    if row.greedy:
        return target
    match policy:
        case ExactSample():
            return [p if v != x else 0.0 for v, p in enumerate(target)]
        case Typical() | RelaxedTopN() | Near() | BiLD() | Fuzzy():
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


def inverse(distribution: Distribution, u: float) -> int:
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
        case SuffixRegret(nats=nats):
            return nats > 0 and not over(z[best] - z[x], nats * (len(row.tokens) - j))
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
