"""``benchmarks/sampled.py``: its expectations are those of all drafts and all coins."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from benchmarks.sampled import CONTROL, Sampled, cut_all, load, outcome, record, save, truncated
from fly.drafts import SingleDraft
from fly.policies import AdditiveSlack, Ensemble, Exact, LogMargin, Near, Typical
from fly.runner.sampling import BatchSampling
from fly.types import SamplingParams
from tests.rule_twins import softmax


def every_draft(seed: int, vocab: int, k: int) -> tuple[Sampled, torch.Tensor]:
    """A block for each draft of k tokens, and the chance of each; distributions depend on the place alone."""
    rng = random.Random(seed)
    target, draft = (
        torch.tensor([softmax([rng.gauss(0, 1.5) for _ in range(vocab)]) for _ in range(n)]) for n in (k + 1, k)
    )
    token = torch.tensor(list(itertools.product(range(vocab), repeat=k)))
    chance = torch.stack([draft[j][token[:, j]] for j in range(k)]).prod(0)
    n = len(token)
    zeros = torch.zeros(n, dtype=torch.int64)
    many = target.expand(n, -1, -1), draft.expand(n, -1, -1)
    return Sampled(0.7, zeros, zeros, torch.full((n,), k), token, *many), chance


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 3), st.sampled_from([0.0, 0.3, 0.6]))
def test_a_truncated_pair_is_judged_as_if_its_drafts_had_been_drawn(
    seed: int, vocab: int, k: int, reach: float
) -> None:
    blocks, chance = every_draft(seed, vocab, k)
    for cut in ({"top_p": 0.7}, {"min_p": 0.4}):
        params = BatchSampling.of([SamplingParams(temperature=1.0, **cut)])
        target, draft = (cut_all(params, probs) for probs in (blocks.target, blocks.draft))
        drawn = torch.stack([draft[:, j].gather(1, blocks.token[:, j : j + 1])[:, 0] for j in range(k)]).prod(0)
        ours = truncated(blocks, reach, **cut)
        wanted = outcome(
            Sampled(0.7, blocks.problem, blocks.start, blocks.length, blocks.token, target, draft), Exact(), reach
        )
        assert float((chance * ours.emitted).sum()) == pytest.approx(float((drawn * wanted.emitted).sum()), abs=1e-4)
        assert float((chance * ours.drafted).sum()) == pytest.approx(float((drawn * wanted.drafted).sum()), abs=1e-4)
    nothing, plain = truncated(blocks, reach), outcome(blocks, Exact(), reach)
    for ours_N, plain_N in zip(nothing, plain):
        assert torch.allclose(ours_N, plain_N, atol=1e-4)
    assert float(plain.tv.max()) < 1e-5 and float(plain.surprise.abs().max()) < 1e-4


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_costs_are_those_of_the_emitted_distribution(seed: int, vocab: int) -> None:
    """One drafted token: what a rule emits, token by token, in Python."""
    blocks, chance = every_draft(seed, vocab, 1)
    target, draft = blocks.target[0, 0].tolist(), blocks.draft[0, 0].tolist()
    for policy in (AdditiveSlack(0.3), Ensemble(0.6), Near(0.5), Typical(0.3, 0.9)):
        keep = policy.chances(
            fly.types.Target(blocks.target.log(), blocks.target),
            fly.types.Draft(blocks.token, blocks.length, blocks.draft),
        )[:, 0].tolist()
        rest = target if isinstance(policy, (Near, Typical)) else [max(p - q, 0.0) for p, q in zip(target, draft)]
        lost = sum(q * (1 - a) for q, a in zip(draft, keep))
        emitted = [q * a + lost * r / max(sum(rest), 1e-30) for q, a, r in zip(draft, keep, rest)]
        found = outcome(blocks, policy)
        tv, surprise = (float((chance * column).sum()) for column in (found.tv, found.surprise))
        assert tv == pytest.approx(sum(abs(e - p) for e, p in zip(emitted, target)) / 2, abs=1e-4)
        logs = torch.tensor(target).log().tolist()
        assert surprise == pytest.approx(sum((p - e) * log for e, p, log in zip(emitted, target, logs)), abs=1e-3)


def test_coins_agree_with_the_exact_sum() -> None:
    """A margin as a condition, by coins, and as a rule of its own: the exact chance, or 1 where the margin holds."""

    class Loose(Exact):
        def accept_probs(self, target, draft):  # type: ignore[no-untyped-def]
            block = fly.policies.Block(target, draft, torch.zeros(draft.shape, dtype=torch.bool))
            return super().accept_probs(target, draft).masked_fill(LogMargin(1.2).holds(block), 1.0)

    blocks, chance = every_draft(5, 4, 2)
    by_coins, exact = outcome(blocks, Exact() | LogMargin(1.2), copies=4000), outcome(blocks, Loose())
    assert float((chance * exact.tv).sum()) > 0.02
    for ours_N, exact_N in zip(by_coins, exact):
        assert float((chance * ours_N).sum()) == pytest.approx(float((chance * exact_N).sum()), abs=0.02)


def test_recorded_blocks_are_distributions_and_come_back_from_a_file(tmp_path: Path) -> None:
    llm = fly.LLM("fly-target", SingleDraft("fly-draft"))
    found = record(llm, [llm.chat_prompt("Reverse the list 4 9 5 7 1 2.")], 7, 0.7, 60)
    assert len(found.token) > 1 and found.token.shape[1] == 7 and int(found.token.min()) >= CONTROL
    for probs in (found.target, found.draft):
        assert torch.allclose(probs.sum(-1), torch.ones(probs.shape[:-1]), atol=1e-4)
    own = found.draft.gather(-1, found.token.unsqueeze(-1))
    assert bool((own > 0).all())  # a drafted token was possible
    save(tmp_path / "blocks.safetensors", {"one": found})
    again = load(tmp_path / "blocks.safetensors")["one"]
    assert (
        again.temperature == 0.7 and torch.equal(again.target, found.target) and torch.equal(again.start, found.start)
    )
