"""A draft head with its own paged KV cache. The runner knows which tokens of each row the head has read, and which
hidden states of the target belong to them. It knows nothing of how tokens are chosen.

The head reads token i together with the target's hidden states at token i - 1. So it never reads token 0, and may start
even later in a row. Its positions count from the first token that it reads. This changes nothing, because rotary
attention depends only on distances.

Shape legend: T packed tokens, N places, S cached tokens of a row, F hidden states side by side, C hidden width of the
head, U draft vocabulary.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from fly.cache import BlockAllocator, OutOfBlocks, PagedBatch, PagedKVCache
from fly.ops import common_prefix
from fly.runner.drafting import Batch, Drafted, DraftSpec
from fly.runner.executor import Executor, Head, HeadInput
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.runner.sampling import BatchSampling

__all__ = ["HeadRunner"]

_KEPT = 64  # hidden states to keep in case a row is rolled back; more than a draft has tokens


@dataclass
class _Held:
    """A row's tokens up to the last one that the head has read. It has read those from index ``first`` on."""

    first: int
    text: list[int]

    @property
    def slots(self) -> int:
        """How many slots of the head's cache the row takes."""
        return len(self.text) - self.first


class HeadRunner:
    """Runs a head with its own KV cache on the hidden states of its target. It implements
    ``fly.runner.continuation.Drafter``.

    Args:
        head: the draft head.
        target: the model to draft for. It records its hidden states from now on (``Runner.watch``).
        layers: the numbers of layers after which the head reads the target's hidden states.
    """

    cache: PagedKVCache  # made later, by ``reserve``

    def __init__(self, head: Head, target: Runner, layers: abc.Sequence[int]) -> None:
        self.head = head
        self.share = target.share  # whether rows share pages
        self._held: dict[int, _Held] = {}
        self.states = target.watch(layers, self.begin, self.release)

    def begin(self, row: Row) -> int:
        """Let a new row adopt pages of rows that begin with the same tokens. Return how many tokens the head does not
        have to read, so that their hidden states are not needed."""
        if (held := self._held.get(row.id)) is None:
            adopted = self.cache.allocator.adopt(row.id, row.tokens[1:-1], _salt(row)) if self.share else 0
            held = self._held[row.id] = _Held(1, row.tokens[: 1 + adopted])
        return len(held.text) - 1

    def may_draft(self, row: Row) -> bool:
        """Whether the hidden states are known up to the row's last token but one."""
        stored = self.states.stored(row)
        return len(stored) > 0 and stored.stop == len(row.tokens) - 1

    def count_unread(self, row: Row) -> int:
        """Return how many tokens the head could read now, beyond those it has read."""
        held = self._held.get(row.id)
        return self.states.stored(row).stop + 1 - (1 if held is None else len(held.text))

    def catch_up(self, rows: abc.Sequence[Row]) -> None:
        """Read all tokens with known hidden states. Raises ``OutOfBlocks`` and changes nothing if there is no room."""
        unread = {row: part for row in rows if (part := self._unread(row))}
        if not unread:
            return
        going, parts = list(unread), list(unread.values())
        new = [row.tokens[part.start : part.stop] for row, part in unread.items()]
        batch, states_TF = Batch.of(new, self._reserve(going, parts, [0] * len(new))), self._states_before(going, parts)
        for row, tokens in zip(going, new):
            self._held[row.id].text += tokens
        self.head.read(batch, states_TF)

    def draft(
        self,
        rows: abc.Sequence[Row],
        spec: DraftSpec,
        max_len: abc.Sequence[int],
        sampling: BatchSampling | None,
        seeds: abc.Sequence[int],
    ) -> Drafted:
        """Read all tokens of ``rows``, then draft chains or trees (``Head.draft``). Each row must pass ``may_draft``.
        No drafted token stays cached. Raises ``OutOfBlocks`` and changes nothing if there is no room."""
        unread = [self._unread(row) for row in rows]
        kv = self._reserve(rows, unread, [self.head.room(n, spec) for n in max_len])
        batch = Batch.of([row.tokens[part.start : part.stop] for row, part in zip(rows, unread)], kv)
        try:
            drafted = self.head.draft(batch, self._states_before(rows, unread), spec, rows, max_len, sampling, seeds)
            for row, part in zip(rows, unread):
                self._held[row.id].text += row.tokens[part.start : part.stop]
        finally:
            for row in rows:
                self.cache.resize(row.id, self._held[row.id].slots)
        return drafted

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

    def fits(self, rows: abc.Sequence[Row], rooms: abc.Sequence[int]) -> bool:
        allocator = self.cache.allocator
        missing = (allocator.missing(row.id, room + self._beyond) for row, room in zip(rows, rooms))
        return sum(missing) <= allocator.num_free

    def prepare(self, rows: abc.Sequence[Row], rooms: abc.Sequence[int]) -> PagedBatch:
        unread = [self._unread(row) for row in rows]
        return self._reserve(rows, unread, [room - part.stop + self._beyond for part, room in zip(unread, rooms)])

    @property
    def _beyond(self) -> int:
        """How many slots a draft of one token takes after the row's tokens."""
        return self.head.room(1, DraftSpec())

    def read_states(self, rows: abc.Sequence[Row], kv: PagedBatch) -> HeadInput:
        first = [self._held[row.id].first for row in rows]
        unread = [range(n + start, n + start + count) for n, start, count in zip(first, kv.starts, kv.counts)]
        return HeadInput(first, self._states_before(rows, unread))

    def note_cached(self, row: Row, text: list[int]) -> None:
        self._held[row.id].text = text

    def commit(self, rows: abc.Iterable[Row]) -> None:
        """Roll the head's cache back to the rows' tokens."""
        for row in rows:
            if (held := self._follow(row)) is not None and held.first == 1 and self.share:
                self.cache.allocator.publish(row.id, held.text[1:], held.slots, _salt(row))
            if not row.k:
                self.states.release(row)  # no drafter needs it
            elif held is not None:
                self.states.drop(row, len(held.text) - 1 - _KEPT)

    def release(self, row: Row) -> None:
        """Free all pages of ``row``."""
        self._held.pop(row.id, None)
        self.cache.allocator.release(row.id)

    def _follow(self, row: Row) -> _Held | None:
        """Roll the cache back to the row's tokens except the last. Return what it still holds of the row, or None."""
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

    def _unread(self, row: Row) -> range:
        """Return the range of tokens to read next. The hidden states at the token before each of them are known."""
        stored, held = self.states.stored(row), self._follow(row)
        if held is None:
            self.begin(row)
            held = self._held[row.id]
        if len(held.text) - 1 < stored.start:
            self.release(row)
            held = self._held[row.id] = _Held(stored.start + 1, row.tokens[: stored.start + 1])
        return range(len(held.text), min(stored.stop + 1, len(row.tokens)))

    def _reserve(self, rows: abc.Sequence[Row], unread: abc.Sequence[range], room: abc.Sequence[int]) -> PagedBatch:
        """Make room in the cache for the tokens ``unread``, and for ``room`` more in each row. Return the batch of
        ``unread``."""
        starts, counts = [self._held[row.id].slots for row in rows], [len(part) for part in unread]
        try:
            for row, start, count, more in zip(rows, starts, counts, room):
                self.cache.resize(row.id, start + count + more)
        except OutOfBlocks:
            for row, start in zip(rows, starts):
                self.cache.resize(row.id, start) if start else self.release(row)
            raise
        return self.cache.batch([row.id for row in rows], starts, counts)

    def _states_before(self, rows: abc.Sequence[Row], unread: abc.Sequence[range]) -> Tensor:
        """Return the hidden states at the token before each of the tokens ``unread``, one row after another."""
        before = [self.states.get(row, range(part.start - 1, part.stop - 1)) for row, part in zip(rows, unread)]
        return before[0] if len(before) == 1 else torch.cat(before)


def _salt(row: Row) -> str:
    """Return the key under which rows may share pages. It includes the row's first token: the head never reads that
    token, but its pages depend on it."""
    return f"{row.params.cache_salt} {row.tokens[0]}"
