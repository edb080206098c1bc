"""Many requests at once: throughput, latency and memory by batch size, with and without speculation:
``python -m benchmarks.batch``, or ``torchrun --nproc-per-node N -m benchmarks.batch``."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fly.cli.options import LOADING, RANKS, Json, K, Rules, output, takes
from fly.cli.run import command, kernels_of, memory_of, options_of, ranks_of, rules_of
from fly.cli.show import console, grouped, note, progress, ratio, table, write_json
from fly.cli.terminal import Table
from fly.engine.job import Job, Request
from fly.extras.bench.loaded import runners_of, settings_of
from fly.extras.eval import Setting
from fly.extras.eval.plots import save_lines
from fly.extras.eval.scorers import check_many
from fly.llm import LLM
from fly.models.bundled import usual_draft
from fly.models.bundled.tasks import Problem
from fly.models.bundled.tasks import problems as bundled_problems
from fly.runner.request import Stats, Token
from fly.types import SamplingParams


@dataclass
class Load:
    """The result of a setting with ``size`` requests at a time. Times are in seconds: ``first`` from a request's
    arrival to its first token, ``each`` per later token (mean over a request), ``whole`` to its end.

    ``held`` is the number of tokens that the pages in use can hold, and ``unused`` the empty ones among them, summed
    over all steps and over the caches of target and draft.
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
        """Share of the memory in use that is empty."""
        return self.unused / self.held if self.held else 0.0

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    def percentiles(self, name: str) -> tuple[float, float]:
        """The median and the 95th percentile of ``first``, ``each`` or ``whole``."""
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
    """Run ``problems`` through every setting with every number of requests at a time; as one ends, the next begins.

    Settings take turns at each size, after a warm-up. The cache is emptied before each run.
    ``advance`` is called after every request.
    """
    for setting in settings:
        for runner in runners_of(setting.llm):
            for stored in (runner.cache.keys, runner.cache.values):
                stored.zero_()  # allocate now: the first write takes the memory
        _run(Load(setting, 2), problems[:2], params)
    return [_run(Load(setting, size), problems, params, advance) for size in sizes for setting in settings]


class _Asked(Job):
    """A request that records its times. ``ended`` is called on the engine's thread when the request ends."""

    def __init__(self, requests: list[Request], ended: Callable[[], None]) -> None:
        super().__init__(requests)
        self._ended = ended
        self.begin = time.perf_counter()
        self.first = self.end = 0.0

    def note(self, index: int, tokens: list[Token]) -> None:
        super().note(index, tokens)
        self.end = time.perf_counter()
        self.first = self.first or self.end
        if not self.left:
            self._ended()


def _run(
    load: Load, problems: Sequence[Problem], params: SamplingParams, advance: Callable[[], None] = lambda: None
) -> Load:
    """Run ``problems`` and fill in ``load``, which is returned."""
    llm, setting = load.setting.llm, load.setting
    llm.scheduler.forget()
    waiting, jobs, texts = deque(problems), list[_Asked](), list[str]()

    coming = threading.Lock()

    def come() -> None:  # called on the engine's thread when a request ends: submit the next
        with coming:
            if waiting:
                prompt = llm.chat_prompt(waiting.popleft().prompt)
                jobs.append(_Asked(llm.requests([prompt], params, setting.policy, setting.k), come))
                llm.worker.submit(jobs[-1])

    def watch() -> None:
        for allocator in llm.scheduler.allocators:
            held = (allocator.num_blocks - allocator.num_free) * allocator.block_size
            load.held += held
            load.unused += sum(
                len(allocator.table(seq)) * allocator.block_size - allocator.length(seq)
                for seq in allocator.sequences()
            )

    llm.worker.watch = watch
    start = time.perf_counter()
    try:
        for _ in range(load.size):
            come()
        for number in range(len(problems)):
            job = jobs[number]
            job.check(job.queue.get())
            (request,) = job.requests
            load.first.append(job.first - job.begin)
            load.whole.append(job.end - job.begin)
            if request.row.generated > 1:
                load.each.append((job.end - job.first) / (request.row.generated - 1))
            load.stats += request.row.stats
            texts.append(request.output().text)
            advance()
    finally:
        waiting.clear()
        for job in jobs:
            llm.worker.cancel(job, wait=True)
        llm.worker.watch = lambda: None
    load.seconds = time.perf_counter() - start
    load.right = check_many(list(zip(problems, texts)))
    return load


@command
@takes(LOADING, K, RANKS)
def main(
    context: typer.Context,
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time; may be given several times.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="How many requests in all: held-out problems of all kinds.")
    ] = 64,
    policy: Rules = None,
    draft: Annotated[str | None, typer.Option(help="The draft. Default: the model's usual one.")] = None,
    plot: Annotated[Path | None, output(help="Write a plot of tokens/s to this file (.svg).", suffix=".svg")] = None,
    json_: Json = None,
    *,
    model: str,
    k: int,
    **_: Any,
) -> None:
    """Throughput, latency and memory for 1 to 64 requests at a time, autoregressive, by exact speculation and by other
    rules."""
    with ranks_of(context) as ranks:
        sizes, rules = size or [1, 2, 4, 8, 16, 32, 64], rules_of(policy)
        options = options_of(context, ("dtype", "device", "kernels"))
        options |= {"cache": max(sizes) * 1024, "ranks": ranks}
        plain = LLM(model, **options)
        draft = draft or usual_draft(model)
        fast = LLM(plain, draft, cache=options["cache"], ranks=ranks)
        if ranks is not None:
            memory_of(ranks)
        settings = settings_of(plain, fast, k, rules)
        asked = bundled_problems(None, "heldout", 0, requests)
        with progress(len(sizes) * len(settings) * len(asked), "batching") as advance:
            loads = measure_load(settings, sizes, asked, SamplingParams(temperature=0.0, max_tokens=400), advance)
        title = f"{model}, {draft}, temperature 0, k {k}, {len(asked)} held-out problems, kernels {kernels_of(plain)}"
        console.print(load_table(loads, title))
        note(
            "first: ms to a request's first token · each: ms a token after it (medians / 95 of 100)\n"
            "unused: share of the pages in use that is empty"
        )
        if plot is not None and (ranks is None or ranks.leads):
            lines = {
                setting.name: [(load.size, load.tokens_per_second) for load in loads if load.setting is setting]
                for setting in settings
            }
            save_lines(plot, title, "requests at a time", "tokens/s", lines, log_x=True)
        write_json(json_, [load.as_json() for load in loads], ranks)


def load_table(loads: list[Load], title: str) -> Table:
    """A table of throughput, latency and memory by size; of each size the first setting is autoregressive, the second
    exact."""
    by_size = grouped(loads, lambda load: load.size)

    def over(load: Load, which: int) -> str:
        return ratio(load.tokens_per_second, by_size[load.size][which].tokens_per_second)

    def plain(load: Load) -> bool:
        return load is by_size[load.size][0]

    def latency(load: Load, name: str, digits: int) -> str:
        return "/".join(f"{seconds * 1e3:,.{digits}f}" for seconds in load.percentiles(name))

    return table(
        title,
        loads,
        {
            "size": lambda load: f"{load.size}" if plain(load) else "",
            "decoding": lambda load: "AR" if plain(load) else escape(load.setting.name),
            "tok/s": lambda load: f"{load.tokens_per_second:,.0f}",
            "× AR": lambda load: over(load, 0),
            "× exact": lambda load: over(load, 1),
            "first": lambda load: latency(load, "first", 0),
            "each": lambda load: latency(load, "each", 1),
            "unused": lambda load: f"{load.waste:.1%}",
            "right": lambda load: f"{sum(load.right)}/{len(load.right)}",
        },
        text=("decoding",),
        ends=lambda load: load is by_size[load.size][-1],
        padding=(0, 1, 0, 0),
    )


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
