"""What the machine can do at most: bytes read and numbers multiplied a second. And the clock all benches share.

Knows nothing of models or speculation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Limits", "Timing", "measure_limits", "synchronize", "take_turns"]

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


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


@dataclass(frozen=True)
class Limits:
    """The most the machine was seen to do, with all threads that PyTorch uses.

    ``reading`` is in bytes a second, by how many bytes are read again and again: what fits the processor's caches comes
    faster than from memory, which the largest is. ``matmul`` is in floating-point operations a second (two for a
    multiplication with its addition) by dtype. Each is the best of several turns: what disturbs a measurement only
    ever makes a limit look lower. ``typical`` are the medians, by the same keys, for how much it was disturbed.
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
        Williams et al., 2009), at the bandwidth of the next larger size measured."""
        size = min((size for size in self.reading if size >= read), default=max(self.reading))
        return max(read / self.reading[size], operations / self.matmul[dtype])

    def rows(self) -> list[tuple[str, float, float, str]]:
        """Name, best, median and unit of each limit."""
        read = [(f"read {size >> 20} MB", rate, self.typical[size], "B/s") for size, rate in self.reading.items()]
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in self.matmul}
        return read + [
            (f"matmul {names[dtype]}", rate, self.typical[dtype], "FLOP/s") for dtype, rate in self.matmul.items()
        ]

    def as_json(self) -> dict[str, object]:
        rates = {name: {"best": best, "median": median, "unit": unit} for name, best, median, unit in self.rows()}
        return {"device": self.device, "threads": self.threads, **rates}


@torch.inference_mode()
def measure_limits(device: torch.device, repeats: int = 12) -> Limits:
    """Measure the limits of ``device``, in a few seconds."""
    side = _SIDES.get(device.type, _SIDES["cpu"])
    numbers = torch.ones(_SIZES[-1] // 8, dtype=torch.int64, device=device)

    def reads(size: int) -> Callable[[], float]:
        part = numbers[: size // 8]

        def read() -> float:
            part.sum()  # brings into the caches what fits
            synchronize(device)
            start = time.perf_counter()
            part.sum()
            synchronize(device)
            return time.perf_counter() - start

        return read

    def multiplies(dtype: torch.dtype) -> Callable[[], None]:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

        def multiply() -> None:
            left @ right

        return multiply

    dtypes = (torch.bfloat16, torch.float32)
    timings = take_turns([*map(reads, _SIZES), *map(multiplies, dtypes)], repeats, device)
    amounts: dict[int | torch.dtype, int] = {
        **{size: size for size in _SIZES},
        **dict.fromkeys(dtypes, 2 * side**3),
    }
    best = {key: amount / timing.low for (key, amount), timing in zip(amounts.items(), timings)}
    return Limits(
        str(device),
        torch.get_num_threads(),
        {size: best[size] for size in _SIZES},
        {dtype: best[dtype] for dtype in dtypes},
        {key: amount / timing.median for (key, amount), timing in zip(amounts.items(), timings)},
    )
