"""Drafting by a trained head that reads the target's hidden states: EAGLE-3 (arXiv 2503.01840)."""

from __future__ import annotations

import sys
from collections import abc
from contextlib import suppress
from pathlib import Path

import torch

from fly.cache import OutOfBlocks
from fly.drafts.base import Continuation, DraftSetup, StopsByChance, describe, drafted_of
from fly.drafts.heads import HeadRunner
from fly.drafts.model import seed_of
from fly.drafts.stops import check_limits, reach_of
from fly.runner.executor import DraftSpec, Growth, Head
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling
from fly.types import Draft

__all__ = ["Eagle3Draft"]

_BACKLOG = 256  # the head catches up with a row as soon as it has more than this many tokens left to read


class Eagle3Draft(StopsByChance):
    """A trained EAGLE-3 head: one layer that continues from the target's hidden states, token after token.

    Its keys and values are cached like a draft model's. The hidden states of some tokens may be unknown, because the
    target's pages came from another request's prompt and the head's own pages are gone. The head skips such tokens, and
    drafts from the tokens after them.

    Args:
        head: the name or path of a head in either published layout (``fly.models.eagle``), which is loaded when the
            strategy is attached, or a loaded head.
        k: the most tokens along a path (None: as many as the caller asks for).
        nodes: 0 drafts chains. Any other number drafts trees of this many tokens, like ``TreeDraft``.
        depth, width: the size of trees.
        confidence, reach: where a chain stops, as for ``SingleDraft``.
        cache_tokens: how many tokens its cache holds over all rows (None: as many as the target's).
        block_size: tokens in a page of its cache (None: as suits the device).
        dtype, device, kernels: how to load and run a head, as for ``LLM``.

    Above temperature 0, the tokens of chains are drawn from the head's distribution after the row's sampling settings
    (``probs_BKV``). Trees depend on the text alone. So a lossless rule stays lossless with both.

    Raises ``ValueError`` if it is attached to a target that has another width or vocabulary, or gives no hidden states.
    """

    def __init__(
        self,
        head: str | Path | Head,
        k: int | None = None,
        nodes: int = 0,
        depth: int = 7,
        width: int = 4,
        confidence: float = 0.0,
        reach: float | None = 0.0,
        cache_tokens: int | None = None,
        block_size: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
    ) -> None:
        for name, value, least in (("nodes", nodes, 0), ("depth", depth, 1), ("width", width, 1)):
            if value < least:
                raise ValueError(f"{name} {value} must be at least {least}")
        check_limits(k, confidence, reach)
        self.k = k
        self.nodes = nodes
        self.width = width
        self.confidence = confidence
        self.reach, self.worth = reach, None if nodes else 0.0  # as for ``SingleDraft``
        self.growth = Growth.uniform(depth, width, nodes) if nodes else None
        self.depth = sys.maxsize if self.growth is None else len(self.growth.widths)  # of a path
        self.spare = 0 if self.growth is None else self.growth.spare
        self.model = describe(head, dtype, device)
        self._options = {"dtype": dtype, "device": device, "kernels": kernels}
        self._cache_tokens, self._block_size = cache_tokens, block_size
        self._runner: HeadRunner | None = None

    @property
    def runner(self) -> HeadRunner:
        """The head with its cache. Raises ``ValueError`` before the strategy is attached."""
        if self._runner is None:
            raise ValueError(f"the draft head {str(self.model)!r} is not loaded yet: LLM attaches the strategy")
        return self._runner

    @property
    def head(self) -> Head:
        """The head."""
        return self.runner.head

    def attach(self, setup: DraftSetup) -> None:
        if self._runner is not None:
            raise ValueError("this Eagle3Draft drafts for another target already; make a new one")
        head, target = setup.open(self.model, **self._options).executor, setup.target
        if not isinstance(head, Head):
            raise ValueError(f"{str(self.model)!r} is a model, not a draft head; write model({self.model})")
        options, sizes = head.options, target.executor.config
        pairs = [
            ("hidden_size", "target_hidden_size", sizes.hidden_size, options.target_hidden_size),
            ("vocab_size", "vocab_size", sizes.vocab_size, head.config.vocab_size),
        ]
        for name, own, theirs, wanted in pairs:
            if theirs != wanted:
                where = "" if isinstance(self.model, Head) else f" {self.model}"
                raise ValueError(
                    f"the draft head{where} is for another target: its {own} is {wanted}, the target's {name} {theirs}"
                )
        states = target.watch(options.states_of(sizes.num_hidden_layers))
        head.share(target.executor)
        self.vocab_size, self.context = sizes.vocab_size, head.config.max_position_embeddings
        self._runner = HeadRunner(head, states, target.share)
        setup.add(self.runner, self._cache_tokens, self._block_size)

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        context, most = self.head.config.max_position_embeddings, []
        for row, n in zip(rows, max_len):
            n = min(n, context - len(row.tokens), self._longest)
            most.append(n if n > 0 and self.runner.may_draft(row) else 0)
        active = [b for b, n in enumerate(most) if n]
        if not active:
            return Draft.empty(len(rows), self.head.device)
        going, sampling = [rows[b] for b in active], None
        if not self.nodes and not all(row.greedy for row in going):
            sampling = BatchSampling.of([row.params for row in going])
        seeds = [seed_of(row) for row in going]
        found = self.runner.draft(going, self._spec(going), [most[b] for b in active], sampling, seeds)
        return drafted_of(len(rows), active, found)

    def continuation(self, rows: abc.Sequence[Row]) -> Continuation | None:
        if not all(map(self.runner.may_draft, rows)):
            return None
        return Continuation(self.runner, [self._longest] * len(rows), self._spec(rows))

    @property
    def _longest(self) -> int:
        """The most tokens along a path."""
        return self.depth if self.k is None else min(self.k, self.depth)

    def _spec(self, rows: abc.Sequence[Row]) -> DraftSpec:
        if self.growth is not None:
            return DraftSpec(tree=self.growth)
        return DraftSpec(self.confidence, reach=reach_of(rows, self.reach, self.worth or 0.0))

    def prefill(self, parts: abc.Sequence[tuple[Row, int]]) -> None:
        """Read the earlier chunks of the prompts. The target has computed their hidden states, but not this chunk's."""
        rows = [row for row, _ in parts if row.k and len(row.tokens) <= self.head.config.max_position_embeddings]
        # If there is no room now, ``propose`` reads the rows later.
        with suppress(OutOfBlocks), torch.inference_mode():
            self.runner.catch_up(rows)

    def commit(self, rows: abc.Sequence[Row]) -> None:
        self.runner.commit(rows)
        if behind := [row for row in rows if row.k and self.runner.count_unread(row) > _BACKLOG]:
            self.prefill([(row, 0) for row in behind])
            self.runner.commit(behind)

    def release(self, row: Row) -> None:
        self.runner.release(row)
