"""How much to draft: as much as pays, by measured costs and acceptance; nothing where nothing does. Knows nothing of
what a draft is made of."""

from __future__ import annotations

import math
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from fly.drafts.base import Continuation, DraftStrategy, Wrapper
from fly.drafts.measures import ONCE, Costs, Mean, Places, Rates, Round, RowRates, Took
from fly.request import Sequence
from fly.types import Draft, Target

__all__ = ["AdaptiveDraft"]

# Rounds after which decoding without a draft is measured again; sooner while it was measured seldom.
_AGAIN, _AGAIN_AT_ONCE = 64, 256
_FEAR = 0.05  # share of rows in which a strategy has lost the thread, to begin with and at least
_LATE = 32  # tokens by which a text has grown before a drafter that has not seen them has to catch up
_MEASURED, _TRIED = 16, 2  # rounds that are taken at once to measure them, without a draft and with one
_FIRST = 4  # tokens asked for in the first of those
_REST = 512  # rounds that a row may go on before it is thought about again
# In rounds without a draft:
_POT = 4.0  # what is saved for probes, at most
_GIFT = 0.02  # share of gains that may be spent on probes
_CREDIT = 12.0  # gain that may be lost again


@dataclass
class _Row(RowRates):
    """What is known of a row beside what is known of all."""

    rest: int = 0  # rounds for which nothing needs to be thought about
    base: float = 0.0  # seconds of each, as far as they were known when the rest began
    beside: int = 0  # rows there were then
    seen: int = 0  # its tokens when it was last drafted for


def _places(rows: abc.Sequence[Sequence]) -> Places:
    return [(row.id, len(row.tokens)) for row in rows]


def _rest(rows: abc.Sequence[Sequence], known: list[_Row]) -> int:
    """Rounds for which nothing needs to be thought about; those that are never drafted for keep nobody from it."""
    drafted = [row for row, own in zip(known, rows) if own.k]
    return min((row.rest if row.beside == len(rows) else 0 for row in drafted), default=0)


def _best(reach: list[list[float]], base: float, start: float, each: float, verify: float) -> list[int]:
    """The lengths that maximise the expected tokens a second. Drafts cost ``start``, and ``each`` for a position and
    ``verify`` for a token more, beside a round of ``base``; the likeliest tokens come first."""
    tokens = sorted((-chance, position, b) for b, row in enumerate(reach) for position, chance in enumerate(row))
    emitted, longest, lengths = float(len(reach)), 0, [0] * len(reach)
    best_value, best = emitted / base, 0
    for number, (negative, position, _) in enumerate(tokens, start=1):
        emitted -= negative
        longest = max(longest, position + 1)
        value = emitted / (base + start + each * longest + verify * number)
        if value > best_value:
            best_value, best = value, number
    for _, position, b in tokens[:best]:
        lengths[b] = position + 1
    return lengths


@cache
def _nothing(rows: int) -> Draft:
    """The empty draft, kept: to make one takes longer than to decide on it."""
    return Draft.empty(rows)


_IDLE = Round(Costs(), [], [])  # of rows that rest: nothing is asked, and nothing learned


class AdaptiveDraft(Wrapper):
    """Drafts as much as pays, nothing where nothing does, by what was measured so far: goodput (TurboSpec,
    arXiv 2406.14066), with a limit on what may be lost.

    **What is measured.** Seconds: of a round without a draft (by the number of rows), of drafting (a straight line in
    the longest draft), of verification (a line in the number of drafted tokens), of catching up with a text that the
    drafter has not seen (a line in its length). Acceptance: how often a drafted token stands, by its position, for all
    rows and for each row. A token that was asked for and not proposed counts as one that did not stand; the share of
    tokens asked for that is proposed is measured too (above 1 in trees). A row may be one where the strategy has lost
    the thread, whatever it does in others: the odds of that, by what stood there lately, are weighed in.

    **What is decided.** With reach(b, j) the chance that row b's first j drafted tokens all stand, the lengths of the
    next drafts maximise the expected tokens a second:

        (B + sum over rows and positions drafted of reach) / (plain round + drafting + its verification).

    **What may be lost.** An account holds the seconds that drafting has gained. A draft that would overdraw it by more
    than eight plain rounds, if nothing of it stood, is not made; gains beyond twelve plain rounds are forgotten. Where
    nothing pays, rows rest, and a pot, into which a share ``loss`` of the time goes and a little of each gain, pays for
    probes of two tokens. So where no row can be predicted, a share ``loss`` of the time at most is lost against
    decoding without a draft, and once eight rounds of it. A round in which nothing is asked of the strategy it does
    not hear of: even listening takes time.

    On compiled kernels rows take several rounds of the same lengths at once, for as long as the account allows. A probe
    there pays for the interruption as well.

    Args:
        strategy: who proposes.
        loss: largest share of time that may be lost by drafting in vain, from 0 to below 1.
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
        self._costs = {True: Costs(), False: Costs()}  # by whether all rows are at temperature 0
        self._rates = Rates()
        self._balance = 0.0  # seconds gained by drafting
        self._pot = 0.0  # seconds that may be spent on probes
        self._rows: dict[int, _Row] = {}
        self._astray = _FEAR  # share of the latest rows in which the strategy was at the end
        self._quiet = 0.0  # seconds of rounds that were not thought about, not booked yet
        self._round: Round | None = None
        self._last: tuple[Places, float] = [], 0.0  # rows after rounds taken at once, and when those were over

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        known, this, draft = self._known(rows), self._round, _nothing(len(rows))
        if _rest(rows, known):
            self._round = _IDLE
            self._go_on(known, 1)
            return draft
        begin = self.clock()
        if this is None or this.before is None or this.places != _places(rows):  # else ``continuation`` has decided
            this, _ = self._decide(rows, known, max_len)
        lengths = list(map(min, this.lengths, max_len))
        teaches = all(row.generated for row in rows)
        this = replace(this, lengths=lengths, teaches=teaches, begin=begin, before=None)
        if any(lengths):
            draft = self.strategy.propose(rows, lengths)
            this.verified = sum(map(len, draft.chains))
            this.costs.count(lengths, this.verified)
            for row, own, n in zip(known, rows, lengths):
                row.seen = len(own.tokens) if n else row.seen
        this.drafting = self.clock() - begin
        self._round = this
        return draft

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        """Rounds without a draft for as long as nothing pays, or some of the same lengths, of a strategy that allows
        it."""
        count, none = len(rows), [0] * len(rows)
        if not any(row.k for row in rows):
            return Continuation(None, none)
        known, inner, trying = self._known(rows), self.strategy.continuation(rows), False
        if rounds := _rest(rows, known):
            this = Round(self._costs_of(rows), _places(rows), none)
        else:
            this, trying = self._decide(rows, known, [row.k for row in rows], inner is not None)
            rounds = _rest(rows, known)
        self._round, this.resting = this, rounds > 0
        this.before = [(row.stats.rounds, len(row.drafts)) for row in rows]
        this.since = self._last[1] if self._last[0] == this.places else None
        if not any(this.lengths):
            return Continuation(None, none, rounds=rounds or _MEASURED, spent=this.spent)
        if inner is None:
            return None
        base = this.costs.plain[count].seconds
        spare = 0.0  # of a try: it goes on as long as it pays for itself, for two rounds at least
        if not trying:  # after each round another must be affordable
            spare = self._balance + ONCE * base - this.costs.price(this.lengths) - this.costs.interruption(base)
        most = list(map(min, this.lengths, inner.most))
        return inner._replace(most=most, token_seconds=base / count, spare_seconds=spare, spent=this.spent)

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Whether these rows will be drafted for is not known yet."""

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        this = self._round
        if this is None or any(this.lengths):
            begin = self.clock()
            super().observe(rows, draft, target)
            if this is not None:
                this.drafting += self.clock() - begin

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        this, self._round = self._round, None
        if this is _IDLE:
            return
        now = self.clock()
        if this is None or any(this.lengths):
            super().commit(rows)
        if this is not None and this.teaches:
            self._learn(this, rows, now)

    def release(self, row: Sequence) -> None:
        if (known := self._rows.pop(row.id, None)) is not None and known.tried:
            self._astray += ((known.trust < 0.5) - self._astray) / 4
        if self._round is not None and any(id_ == row.id for id_, _ in self._round.places):
            self._round = None
        super().release(row)

    def _known(self, rows: abc.Sequence[Sequence]) -> list[_Row]:
        return [self._rows.get(row.id) or self._new(row) for row in rows]

    def _new(self, row: Sequence) -> _Row:
        astray = min(max(self._astray, _FEAR), 1 - _FEAR)
        known = self._rows[row.id] = _Row(math.log(astray / (1 - astray)))
        return known

    def _go_on(self, known: list[_Row], rounds: int) -> None:
        """Note rounds of rows that rest."""
        for row in known:
            row.rest = max(row.rest - rounds, 0)
        self._quiet += max(row.base for row in known) * rounds

    def _costs_of(self, rows: abc.Sequence[Sequence]) -> Costs:
        return self._costs[all(row.greedy for row in rows)]

    def _decide(
        self, rows: abc.Sequence[Sequence], known: list[_Row], max_len: abc.Sequence[int], at_once: bool = False
    ) -> tuple[Round, bool]:
        """What to ask for in a round, or in several that are taken ``at_once``; and whether that is only to see what
        becomes of it. Rounds that were not thought about are booked first."""
        costs = self._costs_of(rows)
        if self._quiet and (plain := costs.plain.get(len(rows))) is not None:
            self._book(self._quiet, 0.0, plain.seconds)
            self._quiet = 0.0
        # Tokens that the strategy would have to catch up with:
        unseen = [max(len(own.tokens) - row.seen - _LATE, 0) for own, row in zip(rows, known)]
        lengths, trying = self._lengths(costs, known, unseen, max_len, at_once)
        late = sum(missed for n, missed in zip(lengths, unseen) if n)
        return Round(costs, _places(rows), lengths, late), trying

    def _learn(self, this: Round, rows: abc.Sequence[Sequence], now: float) -> None:
        """Learn from what was over at ``now``, but for the strategy's own commit."""
        after = {row.id: row for row in rows if row.id in self._rows}
        if any(id_ not in after for id_, _ in this.places):
            return
        rows = [after[id_] for id_, _ in this.places]
        if (took := this.took(rows, now)) is None:
            return
        costs, lengths, known, rounds = this.costs, this.lengths, self._known(rows), took.rounds
        plain = costs.plain.setdefault(len(rows), Mean())
        if this.before is not None:
            if this.since is not None:
                costs.stopping.add(now - this.since - sum(part.whole for part in this.spent))
            self._last = _places(rows), now
            if this.resting:
                self._go_on(known, rounds)
                if took.tells:
                    plain.add(took.scoring)
                return
            if any(lengths):
                costs.count(lengths, took.verified)
        scoring = took.scoring
        if took.verified:
            plain.since += rounds
        elif took.tells or not plain.seconds:
            plain.add(scoring)
            scoring = plain.seconds
        base, elapsed = plain.seconds, plain.seconds * rounds
        if any(lengths):
            elapsed += self._learn_costs(this, took, scoring, base, now)
        emitted = 0
        for row, own, (_, tokens), asked, stood in zip(rows, known, this.places, lengths, took.stood):
            emitted += len(row.tokens) - tokens
            own.rest = max(own.rest - rounds + 1, 0)  # one was counted as it was decided
            if asked and this.before is not None:
                own.seen = len(row.tokens)
            for accepted in stood:
                self._rates.add(asked, accepted, own.trust)  # what is astray says nothing of the others
                own.add(asked, accepted, self._rates.overall)
        self._book(elapsed, emitted / len(rows) * base - elapsed, base)

    def _learn_costs(self, this: Round, took: Took, scoring: float, base: float, now: float) -> float:
        """Learn what drafts cost. Returns the seconds that they count for, beside plain rounds of ``base``."""
        costs, lengths, rounds, longest = this.costs, this.lengths, took.rounds, max(this.lengths)
        commit = (self.clock() - now) / rounds
        elapsed = costs.interruption(base) if this.before is not None else 0.0  # without drafts it would have gone on
        if not took.tells:
            return elapsed + costs.price(lengths) * rounds
        elapsed += costs.verifying.add(took.verified, scoring - base, base) * rounds
        if rounds > 1 or not this.late:
            elapsed += costs.drafting.add(longest, took.drafting + commit, base) * rounds
        else:
            elapsed += costs.drafting(longest)
        if this.late and costs.drafting.count:
            elapsed += costs.catching_up.add(this.late, took.first + commit - costs.drafting(longest), base)
        return elapsed

    def _book(self, elapsed: float, gained: float, base: float) -> None:
        """Gains are a credit for bad luck, but not for ever: they would be spent on drafting in vain later. Nor is more
        of a loss held against it than what may be lost, which it takes a change of costs to exceed."""
        self._balance = max(min(self._balance + gained, _CREDIT * base), -ONCE * base)
        self._pot = min(self._pot + self.loss * elapsed + _GIFT * max(gained, 0.0), _POT * base)

    def _lengths(
        self, costs: Costs, known: list[_Row], unseen: list[int], max_len: abc.Sequence[int], at_once: bool
    ) -> tuple[list[int], bool]:
        """How many tokens to ask for in each row, and whether only to see what becomes of them."""
        count, rates = len(known), self._rates
        again, first, tries = (_AGAIN_AT_ONCE, _FIRST, _TRIED) if at_once else (_AGAIN, 1, 1)
        plain = costs.plain.get(count)
        if plain is None or plain.due(again):  # what everything is held against
            return [0] * count, False
        trial = [min(first, most) for most in max_len]
        if not costs.drafting.count:  # until there is a draft without catching up in it
            return trial, True
        base = plain.seconds
        start = costs.drafting.start + costs.verifying.start
        each, verify = costs.drafting.slope, costs.verifying.slope * costs.share
        every = each + verify * count  # what one more token in every row takes
        stop = costs.interruption(base) if at_once else 0.0
        spare = self._balance + ONCE * base - start - stop
        reach: list[list[float]] = [[] for _ in known]
        for b, (row, late, most) in enumerate(zip(known, unseen, max_len)):
            if row.rest:
                row.rest -= 1
                continue
            most = min(most, 4 * costs.longest)  # how costs go on beyond what was measured nobody knows
            budget = spare - costs.late(late)
            if budget < every * most:
                most = max(0, int(budget / every))
            reach[b] = rates.reach(row.trust, row.rate(rates), most)
        lengths = _best(reach, base, start, each, verify)
        if any(lengths):
            return lengths, False
        if costs.drafting.count < 3:  # perhaps the machine paused when it was measured
            return trial, True
        # Where nothing pays: two tokens in a row that the pot can pay for, or a rest until it can.
        price = tries * (start + 2 * every) + 2 * stop
        for b, (row, late, most) in enumerate(zip(known, unseen, max_len)):
            if not most:
                continue
            cost = price + costs.late(late)
            wanted = min(cost, _POT * base)  # a full pot pays for what costs more, and fills again the longer
            if self._pot >= wanted:
                lengths[b] = min(2, most)
                self._pot -= cost
                break
            row.rest = min(_REST, int((wanted - self._pot) / max(self.loss * base, 1e-12)))
            row.base, row.beside = base, count
        return lengths, any(lengths)
