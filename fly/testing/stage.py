"""What a draft strategy is tested with: rows, a target, and calls in the engine's order.

Shape legend: B rows, K longest draft, V vocabulary.
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
from fly.drafts.base import DraftSetup, DraftStrategy, LoadModel
from fly.errors import shorten
from fly.models import Llama
from fly.ops import first_branch, one_hot
from fly.policies import Exact
from fly.runner.executor import Executor, Head
from fly.runner.request import Row
from fly.testing.blocks import toy_vocabulary
from fly.testing.report import require
from fly.testing.setups import LoadOnce, make_runner, make_setup
from fly.testing.toys import make_executor, toy_target
from fly.types import Draft, SamplingParams

__all__ = ["PARAMS", "DraftKit", "Proposal", "Stage", "compare", "reachable", "split"]

PARAMS = (SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_k=3))
SEEDS = 4000  # how many drafts are drawn to test a claimed distribution
TOGETHER = 250  # for how many rows at once
APART = 1e-3  # how far a claimed distribution's sum may be from 1, and two strategies' distributions from each other
_VOCABULARY = 24  # the size of the toy target's vocabulary, for a strategy without one of its own
_ids = itertools.count(10**12)  # ids of rows, so large that a strategy has no other reason to hold such numbers


@dataclass(frozen=True)
class Proposal:
    """The draft of one row, without padding. ``most`` is the number of tokens that it may have."""

    row: Row
    most: int
    tokens: list[int]
    probs_KV: Tensor | None  # None if the draft is deterministic
    parents: list[int] | None  # None for a chain

    @property
    def asked(self) -> str:
        """The row and what was asked for it, as one line."""
        row, ends = self.row, f", ends {sorted(self.row.stop_ids)}" if self.row.stop_ids else ""
        return f"row {row.tokens}, temperature {row.params.temperature}, seed {row.seed}{ends}, max_len {self.most}"

    @property
    def follows(self) -> list[int]:
        """The index of each token's parent, or -1 for the row's last token. A chain has these indices too."""
        return list(range(-1, len(self.tokens) - 1)) if self.parents is None else self.parents

    def drew(self, j: int) -> bool:
        """Return whether token ``j`` was drawn from its own claimed distribution. In a tree this is known for the first
        token only, since the claimed distributions do not say how siblings were drawn."""
        return len(self.tokens) > j and self.probs_KV is not None and (self.parents is None or j == 0)

    def cut(self, length: int) -> Proposal:
        """Return the first tokens of a chain; a tree stays whole."""
        probs_KV = None if self.probs_KV is None else self.probs_KV[:length]
        return self if self.parents else dataclasses.replace(self, tokens=self.tokens[:length], probs_KV=probs_KV)


def split(draft: Draft, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> list[Proposal]:
    """Split a draft into proposals for single rows."""
    trees = [None] * len(rows) if draft.trees is None else draft.trees
    claims = [None] * len(rows) if draft.probs_BKV is None else draft.probs_BKV.float().cpu().unbind()
    return [
        Proposal(row, most, tokens, None if probs_KV is None else probs_KV[: len(tokens)], tree)
        for row, most, tokens, probs_KV, tree in zip(rows, max_len, draft.chains, claims, trees)
    ]


class Stage:
    """A fresh strategy with its own target, called in the engine's order. A cache whose size the strategy does not
    set holds ``tokens`` tokens; None: one context."""

    def __init__(self, strategy: DraftStrategy, model: Executor, load: LoadModel, tokens: int | None = None) -> None:
        self.setup = make_setup(model, load)
        self.runner, self.positions = self.setup.target, model.config.max_position_embeddings
        self.strategy = self.setup.attach(strategy)
        self.setup.reserve(tokens)

    @property
    def allocators(self) -> list[BlockAllocator]:
        """The allocators of the strategy's caches."""
        return [drafter.allocator for drafter in self.setup.drafters]

    def prime(self, rows: abc.Sequence[Row]) -> None:
        """Let the target read all but the last token of each row, as the engine does before it asks for a draft."""
        self.runner.commit(rows)
        seen_rows = (
            dataclasses.replace(row, tokens=row.tokens[:-1]) for row in rows if len(row.tokens) <= self.positions
        )
        if new_rows := [row for row in seen_rows if self.runner.cached(row) < len(row.tokens)]:
            self.runner.feed(new_rows, [[]] * len(new_rows))

    def draft(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        self.prime(rows)
        draft: object = self.strategy.propose(rows, max_len)
        if not isinstance(draft, Draft):
            name = type(self.strategy).__name__
            raise ValueError(f"{name} proposed {shorten(draft)}, not a Draft, which fly.drafts.pad makes")
        return draft

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> list[Proposal]:
        return split(self.draft(rows, max_len), rows, max_len)

    def observe(self, rows: abc.Sequence[Row], draft: Draft) -> None:
        target, _ = self.runner.score(rows, draft)
        self.strategy.observe(rows, draft, target)

    def round(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int], kept: int, token: int) -> None:
        """Draft, let the target score the draft, keep at most ``kept`` tokens of its first path, and add ``token``."""
        draft = self.draft(rows, max_len)
        self.observe(rows, draft)
        for p in split(draft, rows, max_len):
            p.row.tokens += [*(p.tokens[node] for node in first_branch(p.follows)[:kept]), token]
        self.commit(rows)

    def commit(self, rows: abc.Sequence[Row]) -> None:
        self.runner.commit(rows)
        self.strategy.commit(rows)

    def release(self, rows: abc.Sequence[Row]) -> None:
        for row in rows:
            self.runner.release(row)
            self.strategy.release(row)


@dataclass
class DraftKit:
    """The strategy under test, and the target that it drafts for."""

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
        """Make the kit from the arguments of ``check_draft``."""
        if isinstance(strategy, DraftStrategy):
            make = _copier(strategy)
        else:
            make = strategy
            if not isinstance(make(), DraftStrategy):
                raise ValueError(f"{strategy!r} makes {make()!r}, which is not a DraftStrategy")
        example, load = make(), LoadOnce()
        model = make_executor(_target_for(example, load) if target is None else target)
        return DraftKit(make, type(example).__name__, example.learns if learns is None else learns, model, load)

    @property
    def vocab(self) -> int:
        return self.model.config.vocab_size

    def stage(self, tokens: int | None = None) -> Stage:
        return Stage(self.make(), self.model, self.load, tokens)

    def fresh(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> list[Proposal]:
        """Let a fresh strategy propose."""
        return self.stage().propose(rows, max_len)

    def compare_to_fresh(self, proposals: list[Proposal], how: str) -> None:
        """Raise ``ConformanceError`` if a proposal differs from a fresh strategy's, unless the strategy learns."""
        if not self.learns:
            compare(proposals, self.fresh([p.row for p in proposals], [p.most for p in proposals]), how)

    def row(self, tokens: list[int], params: SamplingParams | float = 0.0, seed: int = 0) -> Row:
        """Make a request that has emitted all ``tokens`` but the first. ``params`` may be just a temperature."""
        if not isinstance(params, SamplingParams):
            params = SamplingParams(temperature=params)
        return Row(list(tokens), 1, params, Exact(), seed, 8, frozenset(params.stop_token_ids), next(_ids))

    def texts(self, count: int) -> list[list[int]]:
        """Make texts of 1 to 13 tokens, short ones first. Each repeats a few tokens."""
        rng = random.Random(count)
        motifs = [[rng.randrange(self.vocab) for _ in range(1 + number % 5)] for number in range(count)]
        return [(motif * 13)[: 1 + 12 * number // max(count - 1, 1)] for number, motif in enumerate(motifs)]

    def batches(self) -> Iterator[tuple[list[Row], list[int]]]:
        """Yield batches of rows, small ones first, with the most tokens to draft for each row: greedy, sampled and
        mixed batches in turn."""
        rng, texts = random.Random(0), self.texts(9)
        for number, size in enumerate((1, 1, 1, 2, 2, 3, 4, 5)):
            picked = [rng.choice(texts) for _ in range(size)]
            rows = [self.row(text, (0.0, 1.0, (0.0, 0.7)[b % 2])[number % 3], b) for b, text in enumerate(picked)]
            yield rows, [rng.choice((1, 2, 5, 8)) for _ in range(size)]

    def drawn(self, params: int, more: int = 0) -> list[Proposal]:
        """Draft up to 3 tokens after one text under ``PARAMS[params]``, once for each of ``SEEDS`` seeds. The text ends
        with ``more`` further tokens. A strategy that draws nothing for the first ``TOGETHER`` seeds is asked no more.
        """
        if (params, more) not in self.samples:
            text = [*self.texts(9)[5], *(token % self.vocab for token in range(3, 3 + more))]
            stage = self.stage(TOGETHER * (len(text) + 32))
            proposals: list[Proposal] = []
            # Draft for as many rows at once as all caches hold: a strategy may have set the size of its own.
            room = [a.num_blocks // a.blocks_for(len(text) + 4 + stage.strategy.spare) for a in stage.allocators]
            size = max(1, min([TOGETHER, *room]))
            for start in range(0, SEEDS, size):
                rows = [self.row(text, PARAMS[params], seed) for seed in range(start, min(start + size, SEEDS))]
                proposals += stage.propose(rows, [3] * len(rows))
                stage.release(rows)
                if len(proposals) >= TOGETHER and all(p.probs_KV is None for p in proposals):
                    break
            self.samples[params, more] = proposals
        return self.samples[params, more]


class _Trial(DraftSetup):
    """A setup without translation, to find a strategy's vocabulary."""

    def translate(self, strategy: DraftStrategy) -> DraftStrategy:
        return strategy


def _target_for(strategy: DraftStrategy, load: LoadOnce) -> Llama:
    """Make a toy target with the strategy's vocabulary, or with the sizes that its draft head needs."""
    with suppress(ValueError):  # the same error will be raised for the next target
        _Trial(make_runner(make_executor(toy_target(_VOCABULARY))), toy_vocabulary(_VOCABULARY), load).attach(strategy)
    head = next((loaded.executor for loaded in load.loaded if isinstance(loaded.executor, Head)), None)
    if head is None:
        return toy_target(strategy.vocab_size or _VOCABULARY)
    options = head.options
    sizes = {"hidden_size": options.target_hidden_size, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = head.config.resized(options.some_layers, **sizes, head_dim=8)
    return toy_target(config.vocab_size, config)


def _copier(strategy: DraftStrategy) -> Callable[[], DraftStrategy]:
    """Return a function that copies ``strategy`` with everything in it except the models, which are shared."""
    shared = {id(part): part for _, part in reachable(strategy) if isinstance(part, (torch.nn.Module, Executor))}
    return lambda: copy.deepcopy(strategy, dict(shared))


def reachable(start: object) -> Iterator[tuple[str, object]]:
    """Yield everything that ``start`` holds in attributes and containers, keys included, with its path."""
    pending: list[tuple[str, object]] = [("self", start)]
    seen_ids: set[int] = set()
    while pending:
        path, value = pending.pop()
        yield path, value
        if isinstance(value, (torch.nn.Module, Executor, Tensor, str, int, float, type)) or id(value) in seen_ids:
            continue
        seen_ids.add(id(value))
        if isinstance(value, dict):
            pending += [(path, part) for pair in value.items() for part in pair]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            pending += [(path, part) for part in value]
        else:
            pending += [(f"{path}.{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def compare(proposals: abc.Iterable[Proposal], expected: abc.Iterable[Proposal], how: str) -> None:
    """Raise ``ConformanceError`` for the first proposal that differs from the expected one; ``how`` names the case."""
    for one, other in zip(proposals, expected):
        drafted = "the same tokens by other distributions" if one.tokens == other.tokens else one.tokens
        require(_same(one, other), f"{how} drafts {drafted}, not {other.tokens}, for {one.asked}")


def _same(one: Proposal, other: Proposal) -> bool:
    """Return whether two proposals for a row have the same tokens and, above temperature 0, the same distributions."""
    if (one.tokens, one.parents) != (other.tokens, other.parents):
        return False
    a, b = one.probs_KV, other.probs_KV
    if one.row.greedy or not one.tokens or (claims := b if a is None else a) is None:
        return True
    certain = one_hot(claims, torch.tensor(one.tokens))  # a deterministic draft counts as one-hot
    return torch.allclose(certain if a is None else a, certain if b is None else b, atol=APART)
