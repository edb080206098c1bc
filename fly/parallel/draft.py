"""Where the draft runs: whole on every rank, divided among all like the target, or whole on the first rank alone.

Knows nothing of policies or HTTP.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal, Protocol, get_args

import torch

from fly.cache import BlockAllocator, OutOfBlocks, PagedKVCache
from fly.drafts import DraftStrategy, Eagle3Draft
from fly.executor import Batch, Executor, Head
from fly.parallel.logits import VocabularyShards
from fly.parallel.plan import PlanError
from fly.parallel.ranks import Ranks
from fly.request import Sequence
from fly.runner import Runner
from fly.types import Draft, Target

__all__ = ["FirstDraft", "Placement", "place_draft"]

Placement = Literal["auto", "replicated", "sharded", "first"]
_STEPS = 9  # decode steps that a placement is timed with


class Make(Protocol):
    """Makes a draft strategy, given how its checkpoints are loaded (the default: whole); None where nothing drafts."""

    def __call__(self, by: Callable[..., Executor] = ...) -> DraftStrategy | None: ...


def place_draft(
    make: Make, ranks: Ranks, placement: Placement, load_part: Callable[..., Executor]
) -> DraftStrategy | None:
    """The strategy that ``make`` gives, placed among ``ranks``.

    - ``replicated``: every rank has all of it, and drafts for itself: nothing to communicate;
    - ``sharded``: its models are divided like the target (by ``load_part``), and all ranks draft together;
    - ``first``: the first rank drafts, and sends it to the others;
    - ``auto``: replicated or sharded, whichever decodes a token sooner here, as timed on the spot (both are loaded for
      that); replicated where there is no model to divide, or it does not divide.

    Raises:
        ValueError: an unknown placement, or one this strategy cannot have.
    """
    if placement not in get_args(Placement):
        raise ValueError(f"draft_placement {placement!r} is unknown; choices: {list(get_args(Placement))}")
    if ranks.size == 1:
        return make()
    if placement == "first":
        first = FirstDraft(ranks, make)
        return first if first.drafts else None
    if placement == "sharded":
        return _by_one_clock(make(load_part), ranks)
    strategy = ranks.together(make, "the draft")
    if placement == "auto" and (whole := _executors(strategy)):
        try:
            other = make(load_part)
        except PlanError:
            return _by_one_clock(strategy, ranks)
        if ranks.share(_decode_seconds(_executors(other)) < _decode_seconds(whole)):
            strategy = other
    return _by_one_clock(strategy, ranks)


def _executors(strategy: DraftStrategy | None) -> list[Executor]:
    """The models that can be divided: a head is small, and whole everywhere."""
    every = [] if strategy is None else strategy.executors() or []
    return [executor for executor in every if not isinstance(executor, Head)]


@torch.inference_mode()
def _decode_seconds(executors: list[Executor]) -> float:
    """Seconds in which each of ``executors`` gives one token, together; medians."""
    total = 0.0
    for executor in executors:
        cache = PagedKVCache.for_model(executor, 1)
        cache.resize(0, 1)
        times = []
        for _ in range(_STEPS + 1):
            start = time.perf_counter()
            executor.score(Batch([0], [0], cache.batch([0], [0], [1]))).logits_NV[:, :1].tolist()
            times.append(time.perf_counter() - start)
        total += statistics.median(times[1:])
    return total


def _nested(strategy: DraftStrategy) -> Iterator[DraftStrategy]:
    """A strategy and all strategies that it is made of."""
    yield strategy
    for part in strategy.parts():
        yield from _nested(part)


def _by_one_clock(strategy: DraftStrategy | None, ranks: Ranks) -> DraftStrategy | None:
    """Strategies that decide by time must decide alike on all ranks."""
    for part in _nested(strategy) if strategy is not None else ():
        part.clock = ranks.clock
    return strategy


class FirstDraft(DraftStrategy):
    """A strategy that lives on the first rank: it proposes there, and sends it to the other ranks.

    Everything that ranks must agree on (limits, sizes of caches) is sent too, so all admit the same requests.
    """

    def __init__(self, ranks: Ranks, make: Make) -> None:
        self.ranks = ranks
        self.strategy = ranks.together(lambda: self._checked(make()) if ranks.leads else None, "the draft")
        facts: dict[str, Any] | None = None
        if (strategy := self.strategy) is not None:
            facts = {name: getattr(strategy, name) for name in ("vocab_size", "context", "learns", "spare")}
            facts["_choices"] = strategy.choices()
            facts["_bytes"] = strategy.bytes_per_token()
            facts["_observes"] = type(strategy).observe is not DraftStrategy.observe
        facts = ranks.share(facts)
        self.drafts = facts is not None
        self._bytes, self._observes, self._choices = 0, False, list[str]()
        vars(self).update(facts or {})
        self._allocators: list[BlockAllocator] | None = None

    @staticmethod
    def _checked(strategy: DraftStrategy | None) -> DraftStrategy | None:
        if strategy is not None and any(isinstance(part, Eagle3Draft) for part in _nested(strategy)):
            raise ValueError(
                "a strategy that drafts by the target's hidden states runs where the target does: on all ranks, not "
                "on the first alone (draft_placement)"
            )
        return strategy

    def attach(self, target: Runner) -> None:
        self._device = target.executor.device  # each rank's own

        def attach() -> None:
            if self.strategy is not None:
                self.strategy.attach(target)

        self.ranks.together(attach, "the draft")

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        self._follow((row, len(row.tokens) + most + self.spare) for row, most in zip(rows, max_len) if most)
        draft: Draft | None = None
        sent: Any = None
        if self.strategy is not None:
            try:
                draft = self.strategy.propose(rows, max_len)
            except Exception as error:  # all ranks go on as one
                sent = error
            else:
                parents = None if draft.parents_BK is None else draft.parents_BK.tolist()
                distribution = None if draft.probs_BKV is None else (draft.probs_BKV.shape, draft.probs_BKV.dtype)
                sent = draft.tokens_BK.tolist(), draft.lengths_B.tolist(), parents, distribution
        sent = self.ranks.share(sent)
        if isinstance(sent, Exception):
            raise sent
        tokens, lengths, parents, distribution = sent
        device, probs_BKV = self._device, None
        if distribution is not None:
            if draft is None or draft.probs_BKV is None:
                probs_BKV = torch.empty(distribution[0], dtype=distribution[1], device=device)
            else:
                probs_BKV = draft.probs_BKV.to(device)
            probs_BKV = self.ranks.spread(probs_BKV)
        shape = len(lengths), len(tokens[0]) if tokens else 0

        def numbers(values: list[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device).view(shape)

        lengths_B = torch.tensor(lengths, dtype=torch.int64, device=device)
        return Draft(numbers(tokens), lengths_B, probs_BKV, None if parents is None else numbers(parents))

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        if self._observes and isinstance(target.logits_BKV, VocabularyShards):
            target.logits_BKV.gathered()  # by all ranks; the first then looks at its copy
        if self.strategy is not None:
            self.strategy.observe(rows, draft, target)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        self._follow((row, len(row.tokens)) for row in rows)
        if self.strategy is not None:
            self.strategy.commit(rows)

    def release(self, row: Sequence) -> None:
        for allocator in self.allocators():
            allocator.release(row.id)
        if self.strategy is not None:
            self.strategy.release(row)

    def allocators(self) -> list[BlockAllocator]:
        """What the first rank's caches would hold if they shared nothing: the same on all ranks, so that all admit the
        same requests."""
        if self._allocators is None:
            own = None if self.strategy is None else self.strategy.allocators()
            sizes = self.ranks.share(None if own is None else [(a.num_blocks, a.block_size) for a in own])
            self._allocators = [BlockAllocator(*size) for size in sizes]
        return self._allocators

    def _follow(self, lengths: Iterable[tuple[Sequence, int]]) -> None:
        most = self.context or sys.maxsize
        for row, length in lengths:
            for allocator in self.allocators():
                # if there is no room for it, that shows where it is drafted for
                with suppress(OutOfBlocks):
                    allocator.resize(row.id, min(length, most + self.spare))

    def choices(self) -> list[str]:
        return self._choices

    def bytes_per_token(self) -> int:
        return self._bytes

    def reserve(self, tokens: int) -> None:
        if self.strategy is not None:
            self.strategy.reserve(tokens)
