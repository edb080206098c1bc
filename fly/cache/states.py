"""Hidden states of cached tokens, for heads that draft by them. Knows nothing of models.

Shape legend: N consecutive tokens of a row, F hidden states side by side.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from fly.ops import upload
from fly.request import Sequence

__all__ = ["HiddenStates"]

_MOST = 8192  # tokens of a row whose hidden states are kept while no drafter uses them


class HiddenStates:
    """A model's hidden states of the cached tokens of each row, for a drafter that needs them: the residual stream
    after so many ``layers`` each, side by side [n, F], of a run of consecutive tokens up to the last that is cached.

    If tokens are cached that were not fed (their pages came from another row), the run begins after them. ``begin``
    returns, for a new row, of how many of its first tokens the drafter needs none: no more are shared. ``end`` is
    called when a row is over.
    """

    def __init__(self, layers: abc.Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.begin: Callable[[Sequence], int] = lambda row: 0
        self.end: Callable[[Sequence], None] = lambda row: None
        self._runs: dict[int, tuple[int, Tensor]] = {}  # by row: number of the first token, and the run

    def run(self, row: Sequence) -> range:
        """Numbers of the tokens whose hidden states are here."""
        start, states_NF = self._runs.get(row.id, (0, ()))
        return range(start, start + len(states_NF))

    def of(self, row: Sequence, tokens: range) -> Tensor:
        """Those of ``tokens``, which are among the ``run``."""
        start, states_NF = self._runs[row.id]
        return states_NF[tokens.start - start : tokens.stop - start]

    def drop(self, row: Sequence, before: int) -> None:
        """Those of tokens before this number are needed no more."""
        start, states_NF = self._runs.get(row.id, (before, None))
        if states_NF is not None and start < before:
            self._runs[row.id] = before, states_NF[before - start :].clone()

    def add(self, row: Sequence, first: int, states_NF: Tensor) -> None:
        """The row's tokens from ``first`` on were fed."""
        start, known_NF = self._runs.get(row.id, (first, None))
        if known_NF is not None and start + len(known_NF) == first:
            first, states_NF = start, torch.cat([known_NF, states_NF])
        over = len(states_NF) - _MOST
        self._runs[row.id] = (
            (first, states_NF) if over < 0 else (first + over + _MOST // 2, states_NF[over + _MOST // 2 :])
        )

    def keep(self, row: Sequence, start: int, path: list[int]) -> None:
        """Of the tokens from ``start`` on, a tree's, those numbered in ``path`` stand."""
        first, states_NF = self._runs.get(row.id, (start, None))
        if states_NF is not None and first <= start:
            kept = [*range(start - first), *(start - first + node for node in path)]
            self._runs[row.id] = first, states_NF[upload(kept, states_NF.device)]

    def cut(self, row: Sequence, length: int) -> None:
        """The row is rolled back to so many tokens."""
        start, states_NF = self._runs.get(row.id, (0, None))
        if states_NF is None or start + len(states_NF) <= length:
            return
        if start < length:
            self._runs[row.id] = start, states_NF[: length - start]
        else:
            del self._runs[row.id]

    def fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        """``child`` begins with the first ``length`` tokens of ``parent``."""
        if parent.id in self._runs:
            self._runs[child.id] = self._runs[parent.id]
            self.cut(child, length)

    def release(self, row: Sequence) -> None:
        self._runs.pop(row.id, None)
        self.end(row)
