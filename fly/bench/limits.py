"""What the machine can do at most: bytes read and numbers multiplied a second. And the clock all benches share.

Knows nothing of speculation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from fly.backends.cpu.library import load, why_not
from fly.cache.paged import zeros
from fly.eval.timed import synchronize

__all__ = ["Limits", "Timing", "between", "measure_limits", "take_turns"]

_SIZES = tuple(size * 2**20 for size in (4, 16, 64, 512))  # bytes; the last is beyond any processor's caches
_SIDES = {"cpu": 1024, "cuda": 8192}  # of square matrices, large enough for the processor's full rate


@dataclass(frozen=True)
class Timing:
    """Seconds of one thing, measured several times."""

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def low(self) -> float:
        return min(self.times)

    @property
    def high(self) -> float:
        return max(self.times)

    def as_json(self) -> dict[str, float | int]:
        return {"median": self.median, "low": self.low, "high": self.high, "count": len(self.times)}


def take_turns(
    runs: Sequence[Callable[[], float | None]],
    repeats: int,
    device: torch.device,
    advance: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time every run ``repeats`` times after one warm-up, in turns, so that a busy moment of the machine falls on all
    of them alike. A run that returns a number has taken its own time, in seconds. ``advance`` is called after every
    turn, the warm-up included."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for number, run in enumerate(runs):
            synchronize(device)
            start = time.perf_counter()
            own = run()
            synchronize(device)
            if turn:
                times[number].append(time.perf_counter() - start if own is None else own)
        advance()
    return [Timing(tuple(each)) for each in times]


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """The height at ``x`` of the line through ``points``, which are in order and lie on both sides of it."""
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    raise ValueError(f"{x} is outside {points[0][0]} to {points[-1][0]}")


@dataclass(frozen=True)
class Limits:
    """The most the machine was seen to do, with all threads that PyTorch uses.

    ``reading`` is in bytes a second, by how many bytes are read again and again: what fits the processor's caches comes
    faster than from memory, which the largest is. ``matmul`` is in operations a second (two for a multiplication with
    its addition) by dtype; int8 is products of whole numbers, on CPUs. Each is the best of several turns: what disturbs
    a measurement only ever makes a limit look lower. ``typical`` are the medians, by the same keys, for how much it was
    disturbed.
    """

    device: str
    threads: int
    reading: dict[int, float]
    matmul: dict[torch.dtype, float]
    typical: dict[int | torch.dtype, float]

    @property
    def bandwidth(self) -> float:
        """Bytes a second from memory."""
        return self.reading[max(self.reading)]

    def seconds(self, read: float, operations: float, dtype: torch.dtype) -> float:
        """The least time that reading ``read`` bytes and doing ``operations`` takes: the longer of the two (roofline,
        Williams et al., 2009), at a bandwidth between those of the sizes measured, by the size's logarithm. Whatever is
        not float32 can also be multiplied as that."""
        rate = max(self.matmul[dtype], self.matmul[torch.float32])
        return max(read / self._bandwidth_of(read), operations / rate)

    def _bandwidth_of(self, read: float) -> float:
        within = min(max(read, min(self.reading)), max(self.reading))
        if within in self.reading:
            return self.reading[int(within)]
        return between(sorted((math.log(size), rate) for size, rate in self.reading.items()), math.log(within))

    def best(self, again: Limits) -> Limits:
        """The better of two measurements of each, of one machine."""

        def better(one: dict[Any, float], other: dict[Any, float]) -> dict[Any, float]:
            return {key: max(rate, other[key]) for key, rate in one.items()}

        reading, matmul = better(self.reading, again.reading), better(self.matmul, again.matmul)
        return Limits(self.device, self.threads, reading, matmul, better(self.typical, again.typical))

    def rows(self) -> list[tuple[str, float, float, str]]:
        """Name, best, median and unit of each limit."""
        read = [(f"read {size >> 20} MB", rate, self.typical[size], "B/s") for size, rate in self.reading.items()]
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in self.matmul}
        return read + [
            (f"matmul {names[dtype]}", rate, self.typical[dtype], "op/s") for dtype, rate in self.matmul.items()
        ]

    def as_json(self) -> dict[str, object]:
        rates = {name: {"best": best, "median": median, "unit": unit} for name, best, median, unit in self.rows()}
        return {"device": self.device, "threads": self.threads, **rates}


@torch.inference_mode()
def measure_limits(device: torch.device, repeats: int = 12) -> Limits:
    """Measure the limits of ``device``, in a few seconds."""
    side = _SIDES.get(device.type, _SIDES["cpu"])
    numbers = _numbers(_SIZES[-1] // 8, device)
    totals = _totals(device)

    def reads(size: int) -> Callable[[], float]:
        part = numbers[: size // 8]

        def read() -> float:
            times = []
            for total in totals:
                total(part)  # brings into the caches what fits
                synchronize(device)
                start = time.perf_counter()
                total(part)
                synchronize(device)
                times.append(time.perf_counter() - start)
            return min(times)

        return read

    def multiplies(dtype: torch.dtype) -> Callable[[], None]:
        left, right = (torch.randn(sides[dtype], sides[dtype], device=device).to(dtype) for _ in range(2))
        product = torch._int_mm if dtype == torch.int8 else torch.mm

        def multiply() -> None:
            product(left, right)

        return multiply

    sides = {torch.bfloat16: side, torch.float32: side}
    if device.type == "cpu" and not why_not():  # what W8A8 is held against
        sides[torch.int8] = 2 * side
    # Not all in turns: the threads of one library look out for work for a while when the other has begun.
    timings = take_turns([*map(reads, _SIZES)], repeats, device)
    timings += take_turns([*map(multiplies, sides)], repeats, device)
    amounts: dict[int | torch.dtype, int] = {
        **{size: size for size in _SIZES},
        **{dtype: 2 * side**3 for dtype, side in sides.items()},
    }
    best = {key: amount / timing.low for (key, amount), timing in zip(amounts.items(), timings)}
    return Limits(
        str(device),
        torch.get_num_threads(),
        {size: best[size] for size in _SIZES},
        {dtype: best[dtype] for dtype in sides},
        {key: amount / timing.median for (key, amount), timing in zip(amounts.items(), timings)},
    )


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """Numbers to read, on a CPU in large pages where there are any, as weights lie there too."""
    large = 2 << 20
    numbers = zeros((count + large // 8,), torch.int64, device)
    return numbers[-numbers.data_ptr() % large // 8 :][:count].fill_(1)


def _totals(device: torch.device) -> list[Callable[[torch.Tensor], object]]:
    """Ways to read all of a tensor: the compiled kernels, where they are, ask for memory ahead of the processor."""
    if device.type != "cpu" or why_not():
        return [torch.Tensor.sum]
    read = load().fly_sum
    return [
        lambda numbers: read(numbers.data_ptr(), numbers.numel() // 8, torch.get_num_threads()),
        torch.Tensor.sum,
    ]
