"""The kit of draft strategies passes our own, and refutes planted wrong ones by name of the fault."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fly.cache import BlockAllocator, OutOfBlocks
from fly.drafts import (
    AdaptiveDraft,
    CascadeDraft,
    DraftStrategy,
    NGramDraft,
    SingleDraft,
    SuffixDraft,
    TreeDraft,
)
from fly.drafts.base import DraftSetup, pad, until_end
from fly.ops import Stream, derive, draw, uniforms
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling
from fly.testing import DRAFT_CHECKS, ConformanceError, check_draft, stage
from fly.testing.blocks import toy_vocabulary
from fly.testing.drawn import p_value
from fly.testing.stage import DraftKit
from fly.types import Draft
from fly.vocabulary import Vocabulary
from tests.toys import random_llama, run

VOCAB = 12
MODEL = random_llama(1, VOCAB, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=64)
OTHER = random_llama(2, VOCAB, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=20)


class Pages:
    """A cache of a strategy's own making."""

    executor, bytes_per_token, context = None, 0, 60

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator

    def reserve(self, tokens: int | None = None, block_size: int | None = None) -> None:
        """It has a size."""


class Bigram(DraftStrategy):
    """A right strategy, in steps that the wrong ones below replace: it draws each token by the one before."""

    vocab_size: int | None = VOCAB
    context: int | None = 60

    def __init__(self) -> None:
        self.logits_VV = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
        self.allocator = BlockAllocator(256, 4)
        self.texts: dict[int, list[int]] = {}  # of every row with what was drafted last

    def attach(self, setup: DraftSetup) -> None:
        setup.add(Pages(self.allocator))

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        most = [self.length(row, n) for row, n in zip(rows, max_len)]
        self.book(rows, most)
        texts = [self.text(row) for row in rows]
        drafts: list[list[int]] = [[] for _ in rows]
        distribution = BatchSampling.of([row.params for row in rows])
        claims = []
        for j in range(max(most)):
            raw_BV = self.logits_VV[[text[-1] for text in texts]]
            probs_BV = distribution.probs(raw_BV.unsqueeze(1))[:, 0]
            claims.append(self.claim(probs_BV, raw_BV))
            for b, token in enumerate(draw(self.source(probs_BV), self.noise(rows, j)).tolist()):
                texts[b].append(token)
                if j < most[b] and not (drafts[b] and drafts[b][-1] in self.ends(rows[b])):
                    drafts[b].append(token)
        for row, draft in zip(rows, drafts):
            self.texts[row.id] = [*row.tokens, *draft]
        tokens_BK = torch.tensor([draft + [0] * (len(claims) - len(draft)) for draft in drafts])
        if not claims or all(row.greedy for row in rows):
            claims = []
        probs_BKV = torch.stack(claims, 1) if claims else None
        return Draft(tokens_BK.long().view(len(rows), -1), torch.tensor([len(draft) for draft in drafts]), probs_BKV)

    def commit(self, rows: abc.Sequence[Row]) -> None:
        for row in rows:
            if row.id in self.allocator.sequences():
                self.allocator.resize(row.id, len(row.tokens))

    def release(self, row: Row) -> None:
        self.texts.pop(row.id, None)
        self.allocator.release(row.id)

    def length(self, row: Row, asked: int) -> int:
        assert self.context is not None
        return max(0, min(asked, self.context - len(row.tokens)))

    def book(self, rows: abc.Sequence[Row], most: abc.Sequence[int]) -> None:
        before = {row.id: self.allocator.length(row.id) for row in rows if row.id in self.allocator.sequences()}
        try:
            for row, n in zip(rows, most):
                if n:
                    self.allocator.resize(row.id, len(row.tokens) + n)
        except OutOfBlocks:
            for row in rows:
                self.allocator.resize(row.id, before[row.id]) if row.id in before else self.allocator.release(row.id)
            raise

    def text(self, row: Row) -> list[int]:
        return list(row.tokens)

    def claim(self, probs_BV: Tensor, raw_BV: Tensor) -> Tensor:
        return probs_BV

    def source(self, probs_BV: Tensor) -> Tensor:
        return probs_BV

    def noise(self, rows: abc.Sequence[Row], j: int) -> Tensor:
        seed_B = torch.tensor([derive(row.seed, len(row.tokens)) for row in rows])
        return uniforms(seed_B, torch.full_like(seed_B, j), Stream.SAMPLE, 1).squeeze(1)

    def ends(self, row: Row) -> frozenset[int]:
        return row.stop_ids


class TooLong(Bigram):
    def length(self, row: Row, asked: int) -> int:
        return super().length(row, asked + 1 if asked else 0)


class AlwaysOne(Bigram):
    def length(self, row: Row, asked: int) -> int:
        return super().length(row, max(1, asked))


class OutOfRange(Bigram):
    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        draft = super().propose(rows, max_len)
        return replace(draft, tokens_BK=draft.tokens_BK + 5 * draft.mask_BK())


class BadPadding(Bigram):
    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        draft = super().propose(rows, max_len)
        return replace(draft, tokens_BK=draft.tokens_BK.masked_fill(~draft.mask_BK(), -1))


class Narrow(Bigram):
    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        draft = super().propose(rows, max_len)
        return replace(draft, tokens_BK=draft.tokens_BK.int())


class Homeless(Bigram):
    vocab_size = None


class PastTheEnd(Bigram):
    def ends(self, row: Row) -> frozenset[int]:
        return frozenset()


class Mutating(Bigram):
    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        for row in rows:
            row.stats.drafted += 1
        return super().propose(rows, max_len)


class Renaming(Bigram):
    def commit(self, rows: abc.Sequence[Row]) -> None:
        super().commit(rows)
        for row in rows:
            row.bigram = True  # type: ignore[attr-defined]


class Unprocessed(Bigram):
    """Draws from the processed distribution, and claims the distribution before it."""

    def claim(self, probs_BV: Tensor, raw_BV: Tensor) -> Tensor:
        return raw_BV.softmax(-1)


class AnotherDistribution(Bigram):
    """Draws likely tokens more often than it says."""

    def source(self, probs_BV: Tensor) -> Tensor:
        return probs_BV**1.5


class Improper(Bigram):
    """Claims unnormalised distributions."""

    def claim(self, probs_BV: Tensor, raw_BV: Tensor) -> Tensor:
        return 0.9 * probs_BV


class Excluding(Bigram):
    """Claims a distribution without the token that was drawn."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        draft = super().propose(rows, max_len)
        if draft.probs_BKV is None:
            return draft
        rest = draft.probs_BKV.scatter(2, draft.tokens_BK.unsqueeze(2), 0.0) + 1e-9
        rest = rest.scatter(2, draft.tokens_BK.unsqueeze(2), 0.0)
        return replace(draft, probs_BKV=rest / rest.sum(-1, keepdim=True))


class Unsaid(Bigram):
    """Draws, and claims nothing."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        return replace(super().propose(rows, max_len), probs_BKV=None)


class Fickle(Bigram):
    """How much it drafts depends on the seed."""

    def length(self, row: Row, asked: int) -> int:
        return super().length(row, asked if row.greedy else min(asked, 1 + row.seed % 3))


class SameEveryRound(Bigram):
    def noise(self, rows: abc.Sequence[Row], j: int) -> Tensor:
        seed_B = torch.tensor([derive(row.seed, 0) for row in rows])
        return uniforms(seed_B, torch.full_like(seed_B, j), Stream.SAMPLE, 1).squeeze(1)


class SameEveryToken(Bigram):
    def noise(self, rows: abc.Sequence[Row], j: int) -> Tensor:
        return super().noise(rows, 0)


class TheRowsOwn(Bigram):
    """Draws with the uniforms that the verdict flips its coins with."""

    def noise(self, rows: abc.Sequence[Row], j: int) -> Tensor:
        seed_B, round_B = (torch.tensor([value(row) for row in rows]) for value in (_seed, _position))
        return uniforms(seed_B, round_B, Stream.ACCEPT, j + 1)[:, j]


def _seed(row: Row) -> int:
    return row.seed


def _position(row: Row) -> int:
    return len(row.tokens)


class OwnCoins(Bigram):
    def noise(self, rows: abc.Sequence[Row], j: int) -> Tensor:
        return torch.rand(len(rows))


class ById(Bigram):
    def noise(self, rows: abc.Sequence[Row], j: int) -> Tensor:
        seed_B = torch.tensor([row.id for row in rows])
        return uniforms(seed_B, torch.full_like(seed_B, j), Stream.SAMPLE, 1).squeeze(1)


class Neighbourly(Bigram):
    """Draws for all rows as for the first."""

    def noise(self, rows: abc.Sequence[Row], j: int) -> Tensor:
        return super().noise([rows[0]] * len(rows), j)


class Unforgetting(Bigram):
    """Goes on from what it drafted last."""

    def text(self, row: Row) -> list[int]:
        held = self.texts.get(row.id, [])
        return [*held, *row.tokens[len(held) :]]


class KeepsIds(Bigram):
    def release(self, row: Row) -> None:
        self.allocator.release(row.id)


class KeepsBlocks(Bigram):
    def release(self, row: Row) -> None:
        self.texts.pop(row.id, None)


class ForgetsAll(Bigram):
    """Raises for a row that it never saw."""

    def release(self, row: Row) -> None:
        del self.texts[row.id]
        self.allocator.release(row.id)


class BeyondItsContext(Bigram):
    def length(self, row: Row, asked: int) -> int:
        return asked


class RaisesAtItsContext(Bigram):
    def length(self, row: Row, asked: int) -> int:
        if len(row.tokens) > (self.context or 0):
            raise IndexError("position 60")
        return super().length(row, asked)


class CorruptWhenFull(Bigram):
    def book(self, rows: abc.Sequence[Row], most: abc.Sequence[int]) -> None:
        try:
            super().book(rows, most)
        except OutOfBlocks:
            if self.allocator.num_free:
                self.allocator.resize("scratch", 1)
            raise


class OtherErrorWhenFull(Bigram):
    def book(self, rows: abc.Sequence[Row], most: abc.Sequence[int]) -> None:
        try:
            super().book(rows, most)
        except OutOfBlocks as error:
            raise MemoryError("no room") from error


class Meddling(Bigram):
    """Wipes the target's cache."""

    def attach(self, setup: DraftSetup) -> None:
        super().attach(setup)
        self.target = setup.target

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        self.target.cache.values.zero_()
        return super().propose(rows, max_len)


class Twins(DraftStrategy):
    """A deterministic tree with one token twice under one parent."""

    vocab_size = VOCAB

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        tokens = torch.tensor([[3, 3]] * len(rows))
        lengths = torch.tensor([2 if most else 0 for most in max_len])
        return Draft(tokens, lengths, parents_BK=torch.full_like(tokens, -1))


class Backwards(Twins):
    """A tree whose first token follows its second."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        draft = super().propose(rows, max_len)
        return replace(draft, parents_BK=torch.tensor([[1, -1]] * len(rows)))


OURS: dict[str, Callable[[], DraftStrategy]] = {
    "bigram": Bigram,
    "ngram": NGramDraft,
    "single": lambda: SingleDraft(run(MODEL), block_size=3),
    "cascade": lambda: CascadeDraft([NGramDraft(), SingleDraft(run(OTHER), k=5)]),
    "confidence": lambda: SingleDraft(run(MODEL), confidence=0.15),
    "suffix": SuffixDraft,
    "tree": lambda: TreeDraft(run(MODEL), nodes=7, depth=3, width=2),
    "adaptive": lambda: AdaptiveDraft(SingleDraft(run(MODEL))),
}


@pytest.mark.usefixtures("few_seeds")
@pytest.mark.parametrize("name", OURS)
def test_our_strategies_conform(name: str) -> None:
    report = check_draft(OURS[name])
    assert len(report.findings) == len(DRAFT_CHECKS) and report.passed


PLANTED: list[tuple[type[DraftStrategy], str, str]] = [
    (TooLong, "shapes and ranges", "tokens where at most"),
    (OutOfRange, "shapes and ranges", "0..11"),
    (BadPadding, "shapes and ranges", "padding included"),
    (Narrow, "shapes and ranges", "torch.int32"),
    (Homeless, "shapes and ranges", "states no vocab_size"),
    (Twins, "shapes and ranges", "two siblings"),
    (Backwards, "shapes and ranges", "token 0 has parent 1"),
    (AlwaysOne, "nothing asked nothing drafted", "max_len 0"),
    (PastTheEnd, "nothing after an end", "which ends the row"),
    (Mutating, "rows untouched", "propose changed stats"),
    (Renaming, "rows untouched", "commit changed bigram"),
    (OwnCoins, "no hidden randomness", "asked again"),
    (ById, "no hidden randomness", "under another id"),
    (Neighbourly, "row alone equals row in batch", "batch drafts"),
    (Unforgetting, "rolled back equals fresh", "after ['keep"),
    (KeepsIds, "release frees all", "self.texts still holds the id"),
    (KeepsBlocks, "release frees all", "allocator 0 still holds"),
    (ForgetsAll, "release frees all", "KeyError"),
    (BeyondItsContext, "context limit", "in a context of 60"),
    (RaisesAtItsContext, "context limit", "IndexError: position 60"),
    (CorruptWhenFull, "full caches", "more blocks taken"),
    (OtherErrorWhenFull, "full caches", "MemoryError"),
    (Unprocessed, "claimed distribution", "it claims"),
    (AnotherDistribution, "claimed distribution", "it claims"),
    (Improper, "claimed distribution", "sums to 0.9"),
    (Excluding, "claimed distribution", "its distribution excludes it"),
    (Unsaid, "claimed distribution", "claims no distribution"),
    (Fickle, "claimed distribution", "the seed decides how much"),
    (SameEveryRound, "rounds are independent", "a later round"),
    (SameEveryToken, "rounds are independent", "the same round"),
    (TheRowsOwn, "independent of the verdict", "derive(row.seed"),
    (Meddling, "speculation equals autoregression", "the target"),
]


@pytest.mark.parametrize(("strategy", "fault", "words"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_faults_are_named(strategy: type[DraftStrategy], fault: str, words: str) -> None:
    (the_check,) = [one for one in DRAFT_CHECKS if one.__name__ == f"check_{fault}".replace(" ", "_")]
    with torch.inference_mode(), pytest.raises((ConformanceError, KeyError, MemoryError)) as caught:
        the_check(DraftKit.of(strategy))
    assert words in f"{type(caught.value).__name__}: {caught.value}"


@pytest.fixture
def few_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about distributions."""
    monkeypatch.setattr(stage, "SEEDS", 400)


@pytest.mark.usefixtures("few_seeds")
def test_a_failed_report_is_raised_and_names_the_strategy() -> None:
    with pytest.raises(ConformanceError, match=r"TooLong: FAILS\n  FAIL shapes and ranges"):
        check_draft(TooLong())


@pytest.mark.usefixtures("few_seeds")
def test_a_strategy_that_was_made_is_copied_and_its_model_is_not() -> None:
    strategy = SingleDraft(run(MODEL))
    calls: list[int] = []
    report = check_draft(strategy, advance=lambda: calls.append(1))
    assert report.passed and len(calls) == len(DRAFT_CHECKS)
    assert strategy.model.model is MODEL  # type: ignore[attr-defined]


class Learning(Bigram):
    """Drafts ever longer: what it proposes depends on what it has seen of any row."""

    learns = True

    def __init__(self) -> None:
        super().__init__()
        self.committed = 0

    def commit(self, rows: abc.Sequence[Row]) -> None:
        super().commit(rows)
        self.committed += len(rows)

    def length(self, row: Row, asked: int) -> int:
        return super().length(row, min(asked, 1 + self.committed))


@pytest.mark.usefixtures("few_seeds")
def test_a_strategy_may_learn_if_it_says_so() -> None:
    assert check_draft(Learning).passed
    failed = [f.check for f in check_draft(Learning, learns=False, raises=False).findings if not f.passed]
    assert "rolled back equals fresh" in failed
    assert "what it has learned" in str(check_draft(NGramDraft, learns=True, raises=False))


@pytest.mark.usefixtures("few_seeds")
def test_an_error_of_the_strategy_is_reported_once_with_its_place() -> None:
    class Broken(Bigram):
        def length(self, row: Row, asked: int) -> int:
            raise KeyError("nothing here")

    (detail,) = [finding.detail for finding in check_draft(Broken, raises=False).findings if not finding.passed]
    assert "KeyError" in detail and "test_check_draft.py" in detail and "in length" in detail
    assert detail.endswith("nothing else was checked")


def test_an_invalid_draft_is_reported_once() -> None:
    class Lists(DraftStrategy):
        def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
            return [[1]] * len(rows)  # type: ignore[return-value]  # what is tested

    (finding,) = check_draft(Lists, raises=False).findings
    assert "Lists proposed [[1]" in finding.detail and "not a Draft" in finding.detail


def test_what_makes_no_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="not a DraftStrategy"):
        check_draft(dict)  # type: ignore[arg-type]  # what is tested


def test_the_chance_of_counts() -> None:
    """Against values of the chi-square distribution, and for counts that no distribution allows."""
    fair = torch.full((2,), 50.0).double()
    assert p_value(torch.tensor([60.0, 40.0]).double(), fair) == pytest.approx(0.0455, abs=1e-4)  # square 4, 1 degree
    assert p_value(fair, fair) == pytest.approx(1.0)
    assert p_value(torch.tensor([99.0, 1.0]).double(), torch.tensor([100.0, 0.0]).double()) == 0.0
    assert p_value(torch.tensor([100.0]).double(), torch.tensor([100.0]).double()) == 1.0
    thin = torch.full((1000,), 0.1).double()  # four cells of 25 each once the rare outcomes are counted together
    assert p_value(torch.zeros(1000).double().index_fill_(0, torch.arange(5), 20.0), thin) < 1e-12


@pytest.mark.usefixtures("few_seeds")
def test_every_vocabulary_that_the_kit_shows_has_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever hook hands it over: a strategy may look up there what its ids stand for."""
    made, begin = [], Vocabulary.__init__

    def noted(self: Vocabulary, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        made.append(self)

    class Spelling(DraftStrategy):
        """Copies the row's last token if its text has a letter."""

        def attach(self, setup: DraftSetup) -> None:
            vocabulary = setup.vocabulary
            self.lettered_V = vocabulary.where(str.strip)
            assert len(vocabulary.texts) == len(vocabulary.bytes) == vocabulary.size
            assert 0 <= vocabulary.token_id(" and") < vocabulary.size

        def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
            asked = [
                row.tokens[-1:] * bool(self.lettered_V[row.tokens[-1]]) * bool(most) for row, most in zip(rows, max_len)
            ]
            return pad([until_end(tokens, row) for tokens, row in zip(asked, rows)])

    monkeypatch.setattr(Vocabulary, "__init__", noted)
    toy_vocabulary.cache_clear()
    assert check_draft(Spelling).passed and made
    assert all(vocabulary.texts for vocabulary in made)
