"""Choose the best of several strategies for each row. Shape legend: N tokens of one row, V vocabulary."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace

from fly.drafts.base import DraftStrategy, Piece, Wrapper, pieces_of, together
from fly.runtime.request import Sequence, common_prefix
from fly.types import Draft

__all__ = ["UnionDraft"]


@dataclass(frozen=True)
class _Average:
    """Exponential averages over a strategy's proposals; the newest has the weight ``rate``."""

    rate: float
    acceptance: float  # how often a token is accepted if all before it were
    length: float = float("inf")  # of a proposal; infinite until one was shorter than asked for

    def expected(self, length: float) -> float:
        """Expected number of accepted tokens if ``length`` are proposed: the sum of acceptance^j over j = 1…length."""
        length, a = min(length, self.length), self.acceptance
        return length if a == 1 else a * (1 - a**length) / (1 - a)

    def after(self, proposed: list[int], asked: int, emitted: list[int]) -> _Average:
        """Return the averages with one more proposal, of at most ``asked`` tokens; ``emitted`` has at least one."""
        # An empty proposal counts as half a token, so that a strategy that found nothing is tried again.
        length = max(float(len(proposed)), 0.5)
        if len(proposed) == asked:  # it might have proposed more
            length = max(length, self.length)
        if self.length != float("inf"):
            length = self.length + self.rate * (length - self.length)
        accepted = common_prefix(proposed, emitted)
        acceptance = 1 - (1 - self.acceptance) * (1 - self.rate) ** accepted
        if accepted < min(len(proposed), len(emitted)):  # a mismatch; otherwise the rest is unknown
            acceptance *= 1 - self.rate
        return replace(self, acceptance=acceptance, length=length)


@dataclass
class _Round:
    """A round, as ``commit`` measures it."""

    start: int  # the length of the row before it
    asked: int  # the most tokens to propose
    proposed: dict[int, list[int]] = field(default_factory=dict)  # by the number of the strategy


class UnionDraft(Wrapper):
    """Uses, for each row, the best proposal of several strategies, which are given cheapest first.

    For each strategy it averages the length of its proposals, and how many of their tokens were emitted, whether the
    proposal was used or not. A row has averages of its own, which start from the averages over all rows. Those start
    from ``prior``, which is high, so that every strategy is tried. The best proposal is the one with the most expected
    accepted tokens, or the cheapest of several such. A strategy is not asked if it is not expected to offer more than a
    cheaper one has offered. Costs count by the order alone.

    Drawn tokens never decide: to look at them and drop them would change their distribution, and the text's. So above
    temperature 0 a proposal with a distribution is always used once it is drawn. It is drawn if more is expected of
    that strategy than is offered so far, and than of any later one. Deterministic proposals are compared freely.

    A relaxed policy makes the text lean towards the proposal that was used, and so the averages too.

    Args:
        rate: weight of the newest token in the averages, above 0 and at most 1.
        prior: acceptance of a token that is assumed at the start, above 0 and at most 1.
    """

    learns = True

    def __init__(self, strategies: abc.Sequence[DraftStrategy], rate: float = 0.1, prior: float = 0.9) -> None:
        if not strategies:
            raise ValueError("UnionDraft needs at least one strategy")
        super().__init__(strategies)
        for name, value in (("rate", rate), ("prior", prior)):
            if not 0 < value <= 1:
                raise ValueError(f"{name} {value} must be above 0 and at most 1")
        self._overall = [_Average(rate, prior) for _ in strategies]
        self._averages: dict[int, list[_Average]] = {}  # by row
        self._rounds: dict[int, _Round] = {}  # by row
        self._draws = [False] * len(strategies)  # whether a strategy has ever given a distribution

    def _follow_members(self) -> None:
        super()._follow_members()
        if trees := [type(member).__name__ for member in self.members if member.spare]:
            raise ValueError(f"UnionDraft combines chains, and {trees[0]} proposes trees")

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        chosen = [Piece([]) for _ in rows]
        offers = [0.0] * len(rows)
        open_rows = [b for b, most in enumerate(max_len) if most > 0]
        for b in open_rows:
            self._averages.setdefault(rows[b].id, list(self._overall))
            self._rounds[rows[b].id] = _Round(len(rows[b].tokens), max_len[b])
        for number, member in enumerate(self.members):
            asked = [b for b in open_rows if self._worth(number, rows[b], max_len[b], offers[b])]
            if not asked:
                continue
            pieces = _ask(member, [rows[b] for b in asked], [max_len[b] for b in asked])
            for b, piece in zip(asked, pieces):
                row, n = rows[b], len(piece.tokens)
                self._rounds[row.id].proposed[number] = piece.tokens
                offer = replace(self._averages[row.id][number], length=float(n)).expected(n)
                drawn = piece.probs_NV is not None and n > 0  # an empty proposal depends on nothing drawn
                if drawn:
                    self._draws[number] = True
                    open_rows.remove(b)
                if drawn or offer > offers[b]:
                    chosen[b], offers[b] = piece, offer
        return together(chosen)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        for row in rows:
            done = self._rounds.pop(row.id, None)
            if done is None or len(row.tokens) <= done.start:  # the round was given up
                continue
            emitted = row.tokens[done.start :]
            for averages in (self._averages[row.id], self._overall):
                for number, tokens in done.proposed.items():
                    averages[number] = averages[number].after(tokens, done.asked, emitted)
        super().commit(rows)

    def release(self, row: Sequence) -> None:
        self._averages.pop(row.id, None)
        self._rounds.pop(row.id, None)
        super().release(row)

    def _worth(self, number: int, row: Sequence, most: int, offer: float) -> bool:
        """Whether to ask a strategy, by estimates and deterministic offers alone."""
        expected = [average.expected(most) for average in self._averages[row.id][number:]]
        rivals = expected[1:] if self._draws[number] and not row.greedy else []
        return expected[0] > offer and all(expected[0] >= rival for rival in rivals)


def _ask(member: DraftStrategy, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> list[Piece]:
    """Ask ``member`` to propose for each row."""
    draft = member.propose(rows, max_len)
    if draft.parents_BK is not None:
        raise ValueError(f"{type(member).__name__} proposed a tree; UnionDraft combines chains only")
    # Nothing is drawn for a row at temperature 0, even if it has a distribution beside other rows' ones.
    return [piece._replace(probs_NV=None) if row.greedy else piece for row, piece in zip(rows, pieces_of(draft))]
