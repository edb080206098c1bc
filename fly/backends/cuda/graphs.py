"""Work that becomes a CUDA graph, and copies between host and device that do not make the host wait."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Awaited", "Captures", "Download", "Kept", "Part", "Watch"]

_log = logging.getLogger("fly")
_NAP = 2e-5  # seconds; forwards take ten times as long
Awaited = Callable[[], AbstractContextManager[Any]]
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


class Download:
    """Pinned memory for a tensor that the device works out again and again."""

    def __init__(self, like: Tensor) -> None:
        self.host = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def begin(self, found: Tensor, done: torch.cuda.Event) -> None:
        """Copy ``found`` as soon as it is worked out; it is here when ``done`` is over."""
        self.host.copy_(found, non_blocking=True)
        done.record()


class Watch:
    """Numbers of the device that the host looks at while the device goes on.

    Args:
        most: numbers that there are at a time.
    """

    def __init__(self, most: int) -> None:
        self.host = torch.empty(most, dtype=torch.int64, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(most)]

    def leave(self, at: int, value_1: Tensor) -> None:
        """Number ``at`` is what ``value_1`` [1] is now."""
        self.host[at : at + 1].copy_(value_1, non_blocking=True)
        self.events[at].record()

    def seen(self, at: int) -> int:
        """The number, once it has arrived. Call this while the device still has other work."""
        while not self.events[at].query():
            time.sleep(_NAP)  # other threads of the process go on meanwhile
        return int(self.host[at])


class Kept(Generic[_K, _T]):
    """Values made for keys, at most so many, whose weights stay within ``budget`` (the last one always stays). Those
    unused for longest are dropped."""

    def __init__(self, most: int, budget: int = 0, weigh: Callable[[_T], int] = lambda _: 0) -> None:
        self.most, self.budget, self.weigh = most, budget, weigh
        self.made: OrderedDict[_K, _T] = OrderedDict()

    def get(self, key: _K, make: Callable[[], _T], suits: Callable[[_T], bool] = lambda _: True) -> _T:
        """What was made for ``key``; made now if there is none that ``suits``."""
        found = self.made.pop(key) if key in self.made else None
        self.made[key] = found = found if found is not None and suits(found) else make()
        while len(self.made) > self.most or (len(self.made) > 1 and self._weight() > self.budget):
            self.made.popitem(last=False)
        return found

    def _weight(self) -> int:
        return sum(map(self.weigh, self.made.values()))


class Captures:
    """The memory that graphs share, which run one after the other, and how many were captured.

    Args:
        awaited: entered around each wait for the result of a graph, which may need other processes to do their part.
    """

    def __init__(self, awaited: Awaited = nullcontext) -> None:
        self.count, self.awaited = 0, awaited
        self._pool: Any = None

    @property
    def pool(self) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


class Part(Generic[_T]):
    """A piece of work on memory that stays where it is. It runs operation by operation the first time, which warms up
    what libraries prepare, is captured the second time, and is one launch from then on.

    From the second time on it returns the same tensors each time. What cannot be captured goes on operation by
    operation, and ``why_not`` says why; then nothing that reads what it returns can be captured either (``follow``).
    """

    def __init__(self, run: Callable[[], _T], captures: Captures, why_not: str | None = None) -> None:
        self.run, self.captures, self.why_not = run, captures, why_not
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._made: _T | None = None

    def follow(self, before: Part[Any]) -> None:
        """This part reads what ``before`` returns, which was called first."""
        if before.why_not is not None and self._graph is None:
            self.why_not = self.why_not or before.why_not

    def __call__(self) -> _T:
        if self._graph is not None:
            self._graph.replay()
            return self._made  # type: ignore[return-value]
        if not self._warm or self.why_not is not None:
            self._warm = True
            return self.run()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on as usual meanwhile.
            with torch.cuda.graph(graph, pool=self.captures.pool, capture_error_mode="thread_local"):
                made = self.run()
        except RuntimeError as error:
            self.why_not = str(error)
            _log.warning("a CUDA graph cannot hold this, which goes on operation by operation: %s", error)
            return self.run()
        self.captures.count += 1
        self._graph, self._made = graph, made
        graph.replay()
        return made
