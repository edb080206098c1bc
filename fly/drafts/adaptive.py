"""Adaptive draft length: draft a token only if it saves time by measured costs and acceptance, and draft nothing where
none does. Knows nothing of how a draft is made."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field

from fly.drafts.base import Continuation, DraftSetup, DraftStrategy, StopsByChance, Wrapper
from fly.drafts.measures import Line, Rates
from fly.drafts.ways import Ways
from fly.runtime.executor import Spent
from fly.runtime.request import Sequence
from fly.types import Draft, Target

__all__ = ["AdaptiveDraft"]

_PLAIN, _DRAFTING = 0, 1  # decode without a draft, or with one
_FIRST = 2, 8  # rounds to measure of each at the start
_TRIED = 2  # rounds of a later trial; in the first of them, the drafter may have to catch up with the text
_GUESS = 0.3  # while costs are unknown, draft a token if its chance to be kept is at least this
_SHORT = 4  # while costs are unknown, ask a strategy without probabilities for this many tokens
_LATEST = 8  # judge how easy a row is by this many of its latest drafts
_AGAIN = 16  # after this many rounds, draft again for a row that seemed too hard


@dataclass
class _Load:
    """Measurements for one load, which is a number of rows, and whether all of them are at temperature 0."""

    ways: Ways = field(default_factory=lambda: Ways(_FIRST, _TRIED))
    drafting: Line = field(default_factory=Line)  # seconds of drafting in a round, by tokens drafted
    scoring: Line = field(default_factory=lambda: Line(through_zero=False))  # further seconds of a round, by tokens
    rates: Rates = field(default_factory=Rates)
    share: float = 1.0  # verified tokens for each drafted position; above 1 in trees

    @property
    def worth(self) -> float:
        """The least chance to be kept at which drafting a token saves time."""
        slope = self.drafting.slope + self.scoring.slope
        return slope / min(self.ways.seconds) if slope else _GUESS


@dataclass
class _Round:
    """A running round, or several that run in one call."""

    load: _Load
    way: int
    late: bool  # whether the strategy may first have to read text that it has missed
    places: list[tuple[int, int]]  # the id of each row, and its number of tokens
    begin: float
    # For a single round:
    drafting: float = 0.0  # seconds
    drafted: list[int] = field(default_factory=list)  # tokens of each row, along a path
    verified: int = 0  # tokens of all rows
    # For several rounds in one call:
    before: list[tuple[int, int]] = field(default_factory=list)  # each row's numbers of rounds and drafts at the start
    spent: list[Spent] = field(default_factory=list)  # seconds of the first round, and of the others
    most: list[int] = field(default_factory=list)  # the most tokens to draft for each row, along a path


class AdaptiveDraft(Wrapper):
    """Drafts each token that saves time, and drafts nothing while no draft does.

    Decoding is fastest if the last drafted token just pays for itself. So the strategy drafts a token if

        chance to be kept > (seconds to draft one more + seconds to verify one more) / seconds per emitted token.

    The right side is measured for each number of rows that decode together, since drafts are shorter on a busy machine.
    The chance on the left is the draft model's own estimate: the product of its probabilities so far
    (``SingleDraft.reach``), or its square root under a rule that excuses mismatches. For a strategy without
    probabilities, the chance is how often recent drafts were kept up to that position, in all rows and in this row.

    Trials decide whether to draft at all. Rounds with and without drafts are timed, and the faster kind is used. The
    slower kind is tried again for two rounds, after 8 rounds, then 16, and so on up to 512.

    Args:
        strategy: proposes the drafts.
        clock: returns the time in seconds. The default is the setup's clock, which ranks share.
    """

    learns = True

    def __init__(self, strategy: DraftStrategy, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__([strategy])
        self.clock = clock
        self._loads: dict[tuple[int, bool], _Load] = {}
        self._last, self._rows = _PLAIN, set[int]()  # whether the last round drafted, and its rows' ids
        self._round: _Round | None = None

    def attach(self, setup: DraftSetup) -> None:
        super().attach(setup)
        if self.clock is time.perf_counter:
            self.clock = setup.clock

    @property
    def strategy(self) -> DraftStrategy:
        """The strategy that proposes the drafts."""
        return self.members[0]

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        this = self._round
        if this is None or this.places != _places(rows):  # otherwise ``continuation`` has started this round
            this, _ = self._begin(rows)
        lengths = self._lengths(this.load, rows, max_len) if this.way == _DRAFTING else []
        if not any(lengths):
            return Draft.empty(len(rows))
        draft = self.strategy.propose(rows, lengths)
        tokens = list(map(len, draft.chains))
        this.drafted = [min(n, asked) for n, asked in zip(tokens, lengths)]
        this.verified = sum(tokens)
        this.drafting = self.clock() - this.begin
        return draft

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        """Describe rounds without a draft until the next trial of drafts, or else rounds in which the strategy
        continues the rows by itself."""
        none = [0] * len(rows)
        if not any(row.k for row in rows):
            return Continuation(None, none)
        this, rounds = self._begin(rows)
        this.before = [(row.stats.rounds, len(row.drafts)) for row in rows]
        if this.way == _PLAIN:
            return Continuation(None, none, rounds=rounds, report=this.spent.extend)
        lengths = self._lengths(this.load, rows, [row.k for row in rows])
        if (inner := self.strategy.continuation(rows)) is None:
            return None
        if not any(lengths):
            return Continuation(None, none, rounds=1, report=this.spent.extend)
        this.most, rounds = list(map(min, lengths, inner.most)), min(rounds, inner.rounds)
        return inner._replace(most=this.most, rounds=rounds, report=this.spent.extend)

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        if self._last == _DRAFTING:  # otherwise the strategy may never draft for these rows
            super().prefill(parts)

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        if self._drafts:
            super().observe(rows, draft, target)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        this, drafts, now = self._round, self._drafts, self.clock()
        self._round = None
        if drafts:
            super().commit(rows)
        if this is not None:
            self._learn(this, rows, now)

    def release(self, row: Sequence) -> None:
        self._rows.discard(row.id)
        if self._round is not None and any(id_ == row.id for id_, _ in self._round.places):
            self._round = None
        super().release(row)

    @property
    def _drafts(self) -> bool:
        """Whether the strategy takes part in the current round. If not, no method of it is called, since even
        ``observe`` takes time."""
        return self._round is None or self._round.way == _DRAFTING

    def _begin(self, rows: abc.Sequence[Sequence]) -> tuple[_Round, int]:
        """Start a round. Return it, and how many rounds to run with, or without, drafts."""
        about = 1 << (len(rows) - 1).bit_length()
        load = self._loads.setdefault((about, all(row.greedy for row in rows)), _Load())
        way, rounds = load.ways.choose()
        ids = {row.id for row in rows}
        late = self._last != way or not ids <= self._rows
        self._last, self._rows = way, ids
        self._round = _Round(load, way, late, _places(rows), self.clock())
        return self._round, rounds

    def _lengths(self, load: _Load, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> list[int]:
        """Return the most tokens to ask the strategy for in each row."""
        strategy = self.strategy
        if isinstance(strategy, StopsByChance) and strategy.worth is not None:
            strategy.worth = load.worth
            return list(max_len)
        if load.drafting.slope == load.scoring.slope == 0:
            return [min(most, _SHORT) for most in max_len]
        return [
            load.rates.longest(most, load.worth * load.share, row.drafts[-_LATEST:])
            or min(most, row.stats.rounds % _AGAIN == 0)
            for row, most in zip(rows, max_len)
        ]

    def _learn(self, this: _Round, rows: abc.Sequence[Sequence], now: float) -> None:
        """Learn from a round, or from several, that ended at ``now``."""
        after = {row.id: row for row in rows}
        if any(id_ not in after for id_, _ in this.places):
            return
        rows = [after[id_] for id_, _ in this.places]
        grown = [len(row.tokens) - tokens for row, (_, tokens) in zip(rows, this.places)]
        if not all(grown) or any(row.generated == n for row, n in zip(rows, grown)):
            return  # the round was abandoned, or it read a prompt
        # Collect the number of rounds, their seconds, and each row's drafted and kept tokens.
        load, ways = this.load, this.load.ways
        if this.spent:  # the executor measured the time
            rounds = max(row.stats.rounds - before for row, (before, _) in zip(rows, this.before))
            drafts = [row.drafts[before:] for row, (_, before) in zip(rows, this.before)]
            seconds, drafting = (sum(part) for part in zip(*((spent.whole, spent.draft) for spent in this.spent)))
            verified = sum(n for some in drafts for n, _ in some)
            drafts = [[(min(n, most), stood) for n, stood in some] for some, most in zip(drafts, this.most)] or drafts
        else:
            rounds, seconds, drafting, verified = 1, now - this.begin, this.drafting, this.verified
            drafts = [[(n, min(more - 1, n))] if n else [] for n, more in zip(this.drafted, grown)]
        if not rounds:
            return
        # Update the costs, the rates, and the speed of this way. Leave out the time to catch up with a text.
        size, plain = verified / rounds, ways.seconds[_PLAIN] * len(rows)
        if this.way == _DRAFTING:
            scoring = (seconds - drafting) / rounds - plain
            if this.late and load.drafting.slope:
                seconds -= max(drafting - load.drafting(size) * rounds, 0.0)
            else:
                load.drafting.add(size, drafting / rounds, plain)
            load.scoring.add(size, scoring, plain)
            for row, some in zip(rows, drafts):
                # A row that ends cuts off tokens that would have been kept, so its last draft says nothing.
                for drafted, accepted in some[:-1] if row.finish_reason else some:
                    load.rates.add(drafted, accepted)
            if total := sum(n for some in drafts for n, _ in some):
                load.share += (verified / total - load.share) / _LATEST
        ways.add(this.way, seconds, sum(grown), rounds)


def _places(rows: abc.Sequence[Sequence]) -> list[tuple[int, int]]:
    return [(row.id, len(row.tokens)) for row in rows]
