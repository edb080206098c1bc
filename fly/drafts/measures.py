"""What drafting costs, as a straight line, and how much of it is kept, by position, as measured lately. Knows nothing
of strategies or clocks."""

from __future__ import annotations

from collections import abc

__all__ = ["Line", "Rates"]

_COSTS = 32.0  # measurements that a cost looks back on, about
_PAUSE = 3.0  # a measurement counts for at most so many times what was expected: the machine may have paused
_TOKENS = 400.0  # drafted tokens that acceptance looks back on, about
_HOPE, _PRIOR = (
    0.9,
    4.0,
)  # chance that a drafted token is kept while nothing is known, and how many tokens this counts for


class Line:
    """Seconds by size: a straight line ``start + slope · size`` through what was measured lately, by least squares.

    Where only one size was measured that says nothing of the slope. Either it is all slope (``through_zero``, as of a
    model that drafts token by token) or none (as of a forward that reads all weights whatever it is for): by a
    few measurements of 0 seconds at size 0, or a penalty on the slope.
    """

    def __init__(self, through_zero: bool = True) -> None:
        self.start = self.slope = 0.0
        self._off = 0  # how often in a row it was too little (above 0), or too much
        self._zero, self._flat = 8.0 * through_zero, float(not through_zero)
        self._sums = [0.0] * 5  # of 1, x, y, x² and x·y, what is long past counting for little

    def __call__(self, size: float) -> float:
        return self.start + self.slope * size

    def add(self, size: float, seconds: float, beside: float) -> None:
        """Learn from a measurement beside other work of so many seconds. What is off three times in a row, to the same
        side, is a change, before which little counts any more."""
        expected = self(size)
        if self._sums[0]:
            seconds = min(seconds, _PAUSE * (expected + beside) - beside)
        ratio = (seconds + beside) / (expected + beside) if expected + beside > 0 else 1.0
        self._off = max(self._off, 0) + 1 if ratio > 1.5 else min(self._off, 0) - 1 if ratio < 1 / 1.5 else 0
        keep = 0.5 if abs(self._off) >= 3 else 1 - 1 / _COSTS
        here = 1.0, size, seconds, size * size, size * seconds
        self._sums = [keep * old + new for old, new in zip(self._sums, here)]
        weight, x, y, xx, xy = self._sums
        weight += self._zero
        spread = weight * (xx + self._flat) - x * x
        self.slope = max((weight * xy - x * y) / spread, 0.0) if spread > 0 else 0.0
        self.start = (y - self.slope * x) / weight
        if self.start < 0:
            self.start, self.slope = 0.0, max(xy / xx, 0.0) if xx else 0.0


class Rates:
    """How often a drafted token was kept if all before it were, by its position; old measurements count for little."""

    def __init__(self) -> None:
        self.tried: list[float] = []
        self.stood: list[float] = []

    @property
    def overall(self) -> float:
        """The same at any position."""
        return (sum(self.stood) + _PRIOR * _HOPE) / (sum(self.tried) + _PRIOR)

    def add(self, drafted: int, accepted: int) -> None:
        """Learn from a draft."""
        reached = min(drafted, accepted + 1)
        keep, more = 1 / (1 + reached / _TOKENS), [0.0] * (drafted - len(self.tried))
        self.tried = [keep * count for count in self.tried] + more
        self.stood = [keep * count for count in self.stood] + more
        for position in range(reached):
            self.tried[position] += 1
            self.stood[position] += position < accepted

    def longest(self, most: int, worth: float, drafts: abc.Iterable[tuple[int, int]]) -> int:
        """The most tokens to draft: up to the last whose chance of being kept, with all before it, is ``worth`` or
        more. ``drafts`` are the row's latest drafts, each with its numbers of drafted and kept tokens: the row may be
        easier than others, or harder."""
        common = self.overall
        reached = [(min(drafted, accepted + 1), accepted) for drafted, accepted in drafts]
        tried, stood = sum(n for n, _ in reached), sum(n for _, n in reached)
        own = (stood + _PRIOR * common) / (tried + _PRIOR) / common
        chance = 1.0
        for position in range(most):
            here = common
            if position < len(self.tried):
                here = (self.stood[position] + _PRIOR * common) / (self.tried[position] + _PRIOR)
            chance *= min(own * here, 1.0)
            if chance < worth:
                return position
        return most
