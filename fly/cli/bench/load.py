"""``fly bench batch``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fly.cli.completion import kernels_of
from fly.cli.options import CollectiveTimeout, Device, Dtype, HeartbeatTimeout, Json, K, Kernels, Model, Policy, output
from fly.cli.run import command, loaded, ranks_of
from fly.cli.show import console, note, progress, ratio, table, write_json
from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT
from fly.llm import LLM
from fly.policies import parse_policy
from fly.types import SamplingParams

if TYPE_CHECKING:
    from fly.bench.batch import Load


@command
def bench_batch(
    context: typer.Context,
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time; may be given several times.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all, held-out problems of all kinds.")] = 64,
    policy: Policy = "fly",
    draft: Annotated[str, typer.Option(help="Who proposes, as for fly generate.")] = "fly-draft",
    k: K = 15,
    model: Model = "fly-target",
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT,
    collective_timeout: CollectiveTimeout = COLLECTIVE_TIMEOUT,
    plot: Annotated[Path | None, output(help="Write a plot of tokens/s to this file (png, svg or pdf).")] = None,
    json_: Json = None,
) -> None:
    """Throughput, latency and memory for 1 to 64 requests at a time: autoregressive, exact and relaxed speculation."""
    with ranks_of(context) as ranks:
        from fly.bench.batch import measure_load
        from fly.bench.plot import check_plot, save_lines
        from fly.bench.settings import settings_of
        from fly.bundled.tasks import KINDS, problems

        check_plot(plot)
        sizes, rule = size or [1, 2, 4, 8, 16, 32, 64], parse_policy(policy, trusted=True)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels}
        options |= {"cache_tokens": max(sizes) * 1024, "ranks": ranks}
        plain = LLM(model, **options)
        fast = LLM(plain, draft, **options)
        if ranks is not None:
            loaded(ranks)
        settings = settings_of(plain, fast, k, [rule])
        each = [list(problems(kind, "heldout", 0, -(-requests // len(KINDS)))) for kind in KINDS]
        asked = [problem for turn in zip(*each) for problem in turn][:requests]
        with progress(len(sizes) * len(settings) * len(asked), "batching") as advance:
            loads = measure_load(settings, sizes, asked, SamplingParams(temperature=0.0, max_tokens=400), advance)
        title = f"{model}, {draft}, temperature 0, k {k}, {len(asked)} held-out problems, kernels {kernels_of(plain)}"
        console.print(load_table(loads, title))
        note(
            "first: ms to a request's first token · each: ms a token after it (medians / 95 of 100)\n"
            "unused: share of the pages in use in which no token stands"
        )
        if plot is not None and (ranks is None or ranks.leads):
            lines = {
                setting.name: [(load.size, load.tokens_per_second) for load in loads if load.setting is setting]
                for setting in settings
            }
            save_lines(plot, title, "requests at a time", "tokens/s", lines, log_x=True)
        write_json(json_, [load.as_json() for load in loads], ranks)


def load_table(loads: list[Load], title: str) -> Table:
    """Throughput, latency and memory by size; the first setting of each size is autoregressive, the second exact."""
    by_size: dict[int, list[Load]] = {}
    for load in loads:
        by_size.setdefault(load.size, []).append(load)

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
        wrapped=("decoding",),
        ends=lambda load: load is by_size[load.size][-1],
        padding=(0, 1, 0, 0),
    )
