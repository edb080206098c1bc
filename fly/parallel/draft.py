"""Place the draft: whole on every rank, divided among all ranks like the target, or whole on the first rank alone.

Knows nothing of policies or HTTP.

Shape legend: B rows, K longest draft, N places, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections import abc
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple, get_args

import torch

from fly.backends.choice import LoadExecutor
from fly.cache import BlockAllocator, OutOfBlocks, PagedKVCache
from fly.config import Placement
from fly.drafts.base import DraftSetup, DraftStrategy, Loaded, OwnCache
from fly.parallel.logits import VocabularyShards
from fly.parallel.plan import PlanError
from fly.parallel.ranks import Ranks
from fly.runner.executor import Batch, Executor, Head
from fly.runner.request import Row
from fly.types import Draft, Target

__all__ = ["FirstDraft", "place_draft"]

_STEPS = 9  # number of decode steps to time for a placement


def place_draft(
    make: Callable[[], DraftStrategy | None],
    setup: DraftSetup,
    ranks: Ranks,
    load_part: LoadExecutor,
) -> DraftStrategy | None:
    """Make a strategy with ``make``, attach it to ``setup``, and return it, placed as ``ranks.draft_placement`` says:

    - ``replicated``: every rank has the whole draft and drafts for itself, without communication;
    - ``sharded``: its models are divided like the target (by ``load_part``), and all ranks draft together;
    - ``first``: the first rank drafts and sends the draft to the others;
    - ``auto``: each model is loaded in both ways, replicated and sharded, and the one that decodes a token faster is
      kept. A model that cannot be divided is replicated.

    Raises:
        ValueError: an unknown placement, or one that is impossible for this strategy.
    """
    placement = ranks.draft_placement
    if placement not in get_args(Placement):
        raise ValueError(f"draft_placement {placement!r} is unknown; choices: {list(get_args(Placement))}")
    if placement == "first" and ranks.size > 1:
        first_draft = FirstDraft(ranks, make)
        setup.attach(first_draft)
        return first_draft if first_draft.drafts else None
    strategy = ranks.together(make, "the draft")
    if strategy is None:
        return None
    setup = setup.among_ranks(ranks.clock)  # a strategy that decides by time then decides the same on all ranks
    if placement == "replicated" or ranks.size == 1:
        return ranks.together(lambda: setup.attach(strategy), "the draft")

    load = setup.load_by

    def load_for_ranks(model: object, **options: Any) -> Loaded:
        if placement == "sharded":
            return load(model, by=load_part, **options)
        whole = ranks.together(lambda: load(model, **options), "the draft")
        if isinstance(model, Executor) or isinstance(whole.executor, Head):  # loaded already, or too small to divide
            return whole
        try:
            part = load(model, by=load_part, **options)
        except PlanError:
            return whole
        return part if ranks.share(_decode_seconds(part.executor) < _decode_seconds(whole.executor)) else whole

    return setup.among_ranks(ranks.clock, load_for_ranks).attach(strategy)


@torch.inference_mode()
def _decode_seconds(executor: Executor) -> float:
    """Return the median time that ``executor`` takes for one token, in seconds."""
    cache = PagedKVCache.for_model(executor, 1)
    cache.resize(0, 1)
    times = []
    for _ in range(_STEPS + 1):
        start = time.perf_counter()
        executor.score(Batch([0], [0], cache.batch([0], [0], [1]))).logits_NV[:, :1].tolist()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


class _Mirror:
    """Represents on every rank a drafter's cache that only the first rank has. Its pages hold nothing, but are
    allocated in the same way, so that all ranks admit the same requests."""

    executor = None
    allocator: BlockAllocator

    def __init__(self, ranks: Ranks, drafter: OwnCache | None, bytes_per_token: int, context: int) -> None:
        self._ranks, self._drafter = ranks, drafter
        self.bytes_per_token, self.context = bytes_per_token, context

    def reserve(self, tokens: int | None = None, block_size: int | None = None) -> None:
        size: Any = None
        if self._drafter is not None:
            self._drafter.reserve(tokens, block_size)
            size = self._drafter.allocator.num_blocks, self._drafter.allocator.block_size
        self.allocator = BlockAllocator(*self._ranks.share(size))


class _Facts(NamedTuple):
    """What all ranks must know of a strategy that runs on the first rank alone: the attributes of a
    ``DraftStrategy``, and more."""

    vocab_size: int | None
    context: int | None
    learns: bool
    spare: int
    observes: bool  # whether it reads the target's output
    gives_logits: dict[str, bool]  # by the name that a request chooses, "" for none

    @staticmethod
    def of(strategy: DraftStrategy) -> _Facts:
        observes = type(strategy).observe is not DraftStrategy.observe
        limits = strategy.vocab_size, strategy.context, strategy.learns, strategy.spare
        return _Facts(
            *limits, observes, {name: strategy.drafter_of(name).gives_logits for name in ("", *strategy.names)}
        )


class FirstDraft(DraftStrategy):
    """A strategy that runs on the first rank alone and sends its drafts to the other ranks.

    Its limits and the sizes of its caches are sent too, so that all ranks admit the same requests.
    """

    drafts = False  # whether there is a strategy
    observes = False  # whether it reads the target's output

    def __init__(self, ranks: Ranks, make: Callable[[], DraftStrategy | None]) -> None:
        self.ranks, self.make = ranks, make
        self.strategy: DraftStrategy | None = None  # on the first rank
        self.mirrors: list[_Mirror] = []

    def attach(self, setup: DraftSetup) -> None:
        self._device, private_setup = setup.target.executor.device, setup.alone()  # a setup of this rank alone
        self.strategy = self.ranks.together(
            lambda: self._attached(private_setup) if self.ranks.leads else None, "the draft"
        )
        facts: _Facts | None = self.ranks.share(None if self.strategy is None else _Facts.of(self.strategy))
        if facts is not None:
            self.drafts = True
            self.vocab_size = facts.vocab_size
            self.context = facts.context
            self.learns = facts.learns
            self.spare = facts.spare
            self.observes = facts.observes
            self._gives_logits = facts.gives_logits
            self.gives_logits = self._gives_logits[""]
            self.names = [name for name in self._gives_logits if name]
        caches: list[Any] = [
            (each.bytes_per_token, each.context, tokens, size) for each, tokens, size in private_setup.caches
        ]
        for drafter, (token_bytes, context, tokens, block_size) in zip_longest(
            private_setup.drafters, self.ranks.share(caches)
        ):
            self.mirrors.append(_Mirror(self.ranks, drafter, token_bytes, context))
            setup.add(self.mirrors[-1], tokens, block_size)

    def drafter_of(self, name: str) -> DraftStrategy:
        """Return this strategy with the limits of the one that drafts on the first rank. All ranks know them."""
        drafter = copy(self)
        drafter.gives_logits = self._gives_logits.get(name, self.gives_logits)
        return drafter

    def _attached(self, own: DraftSetup) -> DraftStrategy | None:
        if (strategy := self.make()) is None:
            return None
        strategy = own.attach(strategy)
        if any(isinstance(drafter.executor, Head) for drafter in own.drafters):
            raise ValueError(
                "a strategy that drafts by the target's hidden states runs where the target does: on all ranks, not "
                "on the first alone (draft_placement)"
            )
        return strategy

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        self._resize((row, len(row.tokens) + most + self.spare) for row, most in zip(rows, max_len) if most)
        sent: Any = None
        parts: list[torch.Tensor | None] = [None, None]
        if self.strategy is not None:
            try:
                draft = self.strategy.propose(rows, max_len)
                parts = [draft.probs_BKV, draft.logits_BKV]
                kinds = [None if part_BKV is None else (part_BKV.shape, part_BKV.dtype) for part_BKV in parts]
                sent = replace(draft, probs_BKV=None, logits_BKV=None).to(torch.device("cpu")), kinds
            except Exception as error:  # sent as well, so that all ranks raise it
                sent = error
        sent = self.ranks.share(sent)
        if isinstance(sent, Exception):
            raise sent
        draft, kinds = sent[0].to(self._device), sent[1]
        # The distributions that tokens were drawn from, and logits, are large, so they go from device to device.
        for name, part_BKV, kind in zip(("probs_BKV", "logits_BKV"), parts, kinds):
            if kind is not None:
                shape, dtype = kind
                values_BKV = torch.empty(shape, dtype=dtype, device=self._device) if part_BKV is None else part_BKV
                draft = replace(draft, **{name: self.ranks.spread(values_BKV.to(self._device))})
        return draft

    def observe(self, rows: abc.Sequence[Row], draft: Draft, target: Target) -> None:
        if self.observes and isinstance(target.logits_BKV, VocabularyShards):
            target.logits_BKV.gathered()  # a collective of all ranks; the first rank's strategy reads the copy
        if self.strategy is not None:
            self.strategy.observe(rows, draft, target)

    def commit(self, rows: abc.Sequence[Row]) -> None:
        self._resize((row, len(row.tokens)) for row in rows)
        if self.strategy is not None:
            self.strategy.commit(rows)

    def release(self, row: Row) -> None:
        for mirror in self.mirrors:
            mirror.allocator.release(row.id)
        if self.strategy is not None:
            self.strategy.release(row)

    def _resize(self, lengths: Iterable[tuple[Row, int]]) -> None:
        """Allocate pages for each row as the first rank does. If there are too few, only the first rank raises."""
        for row, length in lengths:
            for mirror in self.mirrors:
                with suppress(OutOfBlocks):
                    mirror.allocator.resize(row.id, min(length, mirror.context + self.spare))
