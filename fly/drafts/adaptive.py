"""Choose, before each round, between a draft, a lookup and no draft, by measured costs and acceptance. Knows nothing of
how a draft is made."""

from __future__ import annotations

import math
import time
from collections import abc, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter, mul
from statistics import median

from fly.drafts.base import (
    Continuation,
    DraftSetup,
    DraftStrategy,
    RowDraft,
    StopsByChance,
    Wrapper,
    join_rows,
    pad,
    split_rows,
)
from fly.drafts.measures import Costs, Rates
from fly.drafts.suffix import SuffixDraft
from fly.ops import common_prefix
from fly.runner.executor import Spent
from fly.runner.request import Row
from fly.types import Draft, Target

__all__ = ["AdaptiveDraft"]

# What proposes in a round: nothing, the lookup, the strategy.
_PLAIN = "plain"
_LOOKUP = "lookup"
_DRAFTING = "drafting"
_FIRST_LENGTH = 4  # while costs are unknown, ask a strategy without probabilities for this many tokens
_MIN_WORTH, _MAX_WORTH = 0.05, 0.9  # limits of the chance at which a model drafts a token
_LATEST = 8  # judge how easy a row is by this many of its latest drafts
_RETRY_AFTER = 16  # after this many rounds, draft again for a row that seemed too hard
_MAX_UNREAD = 32  # a strategy that missed more tokens of a row, or all, must catch up, which is no cost of drafting
_CATCH_UP = 1.1  # let it catch up only if drafting is this many times as fast as anything else
_DOUBT = 2.0  # an estimate may be wrong by this factor; decoding without drafts is tried only where that would decide
_MAX_LOOKUP_SHARE = 0.05  # ask the lookup only if that takes at most this share of a forward
_TRIAL_ROUNDS = 2  # rounds of a trial
_DECAY = 0.95  # each round multiplies the weight of earlier ones
_FIRST_WAIT, _LONGEST_WAIT = 8, 512  # rounds until the next trial


@dataclass
class _Yield:
    """What a round of drafting gives a row: exponential averages over recent rounds, which start from a guess."""

    kept: float = 3.0  # tokens kept
    verified: float = 4.0  # tokens verified
    steps: float = 4.0  # tokens along a path; fewer than ``verified`` in a tree
    weight: float = 0.5  # of the averages so far, in rounds

    def add(self, kept: float, verified: float, steps: float) -> None:
        old, self.weight = _DECAY * self.weight, _DECAY * self.weight + 1
        for name, new in (("kept", kept), ("verified", verified), ("steps", steps)):
            setattr(self, name, (old * getattr(self, name) + new) / self.weight)

    def copy(self) -> _Yield:
        return _Yield(self.kept, self.verified, self.steps, min(self.weight, 3.0))


@dataclass
class _Row:
    """What is known of a row."""

    drafting: _Yield
    # For each of the lookup's latest proposals: how many of its tokens were checked, and how many were right.
    copied: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_LATEST))
    read: int = 0  # how many of its tokens the strategy has read


@dataclass
class _Trial:
    """When to try what seems to be slower."""

    wait: int = _FIRST_WAIT  # rounds until the next trial
    waited: int = 0  # rounds since the last trial
    left: int = 0  # rounds until a running trial ends

    def begin(self) -> int:
        """Begin a trial, unless one is running. Return how many rounds of it are left."""
        self.left = self.left or _TRIAL_ROUNDS
        return self.left

    def end(self, rounds: int) -> None:
        """End ``rounds`` rounds of a trial. After the last one, wait twice as long for the next trial."""
        self.left = max(self.left - rounds, 0)
        if not self.left:
            self.waited, self.wait = 0, min(2 * self.wait, _LONGEST_WAIT)


@dataclass
class _Measurements:
    """Measurements of rows at temperature 0, or of others."""

    costs: Costs = field(default_factory=Costs)
    rates: Rates = field(default_factory=Rates)
    one_forward: bool = False  # whether a draft takes the same time, however many tokens it has
    drafting: _Yield = field(default_factory=_Yield)  # over all rows
    trials: dict[str, _Trial] = field(default_factory=lambda: {_PLAIN: _Trial(), _DRAFTING: _Trial()})

    def count_steps(self, drafted: int) -> int:
        """Return how many times the cost of a drafted token a draft of so many tokens along a path takes."""
        return min(drafted, 1) if self.one_forward else drafted

    def plain_speed(self, rows: int) -> float:
        """Return the tokens per second without drafts. While no cost is known, the unit of time is such a round."""
        return rows / (self.costs.plain(rows) or 1.0)

    def lookup_speed(self, rows: int, proposed: int, kept: float) -> float:
        """Return the tokens per second by lookup, if ``kept`` of the ``proposed`` tokens are expected to be kept."""
        seconds = (self.costs.forward(rows + proposed) or 1.0) + self.costs.lookup_overhead
        return (rows + kept) / max(seconds, 1e-9)

    def drafting_speed(
        self, rows: int, yields: list[_Yield], behind: bool, proposed: int = 0, copied: float = 0.0
    ) -> float:
        """Return the tokens per second by the strategy, which drafts for as many rows as there are ``yields``. For
        others a lookup has ``proposed`` tokens meanwhile, of which ``copied`` are expected to be kept."""
        if not yields or (rows > 1 and self.costs.step is None):
            return 0.0  # in a batch, first try it for one row
        kept, verified = sum(each.kept for each in yields), sum(each.verified for each in yields)
        steps = 1.0 if self.one_forward else max(each.steps for each in yields)
        drafting = steps * (self.costs.step or 0.0) * (self.costs.plain(len(yields)) or 1.0)
        seconds = (self.costs.forward(rows + verified + proposed) or 1.0) + drafting
        seconds += self.costs.lookup_overhead * bool(proposed)
        return (rows + kept + copied) / seconds / (_CATCH_UP if behind else 1.0)

    def worth(self, active: int, speed: float) -> float:
        """Return the least chance to be kept at which the strategy should draft a token; 0: unknown."""
        if self.costs.step is None or not active:
            return 0.0
        seconds = self.costs.slope
        if not self.one_forward:
            seconds += self.costs.step * self.costs.plain(active) / active
        return seconds * speed


@dataclass
class _Round:
    """A running round, or several that run in one call."""

    measured: _Measurements
    way: str
    begin: float
    places: list[tuple[int, int]]  # the id of each row, and its number of tokens
    asked: list[int]  # the most tokens to propose for each row
    worth: float  # the least chance to be kept at which the strategy drafts a token; 0: unknown
    looked: list[list[int]]  # what the lookup proposes for each row
    # For which rows the strategy drafts, if it does: for all, or beside a lookup for those that cannot use copies.
    drafts: list[bool]
    trial: _Trial | None = None
    rounds: int = 1  # the most rounds to run before choosing again
    behind: bool = False  # whether the strategy has to catch up with a text
    # For a single round:
    drafting: float = 0.0  # seconds
    steps: list[int] = field(default_factory=list)  # tokens of each row, along a path
    verified: list[int] = field(default_factory=list)  # tokens of each row
    # For several rounds in one call:
    before: list[tuple[int, int]] = field(default_factory=list)  # each row's numbers of rounds and drafts at the start
    spent: list[Spent] = field(default_factory=list)  # seconds of the first round, and of the others
    max_len: list[int] = field(default_factory=list)  # the most tokens to draft for each row, along a path


class AdaptiveDraft(Wrapper):
    """Proposes, in each round, what emits the most tokens per second: the strategy's draft, a lookup, or nothing.

    Let F be the seconds of the target's forward, by the number of its tokens. Then B rows get

        nothing:   B / F(B)
        lookup:    (B + tokens it is expected to have kept) / F(B + tokens it proposes)
        strategy:  (B + tokens kept) / (F(B + tokens drafted) + steps · c · F(B))

    tokens per second. F and c, the cost of a drafted token, are measured (``Costs``). How many of the strategy's tokens
    are drafted and kept are averages over recent rounds of the row. A draft of a block drafter costs one step, however
    many tokens it has, and one more token costs nothing to draft. A lookup is judged by how long its proposal is, and
    by how often its earlier proposals were right at each position, whether they were used or not.

    The strategy drafts a token if

        chance to be kept > (seconds to draft one more + seconds to verify one more) · tokens per second.

    The chance is the draft model's own estimate: the product of its probabilities so far (``SingleDraft.reach``), or
    its square root under a rule that excuses mismatches. For a strategy without probabilities, the chance is how often
    recent drafts were kept up to that position, in all rows and in this row.

    Every round improves the estimates for all choices. What seems slower is tried for two rounds, after 8 rounds, then
    16, and so on up to 512; no draft, only if it might be faster. In a batch, a trial drafts for one row. What a
    strategy takes to catch up with a prompt does not count.

    Copies have no logits, so a row whose rule reads them (``row.policy.reads_logits``) cannot use them. While others
    use a lookup, the strategy drafts for such rows if the batch gets more tokens per second in this way.

    Choices depend on estimates and on the lookup, which draws nothing, and never on drawn tokens. So a lossless rule
    stays lossless.

    Args:
        strategy: proposes the drafts.
        lookup: proposes by copying, in chains without distributions. It is asked only while that takes less than a
            twentieth of a forward. None means suffix decoding (``SuffixDraft``) if the strategy drafts by a model's
            probabilities, otherwise no lookup.
        clock: returns the time in seconds. The default is the setup's clock, which ranks share.
    """

    learns = True

    def __init__(
        self,
        strategy: DraftStrategy,
        lookup: DraftStrategy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if lookup is None and isinstance(strategy, StopsByChance):
            lookup = SuffixDraft()
        super().__init__([strategy] if lookup is None else [strategy, lookup])
        self.clock = clock
        # By whether all rows are at temperature 0.
        one_forward = isinstance(strategy, StopsByChance) and strategy.one_forward
        self._measured: defaultdict[bool, _Measurements] = defaultdict(lambda: _Measurements(one_forward=one_forward))
        self._copied = Rates()  # how often the lookup's tokens are right
        self._asking: deque[float] = deque(maxlen=5)  # seconds that the lookup took to propose
        self._rows: dict[int, _Row] = {}
        self._last = _PLAIN
        self._round: _Round | None = None

    def attach(self, setup: DraftSetup) -> None:
        super().attach(setup)
        if self.clock is time.perf_counter:
            self.clock = setup.clock

    def _follow_members(self) -> None:
        super()._follow_members()
        self.gives_logits = self.strategy.gives_logits

    @property
    def strategy(self) -> DraftStrategy:
        """The strategy that proposes the drafts."""
        return self.members[0]

    @property
    def lookup(self) -> DraftStrategy | None:
        """The lookup that proposes in its place."""
        return self.members[1] if len(self.members) > 1 else None

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        this_round = self._round
        # Unless ``continuation`` has started this round, start it.
        if this_round is None or this_round.places != _row_lengths(rows):
            this_round = self._begin(rows, max_len)
        most = list(map(min, self._lengths(this_round, rows), max_len))
        if not any(most):
            return Draft.empty(len(rows))
        drafted_len = [n * drafts for n, drafts in zip(most, this_round.drafts)]
        copies = [tokens[:n] for tokens, n in zip(this_round.looked, most)]
        if not any(drafted_len):
            draft = pad(copies)
        else:
            begin = self.clock()
            propose = self.strategy.propose
            draft = propose(rows, drafted_len, **self._limits(propose, this_round))
            if this_round.way == _LOOKUP:
                pieces = zip(split_rows(draft), copies, this_round.drafts)
                draft = join_rows([piece if drafts else RowDraft(copied) for piece, copied, drafts in pieces])
            this_round.drafting = self.clock() - begin
        this_round.verified = list(map(len, draft.chains))
        this_round.steps = list(map(min, this_round.verified, most))
        return draft

    def continuation(self, rows: abc.Sequence[Row]) -> Continuation | None:
        """Describe rounds without a draft, or rounds in which the strategy continues the rows by itself, until another
        choice may be better. For a round by lookup return None, so that ``propose`` is called."""
        none = [0] * len(rows)
        if not any(row.k for row in rows):
            return Continuation(None, none)
        this_round = self._begin(rows, [row.k for row in rows])
        this_round.before = [(row.stats.rounds, len(row.drafts)) for row in rows]
        if this_round.way == _PLAIN:
            return Continuation(None, none, rounds=this_round.rounds, report=this_round.spent.extend)
        lengths = self._lengths(this_round, rows)
        if this_round.way == _LOOKUP:
            return None
        continue_rows = self.strategy.continuation
        inner = continue_rows(rows, **self._limits(continue_rows, this_round))
        if inner is None:
            return None
        if not any(lengths):
            return Continuation(None, none, rounds=1, report=this_round.spent.extend)
        this_round.max_len, rounds = list(map(min, lengths, inner.max_len)), min(this_round.rounds, inner.rounds)
        return inner._replace(max_len=this_round.max_len, rounds=rounds, report=this_round.spent.extend)

    def prefill(self, parts: abc.Sequence[tuple[Row, int]]) -> None:
        if self._last == _DRAFTING:  # otherwise the strategy may never draft for these rows
            super().prefill(parts)
            for row, end in parts:
                self._row(row).read = end

    def observe(self, rows: abc.Sequence[Row], draft: Draft, target: Target) -> None:
        for member in self._proposing:
            member.observe(rows, draft, target)

    def commit(self, rows: abc.Sequence[Row]) -> None:
        this_round = self._round
        members = self._proposing
        now = self.clock()
        self._round = None
        for member in members:
            member.commit(rows)
        if this_round is not None:
            self._learn(this_round, rows, now)

    def release(self, row: Row) -> None:
        self._rows.pop(row.id, None)
        if self._round is not None and any(id_ == row.id for id_, _ in self._round.places):
            self._round = None
        super().release(row)

    @property
    def _proposing(self) -> list[DraftStrategy]:
        """The strategies that take part in the current round. No method of another is called, since even ``observe``
        takes time."""
        if self._round is None or self._round.way == _DRAFTING:
            return [self.strategy]
        members = [self.strategy] * any(self._round.drafts)
        if self._round.way == _LOOKUP and self.lookup is not None:
            members.append(self.lookup)
        return members

    def _row(self, row: Row) -> _Row:
        if row.id not in self._rows:
            self._rows[row.id] = _Row(self._measured[row.greedy].drafting.copy())
        return self._rows[row.id]

    def _begin(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> _Round:
        """Choose what proposes for ``rows``, and start a round."""
        begin = self.clock()
        count = len(rows)
        histories = list(map(self._row, rows))
        measured, looked = self._measured[all(row.greedy for row in rows)], self._look_up(rows, max_len)
        missed = [
            len(row.tokens) - history.read if n else math.inf for row, history, n in zip(rows, histories, max_len)
        ]
        behind = any(
            history.read == 0 or each > _MAX_UNREAD for history, each, n in zip(histories, missed, max_len) if n
        )
        # Estimate how fast each choice is. Cut the lookup's proposals before tokens that do not pay.
        speeds = {_PLAIN: measured.plain_speed(count)}
        yields = [history.drafting for history, n in zip(histories, max_len) if n]
        speeds[_DRAFTING] = measured.drafting_speed(count, yields, behind)
        worth = measured.costs.slope * max(speeds.values())
        chances = [self._copied.chances(len(tokens), history.copied) for history, tokens in zip(histories, looked)]
        chances = [[chance for chance in each if chance >= worth] for each in chances]
        lengths = list(map(len, chances))
        apart = [False] * count  # the rows that draft while others use a lookup
        if any(lengths):
            copied = sum(lengths), sum(map(sum, chances))
            speeds[_LOOKUP] = measured.lookup_speed(count, *copied)
            reads = [bool(n) and row.policy.reads_logits for row, n in zip(rows, max_len)]
            reading = [history.drafting for history, each in zip(histories, reads) if each]
            mixed_speed = measured.drafting_speed(count, reading, behind, *copied)
            if mixed_speed > speeds[_LOOKUP]:
                speeds[_LOOKUP], apart = mixed_speed, reads
        way, speed = max(speeds.items(), key=itemgetter(1))
        # Now and then, try what seems slower. In a batch a trial drafts for one row, the one that needs least reading.
        other = _DRAFTING if way == _PLAIN else _PLAIN
        next_trial = measured.trials[other]
        trial = None
        requested = list(max_len)
        wait = next_trial.wait if measured.costs.step is not None else _TRIAL_ROUNDS
        plausible = other == _DRAFTING or speeds[_PLAIN] * _DOUBT > speed
        rounds = max(wait - next_trial.waited, 1) if plausible else _FIRST_WAIT
        if next_trial.left or (plausible and next_trial.waited >= wait):
            way = other
            trial = next_trial
            rounds = next_trial.begin()
            first = missed.index(min(missed))
            requested = [n * (b == first) for b, n in enumerate(max_len)]
        drafts = [way == _DRAFTING] * count
        if way == _LOOKUP:
            drafts = apart
            requested = [most if each else n for most, n, each in zip(max_len, lengths, apart)]
        elif way == _PLAIN:
            requested = [0] * count
        unread = [(history.read, each) for history, each, n in zip(histories, missed, map(mul, requested, drafts)) if n]
        worth = measured.worth(len(unread) or sum(map(bool, requested)), speed)
        behind = any(read == 0 or each > _MAX_UNREAD for read, each in unread)
        self._last = way
        places = _row_lengths(rows)
        self._round = _Round(measured, way, begin, places, requested, worth, looked, drafts, trial, rounds, behind)
        return self._round

    def _look_up(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> list[list[int]]:
        """Return what the lookup proposes for each row. If asking it takes too long, it proposes nothing."""
        forward = self._measured[all(row.greedy for row in rows)].costs.plain(len(rows))
        # Copies have no logits, so nothing is copied for a row whose rule reads them.
        copied_len = [0 if row.policy.reads_logits else n for row, n in zip(rows, max_len)]
        if self.lookup is None or not any(copied_len):
            return [[] for _ in rows]
        if forward and median(self._asking or [0.0]) > _MAX_LOOKUP_SHARE * forward:
            return [[] for _ in rows]
        begin = self.clock()
        pieces = split_rows(self.lookup.propose(rows, copied_len))
        self._asking.append(self.clock() - begin)
        if any(piece.parents is not None or piece.probs_NV is not None for piece in pieces):
            raise ValueError(f"{type(self.lookup).__name__} cannot be the lookup: it proposes trees or draws tokens")
        return [piece.tokens for piece in pieces]

    def _lengths(self, this: _Round, rows: abc.Sequence[Row]) -> list[int]:
        """Return the most tokens to propose for each row."""
        measured = this.measured
        if self._stops:
            return this.asked
        worth = this.worth * max(measured.drafting.verified, 1e-9) / max(measured.drafting.steps, 1e-9)

        def length(row: Row, most: int) -> int:
            if not this.worth:
                return min(most, _FIRST_LENGTH)
            likely = sum(chance >= worth for chance in measured.rates.chances(most, row.drafts[-_LATEST:]))
            return likely or min(most, row.stats.rounds % _RETRY_AFTER == 0)

        return [length(row, most) if drafts else most for row, most, drafts in zip(rows, this.asked, this.drafts)]

    @property
    def _stops(self) -> bool:
        """Whether the strategy stops drafting by itself, where the next token is not worth it."""
        strategy = self.strategy
        return isinstance(strategy, StopsByChance) and bool(strategy.limits(strategy.propose, 0.0))

    def _limits(self, method: Callable[..., object], this: _Round) -> dict[str, float]:
        """Return where a strategy that stops by itself is to stop, as keyword arguments of one of its methods."""
        if not isinstance(self.strategy, StopsByChance):
            return {}
        return self.strategy.limits(method, this.worth and min(max(this.worth, _MIN_WORTH), _MAX_WORTH))

    def _learn(self, this: _Round, rows: abc.Sequence[Row], now: float) -> None:
        """Learn from a round, or from several, that ended at ``now``."""
        after = {row.id: row for row in rows}
        if any(id_ not in after for id_, _ in this.places):
            return
        rows = [after[id_] for id_, _ in this.places]
        emitted = [row.tokens[tokens:] for row, (_, tokens) in zip(rows, this.places)]
        if not all(emitted) or any(row.generated == len(new) for row, new in zip(rows, emitted)):
            return  # the round was abandoned, or it read a prompt
        # Collect the number of rounds, their seconds, and each row's drafts: verified tokens, steps and kept tokens.
        # ``draft`` is the time of drafting without catching up.
        if this.spent:  # the executor measured the time
            rounds = max(row.stats.rounds - before for row, (before, _) in zip(rows, this.before))
            seconds, drafting = (sum(part) for part in zip(*((spent.total, spent.draft) for spent in this.spent)))
            most = this.max_len or this.asked
            drafts = [row.drafts[before:] for row, (_, before) in zip(rows, this.before)]
            results = [
                [(n, min(n, limit), kept) for n, kept in row_results] for row_results, limit in zip(drafts, most)
            ]
            draft = drafting - this.spent[0].draft * this.behind
        else:
            rounds = 1
            seconds = now - this.begin
            drafting = this.drafting
            sizes = zip(this.verified or [0] * len(rows), this.steps or [0] * len(rows), emitted)
            results = [[(n, steps, min(len(new) - 1, steps))] if n else [] for n, steps, new in sizes]
            draft = drafting * (not this.behind)
        if not rounds:
            return
        # Judge the lookup by its proposals, used or not.
        for history, looked, new in zip(map(self._row, rows), this.looked, emitted):
            if checked := min(len(looked), len(new)):
                history.copied.append((checked, common_prefix(looked, new)))
                self._copied.add(*history.copied[-1])
        # Learn what forwards and drafted tokens cost.
        measured, forward = this.measured, (seconds - drafting) / rounds
        verified = sum(n for row_results in results for n, _, _ in row_results)
        size = len(rows) + verified / rounds
        if this.way == _LOOKUP and verified:
            measured.costs.add_lookup(size, forward)
        elif verified:
            measured.costs.add_forward(len(rows), size, forward)
        else:
            measured.costs.add_plain(len(rows), forward)
        active = [row_results[this.behind :] for row_results in results if row_results]
        if this.way == _DRAFTING and (
            steps := max((sum(measured.count_steps(n) for _, n, _ in row_results) for row_results in active), default=0)
        ):
            measured.costs.add_step(len(active), draft / steps, size, forward)
        # Learn what drafts yield. A row that ends cuts off tokens that would have been kept, so its last draft says
        # nothing.
        for row, n, row_results, learns in zip(rows, this.asked, results, this.drafts):
            if learns:
                history = self._row(row)
                history.read = len(row.tokens) if row_results else history.read
                row_results += [(0, 0, 0)] * (rounds - len(row_results)) * bool(n)
                for verified, steps, kept in row_results[:-1] if row.finish_reason else row_results:
                    if steps:
                        measured.rates.add(steps, kept)
                    measured.drafting.add(kept, verified, steps)
                    history.drafting.add(kept, verified, steps)
        # Note when to try the other choices again.
        if this.trial is not None:
            this.trial.end(rounds)
        else:
            for way, trial in measured.trials.items():
                if way == this.way:
                    trial.wait = _FIRST_WAIT
                elif way == _PLAIN or this.way == _PLAIN:
                    trial.waited += rounds


def _row_lengths(rows: abc.Sequence[Row]) -> list[tuple[int, int]]:
    """Return the id of each row, and its number of tokens."""
    return [(row.id, len(row.tokens)) for row in rows]
