"""Hidden states of cached tokens, for draft heads that draft from them. Knows nothing of models.

Shape legend: N consecutive tokens of a row, F hidden states side by side.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from fly.ops import upload
from fly.runner.request import Row

__all__ = ["HiddenStates"]

_MAX_KEPT = 8192  # tokens per row whose states are kept while no draft head reads them


class HiddenStates:
    """A model's hidden states for the cached tokens of each row: the residual stream after each of ``layers``,
    concatenated [N, F]. A row has them for a run of consecutive tokens that ends with the last cached one.

    If a row's first tokens were not fed, because their pages came from another row, the run begins after them.

    Args:
        layers: the numbers of layers.
        begin: the reader's function that returns how many of a new row's first tokens need no states, since it has read
            them already; at most these come from other rows' pages.
        end: the reader's function that is called when a row is finished.
    """

    def __init__(self, layers: abc.Sequence[int], begin: Callable[[Row], int], end: Callable[[Row], None]) -> None:
        self.layers = tuple(layers)
        self.begin = begin
        self._end = end
        self._runs: dict[int, tuple[int, Tensor]] = {}  # by row: number of the first token, and the run

    def stored(self, row: Row) -> range:
        """Return the numbers of the tokens whose hidden states are stored."""
        start, states_NF = self._runs.get(row.id, (0, ()))
        return range(start, start + len(states_NF))

    def get(self, row: Row, tokens: range) -> Tensor:
        """Return the hidden states of ``tokens``, which must be within the ``stored`` range."""
        start, states_NF = self._runs[row.id]
        return states_NF[tokens.start - start : tokens.stop - start]

    def drop(self, row: Row, before: int) -> None:
        """Drop the states of tokens before this number."""
        start, states_NF = self._runs.get(row.id, (before, None))
        if states_NF is not None and start < before:
            self._runs[row.id] = before, states_NF[before - start :].clone()

    def add(self, row: Row, first: int, states_NF: Tensor) -> None:
        """Store the states of the row's tokens from ``first`` on, which were just fed."""
        start, stored_NF = self._runs.get(row.id, (first, None))
        if stored_NF is not None and start + len(stored_NF) == first:
            first, states_NF = start, torch.cat([stored_NF, states_NF])
        excess = len(states_NF) - _MAX_KEPT
        if excess >= 0:  # drop half of them at once, since dropping copies the rest
            cut = excess + _MAX_KEPT // 2
            first, states_NF = first + cut, states_NF[cut:]
        self._runs[row.id] = first, states_NF

    def keep(self, row: Row, start: int, path: list[int]) -> None:
        """Keep the tokens of a tree that ``path`` names by their numbers, and drop the rest. The tree begins at
        ``start``."""
        first, states_NF = self._runs.get(row.id, (start, None))
        if states_NF is not None and first <= start:
            indices = [*range(start - first), *(start - first + node for node in path)]
            self._runs[row.id] = first, states_NF[upload(indices, states_NF.device)]

    def cut(self, row: Row, length: int) -> None:
        """Roll the row back to ``length`` tokens."""
        start, states_NF = self._runs.get(row.id, (0, None))
        if states_NF is None or start + len(states_NF) <= length:
            return
        if start < length:
            self._runs[row.id] = start, states_NF[: length - start]
        else:
            del self._runs[row.id]

    def fork(self, parent: Row, child: Row, length: int) -> None:
        """Let ``child`` begin with the first ``length`` tokens of ``parent``."""
        if parent.id in self._runs:
            self._runs[child.id] = self._runs[parent.id]
            self.cut(child, length)

    def release(self, row: Row) -> None:
        """Drop all states of the row, which has ended."""
        self._runs.pop(row.id, None)
        self._end(row)
