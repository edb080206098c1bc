"""Prompt lookup: propose what followed the last time the text looked like this."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from fly.drafts.base import Continuation, DraftStrategy, pad, until_end
from fly.executor import DraftSpec, Executor, Lookup
from fly.request import Sequence, common_prefix
from fly.types import Draft

__all__ = ["NGramDraft"]


@dataclass
class _Index:
    """The tokens indexed so far, and for each n-gram the positions of its last token, in order."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class NGramDraft(DraftStrategy):
    """Prompt lookup (Saxena 2023; FLy's first level): find the longest n-gram, ``longest`` down to ``shortest``
    tokens, that ends the text and occurred before, at its latest place, and copy up to ``k`` tokens that followed.

    A copy that reaches the end of the text goes on into itself, so a repetition is continued for as long as asked.
    The index follows the text from one proposal to the next, so that a lookup costs the same in any context.
    """

    def __init__(self, longest: int = 4, shortest: int = 1, k: int = 6) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram lengths need 1 <= shortest <= longest, got {shortest} and {longest}")
        if k < 1:
            raise ValueError(f"k {k} must be at least 1")
        self.longest, self.shortest, self.k = longest, shortest, k
        self._indices: dict[int, _Index] = {}

    def executors(self) -> list[Executor]:
        return []

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        copied = [self._lookup(row, min(most, self.k)) for row, most in zip(rows, max_len)]
        return pad([until_end(tokens, row) for row, tokens in zip(rows, copied)])

    @property
    def lookup(self) -> Lookup:
        """The settings, as an executor takes them."""
        return Lookup(self.longest, self.shortest, self.k)

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        spec = DraftSpec(lookup=self.lookup)
        return Continuation(None, [self.k] * len(rows), spec) if type(self) is NGramDraft else None

    def release(self, row: Sequence) -> None:
        self._indices.pop(row.id, None)

    def _lookup(self, row: Sequence, most: int) -> list[int]:
        if most < 1:
            return []
        index = self._sync(row)
        tokens = index.tokens
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            ends = index.ends[tuple(tokens[-n:])]
            if len(ends) > 1:  # the last entry is the end of the text itself
                follows = ends[-2] + 1
                copied = tokens[follows : follows + most]
                for i in range(len(copied), most):
                    copied.append(copied[i - (len(tokens) - follows)])
                return copied
        return []

    def _sync(self, row: Sequence) -> _Index:
        index = self._indices.setdefault(row.id, _Index())
        keep = common_prefix(index.tokens, row.tokens)
        for end in range(len(index.tokens) - 1, keep - 1, -1):
            for gram in self._grams(index.tokens, end):
                ends = index.ends[gram]
                ends.pop()
                if not ends:
                    del index.ends[gram]
        del index.tokens[keep:]
        index.tokens += row.tokens[keep:]
        for end in range(keep, len(index.tokens)):
            for gram in self._grams(index.tokens, end):
                index.ends.setdefault(gram, []).append(end)
        return index

    def _grams(self, tokens: list[int], end: int) -> list[tuple[int, ...]]:
        longest = min(self.longest, end + 1)
        return [tuple(tokens[end + 1 - n : end + 1]) for n in range(self.shortest, longest + 1)]
