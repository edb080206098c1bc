"""Choose the faster of two ways to compute the same tokens, by trying both. Knows nothing of the ways themselves."""

from __future__ import annotations

import math

__all__ = ["Ways"]

_KEEP, _KEEP_TRIED = 0.97, 0.8  # each round multiplies the weight of old measurements: of the way in use, of the other
_FIRST_WAIT, _LONGEST_WAIT = 8, 512  # rounds until the slower way is tried again
_PAUSE = 4.0  # cut a measurement to this many times the expected one, since the machine may have paused


class Ways:
    """Chooses between way 0 and way 1.

    It measures each way in its ``first`` rounds. Then it uses the faster way, and tries the other again for ``tried``
    rounds: after 8 rounds, then 16, and so on up to 512.
    """

    def __init__(self, first: tuple[int, int] = (2, 2), tried: int = 1) -> None:
        self.first, self.tried = first, tried
        self.seconds = [math.inf, math.inf]  # per token, for each way
        self._sums = [[0.0, 0.0], [0.0, 0.0]]  # recent seconds and tokens of each way
        self._rounds, self._measured = [0, 0], [0, 0]
        self._left = 0  # rounds until a trial ends
        self._waited, self._wait = 0, _FIRST_WAIT

    def choose(self) -> tuple[int, int]:
        """Return the way to use now, and for how many rounds."""
        for way, (rounds, first) in enumerate(zip(self._rounds, self.first)):
            if rounds < first:
                return way, first - rounds
        if self._left:
            return 1 - self.faster, self._left
        return self.faster, self._wait - self._waited

    @property
    def faster(self) -> int:
        return self.seconds.index(min(self.seconds))

    def add(self, way: int, seconds: float, tokens: float, rounds: int = 1) -> None:
        """Learn from ``rounds`` rounds that took ``seconds`` for ``tokens`` tokens. A way's second measurement replaces
        its first, which may include other work, such as catching up with a text."""
        faster, known = self.faster, min(self._measured) > 0
        keep = (_KEEP if way == faster else _KEEP_TRIED) ** rounds if self._measured[way] > 1 else 0.0
        if self._measured[way] > 1:
            seconds = min(seconds, _PAUSE * self.seconds[way] * tokens)
        sums = self._sums[way] = [keep * old + new for old, new in zip(self._sums[way], (seconds, tokens))]
        self.seconds[way] = sums[0] / sums[1]
        self._measured[way] += 1
        self._rounds[way] += rounds
        if not known:
            return
        if self.faster != faster:
            self._waited, self._wait, self._left = 0, _FIRST_WAIT, 0
        elif way != faster:
            self._left = max(self._left - rounds, 0)
        elif not self._left:
            self._waited += rounds
            if self._waited >= self._wait:
                self._waited, self._wait, self._left = 0, min(2 * self._wait, _LONGEST_WAIT), self.tried
