"""What runs on the device without a wait of the host: captured graphs, copies through pinned memory, events.

Every event and graph of this backend is made here. A ``DeviceRound`` (device_round.py) is made of ``Part``s; the host
(rounds.py) reads their results by a ``Download`` and a ``Watch``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Awaited", "Download", "GraphPool", "Part", "Timer", "Watch", "upload_into"]

_log = logging.getLogger("fly")
_NAP = 2e-5  # seconds between two looks at an event; forwards take ten times as long
Awaited = Callable[[], AbstractContextManager[Any]]
_T = TypeVar("_T")


class GraphPool:
    """The memory that graphs share, which run one after the other.

    Args:
        awaited: entered around each wait for the result of a graph: with ranks, other processes have to do their part.
    """

    def __init__(self, awaited: Awaited = nullcontext) -> None:
        self.awaited = awaited
        self.among_ranks = awaited is not nullcontext

    @cached_property
    def handle(self) -> Any:
        return torch.cuda.graph_pool_handle()


class Part(Generic[_T]):
    """A piece of work on memory that stays where it is.

    It runs operation by operation the first time, which warms up what libraries prepare. The second time it is captured
    as a CUDA graph, and from then on it is one launch, which returns the same tensors each time.

    Args:
        run: the work.
        reads: the part whose results it reads, which runs before it. If that cannot be captured, its results are other
            tensors each time, so this part cannot be captured either.
        refusal: why it cannot be captured, if that is known. It then always runs operation by operation.
    """

    def __init__(
        self, run: Callable[[], _T], pool: GraphPool, reads: Part[Any] | None = None, refusal: str | None = None
    ) -> None:
        self.run, self.pool, self.reads, self.refusal = run, pool, reads, refusal
        self._is_warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: _T | None = None

    def __call__(self) -> _T:
        if self._graph is not None:
            self._graph.replay()
            return self._results  # type: ignore[return-value]
        if self.reads is not None:
            self.refusal = self.refusal or self.reads.refusal
        if not self._is_warm or self.refusal is not None:
            self._is_warm = True
            return self.run()
        return self._capture()

    def _capture(self) -> _T:
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads use the device as usual meanwhile.
            with torch.cuda.graph(graph, pool=self.pool.handle, capture_error_mode="thread_local"):
                self._results = self.run()
        except RuntimeError as error:
            self.refusal = str(error)
            _log.warning("a CUDA graph cannot hold this, which goes on operation by operation: %s", error)
            return self.run()
        self._graph = graph
        graph.replay()
        return self._results


def upload_into(memory: Tensor, values: Tensor) -> None:
    """Copy ``values`` of the host into ``memory`` of the device, queued behind what was launched before."""
    memory.copy_(values.pin_memory(), non_blocking=True)


class Download:
    """Pinned memory for a tensor that the device computes again and again."""

    def __init__(self, like: Tensor) -> None:
        self.host = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def begin(self, values: Tensor) -> None:
        """Queue the copy of ``values``; it has arrived when a later event is over."""
        self.host.copy_(values, non_blocking=True)


class Watch:
    """Numbers of the device that the host reads while the device goes on.

    Args:
        count: how many numbers there are at a time.
    """

    def __init__(self, count: int) -> None:
        self.host = torch.empty(count, dtype=torch.int64, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(count)]

    def begin(self, at: int, value_1: Tensor) -> None:
        """Queue the copy of ``value_1`` [1] as number ``at``."""
        self.host[at : at + 1].copy_(value_1, non_blocking=True)
        self.events[at].record()

    def read(self, at: int) -> int:
        """Number ``at``, once it has arrived. The device should still have other work meanwhile."""
        while not self.events[at].query():
            time.sleep(_NAP)  # other threads of the process go on
        return int(self.host[at])


class Timer:
    """Three moments of a round on the device's own clock."""

    def __init__(self) -> None:
        self.start, self.drafted, self.done = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def seconds(self) -> tuple[float, float]:
        """How long the draft took, and everything after it, of a round that is done."""
        whole, draft = (self.start.elapsed_time(end) / 1e3 for end in (self.done, self.drafted))
        return draft, whole - draft
