"""How much to draft: as much as pays, by measured costs and acceptance; nothing where nothing does. Knows nothing of
what a draft is made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from fly.drafts.base import DraftStrategy, Wrapper
from fly.types import Draft, Sequence, Target

__all__ = ["AdaptiveDraft"]

_COSTS = 32.0  # measurements that a cost looks back on, about
_PAUSE = 3.0  # a measurement counts for at most so many times what was expected
_FEW = 3  # the least of so many first measurements counts
_COMMON = 400.0  # drafted tokens that the acceptance of all rows looks back on, about
_OWN = 64.0  # the same for a row's own
_HOPE = 0.9  # chance that a drafted token stands, while nothing is known
_PRIOR = 4.0  # drafted tokens that what is known beforehand counts for beside what was seen
_AGAIN = 64  # rounds after which decoding without a draft is measured again; sooner while it was measured seldom
_REST = 64  # rounds that a row may go on before it is thought about again
# In steps of autoregressive decoding:
_ONCE = 4.0  # what may be lost by finding out what a strategy is worth, over all rows
_GRACE = 2.0  # what a row may be expected to lose by a draft that it cannot pay for
_CREDIT = 6.0  # gain that may be lost again


class _Plain:
    """Seconds of a round without a draft, for one number of rows."""

    def __init__(self) -> None:
        self.seconds, self.count, self.since = 0.0, 0, 0

    def add(self, seconds: float) -> None:
        self.count, self.since = self.count + 1, 0
        if self.count <= _FEW:
            self.seconds = min(seconds, self.seconds) if self.count > 1 else seconds
        else:
            self.seconds += (min(seconds, _PAUSE * self.seconds) - self.seconds) * max(1 / self.count, 0.1)

    @property
    def due(self) -> bool:
        return self.since >= min(_AGAIN, 8 * self.count)


class _Line:
    """Seconds of what drafting takes, by its size: a straight line ``start + slope · size`` through what was measured
    lately, by least squares. Nothing is known to take no time, which counts as one measurement."""

    def __init__(self) -> None:
        self.start = self.slope = 0.0
        self.count = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def __call__(self, size: float) -> float:
        return self.start + self.slope * size

    def add(self, size: float, seconds: float, beside: float = 0.0) -> float:
        """Learn from a measurement that ``beside`` seconds of another cost are in. Returns what it counts for: a pause
        of the machine is no cost of the size, and the first times are long ones."""
        expected = self(size)
        if self.count >= _FEW:
            seconds = min(seconds, _PAUSE * (expected + beside) - beside)
        elif self.count and seconds + beside < (expected + beside) / 2:
            self._y *= max(seconds, 0.0) / expected
            self._xy *= max(seconds, 0.0) / expected
        self.count += 1
        keep = 1 - 1 / _COSTS
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + size
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + size * size
        self._xy = keep * self._xy + size * seconds
        weight = self._weight + 1
        spread = weight * self._xx - self._x * self._x
        self.slope = max((weight * self._xy - self._x * self._y) / spread, 0.0) if spread > 0 else 0.0
        self.start = (self._y - self.slope * self._x) / weight
        if self.start < 0:
            self.start, self.slope = 0.0, max(self._xy / self._xx, 0.0) if self._xx else 0.0
        return seconds


class _Rates:
    """How often a token stood, by its position in the draft and in all; what is long past counts for little."""

    def __init__(self) -> None:
        self.tried: list[float] = []
        self.stood: list[float] = []
        self.overall = _HOPE
        self._sums = 0.0, 0.0
        self._weight = 1.0  # of the newest: growing instead of letting all others shrink

    def add(self, asked: int, accepted: int) -> None:
        reached = min(asked, accepted + 1)
        self._weight *= 1 + reached / _COMMON
        if self._weight > 1e9:
            self.tried = [count / self._weight for count in self.tried]
            self.stood = [count / self._weight for count in self.stood]
            self._sums = self._sums[0] / self._weight, self._sums[1] / self._weight
            self._weight = 1.0
        if (missing := asked - len(self.tried)) > 0:
            self.tried += [0.0] * missing
            self.stood += [0.0] * missing
        weight, tried, stood = self._weight, self.tried, self.stood
        for position in range(accepted):
            tried[position] += weight
            stood[position] += weight
        if accepted < asked:
            tried[accepted] += weight
        sum_tried, sum_stood = self._sums
        self._sums = sum_tried, sum_stood = sum_tried + reached * weight, sum_stood + accepted * weight
        self.overall = (sum_stood + _PRIOR * _HOPE * weight) / (sum_tried + _PRIOR * weight)

    def reach(self, rate: float, most: int) -> list[float]:
        """For each of ``most`` positions the chance that its token and all before it stand in a row where tokens do at
        ``rate``: each in the proportion in which its position stands to the others in all rows."""
        chance, found = 1.0, []
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
class _Account:
    """What drafting has cost and brought, in seconds, against decoding without it."""

    elapsed: float = 0.0
    lost: float = 0.0  # negative where drafting gained

    def book(self, elapsed: float, lost: float, credit: float) -> None:
        """Gains are a credit for bad luck, but not for ever: they would be spent on drafting in vain later."""
        self.elapsed += elapsed
        self.lost = max(-credit, self.lost + lost)


@dataclass
class _Row(_Account):
    """The same of a row, and what is known of it."""

    tried: float = 0.0  # drafted tokens, those long past for little
    stood: float = 0.0
    rest: int = 0  # rounds for which nothing needs to be thought about
    seen: int = 0  # its tokens when it was last drafted for
    drafted_last: bool = False


@dataclass
class _Round:
    """A round that is not over yet."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)  # id, tokens before, how many were asked for
    drafting: float = 0.0  # seconds
    end: float = 0.0  # when drafting was over
    verified: int = 0  # drafted tokens


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

    The promise: where no row can be predicted, a share ``loss`` of the time at most is lost against decoding without a
    draft, and once four steps of it. Accounts of all rows and of each say what drafting has cost; a draft that would
    overdraw them is not made. Where nothing pays, what they allow is spent on probes. In a round in which no row is
    due for one, the strategy does not hear of anything, since even listening takes time.

    Args:
        strategy: who proposes.
        loss: largest share of time that may be lost by drafting in vain.
        clock: gives seconds; for tests.
    """

    learns = True

    def __init__(
        self, strategy: DraftStrategy, loss: float = 0.01, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__([strategy])
        if not 0 <= loss < 1:
            raise ValueError(f"loss {loss} must be in [0, 1)")
        self.strategy, self.loss, self._clock = strategy, loss, clock
        self._plain: dict[int, _Plain] = {}  # by the number of rows
        self._drafting, self._verifying, self._catching_up = _Line(), _Line(), _Line()
        self._share = 1.0  # tokens proposed for each that was asked for
        self._rates = _Rates()
        self._all = _Account()
        self._rows: dict[int, _Row] = {}
        self._round: _Round | None = None
        self._resting = False

    def propose(self, rows: Rows[Sequence], max_len: Rows[int]) -> Draft:
        known = [self._rows.get(row.id) or self._rows.setdefault(row.id, _Row()) for row in rows]
        count = len(known)
        self._resting = all(row.rest for row in known)
        if self._resting:
            step = self._plain[count].seconds / count if count in self._plain else 0.0
            for row in known:
                row.rest -= 1
                row.elapsed += step
            self._all.elapsed += step * count
            return Draft.empty(count)
        begin = self._clock()
        behind = [0 if row.drafted_last else len(own.tokens) - row.seen for row, own in zip(known, rows)]
        lengths = self._lengths(known, behind, max_len)
        this = self._round = _Round()
        if longest := max(lengths):
            draft = self.strategy.propose(rows, lengths)
            this.verified = sum(draft.lengths_B.tolist())
            self._share += (this.verified / sum(lengths) - self._share) / _COSTS
        else:
            draft = Draft.empty(count)
        for row, own, n in zip(known, rows, lengths):
            row.drafted_last = n > 0
            if n:
                row.seen = len(own.tokens)
            this.rows.append((own.id, len(own.tokens), n))
        this.end = self._clock()
        this.drafting = this.end - begin
        if not all(own.generated for own in rows):  # the time that a prompt takes teaches nothing
            self._round = None
            return draft
        if longest:
            missed = sum(late for late, n in zip(behind, lengths) if n)
            if not missed:
                this.drafting = self._drafting.add(longest, this.drafting)
            elif self._drafting.count:
                usual = self._drafting(longest)
                this.drafting = usual + self._catching_up.add(missed, max(this.drafting - usual, 0.0), usual)
        return draft

    def observe(self, rows: Rows[Sequence], draft: Draft, target: Target) -> None:
        if not self._resting:
            super().observe(rows, draft, target)

    def commit(self, rows: Rows[Sequence]) -> None:
        if self._resting:
            self._resting = False
            return
        if self._round is not None:
            self._settle(rows, self._round)
            self._round = None
        super().commit(rows)

    def release(self, row: Sequence) -> None:
        self._rows.pop(row.id, None)
        super().release(row)

    def _settle(self, rows: Rows[Sequence], this: _Round) -> None:
        """Learn from a round that is over."""
        seconds = self._clock() - this.end
        after = {row.id: row for row in rows}
        if any(id_ not in after or len(after[id_].tokens) <= before for id_, before, _ in this.rows):
            return  # it was given up
        count = len(this.rows)
        plain = self._plain.setdefault(count, _Plain())
        if not this.verified:
            plain.add(seconds)
            seconds = plain.seconds
        else:
            plain.since += 1
            extra = self._verifying.add(this.verified, seconds - plain.seconds, plain.seconds)
            seconds = plain.seconds + extra
        step = plain.seconds / count
        share, credit = (this.drafting + seconds) / count, _CREDIT * step
        total = 0.0
        for id_, before, asked in this.rows:
            own = after[id_]
            known, emitted = self._rows.get(id_), len(own.tokens) - before
            if known is None:
                continue
            lost = share - emitted * step
            known.book(share, lost, credit)
            total += lost
            if asked and own.finish_reason is None:  # the end of a row cuts off what would have stood
                accepted = min(emitted - 1, asked)
                self._rates.add(asked, accepted)
                reached = min(asked, accepted + 1)
                keep = 1 - reached / (_OWN + reached)
                known.tried = keep * known.tried + reached
                known.stood = keep * known.stood + accepted
        self._all.book(share * count, total, count * credit)

    def _lengths(self, known: list[_Row], behind: list[int], max_len: Rows[int]) -> list[int]:
        """How many tokens to ask for in each row."""
        count = len(known)
        plain = self._plain.get(count)
        if plain is None or plain.due:  # what everything is held against
            return [0] * count
        if not self._drafting.count:  # until there is a draft without catching up in it
            return [min(1, most) for most in max_len]
        base, step = plain.seconds, plain.seconds / count
        start = self._drafting.start + self._verifying.start
        each, verify = self._drafting.slope, self._verifying.slope * self._share
        every = each + verify * count  # what one more token in every row takes
        spare = self.loss * self._all.elapsed + _ONCE * base - self._all.lost
        rates = self._rates
        places = []  # minus the chance that a token and all before it stand, its position, its row
        for b, (row, late, most) in enumerate(zip(known, behind, max_len)):
            if row.rest:
                row.rest -= 1
                continue
            rate = (row.stood + _PRIOR * rates.overall) / (row.tried + _PRIOR)
            late_seconds = self._catching_up(late) if late else 0.0
            own = self.loss * row.elapsed + _GRACE * step - row.lost
            budget = min(count * own / max(1 - rate, 1e-9), spare) - late_seconds - start
            if budget < every * most:
                most = max(0, int(budget / every))
            places += [(-chance, position, b) for position, chance in enumerate(rates.reach(rate, most))]
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
        if not best:
            self._probe(known, behind, max_len, lengths, start + 2 * every, spare, step)
        return lengths

    def _probe(
        self,
        known: list[_Row],
        behind: list[int],
        max_len: Rows[int],
        lengths: list[int],
        price: float,
        spare: float,
        step: float,
    ) -> None:
        """Where nothing pays: two tokens in each row that can afford them, or a rest until one can."""
        count = len(known)
        for b, (row, late) in enumerate(zip(known, behind)):
            if row.rest:
                continue
            cost = price + (self._catching_up(late) if late else 0.0)
            short = max(
                cost / count + row.lost - self.loss * row.elapsed - step * _GRACE / 2,
                (cost - spare) / count,
            )
            if short <= 0:
                lengths[b] = min(2, max_len[b])
            else:
                row.rest = min(_REST, int(short / max(self.loss * step, 1e-12)))
