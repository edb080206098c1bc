"""Unions against what they are made of: distributions joined by hand, choices that never see a draw."""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import fly
from fly.cache import BlockAllocator
from fly.drafts import CascadeDraft, DraftStrategy, NGramDraft, SingleDraft
from fly.drafts.base import DraftSetup, pad
from fly.drafts.suffix import SuffixDraft
from fly.drafts.tree import TreeDraft
from fly.drafts.union import UnionDraft
from fly.policies import AcceptancePolicy, BlockVerification, Exact
from fly.runtime.request import Sequence
from fly.types import Draft, SamplingParams, Target
from tests.test_drafts import perturbed
from tests.toys import caches, dense_logits, random_llama, ready, run

VOCAB = 17
SMALL = random_llama(1, VOCAB, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=64)
MEDIUM = perturbed(SMALL, 0.05)
LARGE = perturbed(SMALL, 0.05, seed=8)


def make_row(tokens: list[int], temperature: float = 0.0, seed: int = 0, stop: tuple[int, ...] = ()) -> Sequence:
    params = SamplingParams(temperature=temperature, stop_token_ids=stop)
    return Sequence(list(tokens), 1, params, Exact(), seed, 8, frozenset(stop))


def proposals(draft: Draft) -> list[list[int]]:
    return [tokens[:n] for tokens, n in zip(draft.tokens_BK.tolist(), draft.lengths_B.tolist())]


class Scripted(DraftStrategy):
    """Proposes what a function of (row, most) says; with ``distribution`` it claims to have drawn it from a uniform
    distribution."""

    def __init__(
        self, says: Callable[[Sequence, int], list[int]], distribution: bool = False, vocab: int | None = None
    ) -> None:
        self.says, self.distribution, self.vocab_size = says, distribution, vocab
        self.heard: list[tuple[str, object]] = []

    def attach(self, setup: DraftSetup) -> None:
        self.heard.append(("attach", setup.target))

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        self.heard.append(("propose", [(row.id, list(row.tokens), n) for row, n in zip(rows, max_len)]))
        draft = pad([self.says(row, n)[:n] for row, n in zip(rows, max_len)])
        if self.distribution and not all(row.greedy for row in rows):
            return Draft(draft.tokens_BK, draft.lengths_B, torch.full((*draft.tokens_BK.shape, VOCAB), 1 / VOCAB))
        return draft

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        self.heard.append(("observe", target))

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        self.heard.append(("commit", [row.id for row in rows]))

    def release(self, row: Sequence) -> None:
        self.heard.append(("release", row.id))

    def asked(self) -> list[tuple[int, list[int], int]]:
        """(row, its tokens, at most) of every proposal so far."""
        return [ask for what, asks in self.heard if what == "propose" for ask in asks]  # type: ignore[attr-defined]


def constant(*tokens: int) -> Callable[[Sequence, int], list[int]]:
    return lambda row, most: list(tokens)


texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
batches = st.lists(st.tuples(texts, st.integers(0, 12)), min_size=1, max_size=4)
stops = st.sampled_from([(), (3,), (0, 1, 2, 5, 8)])
temperatures = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=4, max_size=4)

STRATEGIES: dict[str, Callable[[], DraftStrategy]] = {
    "union of lookups and a model": lambda: UnionDraft(
        [NGramDraft(), SuffixDraft(offset=2, shared_tokens=0), SingleDraft(run(LARGE))]
    ),
    "union of two models": lambda: UnionDraft([SingleDraft(run(SMALL)), SingleDraft(run(LARGE), block_size=3)]),
    "union below a model": lambda: CascadeDraft(
        [UnionDraft([NGramDraft(), SingleDraft(run(SMALL))]), SingleDraft(run(LARGE))]
    ),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def naive_expected(acceptance: float, average_length: float, length: float) -> float:
    """Accepted tokens of a proposal, by the geometric sum."""
    length = min(length, average_length)
    return length if acceptance == 1 else acceptance * (1 - acceptance**length) / (1 - acceptance)


class NaiveAverage:
    """Token by token, proposal by proposal."""

    def __init__(self, rate: float, prior: float) -> None:
        self.rate, self.acceptance, self.length = rate, prior, float("inf")

    def update(self, proposed: list[int], asked: int, emitted: list[int]) -> None:
        for ours, theirs in zip(proposed, emitted):
            self.acceptance += self.rate * ((ours == theirs) - self.acceptance)
            if ours != theirs:
                break
        length = max(len(proposed), 0.5)  # nothing found is no reason never to ask again
        if len(proposed) < asked or length > self.length:
            old = self.length
            self.length = length if old == float("inf") else old + self.rate * (length - old)


scripts = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=3)


@settings(max_examples=200)
@given(
    rounds=st.lists(
        st.tuples(scripts, st.lists(st.integers(0, 2), max_size=4), st.integers(0, 5)), min_size=1, max_size=8
    ),
    members=st.integers(1, 3),
    rate=st.sampled_from([0.1, 0.5, 1.0]),
    prior=st.sampled_from([0.3, 0.9, 1.0]),
)
def test_deterministic_proposals_are_compared_as_by_hand(
    rounds: list[tuple[list[list[int]], list[int], int]], members: int, rate: float, prior: float
) -> None:
    script: list[list[int]] = []
    spies = [Scripted(lambda row, most, i=i: script[i % len(script)]) for i in range(members)]  # type: ignore[misc]
    union = UnionDraft(spies, rate, prior)
    row, overall = make_row([0]), [NaiveAverage(rate, prior) for _ in spies]
    own = [NaiveAverage(rate, prior) for _ in spies]
    for said, emitted, most in rounds:
        script = said
        asked_before = [len(spy.asked()) for spy in spies]
        [drafted] = proposals(union.propose([row], [most]))
        offer, best, proposed = 0.0, list[int](), dict[int, list[int]]()
        for i, average in enumerate(own):
            called = most > 0 and naive_expected(average.acceptance, average.length, most) > offer + 1e-12
            borderline = abs(naive_expected(average.acceptance, average.length, most) - offer) < 1e-9
            if not borderline:
                assert (len(spies[i].asked()) > asked_before[i]) == called
            if len(spies[i].asked()) > asked_before[i]:
                proposed[i] = said[i % len(said)][:most]
                worth = naive_expected(average.acceptance, float("inf"), len(proposed[i]))
                if worth > offer + 1e-12:
                    offer, best = worth, proposed[i]
        assert drafted == best
        row.tokens += emitted
        union.commit([row])
        if emitted:
            for averages in (own, overall):
                for i, tokens in proposed.items():
                    averages[i].update(tokens, most, emitted)
        for averages, kept in ((own, union._averages.get(row.id, [])), (overall, union._overall)):
            for average, ours in zip(averages, kept):
                assert ours.acceptance == pytest.approx(average.acceptance)
                assert ours.length == pytest.approx(average.length)
    other = make_row([1])
    union.propose([other], [1])
    assert union._averages[other.id] == union._overall  # where a new row starts
    for gone in (row, other):
        union.release(gone)
    assert not union._averages and not union._rounds


def test_a_dear_strategy_is_not_asked_where_a_cheap_one_offers_enough() -> None:
    cheap, dear = Scripted(lambda row, most: [7] * most if row.tokens[0] == 7 else []), Scripted(constant(7, 7, 7))
    union = UnionDraft([cheap, dear])
    repeats, other = make_row([7]), make_row([1])
    for _ in range(12):
        drafted = proposals(union.propose([repeats, other], [4, 4]))
        assert drafted == [[7] * 4, [7] * 3]
        repeats.tokens += [*drafted[0], 7]
        other.tokens.append(2)
        union.commit([repeats, other])
    assert all(id_ == other.id for id_, _, _ in dear.asked())
    assert len(dear.asked()) == 12
    assert union._averages[repeats.id][0].acceptance > 0.99
    assert union._averages[other.id][1].acceptance < 0.3
    assert union._overall[1] == union._averages[other.id][1]


def test_what_was_not_used_is_measured_too() -> None:
    worse, better = Scripted(constant(1)), Scripted(constant(2, 3, 4))
    union = UnionDraft([worse, better])
    row = make_row([0])
    assert proposals(union.propose([row], [3])) == [[2, 3, 4]]
    row.tokens += [1, 9]
    union.commit([row])
    first, second = union._averages[row.id]
    assert first.acceptance > 0.9 > second.acceptance
    union.propose([row], [3])
    union.commit([row])  # a round that was given up says nothing
    assert union._averages[row.id] == [first, second]


@settings(max_examples=150)
@given(
    rounds=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), max_size=4),  # what a lookup says
            st.integers(0, 5),
            st.lists(st.integers(0, 2), min_size=1, max_size=4),  # what is emitted
        ),
        min_size=1,
        max_size=8,
    ),
    draws=st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=2, max_size=2),
    number=st.integers(0, 7),
    order=st.permutations([0, 1, 2]),
)
def test_a_choice_never_depends_on_what_was_drawn(
    rounds: list[tuple[list[int], int, list[int]]], draws: list[list[int]], number: int, order: list[int]
) -> None:
    """Two histories that differ in the draws of one round alone: that round asks the same and uses the same."""
    seen = []
    for drawn in draws:
        said: list[int] = []
        at = 0

        def tokens(row: Sequence, most: int, of: int = 0) -> list[int]:
            return [(token + of) % 3 for token in (drawn if at == number else [1] * 5)]  # noqa: B023

        lookup = Scripted(lambda row, most: said)  # noqa: B023
        one, two = (
            Scripted(tokens, distribution=True),
            Scripted(lambda row, most: tokens(row, most, 1)[:2], distribution=True),
        )
        everyone = [lookup, one, two]
        union = UnionDraft([everyone[i] for i in order], rate=0.5)
        row = make_row([0], temperature=1.0)
        for at, (said, most, emitted) in enumerate(rounds):
            before = [len(spy.asked()) for spy in everyone]
            draft = union.propose([row], [most])
            called = [len(spy.asked()) > n for spy, n in zip(everyone, before)]
            [drafted] = proposals(draft)
            assert called[1] + called[2] <= 1  # what is drawn stands, so at most one draws
            if called[1] or called[2]:
                assert draft.probs_BKV is not None
                assert drafted == (tokens(row, most)[:most] if called[1] else tokens(row, most, 1)[:2][:most])
            elif called[0]:
                assert drafted == said[:most] and draft.probs_BKV is None
            if at == number:
                seen.append((called, len(drafted), draft.probs_BKV is None))
                break
            row.tokens += emitted
            union.commit([row])
    assert seen[1:] == seen[:-1]
    event(f"something drawn: {any(any(called[1:]) for called, _, _ in seen)}")


def test_of_two_that_draw_the_one_expected_to_offer_more_is_asked() -> None:
    cheap, dear = Scripted(constant(1, 1, 1), distribution=True), Scripted(constant(2, 2, 2), distribution=True)
    union = UnionDraft([cheap, dear])
    row = make_row([0], temperature=1.0)
    for _ in range(8):
        union.propose([row], [3])
        row.tokens += [2, 2, 2]
        union.commit([row])
    assert len(cheap.asked()) == 1  # all it takes to learn that it is the worse one
    assert len(dear.asked()) == 7
    assert union.propose([make_row([0], temperature=1.0)], [3]).tokens_BK.tolist() == [[2, 2, 2]]


@settings(max_examples=25)
@given(batch=batches, heat=temperatures, seed=st.integers(0, 2**63 - 1))
def test_a_union_hands_on_the_distribution_of_what_it_chose(
    batch: list[tuple[list[int], int]], heat: list[float], seed: int
) -> None:
    union = ready(UnionDraft([NGramDraft(k=2), SingleDraft(run(LARGE))]))
    rows = [make_row(tokens, t, seed ^ b) for b, ((tokens, _), t) in enumerate(zip(batch, heat))]
    limits = [most for _, most in batch]
    draft = union.propose(rows, limits)
    lookups = proposals(NGramDraft(k=2).propose([make_row(row.tokens) for row in rows], limits))
    alone = [
        ready(SingleDraft(run(LARGE))).propose([make_row(row.tokens, t, row.seed)], [n])
        for row, t, n in zip(rows, heat, limits)
    ]
    for b, drafted in enumerate(proposals(draft)):
        # At first a model is expected to fill what is asked, and a lookup offers what it found.
        used_lookup = len(lookups[b]) == min(2, limits[b]) == limits[b] and limits[b] > 0
        [by_model] = proposals(alone[b])
        assert drafted == (lookups[b] if used_lookup else by_model)
        if drafted and not rows[b].greedy and not used_lookup:
            distribution = alone[b].probs_BKV
            assert draft.probs_BKV is not None and distribution is not None
            torch.testing.assert_close(draft.probs_BKV[b, : len(drafted)], distribution[0], atol=2e-4, rtol=1e-3)
        elif drafted and draft.probs_BKV is not None:
            assert torch.equal(draft.probs_BKV[b, : len(drafted)], torch.eye(VOCAB)[drafted])


def nothing_is_held(strategy: DraftStrategy) -> None:
    for allocator in caches(strategy):
        assert allocator.num_free == allocator.num_blocks and not allocator.sequences()
    members = [strategy.draft] if isinstance(strategy, CascadeDraft) else getattr(strategy, "members", [])
    for member in members:
        nothing_is_held(member)
    for held in ("_averages", "_rounds", "_own", "_indices"):
        assert not getattr(strategy, held, None)


@every_strategy
@settings(max_examples=10)
@given(
    prompts=st.lists(texts, min_size=1, max_size=4),
    most=st.integers(1, 30),
    k=st.integers(1, 12),
    stop=stops,
    heat=st.sampled_from([0.0, 1.0]),
)
def test_greedy_output_is_that_of_no_draft_and_nothing_stays(
    name: str, prompts: list[list[int]], most: int, k: int, stop: tuple[int, ...], heat: float
) -> None:
    """The last row is sampled at times, so that batches are mixed."""
    strategy = STRATEGIES[name]()
    llm = fly.LLM(perturbed(SMALL, 0.05, seed=9), draft=strategy, policy=Exact())
    params = [SamplingParams(temperature=0.0, max_tokens=most, stop_token_ids=stop) for _ in prompts]
    if len(prompts) > 1:
        params[-1] = params[-1].model_copy(update={"temperature": heat})
    exact = [b for b, p in enumerate(params) if p.temperature == 0]
    wanted = llm.generate(prompts, params, k=0)
    for _ in range(2):
        outs = llm.generate(prompts, params, k=k)
        assert [outs[b].token_ids for b in exact] == [wanted[b].token_ids for b in exact]
    nothing_is_held(strategy)


TINY = random_llama(4, 5, hidden=8, heads=2, kv_heads=1, layers=1, max_positions=16)


@pytest.mark.parametrize("policy", [Exact(), BlockVerification()])
def test_a_sampled_text_has_the_targets_distribution(policy: AcceptancePolicy) -> None:
    """Frequencies of four sampled tokens against their exact distribution."""
    n, prompt = 800, [1, 2, 1]
    strategy = UnionDraft([NGramDraft(k=2), SingleDraft(run(perturbed(TINY, 0.3)))], rate=0.5)
    llm = fly.LLM(TINY, draft=strategy, policy=policy, k=4, cache_tokens=16 * n)
    for member in strategy.members:
        if isinstance(member, SingleDraft):  # room for all rows at once
            member.runner.cache = fly.cache.PagedKVCache.for_model(member.runner.executor, 16 * n, 16)
    outs = llm.generate([prompt] * n, [SamplingParams(temperature=1.0, max_tokens=4, seed=s) for s in range(n)])
    counts = Counter(tuple(out.token_ids) for out in outs)
    assert sum(out.stats.accepted for out in outs) > n / 2
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        distribution = {
            (*text, token): p * float(q)
            for text, p in distribution.items()
            for token, q in enumerate(dense_logits(TINY, [*prompt, *text])[-1].softmax(-1))
        }
    likely = {text for text, p in distribution.items() if p * n >= 5}
    terms = [(counts[text] - distribution[text] * n) ** 2 / (distribution[text] * n) for text in likely]
    rest = n * (1 - sum(distribution[text] for text in likely))
    terms.append((n - sum(counts[text] for text in likely) - rest) ** 2 / rest)
    freedom = len(terms) - 1
    assert sum(terms) < freedom + 4 * (2 * freedom) ** 0.5  # chi-square, four deviations


def test_members_hear_of_everything() -> None:
    one, two = Scripted(constant(1)), Scripted(constant(2, 3), vocab=VOCAB)
    strategy = UnionDraft([one, two])
    assert strategy.vocab_size == VOCAB and strategy.context is None
    llm = fly.LLM(SMALL, draft=strategy, policy=Exact())
    llm.generate([[1, 2], [3]], SamplingParams(temperature=0.0, max_tokens=6))
    for spy in (one, two):
        assert spy.heard[0] == ("attach", llm.engine.runner)
        for what in ("propose", "observe", "commit"):
            assert what in {name for name, _ in spy.heard}
        assert [what for what, _ in spy.heard].count("release") == 2
    models = SingleDraft(run(SMALL)), SingleDraft(run(random_llama(3, VOCAB, max_positions=12)))
    both = ready(UnionDraft(models))
    assert both.context == 64
    allocators: list[BlockAllocator] = [model.runner.cache.allocator for model in models]
    assert caches(both) == allocators


def test_bad_arguments_are_named() -> None:
    model, other = SingleDraft(run(SMALL)), SingleDraft(run(random_llama(0, VOCAB + 1)))
    cases: abc.Sequence[tuple[object, str]] = [
        (lambda: UnionDraft([]), "UnionDraft needs at least one"),
        (lambda: UnionDraft([model, NGramDraft(), model]), "twice"),
        (lambda: ready(UnionDraft([model, NGramDraft(), other])), "18 .* 17, and neither has a tokenizer"),
        (lambda: UnionDraft([model], rate=0.0), "rate 0.0"),
        (lambda: UnionDraft([model], prior=1.1), "prior 1.1"),
    ]
    for make, words in cases:
        with pytest.raises(ValueError, match=words):
            make()  # type: ignore[operator]


def test_trees_are_refused() -> None:
    class Tree(Scripted):
        def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
            chain = super().propose(rows, max_len)
            return Draft(chain.tokens_BK, chain.lengths_B, None, torch.full_like(chain.tokens_BK, -1))

    with pytest.raises(ValueError, match="Tree proposed a tree"):
        UnionDraft([Tree(constant(1, 2))]).propose([make_row([1])], [2])


def test_strategies_that_say_they_draw_trees_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="TreeDraft proposes trees"):
        UnionDraft([NGramDraft(), TreeDraft("fly-draft")])


def test_a_member_that_found_nothing_at_first_is_asked_again() -> None:
    text = [1, 2, 3, 4]
    union, row = UnionDraft([NGramDraft()]), make_row(text)
    for token in (5, 6, 7, 1, 2, 3):  # new words first, then a repetition
        drafted = proposals(union.propose([row], [4]))[0]
        row.tokens.append(token)
        union.commit([row])
    assert drafted == [3, 4, 5, 6]
