"""Prompt lookup: propose the tokens that followed the last time the text ended like this."""

from __future__ import annotations

from collections import abc

from fly.drafts.base import Continuation, DraftStrategy, is_built_in, until_end
from fly.ops import common_prefix
from fly.runner.executor import DraftSpec, Lookup
from fly.runner.request import Row
from fly.types import Draft

__all__ = ["Index", "NGramDraft"]


class Index:
    """An index of the positions at which each n-gram of a text ends, for n-grams of ``shortest`` to ``longest`` tokens.
    An update reads only what changed in the text, so a lookup costs the same in any context."""

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest, self.shortest = longest, shortest
        self._tokens: list[int] = []  # indexed so far
        self._ends: dict[tuple[int, ...], list[int]] = {}  # positions of each n-gram's last token, in order

    def copied(self, text: list[int], most: int) -> list[int]:
        """Find the longest n-gram that ends ``text`` and also occurs earlier in it. Return up to ``most`` tokens after
        its latest earlier occurrence. A copy that reaches the end of the text continues with its own tokens."""
        if most < 1:
            return []
        self._follow(text)
        tokens = self._tokens
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            ends = self._ends[tuple(tokens[-n:])]
            if len(ends) > 1:  # the last entry is the end of the text itself
                follows = ends[-2] + 1
                copied = tokens[follows : follows + most]
                for i in range(len(copied), most):
                    copied.append(copied[i - (len(tokens) - follows)])
                return copied
        return []

    def _follow(self, text: list[int]) -> None:
        keep = common_prefix(self._tokens, text)
        for end in range(len(self._tokens) - 1, keep - 1, -1):
            for gram in self._grams(end):
                ends = self._ends[gram]
                ends.pop()
                if not ends:
                    del self._ends[gram]
        del self._tokens[keep:]
        self._tokens += text[keep:]
        for end in range(keep, len(self._tokens)):
            for gram in self._grams(end):
                self._ends.setdefault(gram, []).append(end)

    def _grams(self, end: int) -> list[tuple[int, ...]]:
        longest = min(self.longest, end + 1)
        return [tuple(self._tokens[end + 1 - n : end + 1]) for n in range(self.shortest, longest + 1)]


def lookup_forwards(index: Index, text: list[int], drafted: list[int], most: int) -> int:
    """Return how many forwards a draft model needs for ``drafted`` if each verifies up to ``most`` copied tokens."""
    at = forwards = 0
    while at < len(drafted):
        copied = index.copied(text + drafted[:at], min(most, len(drafted) - at))
        at += common_prefix(copied, drafted[at:]) + 1
        forwards += 1
    return forwards


class NGramDraft(DraftStrategy):
    """Prompt lookup (Saxena 2023; FLy's first level). Take the last ``longest`` tokens of the text. If they occur
    nowhere earlier, take one token less, down to ``shortest``. Copy up to ``k`` tokens after their latest occurrence.

    A copy that reaches the end of the text continues with its own tokens, so it can continue a repetition for any
    number of tokens.
    """

    def __init__(self, longest: int = 4, shortest: int = 1, k: int = 6) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram lengths need 1 <= shortest <= longest, got {shortest} and {longest}")
        if k < 1:
            raise ValueError(f"k {k} must be at least 1")
        self.longest = longest
        self.shortest = shortest
        self.k = k
        self._indices: dict[int, Index] = {}

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        drafts = []
        for row, most in zip(rows, max_len):
            if row.id not in self._indices:
                self._indices[row.id] = Index(self.longest, self.shortest)
            copied = self._indices[row.id].copied(row.tokens, min(most, self.k))
            drafts.append(until_end(copied, row))
        return Draft.of(drafts)

    @property
    def lookup(self) -> Lookup:
        """The settings in the form that executors take."""
        return Lookup(self.longest, self.shortest, self.k)

    def continuation(self, rows: abc.Sequence[Row]) -> Continuation | None:
        spec = DraftSpec(lookup=self.lookup)
        return Continuation(None, [self.k] * len(rows), spec) if is_built_in(type(self)) else None

    def release(self, row: Row) -> None:
        self._indices.pop(row.id, None)
