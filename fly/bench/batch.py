"""Many requests at once: throughput, latency and memory by batch size, with speculation and without."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fly.bench.loaded import runners_of
from fly.bundled.tasks import Problem, check_many
from fly.eval import Setting
from fly.llm import Request
from fly.request import Stats
from fly.types import SamplingParams

__all__ = ["Load", "measure_load"]


@dataclass
class Load:
    """What a setting did with ``size`` requests at a time. Times are in seconds: ``first`` from a request's arrival to
    its first token, ``each`` a token after that (mean of a request), ``whole`` to its end.

    ``held`` adds up the tokens that the pages in use could hold, ``unused`` what of that no token stood in, over all
    steps and over the caches of target and draft.
    """

    setting: Setting
    size: int
    seconds: float = 0.0
    stats: Stats = field(default_factory=Stats)
    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    held: int = 0
    unused: int = 0
    right: list[bool] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.stats.generated / self.seconds

    @property
    def waste(self) -> float:
        """Share of the memory in use that holds nothing."""
        return self.unused / self.held if self.held else 0.0

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    def percentiles(self, name: str) -> tuple[float, float]:
        """The median of ``first``, ``each`` or ``whole``, and the 95th of 100."""
        ordered = sorted({"first": self.first, "each": self.each, "whole": self.whole}[name])
        return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def as_json(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "decoding": self.setting.name,
            "policy": str(self.setting.policy),
            "k": self.setting.k,
            "tokens_per_second": self.tokens_per_second,
            "tau": self.stats.tau,
            "requests": len(self.right),
            "accuracy": self.accuracy,
            "unused": self.waste,
            "preempted": self.stats.preempted,
            **{
                f"{name}_{which}": seconds
                for name in ("first", "each", "whole")
                for which, seconds in zip(("p50", "p95"), self.percentiles(name))
            },
        }


def measure_load(
    settings: Sequence[Setting],
    sizes: Sequence[int],
    problems: Sequence[Problem],
    params: SamplingParams,
    advance: Callable[[], None] = lambda: None,
) -> list[Load]:
    """Run ``problems`` through every setting with every number of requests at a time: as one ends, the next comes.

    Settings take turns at each size, after a warm-up. What one run leaves in the cache is forgotten before the next.
    ``advance`` is called after every request.
    """
    for setting in settings:
        for runner in runners_of(setting.llm):
            for stored in (runner.cache.keys, runner.cache.values):
                stored.zero_()  # memory is taken when it is first written, which is nobody's decoding
        _run(Load(setting, 2), problems[:2], params)
    return [_run(Load(setting, size), problems, params, advance) for size in sizes for setting in settings]


def _run(
    load: Load, problems: Sequence[Problem], params: SamplingParams, advance: Callable[[], None] = lambda: None
) -> Load:
    """Fill in what happens to ``problems``. Returns ``load``."""
    setting, llm = load.setting, load.setting.llm
    for allocator in llm.scheduler.allocators():
        allocator.forget()
    waiting = deque(enumerate(problems))
    running: list[tuple[int, Request, float]] = []
    texts = [""] * len(problems)
    first: dict[int, float] = {}
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < load.size:
            number, problem = waiting.popleft()
            (request,) = llm.requests([llm.chat_prompt(problem.prompt)], params, setting.policy, setting.k)
            running.append((number, request, time.perf_counter()))
            llm.submit(request)
        llm.step()
        now = time.perf_counter()
        for allocator in llm.scheduler.allocators():
            held = (allocator.num_blocks - allocator.num_free) * allocator.block_size
            load.held += held
            load.unused += sum(
                len(allocator.table(seq)) * allocator.block_size - allocator.length(seq)
                for seq in allocator.sequences()
            )
        for number, request, arrived in running:
            row = request.row
            if row.generated:
                first.setdefault(number, now)
            if row.finish_reason:
                if row.error is not None:
                    raise row.error
                load.first.append(first[number] - arrived)
                load.whole.append(now - arrived)
                if row.generated > 1:
                    load.each.append((now - first[number]) / (row.generated - 1))
                load.stats += row.stats
                texts[number] = llm.output(request).text
                llm.close(request)
                advance()
        running = [entry for entry in running if not entry[1].row.finish_reason]
    load.seconds = time.perf_counter() - start
    load.right = check_many(list(zip(problems, texts)))
    return load
