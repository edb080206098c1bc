"""Where a draft model stops: after the first token that it is not sure of."""

from __future__ import annotations

from collections import abc

from fly.policies import AcceptancePolicy
from fly.runner.request import Row
from fly.types import Guarantee

__all__ = ["REACH_BLOCK", "check_limits", "reach_of", "usual_reach"]

# The usual limits for lossless rules, and for rules that excuse mismatches, which keep more tokens than the draft
# model's probabilities predict. Both are near the best on code and arithmetic if a drafted token costs a tenth to a
# third of a target's token (docs/results).
REACH, REACH_EXCUSED = 0.5, 0.1
# The usual limit of block drafters, whose tokens cost no more drafting. To verify one more takes about a hundredth of
# the target's forward, and a token that is kept saves a sixth of one, at six tokens a forward.
REACH_BLOCK = 0.05


def check_limits(k: int | None, confidence: float, reach: float | None) -> None:
    """Raise ``ValueError`` for a k below 1, or a chance outside [0, 1]."""
    if k is not None and k < 1:
        raise ValueError(f"k {k} must be at least 1")
    for name, chance in (("confidence", confidence), ("reach", reach)):
        if chance is not None and not 0 <= chance <= 1:
            raise ValueError(f"{name} {chance} must be in [0, 1]")


def usual_reach(reach: float | None, policy: AcceptancePolicy) -> float:
    """Return ``reach``, or the usual limit under ``policy`` if it is None."""
    if reach is not None:
        return reach
    return REACH if policy.guarantee is Guarantee.LOSSLESS else REACH_EXCUSED


def reach_of(rows: abc.Sequence[Row], reach: float | None, worth: float) -> tuple[float, ...]:
    """Return ``DraftSpec.reach`` for each row: ``worth`` if it is known (not 0), otherwise ``usual_reach``. ``worth``
    is squared for rules that excuse mismatches, which keep tokens more often."""
    limits = []
    for row in rows:
        power = 1 if row.policy.guarantee is Guarantee.LOSSLESS else 2
        limits.append(worth**power or usual_reach(reach, row.policy))
    return tuple(limits)
