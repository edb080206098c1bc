"""Choose the best of several strategies for each row.

Shape legend: B rows, K longest draft, N tokens of one row, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace

from fly.drafts.base import DraftStrategy, RowDraft, Wrapper, join_rows, split_rows
from fly.runtime.request import Sequence, common_prefix
from fly.types import Draft

__all__ = ["UnionDraft"]


@dataclass(frozen=True)
class _Average:
    """Exponential averages over a strategy's proposals; the newest has the weight ``rate``."""

    rate: float
    acceptance: float  # how often a token is accepted if all tokens before it are
    length: float = float("inf")  # of a proposal; infinite until a proposal is shorter than the most tokens asked for

    def expected(self, length: float) -> float:
        """Return the expected number of accepted tokens if ``length`` tokens are proposed: the sum of acceptance^j over
        j = 1…length."""
        length, a = min(length, self.length), self.acceptance
        return length if a == 1 else a * (1 - a**length) / (1 - a)

    def updated(self, proposed: list[int], asked: int, emitted: list[int]) -> _Average:
        """Return the averages after one more proposal, for which at most ``asked`` tokens were asked. ``emitted`` has
        at least one token."""
        # Count an empty proposal as half a token, so that the strategy is tried again.
        length = max(float(len(proposed)), 0.5)
        if len(proposed) == asked:  # the strategy might have proposed more
            length = max(length, self.length)
        if self.length != float("inf"):
            length = self.length + self.rate * (length - self.length)
        accepted = common_prefix(proposed, emitted)
        acceptance = 1 - (1 - self.acceptance) * (1 - self.rate) ** accepted
        if accepted < min(len(proposed), len(emitted)):  # a mismatch; without one, later tokens say nothing
            acceptance *= 1 - self.rate
        return replace(self, acceptance=acceptance, length=length)


@dataclass
class _Round:
    """What ``commit`` needs to know about a round."""

    start: int  # the length of the row before it
    asked: int  # the most tokens to propose
    proposed: dict[int, list[int]] = field(default_factory=dict)  # each strategy's tokens, by its number


class UnionDraft(Wrapper):
    """Uses, for each row, the best proposal of several strategies, which are given cheapest first.

    For each strategy it averages how long its proposals are, and how many of their tokens are emitted, even if the
    proposal is not used. A row has its own averages, which start from the averages over all rows. The averages over all
    rows start from ``prior``, which is high, so that every strategy is tried. The best proposal has the most expected
    accepted tokens; on a tie it is the cheapest. A strategy is asked only if it is expected to offer more than any
    cheaper one has offered. Costs count only through the order of the strategies.

    The choice never depends on drawn tokens. If it did, dropping a proposal would change the distribution of the text.
    So above temperature 0, a proposal that was drawn from a distribution is always used. It is drawn only if this
    strategy is expected to offer more than the offers so far, and at least as much as any later strategy. Deterministic
    proposals are compared freely.

    Under a policy that keeps mismatches, the text favours the proposal that was used, and so do the averages.

    Args:
        rate: the weight of the newest token in the averages, above 0 and at most 1.
        prior: the acceptance rate of a token to assume at the start, above 0 and at most 1.
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
        self._averages: dict[int, list[_Average]] = {}  # by row id
        self._rounds: dict[int, _Round] = {}  # by row id
        self._draws = [False] * len(strategies)  # whether a strategy has ever given a distribution

    def _follow_members(self) -> None:
        super()._follow_members()
        if trees := [type(member).__name__ for member in self.members if member.spare]:
            raise ValueError(f"UnionDraft combines chains, and {trees[0]} proposes trees")

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        chosen = [RowDraft([]) for _ in rows]
        offers = [0.0] * len(rows)
        open_rows = [b for b, most in enumerate(max_len) if most > 0]
        for b in open_rows:
            self._averages.setdefault(rows[b].id, list(self._overall))
            self._rounds[rows[b].id] = _Round(len(rows[b].tokens), max_len[b])
        for number, member in enumerate(self.members):
            asked = [b for b in open_rows if self._is_worth_asking(number, rows[b], max_len[b], offers[b])]
            if not asked:
                continue
            pieces = _ask(member, [rows[b] for b in asked], [max_len[b] for b in asked])
            for b, piece in zip(asked, pieces):
                row, n = rows[b], len(piece.tokens)
                self._rounds[row.id].proposed[number] = piece.tokens
                offer = replace(self._averages[row.id][number], length=float(n)).expected(n)
                drawn = piece.probs_NV is not None and n > 0  # an empty proposal depends on no drawn token
                if drawn:
                    self._draws[number] = True
                    open_rows.remove(b)
                if drawn or offer > offers[b]:
                    chosen[b], offers[b] = piece, offer
        return join_rows(chosen)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        for row in rows:
            done = self._rounds.pop(row.id, None)
            if done is None or len(row.tokens) <= done.start:  # the round was abandoned
                continue
            emitted = row.tokens[done.start :]
            for averages in (self._averages[row.id], self._overall):
                for number, tokens in done.proposed.items():
                    averages[number] = averages[number].updated(tokens, done.asked, emitted)
        super().commit(rows)

    def release(self, row: Sequence) -> None:
        self._averages.pop(row.id, None)
        self._rounds.pop(row.id, None)
        super().release(row)

    def _is_worth_asking(self, number: int, row: Sequence, most: int, offer: float) -> bool:
        """Whether to ask a strategy to propose. Uses only estimates and deterministic offers."""
        expected = [average.expected(most) for average in self._averages[row.id][number:]]
        rivals = expected[1:] if self._draws[number] and not row.greedy else []
        return expected[0] > offer and all(expected[0] >= rival for rival in rivals)


def _ask(member: DraftStrategy, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> list[RowDraft]:
    """Ask ``member`` to propose for each row."""
    draft = member.propose(rows, max_len)
    if draft.parents_BK is not None:
        raise ValueError(f"{type(member).__name__} proposed a tree; UnionDraft combines chains only")
    # At temperature 0 no token is drawn, even if the row has a distribution because other rows need one.
    return [piece._replace(probs_NV=None) if row.greedy else piece for row, piece in zip(rows, split_rows(draft))]
