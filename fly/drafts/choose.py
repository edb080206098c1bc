"""Several strategies, from which each request chooses one.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import replace

from fly.drafts.base import Continuation, DraftStrategy, Wrapper, pad, pad_trees
from fly.ops import sent, upload
from fly.request import Sequence
from fly.types import Draft, Target

__all__ = ["ChooseDraft"]


class ChooseDraft(Wrapper):
    """Strategies by name. A request chooses one (``LLM.generate(..., draft=name)``) for all of its rounds:
    ``choose(small=fly-tiny, copy=ngram)``. The first is for requests that name none.

    Each strategy sees only its own requests. All are loaded, and share one budget of memory.
    """

    def __init__(self, **members: DraftStrategy) -> None:
        if not members:
            raise ValueError("choose needs at least one strategy, as in choose(small=fly-tiny, copy=ngram)")
        if "none" in members:
            raise ValueError("'none' is no name for a strategy: requests that draft nothing have k 0")
        if len(set(map(id, members.values()))) < len(members):
            raise ValueError("a strategy stands twice in choose; each needs a state of its own")
        self.names = list(members)
        super().__init__(list(members.values()))

    def _follow_members(self) -> None:
        sizes = {member.vocab_size for member in self.members} - {None}
        self.vocab_size = sizes.pop() if len(sizes) == 1 else None
        contexts = [member.context for member in self.members if member.context is not None]
        self.context = max(contexts) if len(contexts) == len(self.members) else None
        self.spare = max(member.spare for member in self.members)
        self.learns = any(member.learns for member in self.members)
        self.device = self.members[0].device

    def choices(self) -> list[str]:
        return self.names

    def _of(self, row: Sequence) -> DraftStrategy:
        return self.members[self.names.index(row.draft) if row.draft else 0]

    def _groups(self, rows: abc.Sequence[Sequence]) -> list[tuple[DraftStrategy, list[int]]]:
        """The strategies that are asked for, and the numbers of their rows."""
        chosen = [self._of(row) for row in rows]
        numbers = {id(member): [b for b, mine in enumerate(chosen) if mine is member] for member in self.members}
        return [(member, numbers[id(member)]) for member in self.members if numbers[id(member)]]

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        for member, numbers in self._groups([row for row, _ in parts]):
            member.prefill([parts[b] for b in numbers])

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        groups = self._groups(rows)
        if len(groups) == 1:
            return groups[0][0].propose(rows, max_len)
        drafts = {
            tuple(numbers): member.propose([rows[b] for b in numbers], [max_len[b] for b in numbers])
            for member, numbers in groups
        }
        return _together(drafts, len(rows))

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        groups = self._groups(rows)
        return groups[0][0].continuation(rows) if len(groups) == 1 else None

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        for member, numbers in self._groups(rows):
            index_B = upload(numbers, target.logits_BKV.device)
            part = draft.to(target.logits_BKV.device).rows(index_B, numbers)
            member.observe([rows[b] for b in numbers], part, target.rows(index_B, numbers))

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        for member, numbers in self._groups(rows):
            member.commit([rows[b] for b in numbers])

    def release(self, row: Sequence) -> None:
        self._of(row).release(row)


def _together(drafts: Mapping[tuple[int, ...], Draft], rows: int) -> Draft:
    """One draft of drafts of some of its rows, chains and trees, drawn and certain ones."""
    tokens: list[list[int]] = [[] for _ in range(rows)]
    parents: list[list[int]] = [[] for _ in range(rows)]
    for numbers, draft in drafts.items():
        trees = draft.trees or [list(range(-1, len(chain) - 1)) for chain in draft.chains]
        for b, chain, tree in zip(numbers, draft.chains, trees):
            tokens[b], parents[b] = chain, tree
    whole = pad(tokens)
    if any(draft.parents_BK is not None for draft in drafts.values()):
        whole = pad_trees(list(zip(tokens, parents)))
    drawn = next((draft.probs_BKV for draft in drafts.values() if draft.probs_BKV is not None), None)
    if drawn is None:
        return whole
    device = drawn.device
    probs_BKV = drawn.new_zeros(*whole.shape, drawn.shape[-1])
    for numbers, draft in drafts.items():
        part_BKV = draft.probs_BKV
        if part_BKV is None:
            part_BKV = drawn.new_zeros(*draft.shape, drawn.shape[-1])
            part_BKV.scatter_(-1, sent(draft.tokens_BK, device).unsqueeze(-1), 1.0)
        probs_BKV[upload(numbers, device), : draft.shape[1]] = part_BKV.to(device)
    return replace(whole, probs_BKV=probs_BKV)
