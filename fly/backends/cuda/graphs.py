"""Work on the device for which the host does not wait: captured graphs, copies through pinned memory, events.

Every event and graph of this backend is made here. A ``DeviceRound`` (device_round.py) is made of ``Part``s; the host
(rounds.py) reads their results by a ``Download`` and a ``Watch``.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Awaited", "Download", "GraphPool", "Part", "Shared", "Timer", "Watch", "drop_graphs", "upload_into"]

_log = logging.getLogger("fly")
_NAP = 2e-5  # seconds between two looks at an event; forwards take ten times as long
Awaited = Callable[[], AbstractContextManager[Any]]
_T = TypeVar("_T")


class GraphPool:
    """The memory shared by the graphs of one device, which run one after the other.

    Args:
        awaited: entered around each wait for the result of a graph, during which other ranks have to do their part.
        preparing: entered around the first rounds of a shape, which may compile code and so make ranks late.
    """

    def __init__(self, device: torch.device, awaited: Awaited = nullcontext, preparing: Awaited = nullcontext) -> None:
        self.device = device
        self.awaited = awaited
        self.preparing = preparing
        self.among_ranks = awaited is not nullcontext
        self.captured: weakref.WeakSet[Part[Any]] = weakref.WeakSet()
        self.prepared = 0  # number of captures, and of the runs that prepared them
        _pools.add(self)

    def current(self) -> AbstractContextManager[Any]:
        """Make the pool's device the current one within this context. Events and captures belong to it."""
        return torch.cuda.device(self.device)

    @cached_property
    def handle(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream that graphs are captured on. Torch's default would be a stream of the first device that captured a
        graph."""
        return torch.cuda.Stream(self.device)


_pools: weakref.WeakSet[GraphPool] = weakref.WeakSet()


def drop_graphs() -> None:
    """Drop every graph of this process. Graphs that hold collectives must go before their process group does."""
    for pool in _pools:
        for part in list(pool.captured):
            part.drop()


class Part(Generic[_T]):
    """A piece of work whose inputs and outputs keep their addresses.

    The first run goes operation by operation, so that libraries can prepare. The second run is captured as a CUDA
    graph. Each later run is one launch, which returns the same tensors. After a failed capture, the next attempt comes
    once the number of runs has doubled.

    Args:
        run: the work.
        reads: the part that runs before this one, and whose results this one reads. If that part cannot be captured, it
            returns new tensors each time, so this one cannot be captured either.
        refusal: the reason why the work cannot be captured, if known. Then it always runs operation by operation.
    """

    def __init__(
        self, run: Callable[[], _T], pool: GraphPool, reads: Part[Any] | None = None, refusal: str | None = None
    ) -> None:
        self.run = run
        self.pool = pool
        self.reads = reads
        self.refusal = refusal
        self._runs, self._capture_at = 0, 1  # runs without a graph so far; how many come before a capture
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: _T | None = None

    def __call__(self) -> _T:
        if self._graph is not None:
            self._graph.replay()
            return self._results  # type: ignore[return-value]
        if self.reads is not None:
            self.refusal = self.refusal or self.reads.refusal
        # A part without a graph returns new tensors each time.
        reads_uncaptured = self.reads is not None and self.reads._graph is None
        if self._runs < self._capture_at or self.refusal is not None or reads_uncaptured:
            self._runs += 1
            self.pool.prepared += self.refusal is None
            return self.run()
        self.pool.prepared += 1
        return self._capture()

    def _capture(self) -> _T:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.pool.device)
        try:
            # thread_local: other threads use the device as usual meanwhile.
            with torch.cuda.graph(graph, self.pool.handle, self.pool.stream, capture_error_mode="thread_local"):
                self._results = self.run()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # torch leaves the thread on the stream of a failed capture
            reason = error.__context__ or error
            self._results = None
            self._capture_at = 2 * self._runs + 1
            _log.warning("a CUDA graph could not hold this, which goes on operation by operation: %s", reason)
            self._runs += 1
            return self.run()
        self._graph = graph
        self.pool.captured.add(self)
        graph.replay()
        return self._results

    def drop(self) -> None:
        """Give up the graph for good."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = None
        self._results = None
        self.refusal = "graphs of this process were dropped"


class Shared:
    """Memory that the rounds of all shapes share. A round owns it until it ends; the next one overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def lend(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of this shape. If there is too little, new memory is allocated; earlier borrowers keep the
        old."""
        size, buffer = math.prod(shape), self._buffers.get((name, dtype))
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name, dtype] = torch.zeros(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


def upload_into(memory: Tensor, values: Tensor) -> None:
    """Queue a copy of ``values``, which are on the host, into ``memory`` on the device."""
    memory.copy_(values.pin_memory(), non_blocking=True)


class Download:
    """Pinned memory for a tensor that the device computes again and again."""

    def __init__(self, like: Tensor) -> None:
        self.host = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def begin(self, values: Tensor) -> None:
        """Queue the copy of ``values``. It has arrived once a later event has passed."""
        self.host.copy_(values, non_blocking=True)


class Watch:
    """Numbers on the device that the host reads while the device goes on working.

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
        """Wait for number ``at`` and return it. Meanwhile the device should have other work."""
        while not self.events[at].query():
            time.sleep(_NAP)  # other threads of the process go on
        return int(self.host[at])


class Timer:
    """Three moments of a round on the device's own clock."""

    def __init__(self) -> None:
        self.start, self.drafted, self.done = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def seconds(self) -> tuple[float, float]:
        """Return how long the draft of a finished round took, and how long everything after it."""
        whole, draft = (self.start.elapsed_time(end) / 1e3 for end in (self.done, self.drafted))
        return draft, whole - draft
