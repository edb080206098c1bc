"""Strategies made of strategies: one after the other along a draft, or the best of several for each row.

Shape legend: B rows, K longest draft, V vocabulary, N tokens of one piece.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from fly.drafts.base import DraftStrategy, Wrapper, pad
from fly.ops import derive
from fly.request import Sequence, common_prefix
from fly.types import Draft

__all__ = ["RelayDraft", "UnionDraft"]


class _Piece(NamedTuple):
    """What one strategy proposed for one row."""

    tokens: list[int]
    probs_NV: Tensor | None  # that each was drawn from; None = deterministic


class _Combined(Wrapper):
    """Chains of several strategies that speak one vocabulary, made into one."""

    def __init__(self, members: abc.Sequence[DraftStrategy]) -> None:
        name = type(self).__name__
        if not members:
            raise ValueError(f"{name} needs at least one strategy")
        if len(set(map(id, members))) < len(members):
            raise ValueError(f"a strategy stands twice in {name}; each needs a state of its own")
        if trees := [type(member).__name__ for member in members if member.spare]:
            raise ValueError(f"{name} combines chains, and {trees[0]} proposes trees")
        super().__init__(members)

    def _follow_members(self) -> None:
        name, members = type(self).__name__, self.members
        sizes = sorted({member.vocab_size for member in members if member.vocab_size is not None})
        if len(sizes) > 1:
            raise ValueError(f"the strategies of {name} have vocabularies of {sizes} tokens; they must be the same")
        tokenizers = [member.tokenizer for member in members if member.tokenizer is not None]
        if not all(tokenizers[0].same_as(other) for other in tokenizers[1:]):
            raise ValueError(
                f"the strategies of {name} have different tokenizers: the same id would mean different text"
            )
        self.vocab_size = sizes[0] if sizes else None
        self.tokenizer = tokenizers[0] if tokenizers else None
        # Each stops by itself at its own context, so the longest counts.
        contexts = [member.context for member in members if member.context is not None]
        self.context = max(contexts) if len(contexts) == len(members) else None

    def _ask(self, member: DraftStrategy, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> list[_Piece]:
        draft = member.propose(rows, max_len)
        if draft.parents_BK is not None:
            raise ValueError(f"{type(member).__name__} proposed a tree; {type(self).__name__} combines chains only")
        probs_BKV = draft.probs_BKV
        # Nothing is drawn for a row at temperature 0, whatever its distribution says beside those of other rows.
        return [
            _Piece(tokens, None if probs_BKV is None or row.greedy else probs_BKV[b, : len(tokens)])
            for b, (row, tokens) in enumerate(zip(rows, draft.chains))
        ]


class RelayDraft(_Combined):
    """Strategies one after the other along the draft: the horizontal cascade of CS-Drafting (Chen et al., arXiv
    2312.11462). Early tokens matter most, so the best strategy proposes them, and cheaper ones go on from there.

    ``RelayDraft([(SingleDraft(small), 4), (NGramDraft(), 8)])`` drafts up to 12 tokens. Each stage proposes up to its
    own number of tokens after the stages before it, unless the row has ended. If any stage gave distributions, each
    token keeps the distribution it was drawn from, and tokens of deterministic stages get one-hot distributions. How
    much a stage proposes may depend on what earlier ones drew (a lookup may find nothing there), but not on its own
    draws: whether a position is drafted is known before its token, which is all that losslessness needs. The paper
        searches for lengths; here they are given, and a stage is any strategy of chains.
    """

    def __init__(self, stages: abc.Sequence[tuple[DraftStrategy, int]]) -> None:
        for stage in stages:
            if not (isinstance(stage, tuple) and len(stage) == 2 and isinstance(stage[0], DraftStrategy)):
                raise ValueError(f"stage {stage!r} of a relay is no pair of a strategy and its number of tokens")
        super().__init__([strategy for strategy, _ in stages])
        self.lengths = [k for _, k in stages]
        for number, k in enumerate(self.lengths):
            if not isinstance(k, int) or k < 1:
                raise ValueError(f"k {k!r} of stage {number} must be an integer of at least 1")

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        drafted: list[list[_Piece]] = [[] for _ in rows]
        tokens = [list(row.tokens) for row in rows]  # with what stands so far
        active = [b for b, most in enumerate(max_len) if most > 0]
        for number, (member, k) in enumerate(zip(self.members, self.lengths)):
            if not active:
                break
            left = [min(k, len(rows[b].tokens) + max_len[b] - len(tokens[b])) for b in active]
            forks = [_extended(rows[b], tokens[b], number) for b in active]
            pieces = dict(zip(active, self._ask(member, forks, left)))
            active = []
            for b, piece in pieces.items():
                drafted[b].append(piece)
                tokens[b] += piece.tokens
                ended = piece.tokens and piece.tokens[-1] in rows[b].stop_ids
                if not ended and len(tokens[b]) < len(rows[b].tokens) + max_len[b]:
                    active.append(b)
        return _join(drafted)


def _extended(row: Sequence, tokens: list[int], stage: int) -> Sequence:
    """A fork of ``row`` that goes on to ``tokens``, with randomness of its own for each round and stage.

    A stage starts where a later round may start too, so its position alone would give both the same seed.
    """
    fork = row.fork(row.policy, 0 if row.greedy else derive(derive(row.seed, len(row.tokens)), stage))
    fork.tokens += tokens[len(row.tokens) :]
    return fork


@dataclass(frozen=True)
class _Average:
    """Exponential averages over the proposals of a strategy, the newest weighing ``rate``."""

    rate: float
    acceptance: float  # of a token, given that all before it were accepted
    length: float = float("inf")  # of a proposal; infinite until one was shorter than asked

    def expected(self, length: float) -> float:
        """Accepted tokens to expect of ``length`` proposed ones, the sum over them of acceptance^j."""
        length, a = min(length, self.length), self.acceptance
        return length if a == 1 else a * (1 - a**length) / (1 - a)

    def after(self, proposed: list[int], asked: int, emitted: list[int]) -> _Average:
        """With one more proposal, of at most ``asked`` tokens, and what was emitted (at least one token)."""
        # Half a token for none: a strategy that found nothing so far must not be given up for good.
        length = max(float(len(proposed)), 0.5)
        if len(proposed) == asked:  # it might have gone on
            length = max(length, self.length)
        if self.length != float("inf"):
            length = self.length + self.rate * (length - self.length)
        accepted = common_prefix(proposed, emitted)
        acceptance = 1 - (1 - self.acceptance) * (1 - self.rate) ** accepted
        if accepted < min(len(proposed), len(emitted)):  # a mismatch; else it is unknown how the rest would have done
            acceptance *= 1 - self.rate
        return replace(self, acceptance=acceptance, length=length)


@dataclass
class _Round:
    """What is to be measured at ``commit``."""

    start: int  # tokens of the row before it
    asked: int  # tokens to propose at most
    proposed: dict[int, list[int]] = field(default_factory=dict)  # by number of the strategy


class UnionDraft(_Combined):
    """For each row the best proposal of several strategies, given cheapest first.

    It keeps, for each strategy, averages of how its proposals did: their length, and how many of their tokens were then
    emitted, whether the proposal was used or not. A row has averages of its own, which start from those over all rows;
    these start at ``prior``, high, so that everything is tried. The best proposal is the one with the most expected
    accepted tokens, the cheapest among equals. A strategy is not even asked for a row if it is not expected to offer
    more than a cheaper one already does. The cost of a strategy counts only by its place in the order.

    Drawn tokens never decide: looking at them and then dropping them would change their distribution, and so that of
    the text. So a proposal with a distribution is used once it is drawn (above temperature 0), and whether to draw it
    is decided before: if more is expected of that strategy than is offered so far, and than of any later one.
    Deterministic proposals can be compared freely.

    With a relaxed policy the emitted text leans to the proposal that was used, and so do the averages.

    Args:
        rate: weight of the newest token in the averages, above 0 and at most 1.
        prior: acceptance of a token to assume at the start, above 0 and at most 1.
    """

    learns = True

    def __init__(self, strategies: abc.Sequence[DraftStrategy], rate: float = 0.1, prior: float = 0.9) -> None:
        super().__init__(strategies)
        for name, value in (("rate", rate), ("prior", prior)):
            if not 0 < value <= 1:
                raise ValueError(f"{name} {value} must be above 0 and at most 1")
        self._overall = [_Average(rate, prior) for _ in strategies]
        self._averages: dict[int, list[_Average]] = {}  # by row
        self._rounds: dict[int, _Round] = {}  # by row
        self._draws = [False] * len(strategies)  # whether it has ever given a distribution

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        chosen: list[list[_Piece]] = [[] for _ in rows]
        offers = [0.0] * len(rows)
        open_rows = [b for b, most in enumerate(max_len) if most > 0]
        for b in open_rows:
            self._averages.setdefault(rows[b].id, list(self._overall))
            self._rounds[rows[b].id] = _Round(len(rows[b].tokens), max_len[b])
        for number, member in enumerate(self.members):
            asked = [b for b in open_rows if self._worth(number, rows[b], max_len[b], offers[b])]
            if not asked:
                continue
            pieces = self._ask(member, [rows[b] for b in asked], [max_len[b] for b in asked])
            for b, piece in zip(asked, pieces):
                row, n = rows[b], len(piece.tokens)
                self._rounds[row.id].proposed[number] = piece.tokens
                offer = replace(self._averages[row.id][number], length=float(n)).expected(n)
                drawn = piece.probs_NV is not None and n > 0  # that it has none does not depend on what it would draw
                if drawn:
                    self._draws[number] = True
                    open_rows.remove(b)
                if drawn or offer > offers[b]:
                    chosen[b], offers[b] = [piece], offer
        return _join(chosen)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        for row in rows:
            done = self._rounds.pop(row.id, None)
            if done is None or len(row.tokens) <= done.start:  # given up: nothing is known
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


def _join(pieces: abc.Sequence[list[_Piece]]) -> Draft:
    """A ``Draft`` of each row's pieces, one after the other; deterministic ones get one-hot distributions if any has a
    distribution."""
    tokens = [[token for piece in row for token in piece.tokens] for row in pieces]
    some_NV = next((piece.probs_NV for row in pieces for piece in row if piece.probs_NV is not None), None)
    if some_NV is None:
        return pad(tokens)
    draft = pad(tokens, some_NV.device)
    probs_BKV = some_NV.new_zeros(*draft.tokens_BK.shape, some_NV.shape[-1])
    for b, row in enumerate(pieces):
        start = 0
        for piece in row:
            end = start + len(piece.tokens)
            if piece.probs_NV is not None:
                probs_BKV[b, start:end] = piece.probs_NV.to(some_NV.device)
            else:
                probs_BKV[b, range(start, end), piece.tokens] = 1.0
            start = end
    return Draft(draft.tokens_BK, draft.lengths_B, probs_BKV)
