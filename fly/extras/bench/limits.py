"""The limits of the machine: bytes read per second, and operations of matrix products per second. This module knows
nothing of speculation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from fly.backends.cpu.library import load, why_not
from fly.cache.paged import zeros
from fly.devices import on_host
from fly.extras.bench.clock import between, clocked, take_turns

__all__ = ["Limits", "measure_limits", "memory_reads"]

_SIZES = tuple(size * 2**20 for size in (4, 16, 64, 512))  # bytes; the last is beyond any processor's caches
_IDLE = 0.02  # seconds until PyTorch's threads stop spinning, which would slow down the next measurement
_SIDES = 1024, 8192  # sides of square matrices, large enough for the full rate of a CPU, and of an accelerator


@dataclass(frozen=True)
class Limits:
    """The highest rates that were measured on the machine, with all threads of PyTorch.

    ``reading`` is bytes per second, by the number of bytes that are read again and again: small amounts come from the
    processor's caches, and the largest from memory. ``matmul`` is operations per second, by dtype (a multiplication
    with its addition counts as two). int8 means products of integers, on CPUs. Each rate is the best of several turns,
    since a disturbance can only lower it. ``typical`` has the medians under the same keys, which show how disturbed the
    measurement was.
    """

    device: str
    threads: int
    reading: dict[int, float]
    matmul: dict[torch.dtype, float]
    typical: dict[int | torch.dtype, float]

    @property
    def bandwidth(self) -> float:
        """Bytes per second from memory."""
        return self.reading[max(self.reading)]

    def seconds(self, read: float, operations: Mapping[torch.dtype, float] = MappingProxyType({})) -> float:
        """Return the least time in which the machine can read ``read`` bytes and do ``operations`` (by dtype): the
        longer of the two times (the roofline, Williams et al. 2009). The bandwidth is interpolated between the measured
        sizes, over their logarithm. Every dtype is multiplied at least at the rate of float32."""
        computing = sum(
            count / max(self.matmul[dtype], self.matmul[torch.float32]) for dtype, count in operations.items()
        )
        return max(read / self._bandwidth_of(read), computing)

    def _bandwidth_of(self, read: float) -> float:
        within = min(max(read, min(self.reading)), max(self.reading))
        if within in self.reading:
            return self.reading[int(within)]
        return between(sorted((math.log(size), rate) for size, rate in self.reading.items()), math.log(within))

    def best(self, again: Limits) -> Limits:
        """Take the better of two measurements of each limit. Both come from the same machine."""

        def better(one: dict[Any, float], other: dict[Any, float]) -> dict[Any, float]:
            return {key: max(rate, other[key]) for key, rate in one.items()}

        return replace(
            self,
            reading=better(self.reading, again.reading),
            matmul=better(self.matmul, again.matmul),
            typical=better(self.typical, again.typical),
        )

    def rows(self) -> Iterator[tuple[str, float, float, str]]:
        """Yield the name, best rate, median rate and unit of each limit."""
        for size, rate in self.reading.items():
            yield f"read {size >> 20} MB", rate, self.typical[size], "B/s"
        for dtype, rate in self.matmul.items():
            yield f"matmul {dtype_name(dtype)}", rate, self.typical[dtype], "op/s"

    def as_json(self) -> dict[str, object]:
        rates = {name: {"best": best, "median": median, "unit": unit} for name, best, median, unit in self.rows()}
        return {"device": self.device, "threads": self.threads, **rates}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@torch.inference_mode()
def measure_limits(device: torch.device, repeats: int = 12) -> Limits:
    """Measure the limits of ``device``, in a few seconds."""
    side = _SIDES[not on_host(device)]
    reads = memory_reads(device)

    def multiplies(dtype: torch.dtype, side: int) -> Callable[[], object]:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        return partial(torch._int_mm if dtype == torch.int8 else torch.mm, left, right)

    sides = {torch.bfloat16: side, torch.float32: side}
    if on_host(device) and not why_not():  # int8 is the limit for w8a8
        sides[torch.int8] = 2 * side
    # Reads and products do not alternate, because PyTorch's threads still spin for a while after a product.
    timings = take_turns(list(reads.values()), repeats, device)
    timings += take_turns([multiplies(*product) for product in sides.items()], repeats, device)
    amounts: dict[int | torch.dtype, int] = {size: size for size in _SIZES}
    amounts |= {dtype: 2 * side**3 for dtype, side in sides.items()}
    best = {key: amount / timing.low for (key, amount), timing in zip(amounts.items(), timings)}
    return Limits(
        str(device),
        torch.get_num_threads(),
        {size: best[size] for size in _SIZES},
        {dtype: best[dtype] for dtype in sides},
        {key: amount / timing.median for (key, amount), timing in zip(amounts.items(), timings)},
    )


def memory_reads(device: torch.device) -> dict[int, Callable[[], float]]:
    """Make a function for each size. It reads that many bytes of the device's memory, and returns the seconds that the
    fastest way takes."""
    numbers = _numbers(_SIZES[-1] // 8, device)
    totals = _totals(device)

    def read(size: int) -> float:
        part, times = numbers[: size // 8], []
        for total in totals:
            total(part)  # fill the caches as far as the numbers fit
            times.append(clocked(partial(total, part), device)[1])
        time.sleep(_IDLE)
        return min(times)

    return {size: partial(read, size) for size in _SIZES}


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """Make numbers to read. On a CPU they are in large pages if there are any, like the weights."""
    page_bytes = 2 << 20
    numbers = zeros((count + page_bytes // 8,), torch.int64, device)
    return numbers[-numbers.data_ptr() % page_bytes // 8 :][:count].fill_(1)


def _totals(device: torch.device) -> list[Callable[[torch.Tensor], object]]:
    """Return ways to read a whole tensor. One of them is a compiled kernel, if there is one, because it prefetches
    memory."""
    if not on_host(device) or why_not():
        return [torch.Tensor.sum]
    read = load().fly_sum
    return [
        lambda numbers: read(numbers, torch.get_num_threads()),
        torch.Tensor.sum,
    ]
