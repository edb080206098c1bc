"""Several strategies, from which each request chooses one.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

from collections import abc

from fly.drafts.base import Continuation, DraftStrategy, RowDraft, Wrapper, join_rows, split_rows
from fly.ops import upload
from fly.runner.request import Row
from fly.types import Draft, Target

__all__ = ["ChooseDraft"]


class ChooseDraft(Wrapper):
    """Holds strategies by name, such as ``choose(small=fly-tiny, copy=ngram)``. A request chooses one for all of its
    rounds (``LLM.generate(..., draft=name)``). A request that names none gets the first.

    Each strategy sees only its own requests. All strategies are loaded, and share one memory budget.

    Args:
        members: the strategies, by the names that requests choose.
    """

    def __init__(self, **members: DraftStrategy) -> None:
        if not members:
            raise ValueError("choose needs at least one strategy, as in choose(small=fly-tiny, copy=ngram)")
        if "none" in members:
            raise ValueError("'none' cannot name a strategy: requests that draft nothing have k 0")
        self._numbers = {name: number for number, name in enumerate(members)}
        super().__init__(list(members.values()))

    def _follow_members(self) -> None:
        super()._follow_members()
        self.learns = any(member.learns for member in self.members)
        self.names = list(self._numbers)

    def _member(self, name: str) -> DraftStrategy:
        # A name that is not here is an outer choose's.
        return self.members[self._numbers.get(name, 0)]

    def _member_of(self, row: Row) -> DraftStrategy:
        return self._member(row.draft)

    def drafter_of(self, name: str) -> DraftStrategy:
        return self._member(name).drafter_of(name)

    def _groups(self, rows: abc.Sequence[Row]) -> list[tuple[DraftStrategy, list[int]]]:
        """Return the strategies that these rows chose, each with the indices of its rows."""
        chosen = [self._member_of(row) for row in rows]
        groups = [(member, [b for b, choice in enumerate(chosen) if choice is member]) for member in self.members]
        return [(member, numbers) for member, numbers in groups if numbers]

    def prefill(self, parts: abc.Sequence[tuple[Row, int]]) -> None:
        for member, numbers in self._groups([row for row, _ in parts]):
            member.prefill([parts[b] for b in numbers])

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        groups = self._groups(rows)
        if len(groups) == 1:
            return groups[0][0].propose(rows, max_len)
        row_drafts = dict[int, RowDraft]()
        for member, numbers in groups:
            draft = member.propose([rows[b] for b in numbers], [max_len[b] for b in numbers])
            row_drafts |= zip(numbers, split_rows(draft))
        return join_rows([row_drafts[b] for b in range(len(rows))])

    def continuation(self, rows: abc.Sequence[Row]) -> Continuation | None:
        groups = self._groups(rows)
        return groups[0][0].continuation(rows) if len(groups) == 1 else None

    def observe(self, rows: abc.Sequence[Row], draft: Draft, target: Target) -> None:
        for member, numbers in self._groups(rows):
            index_B = upload(numbers, target.logits_BKV.device)
            part = draft.to(target.logits_BKV.device).rows(index_B, numbers)
            member.observe([rows[b] for b in numbers], part, target.rows(index_B, numbers))

    def commit(self, rows: abc.Sequence[Row]) -> None:
        for member, numbers in self._groups(rows):
            member.commit([rows[b] for b in numbers])

    def release(self, row: Row) -> None:
        self._member_of(row).release(row)
