"""A draft head with its own paged cache: which tokens of each row it has taken in, and by which hidden states. Knows
nothing of how a draft is chosen.

Of a row it holds the tokens from some number on: token i lies with what the target's layers said of token i - 1, so the
first that can be there is number 1. Positions count from that one: rotary attention only sees how far apart they are.

Shape legend: N places, S cached tokens of a row, F hidden states side by side, C hidden width of the head, U draft
vocabulary.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from fly.cache import BlockAllocator, OutOfBlocks, PagedBatch, PagedKVCache
from fly.runtime.drafting import Batch, Drafted, DraftSpec, ends_of
from fly.runtime.executor import Executor, Given, Head
from fly.runtime.request import Sequence, common_prefix
from fly.runtime.sampling import BatchSampling
from fly.runtime.states import HiddenStates

__all__ = ["HeadRunner"]

_KEPT = 64  # hidden states that stay for a row that is rolled back: more tokens than a draft has


@dataclass
class _Held:
    """What the head has taken in of a row: ``text`` up to its end, of which it holds the tokens from ``first`` on."""

    first: int
    text: list[int]

    @property
    def slots(self) -> int:
        return len(self.text) - self.first


class HeadRunner:
    """A head, its cache, and the hidden states of its target (``Runner.watch``). Rows ``share`` pages as a target's.
    It is a ``fly.runtime.continuation.Drafter``."""

    cache: PagedKVCache  # is made later, by ``reserve``

    def __init__(self, head: Head, states: HiddenStates, share: bool = True) -> None:
        self.head, self.states, self.share = head, states, share
        self._held: dict[int, _Held] = {}
        states.begin, states.end = self.begin, self.release

    def begin(self, row: Sequence) -> int:
        """Start a row that was not seen before with pages of others that began with the same tokens. Of how many tokens
        no hidden states are needed then."""
        if (held := self._held.get(row.id)) is None:
            adopted = self.cache.allocator.adopt(row.id, row.tokens[1:-1], _salt(row)) if self.share else 0
            held = self._held[row.id] = _Held(1, row.tokens[: 1 + adopted])
        return len(held.text) - 1

    def may_draft(self, row: Sequence) -> bool:
        """Whether the target's hidden states of all tokens before the last are here."""
        run = self.states.run(row)
        return len(run) > 0 and run.stop == len(row.tokens) - 1

    def behind(self, row: Sequence) -> int:
        """Tokens that could be taken in."""
        held = self._held.get(row.id)
        return self.states.run(row).stop + 1 - (1 if held is None else len(held.text))

    def catch_up(self, rows: abc.Sequence[Sequence]) -> None:
        """Take in what there is of ``rows``. Raises ``OutOfBlocks``; nothing was changed then."""
        rests = {row: rest for row in rows if (rest := self._rest(row))}
        if not rests:
            return
        going, taken = list(rests), list(rests.values())
        new = [row.tokens[rest.start : rest.stop] for row, rest in rests.items()]
        batch, states_TF = Batch.of(new, self._reserve(going, taken, [0] * len(new))), self._states_of(going, taken)
        for row, tokens in zip(going, new):
            self._held[row.id].text += tokens
        self.head.begin(batch, states_TF, ends_of(batch.kv))

    def chains(
        self,
        rows: abc.Sequence[Sequence],
        spec: DraftSpec,
        most: abc.Sequence[int],
        sampling: BatchSampling | None,
        seeds: abc.Sequence[int],
    ) -> Drafted:
        """Take in all of ``rows``, which may be drafted for, and draft chains or trees (``Head.chains``); nothing that
        was drafted stays cached. Raises ``OutOfBlocks`` where there is no room; nothing was changed then."""
        rests = [self._rest(row) for row in rows]
        kv = self._reserve(rows, rests, [(n - 1) * (1 if spec.tree is None else spec.tree.follow) for n in most])
        batch = Batch.of([row.tokens[rest.start : rest.stop] for row, rest in zip(rows, rests)], kv)
        try:
            found = self.head.chains(batch, self._states_of(rows, rests), spec, rows, most, sampling, seeds)
            for row, rest in zip(rows, rests):
                self._held[row.id].text += row.tokens[rest.start : rest.stop]
        finally:
            for row in rows:
                self.cache.resize(row.id, self._held[row.id].slots)
        return found

    @property
    def executor(self) -> Executor:
        return self.head

    @property
    def bytes_per_token(self) -> int:
        return PagedKVCache.bytes_per_token(self.head.config, self.head.dtype)

    @property
    def context(self) -> int:
        return self.head.config.max_position_embeddings

    @property
    def allocator(self) -> BlockAllocator:
        return self.cache.allocator

    def reserve(self, tokens: int | None = None, block_size: int | None = None) -> None:
        self.cache = PagedKVCache.for_model(self.head, tokens, block_size)

    def fits(self, rows: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> bool:
        allocator = self.cache.allocator
        return sum(allocator.missing(row.id, room) for row, room in zip(rows, rooms)) <= allocator.num_free

    def after(self, rows: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> PagedBatch:
        rests = [self._rest(row) for row in rows]
        return self._reserve(rows, rests, [room - rest.stop for rest, room in zip(rests, rooms)])

    def given(self, rows: abc.Sequence[Sequence], kv: PagedBatch) -> Given:
        first = [self._held[row.id].first for row in rows]
        rests = [range(n + start, n + start + count) for n, start, count in zip(first, kv.starts, kv.counts)]
        return Given(first, self._states_of(rows, rests))

    def drafted(self, row: Sequence, text: list[int]) -> None:
        self._held[row.id].text = text

    def commit(self, rows: abc.Iterable[Sequence]) -> None:
        """The rows' tokens are now the truth: roll back to it."""
        for row in rows:
            if (held := self._follow(row)) is not None and held.first == 1 and self.share:
                self.cache.allocator.publish(row.id, held.text[1:], held.slots, _salt(row))
            if not row.k:
                self.states.release(row)  # no drafter needs it
            elif held is not None:
                self.states.drop(row, len(held.text) - 1 - _KEPT)

    def release(self, row: Sequence) -> None:
        """Forget ``row`` and free its pages."""
        self._held.pop(row.id, None)
        self.cache.allocator.release(row.id)

    def _follow(self, row: Sequence) -> _Held | None:
        """What is held of a row, rolled back to a prefix of its tokens, at most all but the last; None is nothing."""
        if (held := self._held.get(row.id)) is None:
            return None
        keep = min(common_prefix(held.text, row.tokens), len(row.tokens) - 1)
        if keep < held.first:
            self.release(row)
            return None
        del held.text[keep:]
        if held.slots != self.cache.allocator.length(row.id):
            self.cache.resize(row.id, held.slots)
        return held

    def _rest(self, row: Sequence) -> range:
        """Numbers of the row's tokens to take in next: those with hidden states of the token before them."""
        run, held = self.states.run(row), self._follow(row)
        if held is None:
            self.begin(row)
            held = self._held[row.id]
        if len(held.text) - 1 < run.start:
            self.release(row)
            held = self._held[row.id] = _Held(run.start + 1, row.tokens[: run.start + 1])
        return range(len(held.text), min(run.stop + 1, len(row.tokens)))

    def _reserve(self, rows: abc.Sequence[Sequence], rests: abc.Sequence[range], room: abc.Sequence[int]) -> PagedBatch:
        """The batch of tokens ``rests``, with room for so many more of each row."""
        starts, counts = [self._held[row.id].slots for row in rows], [len(rest) for rest in rests]
        try:
            for row, start, count, more in zip(rows, starts, counts, room):
                self.cache.resize(row.id, start + count + more)
        except OutOfBlocks:
            for row, start in zip(rows, starts):
                self.cache.resize(row.id, start) if start else self.release(row)
            raise
        return self.cache.batch([row.id for row in rows], starts, counts)

    def _states_of(self, rows: abc.Sequence[Sequence], rests: abc.Sequence[range]) -> Tensor:
        """Hidden states before the tokens ``rests`` of the rows, one row's after another's."""
        before = [self.states.of(row, range(rest.start - 1, rest.stop - 1)) for row, rest in zip(rows, rests)]
        return before[0] if len(before) == 1 else torch.cat(before)


def _salt(row: Sequence) -> str:
    """Under which pages may be shared: what lies in them depends on the token before the first, too."""
    return f"{row.params.cache_salt} {row.tokens[0]}"
