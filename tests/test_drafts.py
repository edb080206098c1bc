"""Draft strategies against naive twins: what they propose, what distribution they claim, and what they leave behind."""

from __future__ import annotations

import copy
from collections import abc

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fly.cache import OutOfBlocks
from fly.drafts import CascadeDraft, NGramDraft, SingleDraft
from fly.models import Llama
from fly.ops import Stream, derive, draw, uniforms
from fly.policies import Exact, FLy, LossySampling
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling
from fly.types import Draft, SamplingParams
from tests.toys import caches, dense_logits, random_llama, ready, run

VOCAB = 17


def perturbed(model: Llama, noise: float, seed: int = 7) -> Llama:
    """A model that often agrees with ``model``."""
    other, g = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=g)
    return other


SMALL = random_llama(1, VOCAB, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=64)
MEDIUM = perturbed(SMALL, 0.05)
LARGE = perturbed(SMALL, 0.05, seed=8)


def make_row(
    tokens: list[int], temperature: float = 0.0, seed: int = 0, stop: tuple[int, ...] = (), **params: object
) -> Row:
    sampling = SamplingParams(temperature=temperature, stop_token_ids=stop, **params)  # type: ignore[arg-type]
    return Row(list(tokens), 1, sampling, Exact(), seed, 8, frozenset(stop))


def proposals(draft: Draft) -> list[list[int]]:
    return [tokens[:n] for tokens, n in zip(draft.tokens_BK.tolist(), draft.lengths_B.tolist())]


texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


# --- n-gram lookup ---------------------------------------------------------------------------------------


def naive_lookup(tokens: list[int], longest: int, shortest: int, most: int) -> list[int]:
    """Longest n-gram first, then its latest earlier place; what is copied may run on into the copy."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):  # one past the earlier occurrence
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                copied: list[int] = []
                while len(copied) < most:
                    copied.append((tokens + copied)[end + len(copied)])
                return copied
    return []


def test_the_naive_lookup_by_hand() -> None:
    assert naive_lookup([1, 2, 3, 9, 1, 2, 4, 1, 2], 4, 1, 3) == [4, 1, 2]  # latest, not earliest
    assert naive_lookup([1, 2, 3, 2, 5, 1, 2], 4, 1, 2) == [3, 2]  # longest before latest
    assert naive_lookup([5, 7, 7], 4, 1, 4) == [7, 7, 7, 7]  # into itself
    assert naive_lookup([1, 2, 3], 4, 1, 4) == naive_lookup([1], 4, 1, 4) == []
    assert naive_lookup([1, 2, 1], 4, 2, 4) == []


small_texts = st.lists(st.integers(0, 2), max_size=8)
edits = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["extend", "roll back", "commit", "release"]), small_texts),
    max_size=12,
)


@given(edits, st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(0, 12))
def test_ngram_equals_the_naive_lookup_through_any_history(
    history: list[tuple[int, str, list[int]]], a: int, b: int, k: int, most: int
) -> None:
    longest, shortest = max(a, b), min(a, b)
    strategy = NGramDraft(longest, shortest, k)
    rows = [make_row([0]), make_row([1, 1])]
    for number, edit, tokens in history:
        row = rows[number]
        if edit == "extend":
            row.tokens += tokens
        elif edit == "roll back":
            del row.tokens[max(1, len(row.tokens) - len(tokens)) :]
        elif edit == "commit":
            strategy.commit([row])
        else:
            strategy.release(row)
        before = [list(row.tokens) for row in rows]
        draft = strategy.propose(rows, [most, k])
        assert draft.probs_BKV is None
        wanted = [naive_lookup(row.tokens, longest, shortest, min(m, k)) for row, m in zip(rows, (most, k))]
        assert proposals(draft) == wanted
        assert [row.tokens for row in rows] == before
        event(f"found something: {any(wanted)}")
    for row in rows:
        strategy.release(row)
    assert not strategy._indices


# --- draft models ----------------------------------------------------------------------------------------


def greedy(model: Llama, tokens: list[int], most: int, stop: tuple[int, ...] = ()) -> list[int]:
    """Greedy autoregression without any cache, up to and with a stop token."""
    out: list[int] = []
    while len(out) < most and not (out and out[-1] in stop):
        out.append(int(dense_logits(model, tokens + out)[-1].argmax()))
    return out


# name -> a fresh strategy whose last level is LARGE
STRATEGIES = {
    "single": lambda: SingleDraft(run(LARGE), block_size=3),
    "n-gram below": lambda: CascadeDraft([NGramDraft(), SingleDraft(run(LARGE), block_size=4)]),
    "model below": lambda: CascadeDraft([SingleDraft(run(SMALL)), SingleDraft(run(LARGE), block_size=5)]),
    "three levels": lambda: CascadeDraft([NGramDraft(3, k=4), SingleDraft(run(SMALL), k=3), SingleDraft(run(LARGE))]),
    "k of each": lambda: CascadeDraft(
        [SingleDraft(run(SMALL), k=2), SingleDraft(run(MEDIUM), k=4), SingleDraft(run(LARGE))]
    ),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
batches = st.lists(st.tuples(texts, st.integers(0, 9)), min_size=1, max_size=4)
stops = st.sampled_from([(), (3,), (0, 1, 2, 5, 8)])


@every_strategy
@settings(max_examples=15)
@given(batch=batches, stop=stops)
def test_at_temperature_zero_the_last_level_decodes_greedily(
    name: str, batch: list[tuple[list[int], int]], stop: tuple[int, ...]
) -> None:
    strategy = ready(STRATEGIES[name]())
    rows = [make_row(tokens, stop=stop) for tokens, _ in batch]
    draft = strategy.propose(rows, [most for _, most in batch])
    assert draft.probs_BKV is None
    assert proposals(draft) == [greedy(LARGE, tokens, most, stop) for tokens, most in batch]
    assert [row.tokens for row in rows] == [tokens for tokens, _ in batch]
    for row in rows:
        assert row.generated == len(row.tokens) - 1 and not row.provenance and not row.stats.rounds


@every_strategy
@settings(max_examples=15)
@given(
    batch=batches,
    stop=stops,
    temperatures=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=4, max_size=4),
    seed=st.integers(-(2**63), 2**63 - 1),
    top_k=st.sampled_from([0, 4]),
    least=st.sampled_from([0, 60]),
)
def test_the_claimed_distribution_is_the_last_levels_own(
    name: str,
    batch: list[tuple[list[int], int]],
    stop: tuple[int, ...],
    temperatures: list[float],
    seed: int,
    top_k: int,
    least: int,
) -> None:
    strategy = ready(STRATEGIES[name]())
    rows = [
        make_row(tokens, t, seed ^ i, stop, top_k=top_k, min_tokens=least)
        for i, ((tokens, _), t) in enumerate(zip(batch, temperatures))
    ]
    draft = strategy.propose(rows, [most for _, most in batch])
    for b, (row, drafted) in enumerate(zip(rows, proposals(draft))):
        assert len(drafted) <= batch[b][1]
        if row.greedy and not least:
            assert drafted == greedy(LARGE, row.tokens, batch[b][1], stop)
        if row.greedy or not drafted:
            continue
        assert draft.probs_BKV is not None
        logits = dense_logits(LARGE, row.tokens + drafted)[len(row.tokens) - 1 : -1].clone()
        if least:  # more than any draft here reaches
            logits[:, list(stop)] = -torch.inf
        wanted = BatchSampling.of([row.params]).probs(logits.unsqueeze(0))[0]
        claimed = draft.probs_BKV[b, : len(drafted)]
        torch.testing.assert_close(claimed, wanted, atol=2e-4, rtol=1e-3)
        assert (claimed[range(len(drafted)), drafted] > 0).all()
        assert len(drafted) == batch[b][1] or drafted[-1] in stop
        assert not set(drafted[:-1]) & set(stop)


@settings(max_examples=25)
@given(batch=batches, seed=st.integers(0, 2**63 - 1))
def test_a_single_draft_draws_with_its_own_randomness(batch: list[tuple[list[int], int]], seed: int) -> None:
    rows = [make_row(tokens, 1.0, seed ^ b) for b, (tokens, _) in enumerate(batch)]
    draft = ready(SingleDraft(run(LARGE))).propose(rows, [most for _, most in batch])
    for b, (row, drafted) in enumerate(zip(rows, proposals(draft))):
        own = torch.tensor([derive(row.seed, len(row.tokens))])
        for j, token in enumerate(drafted):
            at = torch.tensor([len(row.tokens) + j])
            assert draft.probs_BKV is not None
            uniform = uniforms(own, at, Stream.SAMPLE, 1)[0]
            assert token == int(draw(draft.probs_BKV[b, j].unsqueeze(0), uniform))


rounds = st.lists(st.tuples(st.integers(0, 8), st.integers(0, VOCAB - 1), st.integers(0, 8)), min_size=1, max_size=6)


@every_strategy
@settings(max_examples=12)
@given(
    start=st.lists(texts, min_size=1, max_size=3),
    pattern=rounds,
    temperature=st.sampled_from([0.0, 1.0]),
    skip=st.booleans(),
)
def test_after_any_history_it_proposes_what_a_fresh_one_would(
    name: str, start: list[list[int]], pattern: list[tuple[int, int, int]], temperature: float, skip: bool
) -> None:
    strategy = ready(STRATEGIES[name]())
    rows = [make_row(tokens, temperature, seed=11) for tokens in start]
    for number, (kept, token, most) in enumerate(pattern):
        limits = [0 if skip and (b + number) % 3 == 0 else most for b in range(len(rows))]
        draft = strategy.propose(rows, limits)
        fresh = ready(STRATEGIES[name]()).propose([make_row(row.tokens, temperature, seed=11) for row in rows], limits)
        assert proposals(draft) == proposals(fresh)
        if draft.probs_BKV is not None and fresh.probs_BKV is not None:
            torch.testing.assert_close(draft.probs_BKV, fresh.probs_BKV, atol=2e-4, rtol=1e-3)
        for row, drafted in zip(rows, proposals(draft)):
            row.tokens += [*drafted[:kept], token]
        strategy.commit(rows)
    held = {row.id for row in rows}
    for allocator in caches(strategy):
        assert set(allocator.sequences()) <= held
    for row in rows:
        strategy.release(row)
    assert caches(strategy)
    for allocator in caches(strategy):
        assert allocator.num_free == allocator.num_blocks and not allocator.sequences()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_goes_beyond_a_context(temperature: float) -> None:
    short = random_llama(3, VOCAB, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=12)
    for make in (
        lambda: SingleDraft(run(short)),
        lambda: CascadeDraft([NGramDraft(), SingleDraft(run(short))]),
        lambda: CascadeDraft([SingleDraft(run(SMALL)), SingleDraft(run(short))]),
    ):
        strategy = ready(make())
        assert strategy.context == 12
        rows = [make_row([i % 5 for i in range(n)], temperature) for n in (1, 8, 11, 12, 13, 20)]
        assert strategy.propose(rows, [6] * 6).lengths_B.tolist() == [6, 4, 1, 0, 0, 0]
        strategy.commit(rows)
        assert strategy.propose(rows, [99] * 6).lengths_B.tolist() == [11, 4, 1, 0, 0, 0]


def test_a_lower_level_with_a_shorter_context_leaves_the_rest_to_the_one_above() -> None:
    short = random_llama(3, VOCAB, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=6)
    strategy = ready(CascadeDraft([SingleDraft(run(short)), SingleDraft(run(LARGE))]))
    tokens = [[1, 2], [1, 2, 3, 4, 5], [1] * 9]
    draft = strategy.propose([make_row(t) for t in tokens], [12, 12, 12])
    assert proposals(draft) == [greedy(LARGE, t, 12) for t in tokens]


def test_k_caps_a_level() -> None:
    rows = [make_row([1, 2]), make_row([3])]
    assert ready(SingleDraft(run(LARGE), k=3)).propose(rows, [9, 2]).lengths_B.tolist() == [3, 2]
    assert NGramDraft(k=2).propose([make_row([1, 1, 1])], [9]).lengths_B.tolist() == [2]


@every_strategy
def test_a_full_cache_refuses_and_recovers(name: str) -> None:
    """Rows that do not fit raise OutOfBlocks; once committed, all is as before."""
    small = {
        "single": lambda: SingleDraft(run(LARGE), block_size=3, cache_tokens=24),
        "n-gram below": lambda: CascadeDraft([NGramDraft(), SingleDraft(run(LARGE), cache_tokens=24, block_size=2)]),
        "model below": lambda: CascadeDraft(
            [SingleDraft(run(SMALL), cache_tokens=20, block_size=2), SingleDraft(run(LARGE))]
        ),
        "three levels": lambda: CascadeDraft(
            [NGramDraft(), SingleDraft(run(SMALL), cache_tokens=20, block_size=2), SingleDraft(run(LARGE))]
        ),
        "k of each": lambda: CascadeDraft(
            [SingleDraft(run(SMALL)), SingleDraft(run(MEDIUM), cache_tokens=20, block_size=2), SingleDraft(run(LARGE))]
        ),
    }[name]()
    small = ready(small)
    rows = [make_row([2, 4, 6, 8] * 2), make_row([1, 3, 5, 7] * 2)]
    with pytest.raises(OutOfBlocks):
        small.propose(rows, [12, 12])
    small.commit(rows)
    assert [row.tokens for row in rows] == [[2, 4, 6, 8] * 2, [1, 3, 5, 7] * 2]
    assert proposals(small.propose(rows[:1], [4])) == [greedy(LARGE, rows[0].tokens, 4)]
    for row in rows:
        small.release(row)
    assert all(a.num_free == a.num_blocks and not a.sequences() for a in caches(small))


# --- errors ----------------------------------------------------------------------------------------------


def test_vocabularies_must_agree() -> None:
    other = run(random_llama(0, VOCAB + 1))
    for make in (
        lambda: CascadeDraft([SingleDraft(other), SingleDraft(run(LARGE))]),
        lambda: SingleDraft(run(LARGE), draft=SingleDraft(other)),
    ):
        with pytest.raises(ValueError, match=r"18 .* 17"):
            ready(make())


def test_bad_arguments_are_named() -> None:
    cases: abc.Sequence[tuple[object, str]] = [
        (lambda: SingleDraft(run(LARGE), k=0), "k 0"),
        (lambda: NGramDraft(k=0), "k 0"),
        (lambda: NGramDraft(2, 3), "3 and 2"),
        (lambda: NGramDraft(2, 0), "0 and 2"),
        (lambda: CascadeDraft([]), "at least two levels"),
        (lambda: CascadeDraft([SingleDraft(run(SMALL)), NGramDraft()]), "level 1 .*NGramDraft"),
        (lambda: CascadeDraft([NGramDraft(), SingleDraft(run(LARGE), draft=NGramDraft())]), "already"),
        (lambda: SingleDraft("no-such-model"), "'no-such-model'.*fly-target.*fly-draft"),
    ]
    for make, words in cases:
        with pytest.raises(ValueError, match=words):
            make()  # type: ignore[operator]


def test_one_level_cannot_be_twice_in_a_cascade() -> None:
    level = SingleDraft(run(LARGE))
    with pytest.raises(ValueError, match="twice"):
        CascadeDraft([level, level])
    with pytest.raises(ValueError, match="twice"):
        CascadeDraft([level, SingleDraft(run(SMALL)), level])


@pytest.mark.parametrize("policy", [FLy(), LossySampling(2), Exact() | ~FLy().relaxation])
def test_a_lossy_level_is_refused_above_temperature_zero(policy: Exact) -> None:
    strategy = ready(SingleDraft(run(LARGE), NGramDraft(), policy))
    rows = [make_row([1, 2, 1, 2, 1]), make_row([1, 2, 1, 2, 1], temperature=1.0)]
    with pytest.raises(ValueError, match="temperature 0"):
        strategy.propose(rows, [4, 4])
    assert strategy.propose(rows, [4, 0]).lengths_B.tolist() == [4, 0]
    assert strategy.propose(rows[:1], [4]).lengths_B.tolist() == [4]


def test_a_strategy_drafts_for_one_model() -> None:
    level = SingleDraft("fly-tiny")
    with pytest.raises(ValueError, match="fly-tiny' is not loaded yet"):
        level.propose([make_row([1])], [1])
    attached = ready(level)
    assert attached is level and level.vocab_size == level.runner.executor.config.vocab_size
    with pytest.raises(ValueError, match="already"):
        ready(level)
