"""Recent measurements: seconds as a straight line (``Line``), and how often drafted tokens are kept (``Rates``).
Knows nothing of strategies or clocks."""

from __future__ import annotations

from collections import abc

__all__ = ["Line", "Rates"]

_COSTS = 32.0  # a line remembers about this many measurements
_PAUSE = 3.0  # cut a measurement to this many times the expected one, since the machine may have paused
_TOKENS = 400.0  # rates remember about this many drafted tokens
_HOPE, _PRIOR = 0.9, 4.0  # the rate to assume at first, and its weight in tokens


class Line:
    """Seconds as a function of size: the straight line ``start + slope · size`` through recent measurements, by least
    squares.

    Measurements of a single size do not determine the slope, so an assumption must. With ``through_zero`` the line
    assumes a few measurements of 0 seconds at size 0, and the slope explains all seconds. This suits a model that
    drafts token by token. Otherwise a penalty keeps the slope small, and the start explains the seconds. This suits a
    forward, which reads all weights for any size.
    """

    def __init__(self, through_zero: bool = True) -> None:
        self.start = self.slope = 0.0
        self._off = 0  # how many measurements in a row were far above the line, or (negative) below it
        self._zero, self._flat = 8.0 * through_zero, float(not through_zero)
        self._sums = [0.0] * 5  # decaying sums of 1, x, y, x² and x·y

    def __call__(self, size: float) -> float:
        return self.start + self.slope * size

    def add(self, size: float, seconds: float, beside: float) -> None:
        """Learn from a measurement. ``beside`` is the time in seconds of other work in the same round. Three
        measurements in a row that miss the line on the same side mean that the cost has changed. Then all older
        measurements lose half their weight."""
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
    """For each position of a draft, how often a token is kept if all tokens before it are. Old measurements fade."""

    def __init__(self) -> None:
        self.tried: list[float] = []
        self.kept: list[float] = []

    @property
    def overall(self) -> float:
        """The rate over all positions."""
        return (sum(self.kept) + _PRIOR * _HOPE) / (sum(self.tried) + _PRIOR)

    def add(self, drafted: int, accepted: int) -> None:
        """Learn from a draft, given how many tokens were drafted and how many were kept."""
        reached = min(drafted, accepted + 1)
        keep, more = 1 / (1 + reached / _TOKENS), [0.0] * (drafted - len(self.tried))
        self.tried = [keep * count for count in self.tried] + more
        self.kept = [keep * count for count in self.kept] + more
        for position in range(reached):
            self.tried[position] += 1
            self.kept[position] += position < accepted

    def longest(self, most: int, worth: float, drafts: abc.Iterable[tuple[int, int]]) -> int:
        """Return how many tokens to draft, at most ``most``. A token is drafted if it and all tokens before it are kept
        with a chance of at least ``worth``. ``drafts`` lists the numbers of drafted and kept tokens of the row's latest
        drafts, since a row may be easier or harder than others."""
        common = self.overall
        counts = [(min(drafted, accepted + 1), accepted) for drafted, accepted in drafts]
        tried, kept = sum(n for n, _ in counts), sum(n for _, n in counts)
        own = (kept + _PRIOR * common) / (tried + _PRIOR) / common  # the row's rate, as a multiple of the common one
        chance = 1.0
        for position in range(most):
            here = common
            if position < len(self.tried):
                here = (self.kept[position] + _PRIOR * common) / (self.tried[position] + _PRIOR)
            chance *= min(own * here, 1.0)
            if chance < worth:
                return position
        return most
