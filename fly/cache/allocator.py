"""Block tables of plain integers: which pages of the cache each sequence holds. Knows nothing of tensors or models."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

__all__ = ["BlockAllocator", "OutOfBlocks"]


# The key of a page's content: the number of the content before it (or the salt), and the page's tokens.
_Key: TypeAlias = tuple[int | str, tuple[int, ...]]


class OutOfBlocks(RuntimeError):
    """There are too few free pages. Nothing was changed."""


@dataclass
class _Held:
    """What a sequence holds."""

    table: list[int] = field(default_factory=list)  # its pages, in order of position
    length: int = 0  # how many tokens it has room for
    published: int = 0  # how many of its first pages are published
    content: int = 0  # the content number of the last published page


class BlockAllocator:
    """Hands out ``num_blocks`` pages of ``block_size`` tokens to sequences, with reference counts for sharing.

    An operation that fails changes nothing. The pages of a sequence are consecutive if possible: the sequence grows
    into the page after its last one. A new sequence starts in the middle of the largest free run, so that its neighbour
    has room to grow too.

    Later sequences that begin with the same tokens and have the same ``salt`` share pages with known content
    (``publish``, ``adopt``). Sequences with different salts never share. Tokens are compared, not hashes. A published
    page that no sequence holds is *idle*: it keeps its content until the room is needed. The least recently used idle
    pages are taken first, and the last pages of a text before its first ones.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks} and block_size {block_size} must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._references = [0] * num_blocks
        self._used = bytearray(num_blocks)  # 0: neither held nor idle; bytes, so that free runs are found fast
        self._free = num_blocks  # number of zeros in ``_used``
        self._idle: OrderedDict[int, None] = OrderedDict()  # idle pages, least recently used first
        self._held: dict[Hashable, _Held] = {}  # by sequence
        self._contents: dict[_Key, tuple[int, int]] = {}  # -> its number, which is used once, and the page
        self._keys: dict[int, _Key] = {}  # the key of each page in ``_contents``
        self._last = 0

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence holds."""
        return self._free + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Number of free pages whose content a new sequence may still share."""
        return len(self._idle)

    def __contains__(self, seq: Hashable) -> bool:
        """Whether ``seq`` is known, even if it has no pages."""
        return seq in self._held

    def sequences(self) -> list[Hashable]:
        """Return the known sequences, oldest first."""
        return list(self._held)

    def table(self, seq: Hashable) -> list[int]:
        """Return the page numbers of ``seq``, in order of position; empty if it is unknown. This is the allocator's own
        list: do not change it."""
        return self._of(seq).table

    def length(self, seq: Hashable) -> int:
        """Return how many tokens ``seq`` has room for, as last set by ``resize``; 0 if it is unknown."""
        return self._of(seq).length

    def _of(self, seq: Hashable) -> _Held:
        """Return what ``seq`` holds: nothing if it is unknown."""
        return self._held.get(seq) or _Held()

    def blocks_for(self, n_tokens: int) -> int:
        """Return how many pages ``n_tokens`` tokens need."""
        return -(-n_tokens // self.block_size)

    def resize(self, seq: Hashable, n_tokens: int) -> list[tuple[int, int]]:
        """Grow ``seq`` to ``n_tokens`` tokens, or roll it back to its first ``n_tokens``; a new ``seq`` starts empty.

        Returns the page copies ``(source, destination)`` that the owner of the tensors must make before it writes.
        There is one if the sequence grows into a partly filled page that it shares (copy on write), else none.

        Raises:
            OutOfBlocks: not enough free pages; nothing was changed.
            ValueError: ``n_tokens`` is negative.
        """
        if n_tokens < 0:
            raise ValueError(f"n_tokens {n_tokens} must not be negative")
        held = self._of(seq)
        table = held.table
        shares = self._shares_tail(held, n_tokens)
        grow, copies = self.blocks_for(n_tokens) - len(table), []
        if (blocks := max(grow, 0) + shares) > self.num_free:
            raise OutOfBlocks(
                f"sequence {seq!r} needs {blocks} more blocks of {self.block_size} tokens for {n_tokens} tokens; "
                f"{self.num_free} of {self.num_blocks} are free"
            )
        if grow < 0:
            for block in reversed(table[grow:]):
                self._drop(block)
            del table[grow:]
        if shares:
            source = table.pop()
            self._take(table, 1)
            self._drop(source)
            copies.append((source, table[-1]))
        elif n_tokens > held.length and held.length % self.block_size:
            self._forget_content(table[-1])  # it will be overwritten
        if grow > 0:
            self._take(table, grow)
        if n_tokens // self.block_size < held.published:
            held.published = 0  # the next ``publish`` looks it up from the start
        held.length = n_tokens
        self._held[seq] = held
        return copies

    def missing(self, seq: Hashable, n_tokens: int) -> int:
        """Return how many free pages it takes to ``resize`` to ``n_tokens`` tokens."""
        held = self._of(seq)
        return max(self.blocks_for(n_tokens) - len(held.table), 0) + self._shares_tail(held, n_tokens)

    def _shares_tail(self, held: _Held, n_tokens: int) -> bool:
        """Whether a sequence would grow into a partly filled page that another sequence also holds."""
        partly = n_tokens > held.length and held.length % self.block_size > 0
        return partly and self._references[held.table[-1]] > 1

    def publish(self, seq: Hashable, tokens: Sequence[int], n_tokens: int, salt: str = "") -> None:
        """Declare that ``seq`` stores the first ``n_tokens`` of ``tokens``. Later sequences with this salt can then
        share its full pages.

        Raises ``ValueError`` if ``seq`` has room for fewer than ``n_tokens`` tokens.
        """
        held = self._of(seq)
        if n_tokens > held.length:
            raise ValueError(f"sequence {seq!r} has room for {held.length} tokens and cannot store {n_tokens}")
        while held.published < n_tokens // self.block_size:
            key = self._next_page(held, tokens, salt)
            if key not in self._contents:
                block = held.table[held.published]
                self._forget_content(block)
                self._last += 1
                self._contents[key] = self._last, block
                self._keys[block] = key
            held.content, _ = self._contents[key]
            held.published += 1

    def adopt(self, seq: Hashable, tokens: Sequence[int], salt: str = "") -> int:
        """Start ``seq`` with the published pages that store the first of ``tokens`` under this salt. Return how many
        tokens they store: a multiple of ``block_size``, 0 if there are none. Raises ``ValueError`` if ``seq`` is
        known."""
        if seq in self._held:
            raise ValueError(f"sequence {seq!r} has pages already; only a new one can adopt others")
        held = self._held[seq] = _Held()
        while (key := self._next_page(held, tokens, salt)) in self._contents:
            held.content, block = self._contents[key]
            self._hold(block)
            held.table.append(block)
            held.published += 1
        held.length = held.published * self.block_size
        return held.length

    def forget(self) -> None:
        """Forget all published content, so that later sequences share none of it."""
        self._evict(self.num_free)
        for block in list(self._keys):
            self._forget_content(block)
        for held in self._held.values():
            held.published = 0

    def next_key(self, seq: Hashable, tokens: Sequence[int], salt: str = "") -> Hashable:
        """Return a key of the first full page of ``tokens`` that ``seq`` has not published; None if there is none.
        Sequences with equal keys are about to compute the same page."""
        key = self._next_page(self._of(seq), tokens, salt)
        _, page = key
        return key if len(page) == self.block_size else None

    def _next_page(self, held: _Held, tokens: Sequence[int], salt: str) -> _Key:
        """Return the key of the first page of ``tokens`` that is not published. It may have fewer tokens than a page,
        and is then no key of a content."""
        start = held.published * self.block_size
        return held.content if held.published else salt, tuple(tokens[start : start + self.block_size])

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Let ``child`` share all pages of ``parent``. Raises ``ValueError`` for an unknown parent or a known child."""
        if parent not in self._held:
            raise ValueError(f"cannot fork unknown sequence {parent!r}; known: {self.sequences()[:8]}")
        if child in self._held:
            raise ValueError(f"cannot fork into sequence {child!r}: it exists already")
        held = self._held[parent]
        self._held[child] = replace(held, table=list(held.table))
        for block in held.table:
            self._hold(block)

    def release(self, seq: Hashable) -> None:
        """Give back everything that ``seq`` holds. Does nothing for an unknown sequence."""
        for block in reversed(self._held.pop(seq, _Held()).table):
            self._drop(block)

    def _hold(self, block: int) -> None:
        """Count one more sequence that holds ``block``."""
        self._idle.pop(block, None)
        self._references[block] += 1

    def _drop(self, block: int) -> None:
        """Count one sequence fewer that holds ``block``. A block that none holds is idle if it is published, else
        free."""
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self._keys:
            self._idle[block] = None
        else:
            self._used[block] = 0
            self._free += 1

    def _forget_content(self, block: int) -> None:
        """Forget the content of ``block``."""
        if (key := self._keys.pop(block, None)) is not None:
            del self._contents[key]

    def _evict(self, count: int) -> None:
        """Free idle pages until ``count`` are free. The caller has checked that there are enough."""
        while self._free < count:
            block, _ = self._idle.popitem(last=False)
            self._forget_content(block)
            self._used[block] = 0
            self._free += 1

    def _take(self, table: list[int], count: int) -> None:
        """Append ``count`` free pages to ``table``. The caller has checked that there are enough."""
        self._evict(count)
        while count:
            start = table[-1] + 1 if table else self.num_blocks
            if start >= self.num_blocks or self._used[start]:
                start = self._find_run(count)
            end = self._used.find(1, start, start + count)
            run = range(start, min(start + count, self.num_blocks) if end < 0 else end)
            for block in run:
                self._references[block], self._used[block] = 1, 1
            table.extend(run)
            self._free -= len(run)
            count -= len(run)

    def _find_run(self, count: int) -> int:
        """Return where ``count`` pages start: in the largest free run. If a sequence before this run may grow into it,
        they start in its middle, where they fit."""
        best = 0
        longest = 0
        at = self._used.find(0)
        while at >= 0:
            end = self._used.find(1, at)
            end = self.num_blocks if end < 0 else end
            if end - at > longest:
                best, longest = at, end - at
            at = self._used.find(0, end)
        middle = best + longest // 2
        return middle if best > 0 and best + longest - middle >= count else best
