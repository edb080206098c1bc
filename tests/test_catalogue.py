"""The catalogue of acceptance rules against slow twins, and its parameters."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
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
    Ensemble,
    Exact,
    ExactSample,
    Fuzzy,
    LogMargin,
    Mentored,
    Near,
    Regret,
    RelaxedTopN,
    SuffixRegret,
    Thresholds,
    TopRatio,
    Typical,
    verify,
)
from fly.policies.registry import CATALOGUE, GATES
from fly.types import Guarantee
from tests.rule_twins import POLICIES, chance, correction, random_row, random_rows, tensors, twin

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


# ------------------------------------------------------------------------------------------------ parameters


def variants(policy: AcceptancePolicy) -> Iterator[tuple[AcceptancePolicy, AcceptancePolicy]]:
    """Pairs (accepts no more, accepts no less) by each parameter the rule calls monotone."""
    for name, direction in policy.monotone.items():
        values = {"n": [1, 2, 3, 9], "r": [0.0, 0.5, 2.0, 5.0]}.get(name, [0.05, 0.3, 0.7, 1.0])
        made = [replace(policy, **{name: value}) for value in values]
        yield from itertools.pairwise(made if direction > 0 else made[::-1])


@pytest.mark.parametrize("policy", [p for p in POLICIES if p.monotone], ids=str)
def test_accept_probs_are_monotone_in_the_parameters_that_say_so(policy):
    rng = random.Random(3)
    for temperature, stochastic in itertools.product(["zero", "positive", "mixed"], [False, True]):
        target, draft, _ = tensors(random_rows(rng, temperature, stochastic, [5, 4, 5, 5, 2], 5))
        for less, more in variants(policy):
            assert bool((less.accept_probs(target, draft) <= more.accept_probs(target, draft) + 1e-6).all())


@pytest.mark.parametrize(
    ("gate", "name"), [(LogMargin, "tau"), (Regret, "nats"), (SuffixRegret, "nats"), (TopRatio, "theta")]
)
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
        *bad(Ensemble, ("weight", -0.1), ("weight", 1.5)),
        *bad(Near, ("share", 2), ("share", math.nan)),
        *bad(SuffixRegret, ("nats", -0.25), ("nats", math.inf)),
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
    assert all(issubclass(rule, AcceptancePolicy) for rule in CATALOGUE.values())
    assert all(issubclass(gate, Condition) for gate in GATES.values())
    made = [rule() for rule in (CATALOGUE | GATES).values()]
    assert [rule.name for rule in made] == [*CATALOGUE, *GATES]
    for rule in made:
        hash(rule)
        assert str(rule)


@pytest.mark.parametrize("rule", CATALOGUE.values())
def test_a_bound_is_stated_where_one_is_promised(rule):
    policy = rule()
    assert (policy.bound is not None) == (policy.guarantee is Guarantee.BOUNDED)


def test_thresholds_promise_depends_on_their_values():
    assert Thresholds().guarantee is Guarantee.LOSSLESS
    assert Thresholds(0.9).guarantee is Guarantee.HEURISTIC
    assert Thresholds(1.0, 0.9).guarantee is Guarantee.HEURISTIC


@pytest.mark.parametrize(
    "policy", [ExactSample(), BlockVerification(), Ears(), Ensemble(0.1), Cactus(), Mentored()], ids=str
)
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
