"""Recent measurements: seconds of forwards and of drafting (``Costs``), how often drafted tokens are kept at each
position (``Rates``). Knows nothing of strategies or clocks.

A neighbour on the machine makes single rounds many times as long. So costs are medians, and a drafted token is compared
with the forward of the same round."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import abc, defaultdict, deque
from itertools import accumulate
from operator import mul
from statistics import median, median_low

__all__ = ["Costs", "Rates"]

_FEW, _MANY = 5, 12  # how many measurements a median is taken of, and a line is laid through
_MEMORY = 400.0  # rates remember about this many drafted tokens
_FIRST_RATE, _FIRST_WEIGHT = 0.9, 4.0  # the rate to assume at first, and its weight in tokens


class Costs:
    """What a forward of the target takes, by the number of its tokens, and what drafting takes.

    A forward without drafts takes the median of the last 5, for each number of rows. A forward over drafts takes
    ``start + slope · tokens``, a line through the last 12 by the Theil-Sen estimator: its slope is the median of the
    slopes between pairs, weighted by their distance, so that a few slow rounds do not move it. A drafted token takes
    ``step`` forwards of the target over the same rows; this ratio hardly depends on how many rows there are.

    A neighbour slows down everything. So seconds are divided by the pace before they are kept: the median of how much
    longer the last 5 rounds took than expected. Only kinds of rounds that have been measured before set the pace.
    """

    def __init__(self) -> None:
        self.start = self.slope = 0.0
        self._plain: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_FEW))  # seconds, by rows
        self._forwards: deque[tuple[float, float]] = deque(maxlen=_MANY)  # tokens and seconds of forwards over drafts
        self._steps: deque[float] = deque(maxlen=2 * _FEW)
        self._lookups: deque[tuple[float, float]] = deque(maxlen=_FEW)
        self._paces: deque[float] = deque(maxlen=_FEW)

    def plain(self, rows: int) -> float:
        """Return the seconds of a forward without drafts, at most those of a forward over drafts; 0 if unknown."""
        if rows in self._plain:
            limit = self.forward(rows + 1) if self._forwards else math.inf
            return min(median_low(self._plain[rows]), limit)
        if not self._plain:
            return self.forward(rows)
        nearest = min(self._plain, key=lambda known: abs(known - rows))
        seconds = self.plain(nearest)
        return max(seconds + self.slope * (rows - nearest), seconds * min(rows / nearest, 1.0))

    def forward(self, tokens: float) -> float:
        """Return the seconds of a forward over drafts, with ``tokens`` tokens in all rows together; 0 if unknown."""
        if self._forwards:
            return self.start + self.slope * tokens
        return max((median(times) for times in self._plain.values()), default=0.0)

    @property
    def step(self) -> float | None:
        """The time of a drafted token, in forwards of the target without drafts; None: unknown."""
        return median(self._steps) if self._steps else None

    @property
    def lookup_overhead(self) -> float:
        """The seconds of a round by lookup, less those of its forward. Compiled code does not run such rounds."""
        return median([seconds - self.forward(tokens) for tokens, seconds in self._lookups] or [0.0])

    def add_plain(self, rows: int, seconds: float) -> None:
        """Learn from a forward without drafts."""
        durations = self._plain[rows]
        durations.append(self._at_usual_pace(seconds, median(durations) if len(durations) > 2 else 0.0))
        self._fit(rows)

    def add_forward(self, rows: int, tokens: float, seconds: float) -> None:
        """Learn from a forward over drafts, with ``tokens`` tokens in all rows together."""
        expected = self.forward(tokens) if len(self._forwards) > 2 else 0.0
        self._forwards.append((tokens, self._at_usual_pace(seconds, expected)))
        self._fit(rows)

    def add_lookup(self, tokens: float, seconds: float) -> None:
        """Learn from a round by lookup, whose forward is over ``tokens`` tokens."""
        expected = self.forward(tokens) + self.lookup_overhead if len(self._lookups) > 2 else 0.0
        self._lookups.append((tokens, self._at_usual_pace(seconds, expected)))

    def _at_usual_pace(self, seconds: float, expected: float) -> float:
        """Return ``seconds`` divided by the pace. If ``expected`` seconds are known (not 0), update the pace first."""
        if expected > 0:
            self._paces.append(seconds / expected)
        return seconds / (median(self._paces) or 1.0) if self._paces else seconds

    def add_step(self, rows: int, seconds: float, tokens: float, forward: float) -> None:
        """Learn from a drafted token for each of ``rows`` rows. It took ``seconds``, in a round in which the target's
        forward over ``tokens`` tokens took ``forward`` seconds. A slow machine slows down both."""
        if forward > 0 and (usual := self.plain(rows)) > 0:
            self._steps.append(seconds / forward * self.forward(tokens) / usual)

    def _fit(self, rows: int) -> None:
        """Lay the line through the latest forwards over drafts, and through the one without drafts of ``rows`` rows."""
        if not self._forwards:
            return
        points = list(self._forwards)
        plain = [(float(rows), median(self._plain[rows]))] if rows in self._plain else []
        pairs = sorted(
            ((second[1] - first[1]) / (second[0] - first[0]), abs(second[0] - first[0]))
            for at, first in enumerate(points)
            for second in points[at + 1 :] + plain
            if abs(second[0] - first[0]) >= 0.5
        )
        x, y = median(tokens for tokens, _ in points), median(seconds for _, seconds in points)
        reached = list(accumulate(weight for _, weight in pairs))
        slope = pairs[bisect_left(reached, reached[-1] / 2)][0] if pairs else 0.0  # the weighted median
        self.slope = min(max(slope, 0.0), y / x)  # no forward costs less than nothing
        self.start = max(median(seconds - self.slope * tokens for tokens, seconds in points), 0.0)


class Rates:
    """For each position of a draft, how often a token is kept if all tokens before it are. Old measurements fade."""

    def __init__(self) -> None:
        self.tried: list[float] = []
        self.kept: list[float] = []

    @property
    def overall(self) -> float:
        """The rate over all positions."""
        return (sum(self.kept) + _FIRST_WEIGHT * _FIRST_RATE) / (sum(self.tried) + _FIRST_WEIGHT)

    def add(self, drafted: int, accepted: int) -> None:
        """Learn from a draft, given how many tokens were drafted and how many were kept."""
        reached = min(drafted, accepted + 1)
        keep, more = 1 / (1 + reached / _MEMORY), [0.0] * (drafted - len(self.tried))
        self.tried = [keep * count for count in self.tried] + more
        self.kept = [keep * count for count in self.kept] + more
        for position in range(reached):
            self.tried[position] += 1
            self.kept[position] += position < accepted

    def chances(self, count: int, drafts: abc.Iterable[tuple[int, int]]) -> list[float]:
        """Return, for each of ``count`` positions, the chance that the token there and all before it are kept.
        ``drafts`` lists the numbers of drafted and kept tokens of the row's latest drafts, since a row may be easier or
        harder than others."""
        common = self.overall
        counts = [(min(drafted, accepted + 1), accepted) for drafted, accepted in drafts]
        tried, kept = sum(n for n, _ in counts), sum(n for _, n in counts)
        # The row's rate, as a multiple of the common one.
        ratio = (kept + _FIRST_WEIGHT * common) / (tried + _FIRST_WEIGHT) / common
        rates = [
            (self.kept[j] + _FIRST_WEIGHT * common) / (self.tried[j] + _FIRST_WEIGHT) if j < len(self.tried) else common
            for j in range(count)
        ]
        return list(accumulate((min(ratio * rate, 1.0) for rate in rates), mul))
