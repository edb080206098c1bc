"""Where a drafting model stops by itself: after the first token that it is not sure of."""

from __future__ import annotations

from collections import abc

from fly.policies import AcceptancePolicy
from fly.runtime.request import Sequence
from fly.types import Guarantee

__all__ = ["check_chance", "reach_of", "usual_reach"]

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
