"""What the strategies of trained heads share: a head that drafts from the target's hidden states, with its cache."""

from __future__ import annotations

import sys
from collections import abc
from contextlib import suppress
from pathlib import Path

import torch

from fly.cache import OutOfBlocks
from fly.drafts.base import Continuation, DraftSetup, StopsByChance, describe, drafted_of, word_of
from fly.drafts.heads import HeadRunner
from fly.drafts.model import seed_of
from fly.drafts.stops import check_limits, reach_of
from fly.runner.executor import DraftSpec, Head
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling
from fly.types import Draft

__all__ = ["HeadDraft"]

_BACKLOG = 256  # the head catches up with a row as soon as it has more than this many tokens left to read


class HeadDraft(StopsByChance):
    """A trained head that drafts from the target's hidden states.

    Its keys and values are cached like a draft model's. The hidden states of some tokens may be unknown, because the
    target's pages came from another request's prompt and the head's own pages are gone. The head skips such tokens, and
    drafts from the tokens after them.

    Args:
        head: the name or path of a head, which is loaded when the strategy is attached, or a loaded head.
        k: the most tokens along a path (None: as many as the caller asks for).
        confidence, reach: where a chain stops, as for ``SingleDraft``.
        cache_tokens: how many tokens its cache holds over all rows (None: as many as the target's).
        block_size: tokens in a page of its cache; None lets the device decide.
        dtype, device, kernels: how to load and run a head, as for ``LLM``.
    """

    kind: type[Head]  # of its head

    def __init__(
        self,
        head: str | Path | Head,
        k: int | None = None,
        confidence: float = 0.0,
        reach: float | None = 0.0,
        cache_tokens: int | None = None,
        block_size: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
    ) -> None:
        check_limits(k, confidence, reach)
        self.k = k
        self.confidence = confidence
        self.reach = reach
        self.with_logits = False  # whether all drafts carry their logits; if so, each round is a call of its own
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
            raise ValueError(f"this {type(self).__name__} drafts for another target already; make a new one")
        head, target = setup.open(self.model, **self._options).executor, setup.target
        if not isinstance(head, Head):
            raise ValueError(f"{str(self.model)!r} is a model, not a draft head; write model({self.model})")
        if not isinstance(head, self.kind):
            raise ValueError(f"{str(self.model)!r} is a head of another kind; write {word_of(head)}({self.model})")
        options, sizes = head.options, target.executor.config
        pairs = [
            ("hidden_size", "target_hidden_size", sizes.hidden_size, options.target_hidden_size),
            ("vocab_size", "vocab_size", sizes.vocab_size, head.config.vocab_size),
        ]
        for name, key, size, expected in pairs:
            if size != expected:
                where = "" if isinstance(self.model, Head) else f" {self.model}"
                raise ValueError(
                    f"the draft head{where} is for another target: its {key} is {expected}, the target's {name} {size}"
                )
        runner = HeadRunner(head, target, options.states_of(sizes.num_hidden_layers))
        self._prepare(head, setup)
        head.share(target.executor)
        self.vocab_size, self.context = sizes.vocab_size, head.config.max_position_embeddings
        self._runner = runner
        setup.add(runner, self._cache_tokens, self._block_size)

    def _prepare(self, head: Head, setup: DraftSetup) -> None:
        """Change a loaded head before it shares what the target has."""

    def continuation(self, rows: abc.Sequence[Row], worth: float = 0.0) -> Continuation | None:
        if self.with_logits or not all(map(self.runner.may_draft, rows)):
            return None
        return Continuation(self.runner, [self._longest] * len(rows), self._spec(rows, worth))

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int], worth: float = 0.0) -> Draft:
        most = []
        for row, n in zip(rows, max_len):
            n = min(n, self._limit(row))
            most.append(n if n > 0 and self.runner.may_draft(row) else 0)
        active = [b for b, n in enumerate(most) if n]
        if not active:
            return Draft.empty(len(rows), self.head.device)
        going, sampling = [rows[b] for b in active], None
        spec = self._spec(going, worth)
        if spec.tree is None and not all(row.greedy for row in going):
            sampling = BatchSampling.of([row.params for row in going])
        seeds = [seed_of(row) for row in going]
        drafted = self.runner.draft(going, spec, [most[b] for b in active], sampling, seeds)
        return drafted_of(len(rows), active, drafted)

    def _limit(self, row: Row) -> int:
        """Return the most tokens along a path after ``row``."""
        return min(self.head.config.max_position_embeddings - len(row.tokens), self._longest)

    @property
    def _longest(self) -> int:
        """The most tokens along a path."""
        return sys.maxsize if self.k is None else self.k

    def _spec(self, rows: abc.Sequence[Row], worth: float) -> DraftSpec:
        """Return how the head drafts chains for ``rows`` (``worth`` as for ``propose``)."""
        reach = reach_of(rows, self.reach, worth)
        with_logits = self.with_logits or any(row.policy.reads_logits for row in rows)
        return DraftSpec(self.confidence, reach, with_logits=with_logits)

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
