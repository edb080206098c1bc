"""What drafting costs and how much of it stands, as measured lately: seconds as means and straight lines, acceptance by
position and by row. Knows nothing of strategies, and of no clock."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from fly.executor import Spent
from fly.request import Sequence

__all__ = ["ONCE", "Costs", "Line", "Mean", "Places", "Rates", "Round", "RowRates", "Took"]

_COSTS = 32.0  # measurements that a cost looks back on, about
_PAUSE = 3.0  # a measurement counts for at most so many times what was expected
_COMMON = 400.0  # drafted tokens that the acceptance of all rows looks back on, about
_OWN = 100.0  # the same for a row's own
_HOPE = 0.9  # chance that a drafted token stands, while nothing is known
_PRIOR = 4.0  # drafted tokens for which that counts
_OTHERS = 20.0  # drafted tokens for which all rows count beside a row's own, at most
_ASTRAY = 0.05  # chance that a token stands where the strategy has lost the thread
_FOLLOWS = 0.8  # the same elsewhere, at most: two misses in a row prove little
_SURE = 5.0  # the odds stay within this, so that a text may change
_LONG = 0.01  # seconds of a round that shows what it costs even if it is alone
ONCE = 8.0  # rounds without a draft that may be lost by finding out what a strategy is worth


class Mean:
    """Seconds of what should always take the same, such as a round without a draft for one number of rows."""

    def __init__(self) -> None:
        self.seconds, self.since, self._count = 0.0, 0, 0
        self._first: list[float] = []

    def add(self, seconds: float) -> None:
        self._count, self.since = self._count + 1, 0
        if self._count <= 3:  # a pause of the machine must not stand for it: the least of two, the middle one of three
            self._first = sorted([*self._first, seconds])
            self.seconds = self._first[(self._count - 1) // 2]
        else:
            self.seconds += (min(seconds, _PAUSE * self.seconds) - self.seconds) * max(1 / self._count, 0.1)

    def due(self, again: int) -> bool:
        """Whether to measure once more: ``again`` rounds after the last time, sooner while it was measured seldom."""
        return self.since >= again * min(self._count / 8, 1)


class Line:
    """Seconds of what drafting takes, by its size: a straight line ``start + slope · size`` through what was measured
    lately, by least squares.

    Where only one size was measured that says nothing of the slope. Either it is all slope (``through_zero``, as of a
    model that drafts token by token) or none (as of a forward that reads all weights whatever it is for): by a
    few measurements of 0 seconds at size 0, or a penalty on the slope.
    """

    def __init__(self, through_zero: bool = True) -> None:
        self.start = self.slope = 0.0
        self.count = 0
        self._off = 0  # how often in a row it was too little (above 0), or too much
        self._zero, self._flat = 8.0 * through_zero, float(not through_zero)
        self._sums = [0.0] * 5  # of 1, x, y, x² and x·y, what is long past counting for little

    def __call__(self, size: float) -> float:
        return self.start + self.slope * size

    def add(self, size: float, seconds: float, base: float) -> float:
        """Learn from a measurement beside a round of ``base`` seconds. Returns what it counts for: a pause of the
        machine is no cost of the size, and first times are long ones."""
        expected = self(size)
        seconds = min(seconds, _PAUSE * (expected + base) - base)
        if self.count < 3 and expected > 0 and seconds + base < (expected + base) / 2:
            for number in (2, 4):
                self._sums[number] *= max(seconds, 0.0) / expected
        self.count += 1
        # What is off three times in a row, to the same side, is a change, before which little counts any more.
        ratio = (seconds + base) / (expected + base)
        self._off = max(self._off, 0) + 1 if ratio > 1.7 else min(self._off, 0) - 1 if ratio < 1 / 1.7 else 0
        keep = 0.5 if abs(self._off) >= 3 else 1 - 1 / _COSTS
        here = 1.0, size, seconds, size * size, size * seconds
        self._sums = [keep * old + new for old, new in zip(self._sums, here)]
        weight, x, y, xx, xy = self._sums
        weight += self._zero
        self.slope = max((weight * xy - x * y) / (weight * (xx + self._flat) - x * x), 0.0)
        self.start = (y - self.slope * x) / weight
        if self.start < 0:
            self.start, self.slope = 0.0, max(xy / xx, 0.0)
        return seconds


class Rates:
    """How often a token stood, by its position in the draft and in all; what is long past counts for little."""

    def __init__(self) -> None:
        self.tried: list[float] = []
        self.stood: list[float] = []
        self.seen = 0.0  # drafted tokens of which it is known whether they stood
        self.overall = _HOPE  # chance that a token stands if all before it do

    def add(self, asked: int, accepted: int, share: float) -> None:
        """Learn from a draft, of which ``share`` counts."""
        reached = min(asked, accepted + 1)
        keep, new = 1 / (1 + share * reached / _COMMON), [0.0] * (asked - len(self.tried))
        self.tried = [keep * count for count in self.tried] + new
        self.stood = [keep * count for count in self.stood] + new
        for position in range(reached):
            self.tried[position] += share
            self.stood[position] += share * (position < accepted)
        self.seen = sum(self.tried)
        self.overall = (sum(self.stood) + _PRIOR * _HOPE) / (self.seen + _PRIOR)

    def reach(self, chance: float, rate: float, most: int) -> list[float]:
        """For each of ``most`` positions the chance that its token and all before it stand, if with ``chance`` tokens
        do at ``rate`` and else none does: each in the proportion in which its position stands to the others in all
        rows."""
        found, common = [], self.overall
        for position in range(most):
            if position < len(self.tried):
                here = (self.stood[position] + _PRIOR * common) / (self.tried[position] + _PRIOR)
                chance *= min(rate * here / common, 1.0)
            else:
                chance *= rate
            found.append(chance)
        return found


@dataclass
class RowRates:
    """The same for one row, where the strategy may have lost the thread whatever it does in others."""

    doubt: float  # ln of the odds that the strategy is astray there
    tried: float = 0.0  # drafted tokens, those long past for little
    stood: float = 0.0

    def add(self, asked: int, accepted: int, common: float) -> None:
        """Learn from a draft, where tokens of all rows stand with the chance ``common``."""
        reached = min(asked, accepted + 1)
        keep = _OWN / (_OWN + reached)
        self.tried = keep * self.tried + reached
        self.stood = keep * self.stood + accepted
        common = min(max(common, 2 * _ASTRAY), _FOLLOWS)
        if accepted:
            self.doubt = max(self.doubt + accepted * math.log(_ASTRAY / common), -_SURE)
        if accepted < asked:
            self.doubt = min(self.doubt + math.log((1 - _ASTRAY) / (1 - common)), _SURE)

    def rate(self, others: Rates) -> float:
        """Chance that a drafted token stands if the strategy is not astray."""
        weight = min(_OTHERS, others.seen / 8 + 2)
        return (self.stood + weight * others.overall) / (self.tried + weight)

    @property
    def trust(self) -> float:
        """Chance that it is not."""
        return 1 / (1 + math.exp(self.doubt))


class Costs:
    """What the machine takes, for rows at temperature 0 or for others. All in seconds."""

    def __init__(self) -> None:
        self.plain: dict[int, Mean] = {}  # a round without a draft, by the number of rows
        self.drafting = Line()  # by the longest draft
        self.verifying = Line(through_zero=False)  # by the number of drafted tokens
        self.catching_up = Line()  # by the tokens that the drafter has not seen
        self.stopping = Mean()  # between two calls of compiled code that take several rounds
        self.share = 1.0  # tokens proposed for each that was asked for
        self.longest = 1  # draft that was asked for and verified

    def count(self, lengths: abc.Sequence[int], verified: float) -> None:
        """Note that so many were asked for, and how many were proposed and verified."""
        if verified:
            self.longest = max(self.longest, *lengths)
        self.share += (verified / sum(lengths) - self.share) / _COSTS

    def price(self, lengths: abc.Sequence[int]) -> float:
        """What drafts of rows add to a round."""
        return self.drafting(max(lengths)) + self.verifying(sum(lengths) * self.share)

    def interruption(self, base: float) -> float:
        """The time between two calls, beside rounds of ``base``, unless somebody just reads slowly."""
        return min(self.stopping.seconds, ONCE * base)

    def late(self, tokens: int) -> float:
        """The time to catch up with so many; none while that was measured too seldom to be blamed."""
        return self.catching_up(tokens) if tokens and self.catching_up.count >= 3 else 0.0


Places = list[tuple[int, int]]  # rows by their id, and how many tokens they have


class Took(NamedTuple):
    """What one round took, or each of several, and what came of it."""

    rounds: int
    first: float  # seconds of drafting, in the first round
    drafting: float  # and in a usual one
    scoring: float  # seconds of all else in it
    tells: bool  # whether these times say what it costs
    verified: float  # drafted tokens, in the mean
    stood: list[list[int]]  # by row, of each of its drafts: tokens that stood


@dataclass
class Round:
    """A round that is not over yet, or several that are taken at once."""

    costs: Costs
    places: Places  # before it
    lengths: list[int]  # tokens asked for in each row
    late: int = 0  # tokens that the strategy had to catch up with
    # Of one round:
    teaches: bool = True  # not the time that a prompt takes
    begin: float = 0.0
    drafting: float = 0.0  # seconds that the strategy took
    verified: int = 0  # drafted tokens
    # Of several at once:
    before: list[tuple[int, int]] | None = None  # rounds and drafts of each row
    resting: bool = False
    since: float | None = None  # when the rounds before were over, if these were of the same rows
    spent: list[Spent] = field(default_factory=list)  # by the first round, and by the others

    def took(self, rows: list[Sequence], now: float) -> Took | None:
        """What is known now that it is over; None if it was given up."""
        if self.before is None:
            emitted = [len(row.tokens) - tokens for row, (_, tokens) in zip(rows, self.places)]
            # The end of a row cuts off what would have stood.
            stood = [
                [min(count - 1, asked)] if asked and row.finish_reason is None else []
                for row, count, asked in zip(rows, emitted, self.lengths)
            ]
            scoring = now - self.begin - self.drafting
            return (
                Took(1, self.drafting, self.drafting, scoring, True, self.verified, stood) if min(emitted) > 0 else None
            )
        # Of a row that somebody ended, fewer count than were taken.
        counts = [row.stats.rounds - rounds for row, (rounds, _) in zip(rows, self.before)]
        if not max(counts) or not self.spent:
            return None
        first, others = self.spent
        # In the first round threads have to wake up and caches to fill, which is no cost of it where it is short.
        timed, tells = (others, True) if others.rounds else (first, first.whole > _LONG)
        stood, verified = [], 0
        for row, asked, count, (_, drafts) in zip(rows, self.lengths, counts, self.before):
            verified += sum(n for n, _ in row.drafts[drafts:])
            accepted = [n for _, n in row.drafts[drafts:]]
            accepted += [0] * (count - len(accepted))  # rounds in which nothing was proposed
            stood.append(accepted[: len(accepted) - bool(row.finish_reason)] if asked else [])
        drafting = timed.draft / timed.rounds
        scoring = timed.whole / timed.rounds - drafting
        return Took(max(counts), first.draft, drafting, scoring, tells, verified / max(counts), stood)
