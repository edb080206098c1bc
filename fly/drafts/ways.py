"""Which of two ways to the same tokens takes less time. Knows nothing of what they are."""

from __future__ import annotations

import math

__all__ = ["Ways"]

_NEWS = 0.2  # weight of a new measurement
_FIRST_WAIT, _LONGEST_WAIT = 8, 512  # proposals after which the slower way is tried again


class Ways:
    """Drafting with the level below (0), or without (1).

    Each is measured twice; then the faster is taken, and the other tried again after more and more proposals.
    """

    def __init__(self) -> None:
        self.seconds, self.seen = [math.inf, math.inf], [0, 0]  # a token; measurements
        self.waited, self.wait = 0, _FIRST_WAIT

    def choose(self) -> int:
        """The way to go now."""
        if min(self.seen) < 2:
            return self.seen.index(min(self.seen))
        faster = self.seconds.index(min(self.seconds))
        self.waited += 1
        if self.waited < self.wait:
            return faster
        self.waited, self.wait = 0, min(2 * self.wait, _LONGEST_WAIT)
        return 1 - faster

    def add(self, way: int, seconds: float) -> None:
        """So long a token took. The first two may have had other things to do, such as to catch up with a text."""
        self.seen[way] += 1
        if self.seen[way] <= 2:
            self.seconds[way] = min(self.seconds[way], seconds)
        else:
            self.seconds[way] += _NEWS * (seconds - self.seconds[way])
