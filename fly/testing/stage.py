"""What a draft strategy is tried out on: rows, a target, and the calls in the order in which the engine makes them.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections import abc, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fly.cache import BlockAllocator
from fly.drafts.base import DraftSetup, DraftStrategy, Load
from fly.errors import short
from fly.models import Llama
from fly.ops import first_branch, one_hot
from fly.policies import Exact
from fly.runtime.executor import Executor, Head
from fly.runtime.request import Sequence
from fly.testing.blocks import toy_vocabulary
from fly.testing.report import require
from fly.testing.toys import LoadOnce, make_executor, make_runner, make_setup, toy_target
from fly.types import Draft, SamplingParams

__all__ = ["PARAMS", "DraftKit", "Proposal", "Stage", "compare", "reachable", "split"]

PARAMS = (SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_k=3))
SEEDS = 4000  # at which a draft is drawn to compare it with the distribution it claims
APART = 1e-3  # how far a claimed distribution may be from one that sums to 1, or from that of a fresh strategy
_VOCABULARY = 24  # of the toy target, for a strategy that has none of its own
_ids = itertools.count(10**12)  # of rows: numbers that a strategy holds for no other reason


@dataclass(frozen=True)
class Proposal:
    """One row's share of a draft, without padding, and what was asked for it."""

    row: Sequence
    most: int
    tokens: list[int]
    probs_KV: Tensor | None  # None where the draft is deterministic
    parents: list[int] | None  # None is a chain

    @property
    def asked(self) -> str:
        """The row and what was asked for it, in one line."""
        row, ends = self.row, f", ends {sorted(self.row.stop_ids)}" if self.row.stop_ids else ""
        return f"row {row.tokens}, temperature {row.params.temperature}, seed {row.seed}{ends}, max_len {self.most}"

    @property
    def follows(self) -> list[int]:
        """The number of the token that each token follows, -1 for the row's last, of a chain too."""
        return list(range(-1, len(self.tokens) - 1)) if self.parents is None else self.parents

    def drew(self, j: int) -> bool:
        """Whether token ``j`` was drawn from a distribution of its own. Of a tree that is the first token alone: how
        the others came about, their distributions do not say."""
        return len(self.tokens) > j and self.probs_KV is not None and (self.parents is None or j == 0)

    def cut(self, length: int) -> Proposal:
        """The first tokens of a chain; a tree as it is."""
        probs_KV = None if self.probs_KV is None else self.probs_KV[:length]
        return self if self.parents else dataclasses.replace(self, tokens=self.tokens[:length], probs_KV=probs_KV)


def split(draft: Draft, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> list[Proposal]:
    """A draft row by row."""
    trees = [None] * len(rows) if draft.trees is None else draft.trees
    claims = [None] * len(rows) if draft.probs_BKV is None else draft.probs_BKV.float().cpu().unbind()
    return [
        Proposal(row, most, tokens, None if probs_KV is None else probs_KV[: len(tokens)], tree)
        for row, most, tokens, probs_KV, tree in zip(rows, max_len, draft.chains, claims, trees)
    ]


class Stage:
    """A fresh strategy with a target of its own, called in the order in which the engine calls it."""

    def __init__(self, strategy: DraftStrategy, model: Executor, load: Load) -> None:
        self.setup = make_setup(model, load)
        self.runner, self.positions = self.setup.target, model.config.max_position_embeddings
        self.strategy = self.setup.attach(strategy)
        self.setup.reserve()

    @property
    def allocators(self) -> list[BlockAllocator]:
        """The allocators of the strategy's caches."""
        return [drafter.allocator for drafter in self.setup.drafters]

    def prime(self, rows: abc.Sequence[Sequence]) -> None:
        """Let the target have seen all but the last token of each row, as it has whenever the engine wants a draft."""
        self.runner.commit(rows)
        seen = (dataclasses.replace(row, tokens=row.tokens[:-1]) for row in rows if len(row.tokens) <= self.positions)
        if new := [row for row in seen if self.runner.pending(row)]:
            self.runner.feed(new, [[]] * len(new))

    def draft(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        self.prime(rows)
        draft: object = self.strategy.propose(rows, max_len)
        if not isinstance(draft, Draft):
            raise ValueError(f"{type(self.strategy).__name__} proposed {short(draft)}, not a Draft")
        return draft

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> list[Proposal]:
        return split(self.draft(rows, max_len), rows, max_len)

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft) -> None:
        target, _ = self.runner.score(rows, draft)
        self.strategy.observe(rows, draft, target)

    def round(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int], kept: int, token: int) -> None:
        """Draft, have the target look at it, keep at most ``kept`` tokens of the first path and add ``token``."""
        draft = self.draft(rows, max_len)
        self.observe(rows, draft)
        for p in split(draft, rows, max_len):
            p.row.tokens += [*(p.tokens[node] for node in first_branch(p.follows)[:kept]), token]
        self.commit(rows)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        self.runner.commit(rows)
        self.strategy.commit(rows)

    def release(self, rows: abc.Sequence[Sequence]) -> None:
        for row in rows:
            self.runner.release(row)
            self.strategy.release(row)


@dataclass
class DraftKit:
    """How to make the strategy, and who it drafts for."""

    make: Callable[[], DraftStrategy]
    name: str
    learns: bool
    model: Executor
    load: LoadOnce
    samples: dict[tuple[int, int], list[Proposal]] = field(default_factory=dict)

    @staticmethod
    def of(
        strategy: DraftStrategy | Callable[[], DraftStrategy], learns: bool | None = None, target: object = None
    ) -> DraftKit:
        """The kit for what ``check_draft`` takes."""
        if isinstance(strategy, DraftStrategy):
            given = _copier(strategy)
        else:
            given = strategy
            if not isinstance(given(), DraftStrategy):
                raise ValueError(f"{strategy!r} makes {given()!r}, which is no DraftStrategy")
        first, load = given(), LoadOnce()
        model = make_executor(_target_for(first, load) if target is None else target)
        return DraftKit(given, type(first).__name__, first.learns if learns is None else learns, model, load)

    @property
    def vocab(self) -> int:
        return self.model.config.vocab_size

    def stage(self) -> Stage:
        return Stage(self.make(), self.model, self.load)

    def fresh(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> list[Proposal]:
        """What a fresh strategy proposes."""
        return self.stage().propose(rows, max_len)

    def as_fresh(self, found: list[Proposal], how: str) -> None:
        """Raise ``ConformanceError`` where one that does not learn proposes what a fresh one would not."""
        if not self.learns:
            compare(found, self.fresh([p.row for p in found], [p.most for p in found]), how)

    def row(self, tokens: list[int], params: SamplingParams | float = 0.0, seed: int = 0) -> Sequence:
        """A request that has emitted all of ``tokens`` but the first; a number is a temperature."""
        if not isinstance(params, SamplingParams):
            params = SamplingParams(temperature=params)
        return Sequence(list(tokens), 1, params, Exact(), seed, 8, frozenset(params.stop_token_ids), next(_ids))

    def texts(self, count: int) -> list[list[int]]:
        """Texts of 1 to 13 tokens, short ones first: a few words of the vocabulary, repeated until cut off."""
        rng = random.Random(count)
        motifs = [[rng.randrange(self.vocab) for _ in range(1 + number % 5)] for number in range(count)]
        return [(motif * 13)[: 1 + 12 * number // max(count - 1, 1)] for number, motif in enumerate(motifs)]

    def batches(self) -> Iterator[tuple[list[Sequence], list[int]]]:
        """Rows and how much may be drafted for them, small batches first: greedy ones, sampled ones, both."""
        rng, texts = random.Random(0), self.texts(9)
        for number, size in enumerate((1, 1, 1, 2, 2, 3, 4, 5)):
            picked = [rng.choice(texts) for _ in range(size)]
            rows = [self.row(text, (0.0, 1.0, (0.0, 0.7)[b % 2])[number % 3], b) for b, text in enumerate(picked)]
            yield rows, [rng.choice((1, 2, 5, 8)) for _ in range(size)]

    def drawn(self, params: int, more: int = 0) -> list[Proposal]:
        """Drafts of up to 3 tokens for one text under ``PARAMS[params]``, one for each of ``SEEDS`` seeds.

        ``more`` gives another text, the same with so many tokens after it.
        """
        if (params, more) not in self.samples:
            text = [*self.texts(9)[5], *(token % self.vocab for token in range(3, 3 + more))]
            stage, found = self.stage(), list[Proposal]()
            # As many rows at once as all caches hold.
            room = [a.num_blocks // a.blocks_for(len(text) + 4 + stage.strategy.spare) for a in stage.allocators]
            size = max(1, min([64, *room]))
            for start in range(0, SEEDS, size):
                rows = [self.row(text, PARAMS[params], seed) for seed in range(start, min(start + size, SEEDS))]
                found += stage.propose(rows, [3] * len(rows))
                stage.release(rows)
            self.samples[params, more] = found
        return self.samples[params, more]


class _Trial(DraftSetup):
    """A setup that any vocabulary goes with, to see which one a strategy has."""

    def translate(self, strategy: DraftStrategy) -> DraftStrategy:
        return strategy


def _target_for(strategy: DraftStrategy, load: LoadOnce) -> Llama:
    """A toy target of the vocabulary that a strategy knows, or of the sizes that its draft head is made for."""
    with suppress(ValueError):  # why it cannot draft for this target will be seen with another
        _Trial(make_runner(make_executor(toy_target(_VOCABULARY))), toy_vocabulary(_VOCABULARY), load).attach(strategy)
    head = next((loaded.executor for loaded in load.loaded if isinstance(loaded.executor, Head)), None)
    if head is None:
        return toy_target(strategy.vocab_size or _VOCABULARY)
    options, layers = head.options, head.options.states
    sizes = {"hidden_size": options.target_hidden_size, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = head.config.resized(8 if layers is None else max(*layers, 1), **sizes, head_dim=8)
    return toy_target(config.vocab_size, config)


def _copier(strategy: DraftStrategy) -> Callable[[], DraftStrategy]:
    """A function that copies ``strategy`` and all it holds but the models."""
    shared = {id(found): found for _, found in reachable(strategy) if isinstance(found, (torch.nn.Module, Executor))}
    return lambda: copy.deepcopy(strategy, dict(shared))


def reachable(start: object) -> Iterator[tuple[str, object]]:
    """Everything that ``start`` holds in attributes and containers, keys included, with where it is."""
    pending: list[tuple[str, object]] = [("self", start)]
    seen: set[int] = set()
    while pending:
        where, found = pending.pop()
        yield where, found
        if isinstance(found, (torch.nn.Module, Executor, Tensor, str, int, float, type)) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, dict):
            pending += [(where, part) for pair in found.items() for part in pair]
        elif isinstance(found, (list, tuple, set, frozenset, deque)):
            pending += [(where, part) for part in found]
        else:
            pending += [(f"{where}.{name}", part) for name, part in getattr(found, "__dict__", {}).items()]


def compare(found: abc.Iterable[Proposal], expected: abc.Iterable[Proposal], how: str) -> None:
    """Raise ``ConformanceError`` at the first row whose proposal differs from the one it should be; ``how`` it came."""
    for one, other in zip(found, expected):
        what = "the same tokens by other distributions" if one.tokens == other.tokens else one.tokens
        require(_same(one, other), f"{how} drafts {what}, not {other.tokens}, for {one.asked}")


def _same(one: Proposal, other: Proposal) -> bool:
    """Whether two proposals for a row are the same tokens by the same distributions (at temperature 0: the same
    tokens)."""
    if (one.tokens, one.parents) != (other.tokens, other.parents):
        return False
    a, b = one.probs_KV, other.probs_KV
    if one.row.greedy or not one.tokens or (like := b if a is None else a) is None:
        return True
    certain = one_hot(like, torch.tensor(one.tokens))  # which one of them may be
    return torch.allclose(certain if a is None else a, certain if b is None else b, atol=APART)
