"""Conditions on *when* mismatches may be excused: how far into the text, how often, in which phase.

Shape legend: B rows, K longest draft, N selected positions, V vocabulary. Positions count from 0 here.

The block tells a condition what it needs to know about the past (``Target.generated_B`` and others). Within the block,
a position matters only if every mismatch before it was excused. So the mismatches before it *are* the relaxed tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fly.expressions import Amount, Checked, Count, Share
from fly.ops import sent, upload
from fly.policies.conditions import Block, Clause, Condition, Past, describe
from fly.policies.formulas import raw_log_probs, raw_regret
from fly.types import Draft, Target
from fly.vocabulary import Vocabulary

__all__ = ["AboveContext", "AfterTokens", "AtMost", "Budget", "CostBudget", "NatsBudget", "Phase", "RegretBudget"]

T = TypeVar("T")


def _relaxed_so_far(block: Block) -> Tensor:
    """Return how many tokens of the output are relaxed up to each position, int64 [B, K], if all mismatches up to it
    are excused."""
    return block.target.relaxed_B.unsqueeze(1) + (~block.agree_BK).long().cumsum(-1)


@dataclass(frozen=True)
class AfterTokens(Condition, Checked):
    """At least ``count`` tokens were generated before this one, so the first ``count`` tokens stay exact.

    This restores most refusals and other safety behaviour that relaxation removes.
    """

    name: ClassVar[str] = "after"
    monotone: ClassVar[Mapping[str, int]] = {"count": -1}
    count: Count = 2

    def _compile(self) -> Clause:
        return Clause.of("after", count=self.count, generated=_generated)

    def evaluate(self, block: Block) -> Tensor:
        return block.target.generated_B.unsqueeze(1) + block.columns_K >= self.count


@dataclass(frozen=True)
class AboveContext(Condition, Checked):
    """The token's position in the whole context, prompt included, is at least ``position``.

    Raises ``ValueError`` if the block does not tell the rows' lengths.
    """

    name: ClassVar[str] = "above"
    monotone: ClassVar[Mapping[str, int]] = {"position": -1}
    position: Count = 0

    def _compile(self) -> Clause:
        def length(past: Past) -> int:
            return len(_known(past.history, self))

        return Clause.of("above", position=self.position, length=length)

    def evaluate(self, block: Block) -> Tensor:
        history = _known(block.target.history, self)
        lengths_B = upload([len(tokens) for tokens in history], block.agree_BK.device)
        return lengths_B.unsqueeze(1) + block.columns_K >= self.position


@dataclass(frozen=True)
class Budget(Condition, Checked):
    """Relaxed tokens are at most this ``share`` of all generated tokens, including this token."""

    name: ClassVar[str] = "budget"
    monotone: ClassVar[Mapping[str, int]] = {"share": 1}
    share: Share = 0.1

    @property
    def possible(self) -> bool:
        return self.share > 0

    def _compile(self) -> Clause:
        return Clause.of("budget", share=self.share, generated=_generated, relaxed=_relaxed)

    def evaluate(self, block: Block) -> Tensor:
        generated_BK = block.target.generated_B.unsqueeze(1) + block.columns_K + 1
        return _relaxed_so_far(block) <= self.share * generated_BK


@dataclass(frozen=True)
class AtMost(Condition, Checked):
    """At most ``count`` tokens of the whole output are relaxed, or of each block (``per`` ``"block"``); the rest is
    exact. A cap on blocks keeps relaxed tokens apart (ASD, arXiv 2608.03447: 2)."""

    name: ClassVar[str] = "at_most"
    monotone: ClassVar[Mapping[str, int]] = {"count": 1}
    count: Count = 10
    per: Literal["output", "block"] = "output"

    @property
    def possible(self) -> bool:
        return self.count > 0

    def _compile(self) -> Clause:
        if self.per == "block":
            return Clause.of("at_most_per_block", count=self.count)
        return Clause.of("at_most", count=self.count, relaxed=_relaxed)

    def evaluate(self, block: Block) -> Tensor:
        if self.per == "block":
            return (~block.agree_BK).long().cumsum(-1) <= self.count
        return _relaxed_so_far(block) <= self.count


class CostBudget(Condition):
    """A budget of any quantity. The relaxed tokens of a request cost at most ``most`` in all; the rest is exact.

    A subclass defines ``most`` (a parameter) and ``cost``. The engine adds up the costs of each request in
    ``out.stats.spent``, under the condition's text.
    """

    most: float

    @abstractmethod
    def cost(self, target: Target, draft: Draft, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Return what it costs to excuse the drafted token at each of these positions, float [N]. The cost must not
        depend on tokens that follow, because the engine calls this again with the accepted path alone."""

    def costs(self, target: Target, draft: Draft, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Call ``cost`` and check its shape.

        Raises ``ValueError`` unless it is [N]: a tensor [1] would be broadcast silently.
        """
        cost_N, shape = self.cost(target, draft, rows_N, positions_N), list(rows_N.shape)
        if not isinstance(cost_N, Tensor) or list(cost_N.shape) != shape or cost_N.is_complex():
            raise ValueError(f"{self}: cost gave {describe(cost_N)}, not a tensor [N] of {shape}")
        return cost_N.float()

    def spent(self, target: Target) -> Tensor:
        """Return the cost of each row's relaxed tokens before the block, [B]."""
        return target.spent(self.label)

    @property
    def budgets(self) -> tuple[CostBudget, ...]:
        return (self,)

    def evaluate(self, block: Block) -> Tensor:
        cost_BK = block.at_mismatches(lambda rows_N, at_N: self.costs(block.target, block.draft, rows_N, at_N))
        after_BK = self.spent(block.target).unsqueeze(1) + cost_BK.masked_fill(block.agree_BK, 0.0).cumsum(-1)
        return after_BK <= self.most


class _InNats(CostBudget, Checked):
    """A budget whose parameter is ``nats``. With 0 it excuses nothing."""

    nats: float

    @property
    def possible(self) -> bool:
        return self.nats > 0

    @property
    def most(self) -> float:  # type: ignore[override]
        return self.nats


@dataclass(frozen=True)
class NatsBudget(_InNats):
    """The divergence spent on relaxed tokens stays within ``nats`` over the whole output; the rest is exact.

    A relaxed token x replaces the target's raw distribution by one that is certain of x, which costs
    KL(x || target) = -ln target(x). Costs add up over the output (chain rule of the KL divergence).
    """

    name: ClassVar[str] = "nats"
    monotone: ClassVar[Mapping[str, int]] = {"nats": 1}
    nats: Amount = 5.0

    @property
    def budgets(self) -> tuple[CostBudget, ...]:
        return ()  # nats are counted for every rule

    def _compile(self) -> Clause:
        return Clause.of("nats", most=self.nats, spent=lambda past: past.account.nats)

    def spent(self, target: Target) -> Tensor:
        return target.nats_B

    def cost(self, target: Target, draft: Draft, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        return -raw_log_probs(target, draft, rows_N, positions_N)[0]


@dataclass(frozen=True)
class RegretBudget(_InNats):
    """The regret of relaxed tokens stays within ``nats`` over the whole output; the rest is exact (ASD, arXiv
    2608.03447, with ``nats`` as its B).

    The regret of a token is what the target's largest logit exceeds its own by. So, by its own conditional
    probabilities, the target finds the relaxed tokens at most e^nats times less likely than its own choices at the
    same places. The authors use 2 to 8 nats. With 0 the condition never holds.
    """

    name: ClassVar[str] = "regret_budget"
    monotone: ClassVar[Mapping[str, int]] = {"nats": 1}
    nats: Amount = 8.0

    def _compile(self) -> Clause:
        return Clause.of("regret_budget", most=self.nats, spent=lambda past: past.account.cost(self.label))

    def evaluate(self, block: Block) -> Tensor:
        return super().evaluate(block) & self.possible

    def cost(self, target: Target, draft: Draft, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        return raw_regret(target, draft)[rows_N, positions_N]


@dataclass(frozen=True)
class Phase(Condition):
    """The token is inside a phase of the text: after a ``start`` marker and before the next ``end`` marker.

    Markers are token ids, or texts of single tokens. In a shell: ``--policy "fly & phase('<think>', '</think>')"``. The
    last marker before the token decides; it may be in the prompt. Before any marker the text is outside, unless
    ``inside_first``. Markers themselves are outside.

    Raises ``ValueError`` if a marker is a text and the condition is not bound, or if the block does not know the text
    before it.
    """

    name: ClassVar[str] = "phase"
    start: int | str
    end: int | str
    inside_first: bool = False

    def __post_init__(self) -> None:
        for name, marker in (("start", self.start), ("end", self.end)):
            if isinstance(marker, bool) or not isinstance(marker, (int, str)) or marker == "":
                raise ValueError(f"{name} {marker!r} must be a token id or the text of a token")
        if self.start == self.end:
            raise ValueError(f"start and end are the same marker {self.start!r}")

    def bind(self, vocabulary: Vocabulary) -> Phase:
        bound = super().bind(vocabulary)
        _ = bound._markers  # raise for unknown texts now
        return bound

    @cached_property
    def _markers(self) -> tuple[int, int]:
        """The ids of start and end."""
        start, end = self.start, self.end
        return (
            self.vocabulary.token_id(start) if isinstance(start, str) else start,
            self.vocabulary.token_id(end) if isinstance(end, str) else end,
        )

    def _compile(self) -> Clause | None:
        if self._vocabulary is None and any(isinstance(marker, str) for marker in (self.start, self.end)):
            return None
        start, end = self._markers

        def inside(past: Past) -> bool:
            return self._inside_after(_known(past.history, self))

        return Clause.of("phase", start=start, end=end, inside=inside)

    def evaluate(self, block: Block) -> Tensor:
        start, end = self._markers
        tokens_BK = block.draft.tokens_BK
        columns_K = block.columns_K
        opens_BK, closes_BK = tokens_BK == start, tokens_BK == end
        before = [self._inside_after(tokens) for tokens in _known(block.target.history, self)]
        before_B1 = sent(torch.tensor(before), tokens_BK.device).unsqueeze(1)
        marker_BK = opens_BK | closes_BK
        # After each token, the last marker in the block decides. Without one, the text before the block decides.
        last_BK = torch.where(marker_BK, columns_K, -1).cummax(-1).values
        after_BK = torch.where(last_BK < 0, before_B1, opens_BK.gather(1, last_BK.clamp_min(0)))
        return torch.cat([before_B1, after_BK], dim=1)[:, :-1] & ~marker_BK

    def _inside_after(self, tokens: list[int]) -> bool:
        last = next((token for token in reversed(tokens) if token in self._markers), None)
        return self.inside_first if last is None else last == self._markers[0]


def _known(history: list[T] | None, condition: Condition) -> list[T]:
    if history is None:
        raise ValueError(f"{condition} needs to know what came before the block, and this target does not say")
    return history


def _generated(past: Past) -> int:
    return past.generated


def _relaxed(past: Past) -> int:
    return past.account.relaxed
