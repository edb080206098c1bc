"""Block tables as plain integers: who owns which page of the cache. Knows nothing of tensors or models."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["BlockAllocator", "OutOfBlocks"]


class OutOfBlocks(RuntimeError):
    """The pool cannot serve a request; nothing was changed."""


class BlockAllocator:
    """Hands out ``num_blocks`` pages of ``block_size`` tokens to sequences, with reference counts for sharing.

    Every operation is all or nothing. Pages of one sequence are consecutive whenever the pool allows it: a
    sequence grows into the page after its last one, and a new sequence starts in the middle of the largest free
    run behind another sequence, so that both keep room to grow.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks} and block_size {block_size} must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._references = [0] * num_blocks
        self._used = bytearray(num_blocks)  # 1 where references > 0; searched at C speed for free runs
        self._free = num_blocks
        self._tables: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Pages no sequence holds."""
        return self._free

    def sequences(self) -> list[Hashable]:
        """Sequences that hold an entry, in order of arrival."""
        return list(self._tables)

    def table(self, seq: Hashable) -> list[int]:
        """Page numbers of ``seq`` in order of position (its own list: do not change it); empty if unknown."""
        return self._tables.get(seq, [])

    def length(self, seq: Hashable) -> int:
        """Tokens ``seq`` has room reserved for, as last set by ``resize``; 0 if unknown."""
        return self._lengths.get(seq, 0)

    def blocks_for(self, n_tokens: int) -> int:
        """Pages that ``n_tokens`` tokens occupy."""
        return -(-n_tokens // self.block_size)

    def resize(self, seq: Hashable, n_tokens: int) -> list[tuple[int, int]]:
        """Grow ``seq`` to, or roll it back to, ``n_tokens`` tokens; a new ``seq`` starts from nothing.

        Returns the page copies ``(source, destination)`` the owner of the tensors must make before writing:
        empty unless the sequence would grow into a partly filled page that it shares (copy on write).

        Raises:
            OutOfBlocks: not enough free pages; nothing was changed.
            ValueError: ``n_tokens`` is negative.
        """
        if n_tokens < 0:
            raise ValueError(f"n_tokens {n_tokens} must not be negative")
        table, length = self._tables.get(seq, []), self._lengths.get(seq, 0)
        shared_tail = n_tokens > length and length % self.block_size != 0 and self._references[table[-1]] > 1
        grow = self.blocks_for(n_tokens) - len(table)
        needed = max(grow, 0) + shared_tail
        if needed > self._free:
            raise OutOfBlocks(
                f"sequence {seq!r} needs {needed} more blocks of {self.block_size} tokens for {n_tokens} tokens; "
                f"{self._free} of {self.num_blocks} are free"
            )
        copies = []
        if grow < 0:
            for block in table[grow:]:
                self._drop(block)
            del table[grow:]
        if shared_tail:
            source = table.pop()
            self._take(table, 1)
            self._drop(source)
            copies.append((source, table[-1]))
        if grow > 0:
            self._take(table, grow)
        self._tables[seq], self._lengths[seq] = table, n_tokens
        return copies

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Let ``child`` share all pages of ``parent``. Raises ``ValueError`` for an unknown parent or a known child."""
        if parent not in self._tables:
            raise ValueError(f"cannot fork unknown sequence {parent!r}; known: {self.sequences()[:8]}")
        if child in self._tables:
            raise ValueError(f"cannot fork into sequence {child!r}: it exists already")
        self._tables[child], self._lengths[child] = list(self._tables[parent]), self._lengths[parent]
        for block in self._tables[child]:
            self._references[block] += 1

    def release(self, seq: Hashable) -> None:
        """Give back everything ``seq`` holds; an unknown sequence holds nothing."""
        for block in self._tables.pop(seq, []):
            self._drop(block)
        self._lengths.pop(seq, None)

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if not self._references[block]:
            self._used[block] = 0
            self._free += 1

    def _take(self, table: list[int], count: int) -> None:
        """Append ``count`` free pages to ``table``; the caller has checked that there are enough."""
        while count:
            after = table[-1] + 1 if table else self.num_blocks
            if after < self.num_blocks and not self._used[after]:
                start = after
            else:
                start = self._start(count)
            end = self._used.find(1, start, start + count)
            run = range(start, start + count if end < 0 else end)
            run = range(run.start, min(run.stop, self.num_blocks))
            for block in run:
                self._references[block], self._used[block] = 1, 1
            table.extend(run)
            self._free -= len(run)
            count -= len(run)

    def _start(self, count: int) -> int:
        """Where to begin a run of ``count`` pages: the largest free run, at its middle if a neighbour may grow."""
        best, longest, at = 0, 0, self._used.find(0)
        while at >= 0:
            end = self._used.find(1, at)
            end = self.num_blocks if end < 0 else end
            if end - at > longest:
                best, longest = at, end - at
            at = self._used.find(0, end)
        middle = best + longest // 2
        return middle if best > 0 and best + longest - middle >= count else best
