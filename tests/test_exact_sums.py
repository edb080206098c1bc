"""What the catalogue's rules emit, as exact sums over all drafts and all noise."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fly.policies import (
    AcceptancePolicy,
    AdditiveSlack,
    BlockVerification,
    Cactus,
    Cascade,
    Ears,
    Ensemble,
    Exact,
    ExactSample,
    Fuzzy,
    Mentored,
    Near,
    Thresholds,
    verify,
)
from fly.runner.sampling import BatchSampling
from fly.types import Draft, Guarantee, SamplingParams, Target
from tests.rule_twins import (
    POLICIES,
    Distribution,
    Row,
    block_chances,
    chance,
    correction,
    kl,
    one_hot,
    positive,
    random_row,
    softmax,
    tensors,
)


@dataclass
class Tree:
    """Target and draft distributions by prefix, and for a deterministic draft its token by prefix."""

    vocab: int
    k: int
    target: dict[tuple[int, ...], Distribution]
    draft: dict[tuple[int, ...], Distribution]
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


def following(policy: AcceptancePolicy, row: Row, n: int) -> Distribution:
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
    """Distribution of what one round emits, summed over every draft and every cell of the noise cube.

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
    """Distribution of K+1 tokens: those emitted, the rest by the target."""
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
    policy: AcceptancePolicy, target: Distribution, draft: Distribution, token: int | None = None
) -> Distribution:
    """Distribution of one emitted token: sum over drafted tokens of keeping and correcting (``token`` is certain if
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


def apart(measure: str, emitted: Distribution, target: Distribution) -> float:
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


@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 6), weight=st.floats(0, 1))
def test_ensemble_emits_the_mixture(seed, vocab, weight):
    row = random_row(random.Random(seed), vocab, 1, False, True)
    target, draft = row.target[0], row.distribution(0)
    assume(all(p > 0 or q == 0 for p, q in zip(target, draft)))  # no drafted token is excluded
    mixture = [weight * p + (1 - weight) * q for p, q in zip(target, draft)]
    assert emitted_distribution(Ensemble(weight), target, draft) == pytest.approx(mixture, abs=1e-5)


@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 6), share=st.sampled_from([0.1, 0.5, 0.9]))
def test_near_keeps_the_tokens_of_min_p_and_the_drafts_own_mass_on_them(seed, vocab, share):
    row = random_row(random.Random(seed), vocab, 1, False, True)
    target, draft = row.target[0], row.distribution(0)
    assume(all(abs(p - share * max(target)) > 1e-5 for p in target))
    cut = BatchSampling.of([SamplingParams(temperature=1.0, min_p=share)]).probs(torch.tensor([[target]]).log())[0, 0]
    kept = [q if p > 0 else 0.0 for p, q in zip(cut.tolist(), draft)]
    expected = [a + (1 - sum(kept)) * p for a, p in zip(kept, target)]
    assert emitted_distribution(Near(share), target, draft) == pytest.approx(expected, abs=1e-5)


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
