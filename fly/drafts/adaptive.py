"""How much to draft: as much as pays, by measured costs and acceptance; nothing where nothing does."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from fly.cache import BlockAllocator
from fly.drafts.base import DraftStrategy
from fly.engine import Runner
from fly.models.tokenizer import Tokenizer
from fly.types import Draft, Sequence, Target, depths

__all__ = ["AdaptiveDraft"]

_NEWS = 0.2  # weight of a new draft in the average size of trees
_SAMPLES = 9  # measurements of a cost that are kept for a size
_OLD = 100  # measurements after which one that was not repeated is forgotten
_MEMORY = 500.0  # drafted tokens that the common acceptance rates look back on, about
_ROW_MEMORY = 48.0  # the same for a row's own
_PRIOR = 4.0  # drafted tokens that the common rate counts for beside a row's own
_START = 2  # tokens a row drafts first; twice as many once they stand
_KNOWN = 40  # drafted tokens after which the common rates are trusted with the first draft of a row
_CREDIT = 6.0  # autoregressive steps of gain that a row may lose again
_GRACE = 2.0  # autoregressive steps a row may lose before its account must be balanced


class _Costs:
    """Seconds by size, as measured lately: straight lines between sizes, half as steep beyond them.

    A measurement may be far too large (a pause of the machine, a text to catch up on) and then keep its own size from
    being tried again, so it counts for as little as can be: the median of a size's last few, the least of one or two;
    no more than any larger size takes; and nothing once it is old.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._count = 0
        self._known: list[tuple[int, float]] | None = None  # sizes with their seconds, both ascending

    def add(self, size: int, seconds: float) -> None:
        self._count += 1
        self._samples.setdefault(size, deque(maxlen=_SAMPLES)).append(seconds)
        self._seen[size] = self._count
        self._known = None

    def knows(self, size: int) -> bool:
        return size in self._samples

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return bool(self._samples)

    def __call__(self, size: int) -> float:
        """Seconds to expect; 0 while nothing was measured."""
        if self._known is None:
            self._known = self._summary()
        known = self._known
        if not known:
            return 0.0
        at = bisect_left(known, (size, 0.0))
        if at == len(known):
            (first, least), (last, most) = known[0], known[-1]
            slope = (most - least) / (last - first) if last > first else 0.0
            return most + slope / 2 * (size - last)
        if at == 0 or known[at][0] == size:
            return known[at][1]
        (low, before), (high, after) = known[at - 1], known[at]
        return before + (after - before) * (size - low) / (high - low)

    def _summary(self) -> list[tuple[int, float]]:
        smallest = min(self._samples, default=0)
        for size in [s for s, seen in self._seen.items() if seen < self._count - _OLD and s != smallest]:
            del self._samples[size], self._seen[size]
        known: list[tuple[int, float]] = []
        least = math.inf
        for size in sorted(self._samples, reverse=True):
            samples = self._samples[size]
            least = min(least, statistics.median(samples) if len(samples) > 2 else min(samples))
            known.append((size, least))
        return known[::-1]


@dataclass
class _Rates:
    """Decayed counts: at each position of a draft, how often a token was tried and how often it stood."""

    memory: float
    tried: list[float] = field(default_factory=list)
    stood: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        keep = 1 - min(drafted, accepted + 1) / self.memory
        self.tried = [count * keep for count in self.tried]
        self.stood = [count * keep for count in self.stood]
        missing = drafted - len(self.tried)
        if missing > 0:
            self.tried += [0.0] * missing
            self.stood += [0.0] * missing
        for position in range(min(drafted, accepted + 1)):
            self.tried[position] += 1
            self.stood[position] += position < accepted

    def overall(self, default: float, weight: float) -> float:
        """Share of tried tokens that stood, with ``weight`` more of which the share ``default`` did."""
        return (sum(self.stood) + weight * default) / (sum(self.tried) + weight)


@dataclass
class _Account:
    """What drafting has cost and brought a row, in seconds, against decoding without it."""

    rates: _Rates = field(default_factory=lambda: _Rates(_ROW_MEMORY))
    most: int = _START  # doubled when a draft of this length stands
    elapsed: float = 0.0
    lost: float = 0.0  # negative where drafting gained
    rest: int = 0  # rounds for which nothing needs to be thought about
    drafted_last: bool = False


class AdaptiveDraft(DraftStrategy):
    """Goodput (TurboSpec, arXiv 2406.14066): of each draft propose as many tokens as maximise the expected number of
    emitted tokens per second, none included.

    Everything is measured online: seconds of a proposal by its length, seconds from a proposal to its commit (the
    verification) by the number of tokens in it, and how often a token stands by its position, for all rows and for
    each row. With reach(b, j) the estimated chance that row b's first j drafted tokens all stand, the lengths maximise

        (B + sum over rows and positions drafted of reach) / (draft seconds + verification seconds).

    The promise: a row that no drafter predicts loses at most a share ``loss`` of its time, and two steps, against
    decoding without a draft. Every row has an account of what drafting has cost it, and once that exceeds the promise
    it drafts no more, except for probes the account can pay for.

    Args:
        strategy: who proposes.
        loss: largest share of a row's time that may be lost by drafting in vain.
        clock: gives seconds; where ranks share the work, all go by one.
    """

    learns = True

    def __init__(
        self, strategy: DraftStrategy, loss: float = 0.01, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if not 0 <= loss < 1:
            raise ValueError(f"loss {loss} must be in [0, 1)")
        self.strategy, self.loss, self.clock = strategy, loss, clock
        self.vocab_size, self.context, self.spare = strategy.vocab_size, strategy.context, strategy.spare
        self.tokenizer: Tokenizer | None = strategy.tokenizer
        self._drafting, self._verifying = _Costs(), _Costs()
        self._rates = _Rates(_MEMORY)
        self._accounts: dict[int, _Account] = {}
        self._bulk = 1.0  # tokens verified for each that can be emitted: more than one in trees
        # begin and end of the proposal, tokens verified, and of each row its id, its length and what can be emitted
        self._round: tuple[float, float, int, list[tuple[int, int, int]]] | None = None

    def attach(self, target: Runner) -> None:
        self.strategy.attach(target)

    def propose(self, rows: Rows[Sequence], max_len: Rows[int]) -> Draft:
        known = sum(self._rates.tried) >= _KNOWN
        for row, most in zip(rows, max_len):
            if row.id not in self._accounts:
                self._accounts[row.id] = _Account(most=max(most, _START) if known else _START)
        accounts = [self._accounts[row.id] for row in rows]
        begin = self.clock()
        if all(account.rest > 0 for account in accounts):
            for account in accounts:
                account.rest -= 1
            lengths = [0] * len(rows)
        else:
            lengths = self._lengths(accounts, max_len)
        if not any(lengths):
            draft = Draft.empty(len(rows))
        else:
            draft = self.strategy.propose(rows, lengths)
        counts, proposed = draft.lengths_B.tolist(), draft.lengths_B.tolist()
        if draft.parents_BK is not None:  # of a tree, its longest path is what can be emitted
            trees = [tree[:n] for tree, n in zip(draft.parents_BK.tolist(), counts)]
            proposed = [max((depth + 1 for depth in depths(tree)), default=0) for tree in trees]
        end = self.clock()
        # A drafter that sat out a while has text to catch up on; that is no cost of the length.
        if any(proposed) and all(account.drafted_last for account, n in zip(accounts, proposed) if n):
            self._drafting.add(max(proposed), end - begin)
        for account, n in zip(accounts, proposed):
            account.drafted_last = n > 0
        if any(proposed):
            self._bulk += _NEWS * (sum(counts) / sum(proposed) - self._bulk)
        self._round = (
            begin,
            end,
            len(rows) + sum(counts),
            [(row.id, len(row.tokens), n) for row, n in zip(rows, proposed)],
        )
        return draft

    def observe(self, rows: Rows[Sequence], draft: Draft, target: Target) -> None:
        self.strategy.observe(rows, draft, target)

    def commit(self, rows: Rows[Sequence]) -> None:
        if self._round is not None:
            self._settle(rows, *self._round)
            self._round = None
        self.strategy.commit(rows)

    def release(self, row: Sequence) -> None:
        self._accounts.pop(row.id, None)
        if self._round is not None and any(id_ == row.id for id_, _, _ in self._round[-1]):
            self._round = None
        self.strategy.release(row)

    def allocators(self) -> list[BlockAllocator]:
        return self.strategy.allocators()

    def bytes_per_token(self) -> int:
        return self.strategy.bytes_per_token()

    def reserve(self, tokens: int) -> None:
        self.strategy.reserve(tokens)

    def _settle(
        self, rows: Rows[Sequence], begin: float, end: float, size: int, round_: list[tuple[int, int, int]]
    ) -> None:
        """Learn from a round that is over."""
        now = self.clock()
        count = len(round_)
        self._verifying.add(size, now - end)
        # By the averages: a pause of the machine is nobody's fault.
        share, alone = (end - begin + self._verifying(size)) / count, self._verifying(count) / count
        lengths = {row.id: len(row.tokens) for row in rows}
        for id_, before, proposed in round_:
            account, emitted = self._accounts.get(id_), lengths.get(id_, before) - before
            if account is None or emitted < 1:
                continue
            account.elapsed += share
            # Gains are a credit for bad luck, but not for ever: they would be spent on drafting in vain later.
            account.lost = max(-_CREDIT * alone, account.lost + share - emitted * alone)
            if proposed:
                accepted = min(emitted - 1, proposed)
                self._rates.add(proposed, accepted)
                account.rates.add(proposed, accepted)
                if accepted == proposed >= account.most:
                    account.most *= 2

    def _lengths(self, accounts: list[_Account], max_len: Rows[int]) -> list[int]:
        """How many tokens to ask for in each row."""
        count = len(accounts)
        if not self._verifying.knows(count):  # what everything is held against is measured first
            return [0] * count
        step = self._verifying(count) / count
        common = self._rates.overall(0.8, _PRIOR)
        positions = []  # (reach, row, position): the chance that a token and all before it stand
        probes = []
        for b, (account, most) in enumerate(zip(accounts, max_len)):
            allowed = self.loss * account.elapsed
            rate = account.rates.overall(common, _PRIOR)
            # A draft that may fail must not cost the row more than is promised.
            afford = allowed + _GRACE * step - account.lost
            most = min(most, account.most)
            while most and (1 - rate) * self._price(count, most) / count > afford:
                most //= 2
            reach = 1.0
            for position in range(most):
                reach *= self._at(position, rate, common)
                positions.append((reach, b, position))
            if max(account.lost, 0.0) + self._price(count, 2) / count <= allowed and max_len[b]:
                probes.append(b)
        positions.sort(key=lambda entry: (-entry[0], entry[2]))
        lengths, best = [0] * count, [0] * count
        value, most_value, emitted = 0.0, count / max(self._verifying(count), 1e-9), float(count)
        for number, (reach, b, position) in enumerate(positions, start=1):
            emitted += reach
            lengths[b] = position + 1
            value = emitted / max(
                self._drafting(max(lengths)) + self._verifying(count + round(number * self._bulk)), 1e-9
            )
            if value > most_value:
                most_value, best = value, list(lengths)
        for b in probes:
            best[b] = max(best[b], min(2, max_len[b]))
        for b, account in enumerate(accounts):
            if account.drafted_last and max_len[b] and not self._drafting.measured:
                best[b] = max(best[b], 1)  # once, so that there is a cost without catching up in it
        if not any(best):
            # Nothing changes until some account can pay for a probe again.
            price = self._price(count, 2) / count
            for account in accounts:
                short = (max(account.lost, 0.0) + price) / max(self.loss, 1e-9) - account.elapsed
                account.rest = max(4, min(64, int(short / max(step, 1e-9))))
        return best

    def _at(self, position: int, rate: float, common: float) -> float:
        """Chance that the token at a position stands if those before it do: the row's rate, in the proportion that the
        position has to the others in all rows."""
        if position >= len(self._rates.tried) or self._rates.tried[position] < 1:
            return min(rate, 1.0)
        here = (self._rates.stood[position] + _PRIOR * common) / (self._rates.tried[position] + _PRIOR)
        return min(rate * here / max(common, 1e-9), 1.0)

    def _price(self, count: int, length: int) -> float:
        """Seconds that a draft in vain costs a batch."""
        return (
            self._drafting(length)
            + self._verifying(count + round(count * length * self._bulk))
            - self._verifying(count)
        )
