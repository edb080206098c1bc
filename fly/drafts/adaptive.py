"""How much to draft: as much as pays, by measured costs and acceptance; nothing where nothing does. Knows nothing of
what a draft is made of."""

from __future__ import annotations

import math
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from fly.drafts.base import Continuation, DraftStrategy, Wrapper
from fly.executor import Spent
from fly.request import Sequence
from fly.types import Draft, Target

__all__ = ["AdaptiveDraft"]

_COSTS = 32.0  # measurements that a cost looks back on, about
_PAUSE = 3.0  # a measurement counts for at most so many times what was expected
# Rounds after which decoding without a draft is measured again; sooner while it was measured seldom.
_AGAIN, _AGAIN_AT_ONCE = 64, 256
_COMMON = 400.0  # drafted tokens that the acceptance of all rows looks back on, about
_OWN = 100.0  # the same for a row's own
_HOPE = 0.9  # chance that a drafted token stands, while nothing is known
_PRIOR = 4.0  # drafted tokens for which that counts
_OTHERS = 20.0  # drafted tokens for which all rows count beside a row's own, at most
_ASTRAY = 0.05  # chance that a token stands where the strategy has lost the thread
_FOLLOWS = 0.8  # the same elsewhere, at most: two misses in a row prove little
_FEAR = 0.05  # share of rows in which it has lost it, to begin with and at least
_SURE = 5.0  # the odds stay within this, so that a text may change
_LATE = 32  # tokens by which a text has grown before a drafter that has not seen them has to catch up
_LONG = 0.01  # seconds of a round that tells what it costs even if it is alone
_MEASURED, _TRIED = 16, 2  # rounds that are taken at once to measure them, without a draft and with one
_FIRST = 4  # tokens asked for in the first of those
_REST = 512  # rounds that a row may go on before it is thought about again
# In rounds without a draft:
_ONCE = 8.0  # what may be lost by finding out what a strategy is worth
_POT = 4.0  # what is saved for probes, at most
_GIFT = 0.02  # share of gains that may be spent on probes
_CREDIT = 12.0  # gain that may be lost again


class _Plain:
    """Seconds of what should always take the same, such as a round without a draft for one number of rows."""

    def __init__(self) -> None:
        self.seconds, self.since = 0.0, 0
        self._first: list[float] = []
        self._count = 0

    def add(self, seconds: float) -> None:
        self._count, self.since = self._count + 1, 0
        if self._count <= 3:  # a pause of the machine must not stand for it: the least of two, the middle one of three
            self._first = sorted([*self._first, seconds])
            self.seconds = self._first[(self._count - 1) // 2]
        else:
            self.seconds += (min(seconds, _PAUSE * self.seconds) - self.seconds) * max(1 / self._count, 0.1)

    def due(self, again: int) -> bool:
        return self.since >= again * min(self._count / 8, 1)


class _Line:
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
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def __call__(self, size: float) -> float:
        return self.start + self.slope * size

    def add(self, size: float, seconds: float, base: float) -> float:
        """Learn from a measurement beside a round of ``base`` seconds. Returns what it counts for: a pause of the
        machine is no cost of the size, and first times are long ones."""
        expected = self(size)
        seconds = min(seconds, _PAUSE * (expected + base) - base)
        if self.count < 3 and expected > 0 and seconds + base < (expected + base) / 2:
            self._y *= max(seconds, 0.0) / expected
            self._xy *= max(seconds, 0.0) / expected
        self.count += 1
        # What is off three times in a row, to the same side, is a change, before which little counts any more.
        ratio = (seconds + base) / (expected + base)
        self._off = max(self._off, 0) + 1 if ratio > 1.7 else min(self._off, 0) - 1 if ratio < 1 / 1.7 else 0
        keep = 0.5 if abs(self._off) >= 3 else 1 - 1 / _COSTS
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + size
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + size * size
        self._xy = keep * self._xy + size * seconds
        weight = self._weight + self._zero
        spread = weight * (self._xx + self._flat) - self._x * self._x
        self.slope = max((weight * self._xy - self._x * self._y) / spread, 0.0)
        self.start = (self._y - self.slope * self._x) / weight
        if self.start < 0:
            self.start, self.slope = 0.0, max(self._xy / self._xx, 0.0)
        return seconds


class _Rates:
    """How often a token stood, by its position in the draft and in all; what is long past counts for little."""

    def __init__(self) -> None:
        self.tried: list[float] = []
        self.stood: list[float] = []
        self.overall = _HOPE
        self.seen = 0.0  # tokens
        self._sums = 0.0, 0.0
        self._weight = 1.0  # of the newest: growing instead of letting all others shrink

    def add(self, asked: int, accepted: int, share: float) -> None:
        """Learn from a draft, of which ``share`` counts."""
        reached = min(asked, accepted + 1)
        self._weight *= 1 + share * reached / _COMMON
        if self._weight > 1e9:
            self.tried = [count / self._weight for count in self.tried]
            self.stood = [count / self._weight for count in self.stood]
            self._sums = self._sums[0] / self._weight, self._sums[1] / self._weight
            self._weight = 1.0
        if (missing := asked - len(self.tried)) > 0:
            self.tried += [0.0] * missing
            self.stood += [0.0] * missing
        weight, tried, stood = self._weight * share, self.tried, self.stood
        for position in range(accepted):
            tried[position] += weight
            stood[position] += weight
        if accepted < asked:
            tried[accepted] += weight
        sum_tried, sum_stood = self._sums
        self._sums = sum_tried, sum_stood = sum_tried + reached * weight, sum_stood + accepted * weight
        prior = _PRIOR * self._weight
        self.seen = sum_tried / self._weight
        self.overall = (sum_stood + prior * _HOPE) / (sum_tried + prior)

    def reach(self, chance: float, rate: float, most: int) -> list[float]:
        """For each of ``most`` positions the chance that its token and all before it stand, if with ``chance`` tokens
        do at ``rate`` and else none does: each in the proportion in which its position stands to the others in all
        rows."""
        found = []
        common, prior = self.overall, _PRIOR * self._weight
        known = len(self.tried)
        for position in range(most):
            if position < known:
                here = (self.stood[position] + prior * common) / (self.tried[position] + prior)
                chance *= min(rate * here / common, 1.0)
            else:
                chance *= rate
            found.append(chance)
        return found


@dataclass
class _Row:
    """What is known of a row beside what is known of all."""

    doubt: float  # ln of the odds that the strategy is astray there
    tried: float = 0.0  # drafted tokens, those long past for little
    stood: float = 0.0
    rest: int = 0  # rounds for which nothing needs to be thought about
    base: float = 0.0  # seconds of each, as far as they were known when the rest began
    beside: int = 0  # rows there were then
    seen: int = 0  # its tokens when it was last drafted for

    def add(self, asked: int, accepted: int, common: float) -> None:
        reached = min(asked, accepted + 1)
        keep = _OWN / (_OWN + reached)
        self.tried = keep * self.tried + reached
        self.stood = keep * self.stood + accepted
        common = min(max(common, 2 * _ASTRAY), _FOLLOWS)
        if accepted:
            self.doubt = max(self.doubt + accepted * math.log(_ASTRAY / common), -_SURE)
        if accepted < asked:
            self.doubt = min(self.doubt + math.log((1 - _ASTRAY) / (1 - common)), _SURE)

    def rate(self, others: _Rates) -> float:
        """Chance that a drafted token stands if the strategy is not astray."""
        weight = min(_OTHERS, others.seen / 8 + 2)
        return (self.stood + weight * others.overall) / (self.tried + weight)

    @property
    def trust(self) -> float:
        """Chance that it is not."""
        return 1 / (1 + math.exp(self.doubt))


class _Costs:
    """What the machine takes, for rows at temperature 0 or for others."""

    def __init__(self) -> None:
        self.plain: dict[int, _Plain] = {}  # by the number of rows
        self.drafting, self.catching_up = _Line(), _Line()
        self.verifying = _Line(through_zero=False)
        self.stopping = _Plain()  # between two calls of compiled code that take several rounds
        self.share = 1.0  # tokens proposed for each that was asked for
        self.longest = 1  # draft that was asked for and verified

    def price(self, lengths: list[int]) -> float:
        """Seconds that drafts of rows add to a round."""
        return self.drafting(max(lengths)) + self.verifying(sum(lengths) * self.share)

    def interruption(self, base: float) -> float:
        """Seconds between two calls, beside rounds of ``base``, unless somebody just reads slowly."""
        return min(self.stopping.seconds, _ONCE * base)

    def late(self, tokens: int) -> float:
        """Seconds to catch up with so many; nothing while that was measured too seldom to be blamed."""
        return self.catching_up(tokens) if tokens and self.catching_up.count >= 3 else 0.0


@dataclass
class _Round:
    """A round that is not over yet."""

    costs: _Costs
    rows: list[tuple[int, int, int]]  # id, tokens before, how many were asked for
    late: int  # tokens that the strategy had to catch up with
    verified: int  # drafted tokens
    begin: float
    end: float  # when drafting was over
    listening: float = 0.0  # seconds


@dataclass
class _Stretch:
    """Rounds that are taken at once and are not over yet."""

    costs: _Costs
    rows: list[tuple[Sequence, int, int, int, int]]  # with tokens, rounds and drafts before, and how many are asked for
    late: int
    resting: bool
    since: float | None  # when the stretch before it was over, if that was of the same rows
    spent: list[Spent]  # by the first round, and by the others


_Places = list[tuple[int, int]]  # rows by their id, and how many tokens they have


def _places(rows: abc.Sequence[Sequence]) -> _Places:
    return [(row.id, len(row.tokens)) for row in rows]


def _rest(rows: abc.Sequence[Sequence], known: list[_Row]) -> int:
    """Rounds for which nothing needs to be thought about; those that are never drafted for keep nobody from it."""
    drafted = [row for row, own in zip(known, rows) if own.k]
    return min((row.rest if row.beside == len(rows) else 0 for row in drafted), default=0)


def _behind(rows: abc.Sequence[Sequence], known: list[_Row]) -> list[int]:
    """Tokens that the strategy would have to catch up with."""
    return [max(len(own.tokens) - row.seen - _LATE, 0) for own, row in zip(rows, known)]


@cache
def _nothing(rows: int) -> Draft:
    """The empty draft, kept: to make one takes longer than to decide on it."""
    return Draft.empty(rows)


class AdaptiveDraft(Wrapper):
    """Goodput (TurboSpec, arXiv 2406.14066): of each draft propose as many tokens as maximise the expected number of
    emitted tokens per second, none included.

    Everything is measured online: seconds of a round without a draft; what a draft adds by its length, and its tokens
    to the verification by their number; what a drafter that sat out takes to catch up with a text, by its length; and
    how often a token stands by its position, for all rows and for each row. With reach(b, j) the estimated chance that
    row b's first j drafted tokens all stand, the lengths maximise

        (B + sum over rows and positions drafted of reach) / (plain round + drafting + its verification).

    A token that was asked for and not proposed counts as one that did not stand, and of what is asked for, the share
    that is proposed is measured too (above 1 in trees): the strategy may end a draft where it likes.

    A row may be one where the strategy has lost the thread, whatever it does in others: the odds of that, by what
    stood there lately, are weighed in.

    The promise: where no row can be predicted, a share ``loss`` of the time at most is lost against decoding without a
    draft, and once eight rounds of it. An account says what drafting has cost; a draft that would overdraw it if
    nothing of it stood is not made. Where nothing pays, a share ``loss`` of the time is spent on probes. A round in
    which nothing is asked of the strategy it does not hear of: even listening takes time.

    On compiled kernels rows take several rounds of the same lengths at once, for as long as the account allows. A probe
    there pays for the interruption as well.

    Args:
        strategy: who proposes.
        loss: largest share of time that may be lost by drafting in vain.
        clock: gives seconds; where ranks share the work, all go by one.
    """

    learns = True

    def __init__(
        self, strategy: DraftStrategy, loss: float = 0.005, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__([strategy])
        if not 0 <= loss < 1:
            raise ValueError(f"loss {loss} must be in [0, 1)")
        self.strategy, self.loss, self.clock = strategy, loss, clock
        self._costs = {True: _Costs(), False: _Costs()}  # by whether all rows are at temperature 0
        self._rates = _Rates()
        self._balance = 0.0  # seconds gained by drafting
        self._pot = 0.0  # seconds that may be spent on probes
        self._rows: dict[int, _Row] = {}
        self._astray = _FEAR  # share of the latest rows in which the strategy was at the end
        self._round: _Round | None = None
        self._quiet = 0.0  # seconds of rounds that were not thought about, not booked yet
        self._silent = False  # whether nothing is asked of the strategy in this round
        self._trying = False  # whether it is asked only for what is seen of it
        self._stretch: _Stretch | None = None
        self._last: tuple[_Places, float] = [], 0.0  # rows after their stretch, and when that was over
        self._decided: tuple[_Places, list[int]] | None = None  # what to ask for in rows, should it come to ``propose``

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        known, count = self._known(rows), len(rows)
        self._silent, self._stretch = True, None
        if _rest(rows, known):
            self._go_on(known, 1)
            return _nothing(count)
        begin = self.clock()
        costs = self._costs[all(row.greedy for row in rows)]
        self._book_quiet(costs, count)
        behind = _behind(rows, known)
        decided, self._decided = self._decided, None
        if decided is not None and decided[0] == _places(rows):
            lengths = list(map(min, decided[1], max_len))
        else:
            lengths = self._lengths(costs, known, behind, max_len)
        late = verified = 0
        if asked := sum(lengths):
            self._silent = False
            draft = self.strategy.propose(rows, lengths)
            verified = sum(map(len, draft.chains))
            if verified:
                costs.longest = max(costs.longest, *lengths)
            costs.share += (verified / asked - costs.share) / _COSTS
            for row, own, n, missed in zip(known, rows, lengths, behind):
                if n:
                    row.seen, late = len(own.tokens), late + missed
        else:
            draft = _nothing(count)
        if all(own.generated for own in rows):  # the time that a prompt takes teaches nothing
            before = [(own.id, len(own.tokens), n) for own, n in zip(rows, lengths)]
            self._round = _Round(costs, before, late, verified, begin, self.clock())
        return draft

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        """Rounds without a draft for as long as nothing pays, or some of the same lengths, of a strategy that allows
        it."""
        count, none = len(rows), [0] * len(rows)
        if not any(row.k for row in rows):
            return Continuation(None, none)
        known = self._known(rows)
        costs, inner = self._costs[all(row.greedy for row in rows)], self.strategy.continuation(rows)
        rounds, lengths, late = _rest(rows, known), none, 0
        if not rounds:
            self._book_quiet(costs, count)
            behind = _behind(rows, known)
            lengths = self._lengths(costs, known, behind, [row.k for row in rows], inner is not None)
            self._decided = _places(rows), lengths
            if any(lengths) and inner is None:
                return None
            late = sum(missed for n, missed in zip(lengths, behind) if n)
            rounds = _rest(rows, known)
        since = self._last[1] if self._last[0] == _places(rows) else None
        before = [(row, len(row.tokens), row.stats.rounds, len(row.drafts), n) for row, n in zip(rows, lengths)]
        self._stretch = this = _Stretch(costs, before, late, rounds > 0, since, [])
        if any(lengths) and inner is not None:
            base = costs.plain[count].seconds
            spare = 0.0  # of a try: it goes on as long as it pays for itself, for two rounds at least
            if not self._trying:  # after each round another must be affordable
                spare = self._balance + _ONCE * base - costs.price(lengths) - costs.interruption(base)
            most = list(map(min, lengths, inner.most))
            return inner._replace(most=most, token_seconds=base / count, spare_seconds=spare, spent=this.spent)
        return Continuation(None, none, rounds=rounds or _MEASURED, spent=this.spent)

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Whether these rows will be drafted for is not known yet."""

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        if not self._silent:
            begin = self.clock()
            super().observe(rows, draft, target)
            if self._round is not None:
                self._round.listening += self.clock() - begin

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        if (stretch := self._stretch) is not None:
            self._stretch, now = None, self.clock()
            if any(n for *_, n in stretch.rows):
                super().commit(rows)
            self._learn(stretch, now)
            return
        this, self._round = self._round, None
        silent, self._silent = self._silent, False
        if silent and this is None:
            return
        now = self.clock()
        if not silent:
            super().commit(rows)
        if this is not None:
            self._settle(rows, this, now)

    def release(self, row: Sequence) -> None:
        if (known := self._rows.pop(row.id, None)) is not None and known.tried:
            self._astray += ((known.trust < 0.5) - self._astray) / 4
        if self._round is not None and any(id_ == row.id for id_, _, _ in self._round.rows):
            self._round = None
        if self._stretch is not None and any(own.id == row.id for own, *_ in self._stretch.rows):
            self._stretch = None
        super().release(row)

    def _known(self, rows: abc.Sequence[Sequence]) -> list[_Row]:
        return [self._rows.get(row.id) or self._new(row) for row in rows]

    def _go_on(self, known: list[_Row], rounds: int) -> None:
        """Note rounds of rows that rest."""
        for row in known:
            row.rest = max(row.rest - rounds, 0)
        self._quiet += max(row.base for row in known) * rounds

    def _new(self, row: Sequence) -> _Row:
        astray = min(max(self._astray, _FEAR), 1 - _FEAR)
        known = self._rows[row.id] = _Row(math.log(astray / (1 - astray)))
        return known

    def _settle(self, rows: abc.Sequence[Sequence], this: _Round, now: float) -> None:
        """Learn from a round that was over at ``now``, but for the strategy's own commit."""
        after = {row.id: row for row in rows}
        if any(id_ not in after or len(after[id_].tokens) <= before for id_, before, _ in this.rows):
            return  # it was given up
        count, costs = len(this.rows), this.costs
        plain = costs.plain.setdefault(count, _Plain())
        seconds = now - this.end - this.listening
        longest = max(asked for _, _, asked in this.rows)
        if not longest or not this.verified:
            plain.add(seconds)
            seconds = plain.seconds
        else:
            plain.since += 1
        base = elapsed = plain.seconds
        if longest:
            elapsed += costs.verifying.add(this.verified, seconds - base, base)
            drafting = this.end - this.begin + this.listening + self.clock() - now
            if not this.late:
                elapsed += costs.drafting.add(longest, drafting, base)
            elif costs.drafting.count:
                usual = costs.drafting(longest)
                elapsed += usual + costs.catching_up.add(this.late, drafting - usual, base)
        total = 0
        for id_, before, asked in this.rows:
            own = after[id_]
            emitted = len(own.tokens) - before
            total += emitted
            if asked and own.finish_reason is None:  # the end of a row cuts off what would have stood
                accepted = min(emitted - 1, asked)
                known = self._rows[id_]
                self._rates.add(asked, accepted, known.trust)  # what is astray says nothing of the others
                known.add(asked, accepted, self._rates.overall)
        self._book(elapsed, total / count * base - elapsed, base)

    def _learn(self, this: _Stretch, now: float) -> None:
        """Learn from rounds that were taken at once and were over at ``now``, as ``_settle`` does from one."""
        rows, costs, count = [row for row, *_ in this.rows], this.costs, len(this.rows)
        known = [self._rows[row.id] for row in rows]
        # Of a row that somebody ended, fewer count than were taken.
        rounds = max(row.stats.rounds - before for row, _, before, *_ in this.rows)
        if not rounds or not this.spent:
            return  # given up
        first, others = this.spent
        if this.since is not None:
            costs.stopping.add(now - this.since - first.whole - others.whole)
        self._last = _places(rows), now
        # In the first round threads have to wake up and caches to fill, which is no cost of it where it is short.
        timed = others if others.rounds else first
        tells = others.rounds > 0 or first.whole > _LONG
        plain = costs.plain.setdefault(count, _Plain())
        if this.resting:
            self._go_on(known, rounds)
            if tells:
                plain.add(timed.whole / timed.rounds)
            return
        drafted = timed.draft / timed.rounds
        scored = timed.whole / timed.rounds - drafted
        lengths = [asked for *_, asked in this.rows]
        if verified := sum(n for row, *_, before, _ in this.rows for n, _ in row.drafts[before:]) / rounds:
            plain.since += rounds
        elif tells or not plain.seconds:
            plain.add(scored)
            scored = plain.seconds
        base, elapsed = plain.seconds, plain.seconds * rounds
        if any(lengths):
            elapsed += costs.interruption(base)  # without drafts it would have gone on
            longest = max(lengths)
            costs.longest = max(costs.longest, longest)
            costs.share += (verified / sum(lengths) - costs.share) / _COSTS
            if verified and tells:
                elapsed += costs.verifying.add(verified, scored - base, base) * rounds
            drafted += (self.clock() - now) / rounds
            if not tells:
                elapsed += costs.price(lengths) * rounds
            elif others.rounds or not this.late:
                elapsed += costs.drafting.add(longest, drafted, base) * rounds
            else:
                elapsed += costs.drafting(longest)
            if tells and this.late and costs.drafting.count:
                elapsed += costs.catching_up.add(this.late, first.draft - costs.drafting(longest), base)
        total = 0
        for own, (row, tokens, begun, before, asked) in zip(known, this.rows):
            total += len(row.tokens) - tokens
            own.rest = max(own.rest - rounds + 1, 0)  # one was counted as it was decided
            if not asked:
                continue
            own.seen = len(row.tokens)
            stood = [accepted for _, accepted in row.drafts[before:]]
            stood += [0] * (row.stats.rounds - begun - len(stood))
            if row.finish_reason and stood:
                del stood[-1]  # the end of a row cuts off what would have stood
            for accepted in stood:
                self._rates.add(asked, accepted, own.trust)
                own.add(asked, accepted, self._rates.overall)
        self._book(elapsed, total / count * base - elapsed, base)

    def _book_quiet(self, costs: _Costs, count: int) -> None:
        """Book the rounds of ``count`` rows that were not thought about."""
        if self._quiet and (plain := costs.plain.get(count)) is not None:
            self._book(self._quiet, 0.0, plain.seconds)
            self._quiet = 0.0

    def _book(self, elapsed: float, gained: float, base: float) -> None:
        """Gains are a credit for bad luck, but not for ever: they would be spent on drafting in vain later. Nor is more
        of a loss held against it than what may be lost, which it takes a change of costs to exceed."""
        self._balance = max(min(self._balance + gained, _CREDIT * base), -_ONCE * base)
        self._pot = min(self._pot + self.loss * elapsed + _GIFT * max(gained, 0.0), _POT * base)

    def _lengths(
        self, costs: _Costs, known: list[_Row], behind: list[int], max_len: abc.Sequence[int], at_once: bool = False
    ) -> list[int]:
        """How many tokens to ask for in each row, in this round or in several that are taken ``at_once``."""
        count, self._trying = len(known), False
        plain = costs.plain.get(count)
        again, first, tries = (_AGAIN_AT_ONCE, _FIRST, _TRIED) if at_once else (_AGAIN, 1, 1)
        if plain is None or plain.due(again):  # what everything is held against
            return [0] * count
        self._trying = True  # unless something pays
        if not costs.drafting.count:  # until there is a draft without catching up in it
            return [min(first, most) for most in max_len]
        base, rates = plain.seconds, self._rates
        start = costs.drafting.start + costs.verifying.start
        each, verify = costs.drafting.slope, costs.verifying.slope * costs.share
        every = each + verify * count  # what one more token in every row takes
        stop = costs.interruption(base) if at_once else 0.0
        spare = self._balance + _ONCE * base - start - stop
        places = []  # minus the chance that a token and all before it stand, its position, its row
        for b, (row, late, most) in enumerate(zip(known, behind, max_len)):
            if row.rest:
                row.rest -= 1
                continue
            most = min(most, 4 * costs.longest)  # how costs go on beyond what was measured nobody knows
            budget = spare - costs.late(late)
            if budget < every * most:
                most = max(0, int(budget / every))
            for position, chance in enumerate(rates.reach(row.trust, row.rate(rates), most)):
                places.append((-chance, position, b))
        if count > 1:
            places.sort()
        emitted, best_value, best, longest = float(count), count / base, 0, 0
        for number, (negative, position, _) in enumerate(places, start=1):
            emitted -= negative
            longest = max(longest, position + 1)
            value = emitted / (base + start + each * longest + verify * number)
            if value > best_value:
                best_value, best = value, number
        lengths = [0] * count
        for _, position, b in places[:best]:
            lengths[b] = position + 1
        if not best and costs.drafting.count < 3:  # perhaps the machine paused when it was measured
            return [min(first, most) for most in max_len]
        if not best:
            self._probe(costs, known, behind, max_len, lengths, tries * (start + 2 * every) + 2 * stop, base)
        self._trying = not best and any(lengths)
        return lengths

    def _probe(
        self,
        costs: _Costs,
        known: list[_Row],
        behind: list[int],
        max_len: abc.Sequence[int],
        lengths: list[int],
        price: float,
        base: float,
    ) -> None:
        """Where nothing pays: two tokens in a row that the pot can pay for, or a rest until it can."""
        for b, (row, late) in enumerate(zip(known, behind)):
            if not max_len[b]:
                continue
            cost = price + costs.late(late)
            wanted = min(cost, _POT * base)  # a full pot pays for what costs more, and fills again the longer
            if self._pot >= wanted:
                lengths[b] = min(2, max_len[b])
                self._pot -= cost
                return
            row.rest = min(_REST, int((wanted - self._pot) / max(self.loss * base, 1e-12)))
            row.base, row.beside = base, len(known)
