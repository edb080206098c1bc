"""Where a drafting model stops by itself: after the first token that it is not sure of.

Shape legend: N places, V vocabulary.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass

from torch import Tensor

from fly.executor import DraftSpec
from fly.ops import entropy
from fly.policies import AcceptancePolicy
from fly.request import Sequence
from fly.types import Guarantee

__all__ = ["Certainty", "check_chance", "reach_of", "usual_reach"]

# Near the best on code and on arithmetic for drafts of a tenth to a third of the target's cost: for rows under a
# lossless rule, and under others, where tokens stand more often than the draft model's chances say (docs/results).
REACH, REACH_EXCUSED = 0.5, 0.1


def check_chance(name: str, chance: float | None) -> None:
    """Raises ``ValueError``, with the name, for a value outside [0, 1]."""
    if chance is not None and not 0 <= chance <= 1:
        raise ValueError(f"{name} {chance} must be in [0, 1]")


def usual_reach(reach: float | None, policy: AcceptancePolicy) -> float:
    """``reach``, or what is usual under ``policy`` where that is None."""
    if reach is not None:
        return reach
    return REACH if policy.guarantee is Guarantee.LOSSLESS else REACH_EXCUSED


def reach_of(rows: abc.Sequence[Sequence], reach: float | None, worth: float) -> tuple[float, ...]:
    """``DraftSpec.reach`` of each row: what pays, where that is known (``worth``), else ``usual_reach``."""
    pays = {True: worth, False: worth**2}  # under rules that excuse mismatches tokens stand more often
    return tuple(pays[row.policy.guarantee is Guarantee.LOSSLESS] or usual_reach(reach, row.policy) for row in rows)


@dataclass
class Certainty:
    """How sure a model is of what it drafts for a row."""

    spec: DraftSpec
    least: float  # chance that all tokens so far stand
    reached: float = 1.0

    @property
    def asks(self) -> bool:
        """Whether it may stop."""
        return self.least > 0 or self.spec.confidence > 0 or self.spec.entropy < math.inf

    def after(self, probs_NV: Tensor) -> list[bool]:
        """Whether to draft on after each of the next N tokens, by the distribution each is of."""
        peak_N = probs_NV.amax(-1)
        reached_N = self.reached * peak_N.cumprod(0)
        self.reached = float(reached_N[-1])
        spec = self.spec
        sure_N = (peak_N >= spec.confidence) & (reached_N >= self.least) & (entropy(probs_NV) <= spec.entropy)
        sure: list[bool] = sure_N.tolist()
        return sure
