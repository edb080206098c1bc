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

_FROM_MEMORY = 512 * 2**20  # bytes: beyond any processor's caches
_SIDE = 2048  # of the square matrices


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

    ``bandwidth`` is in bytes a second read from memory; ``matmul`` in floating-point operations a second (two for a
    multiplication with its addition) by dtype. Each is the best of several turns: what disturbs a measurement only
    ever makes a limit look lower. ``typical`` are the medians, for how much the machine was disturbed.
    """

    device: str
    threads: int
    bandwidth: float
    matmul: dict[torch.dtype, float]
    typical: dict[str, float]

    def seconds(self, read: float, operations: float, dtype: torch.dtype) -> float:
        """The least time that reading ``read`` bytes and doing ``operations`` takes: the longer of the two (roofline,
        Williams et al., 2009). Above 100 % of it is possible where what is read fits the processor's caches."""
        return max(read / self.bandwidth, operations / self.matmul[dtype])

    def as_json(self) -> dict[str, object]:
        rates = {f"matmul_{str(dtype).removeprefix('torch.')}": rate for dtype, rate in self.matmul.items()}
        return {"device": self.device, "threads": self.threads, "bandwidth": self.bandwidth, **rates} | {
            f"{name}_typical": value for name, value in self.typical.items()
        }


@torch.inference_mode()
def measure_limits(device: torch.device, repeats: int = 12) -> Limits:
    """Measure the limits of ``device``, in a few seconds."""
    numbers = torch.ones(_FROM_MEMORY // 8, dtype=torch.int64, device=device)

    def read() -> None:
        numbers.sum()

    def multiplies(dtype: torch.dtype) -> Callable[[], None]:
        left, right = (torch.randn(_SIDE, _SIDE, device=device).to(dtype) for _ in range(2))

        def multiply() -> None:
            left @ right

        return multiply

    dtypes = (torch.bfloat16, torch.float32)
    reading, *multiplying = take_turns([read, *map(multiplies, dtypes)], repeats, device)
    operations = 2 * _SIDE**3
    typical = {"bandwidth": _FROM_MEMORY / reading.median}
    for dtype, timing in zip(dtypes, multiplying):
        typical[f"matmul_{str(dtype).removeprefix('torch.')}"] = operations / timing.median
    return Limits(
        str(device),
        torch.get_num_threads(),
        _FROM_MEMORY / reading.low,
        {dtype: operations / timing.low for dtype, timing in zip(dtypes, multiplying)},
        typical,
    )
