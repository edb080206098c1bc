"""Where a draft model stops by itself: after the first token that it is not sure of."""

from __future__ import annotations

from collections import abc

from fly.policies import AcceptancePolicy
from fly.runtime.request import Sequence
from fly.types import Guarantee

__all__ = ["check_chance", "reach_of", "usual_reach"]

# Near the best on code and arithmetic if a drafted token costs a tenth to a third of the target's. The first is for
# lossless rules, the second for others, which keep more tokens than the draft's probabilities say (docs/results).
REACH, REACH_EXCUSED = 0.5, 0.1


def check_chance(name: str, chance: float | None) -> None:
    """Raise ``ValueError``, which gives ``name``, for a value outside [0, 1]."""
    if chance is not None and not 0 <= chance <= 1:
        raise ValueError(f"{name} {chance} must be in [0, 1]")


def usual_reach(reach: float | None, policy: AcceptancePolicy) -> float:
    """``reach``; or the usual one under ``policy``, if ``reach`` is None."""
    if reach is not None:
        return reach
    return REACH if policy.guarantee is Guarantee.LOSSLESS else REACH_EXCUSED


def reach_of(rows: abc.Sequence[Sequence], reach: float | None, worth: float) -> tuple[float, ...]:
    """``DraftSpec.reach`` for each row: by ``worth`` if it is known what pays, otherwise ``usual_reach``."""
    pays = {True: worth, False: worth**2}  # rules that excuse mismatches keep tokens more often
    return tuple(pays[row.policy.guarantee is Guarantee.LOSSLESS] or usual_reach(reach, row.policy) for row in rows)
