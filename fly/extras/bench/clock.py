"""The clock of all benchmarks. This module knows nothing of models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from fly.devices import kind_of

__all__ = ["Timing", "between", "clocked", "take_turns"]

_Result = TypeVar("_Result")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Timing:
    """Several measurements of the same thing, in seconds."""

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


def clocked(run: Callable[[], _Result], device: torch.device = _CPU) -> tuple[_Result, float]:
    """Call ``run``. Returns its result, and the seconds until it returned and ``device`` had finished its work."""
    kind = kind_of(device)
    kind.synchronize(device)
    start = time.perf_counter()
    result = run()
    kind.synchronize(device)
    return result, time.perf_counter() - start


def take_turns(
    runs: Sequence[Callable[[], object]],
    repeats: int,
    device: torch.device = _CPU,
    advance: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time every run ``repeats`` times after one warm-up. Runs take turns, so that a busy moment of the machine affects
    all of them alike. A run that returns a float has measured its own time, in seconds. ``advance`` is called after
    every turn, the warm-up included."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run_times, run in zip(times, runs):
            result, seconds = clocked(run, device)
            run_times.append(result if isinstance(result, float) else seconds)
        advance()
    return [Timing(tuple(each[1:])) for each in times]


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate at ``x`` between the two neighbouring ``points``. The points are in order and lie on both sides of
    ``x``."""
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    raise ValueError(f"{x} is outside {points[0][0]} to {points[-1][0]}")
