"""``fly bench``: what the modules of ``fly.bench`` measure or predict, as tables, plots and JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fly.bench.batch import Load, measure_load
from fly.bench.drafts import PROMISE, STRATEGIES, Drafted, Promise, Ratio, measure_drafts, measure_promise
from fly.bench.loaded import settings_of
from fly.bench.plot import check_plot, save_lines
from fly.bench.policy import measure_decisions
from fly.bundled import usual_draft
from fly.bundled.tasks import KINDS
from fly.bundled.tasks import problems as draw_problems
from fly.cli.gpu import bench_gpu
from fly.cli.options import (
    CollectiveTimeout,
    Device,
    DraftOption,
    Dtype,
    HeartbeatTimeout,
    Json,
    K,
    Kernels,
    Model,
    Policy,
    Rules,
    output,
)
from fly.cli.plan import bench_plan
from fly.cli.run import alone, command, kernels_of, loaded, ranks_of, rules_of
from fly.cli.show import console, grouped, note, print_list, print_named, progress, ratio, table, write_json
from fly.cli.speed import bench_peers, bench_speed, bench_twins
from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT
from fly.llm import LLM
from fly.models.loading import resolve_device, resolve_dtype
from fly.policies import AcceptancePolicy, parse_policy
from fly.types import SamplingParams


@alone
def bench_policy(
    policy: Rules = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes B.")] = None,
    k: Annotated[list[int] | None, typer.Option(min=1, help="Draft lengths K.")] = None,
    vocab: Annotated[list[int] | None, typer.Option(min=16, help="Vocabulary sizes V.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
) -> None:
    """What a decision costs, for B × K × V, beside the verification forward before it (12 layers of width 768)."""
    rules = rules_of(policy)
    shapes = [(b, n, v) for v in vocab or [32_000, 128_256, 262_144] for b in rows or [1, 8] for n in k or [15]]
    where = {"dtype": resolve_dtype(dtype, {}), "device": resolve_device(device)}
    lines = []
    with progress(len(rules) * len(shapes), "measuring") as advance:
        for rule in rules:
            for cost in measure_decisions(rule, shapes, **where):  # type: ignore[arg-type]
                sizes = (str(rule), f"{cost.rows}", f"{cost.k}", f"{cost.vocab:,}", f"{cost.forward * 1e3:,.1f} ms")
                greedy = (f"{cost.greedy * 1e3:,.2f} ms", f"{cost.greedy / cost.forward:.1%}")
                sampled = (f"{cost.sampled * 1e3:,.2f} ms", f"{cost.sampled / cost.forward:.1%}")
                lines.append((*sizes, *greedy, *sampled))
                advance()
    print_list(lines, "policy", "B", "K", "V", "forward", "greedy", "share", "sampled", "share")
    console.print(
        "[dim]share: the decision's time over the forward's, medians of 9; sampled: temperature 0.8, top-p 0.95[/]"
    )


@alone
def bench_drafts(
    draft: Annotated[list[str] | None, typer.Option(help="Strategies; may be given several times.")] = None,
    policy: Policy = "exact",
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems of each kind, and unpredictable texts.")] = 8,
    repeats: Annotated[
        int,
        typer.Option(
            min=0, help="How often each unpredictable text is decoded, for each adaptive(...) draft; 0 leaves it out."
        ),
    ] = 3,
    k: K = 15,
    model: Model = "fly-target",
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
) -> None:
    """Every draft strategy on every kind of task, and adaptive ones on texts that cannot be predicted."""
    names, rule = tuple(draft or STRATEGIES), parse_policy(policy, trusted=True)
    setup = {"model": model, "dtype": dtype, "device": device, "kernels": kernels}
    show_drafts(names, rule, problems, k, **setup)
    inner = [name[len("adaptive(") : -1] for name in names if re.fullmatch(r"adaptive\(.*\)", name)]
    if inner and repeats:
        _show_promise(inner, rule, problems, repeats, k, **setup)


def show_drafts(names: Sequence[str], rule: AcceptancePolicy, problems: int, k: int, **setup: Any) -> None:
    """Measure strategies, the single draft first, and print the table. ``setup`` is what ``measure_drafts`` takes."""
    names = tuple(dict.fromkeys((STRATEGIES[0], *names)))
    with progress((len(names) + 1) * len(KINDS) * problems, "drafting") as advance:
        rows = measure_drafts(names, rule, problems, k, advance=advance, **setup)
    title = f"{rule}, {problems} held-out problems a kind, temperature 0, k {k}, batch 1"
    print_named(("none", *names), lambda called: drafts_table(rows, title, called))
    note(
        f"τ: tokens a target forward emits · tok/s: prompt included · × AR, × single: speed over autoregressive "
        f"decoding and over {names[0]} · right: answers"
    )


def _show_promise(
    names: Sequence[str], rule: AcceptancePolicy, problems: int, repeats: int, k: int, **setup: Any
) -> None:
    """Measure strategies and their adaptive twins where nothing can be predicted, and say whether the promise holds."""
    with progress(2 * len(names) * problems * repeats, "where nothing can be predicted") as advance:
        found = measure_promise(names, rule, problems, repeats, k, advance=advance, **setup)
    title = f"speed over autoregressive decoding, {problems} texts of 256 tokens, {repeats} times each"
    print_named(names, lambda called: promise_table(found, title, called))
    said = {False: "broken by", None: "not decided (too few or too uneven runs) for", True: "kept by"}
    verdicts = [
        f"{words} {', '.join(which)}"
        for kept, words in said.items()
        if (which := [f"{row.name} ({row.text})" for row in found if row.kept is kept])
    ]
    promise = f"Promise, at most {1 - PROMISE:.0%} slower where nothing can be predicted: {'; '.join(verdicts)}"
    console.print(promise, markup=False, highlight=False)
    pairs = problems * repeats
    spread = ", with 95 % intervals" if pairs >= 6 else ", with the least and the most" if pairs >= 3 else ""
    note(
        f"medians over {pairs} pairs of runs{spread} · τ: of the draft as it is · always wrong: a drafter "
        "that costs as much · AR again: what such a ratio is worth here"
    )


def drafts_table(rows: Sequence[Drafted], title: str, names: Mapping[str, str]) -> Table:
    """τ and speed by kind; the first row is autoregressive, the second what the others are held to. ``names`` are what
    to call those whose own name is too long."""
    plain, single = (row.tokens_per_second for row in rows[:2])
    digits = max(len(f"{r.tokens_per_second:.0f}") for row in rows for r in row.kinds.values())

    def of_kind(kind: str) -> Any:
        return lambda r: f"{r.kinds[kind].stats.tau:5.2f} {r.kinds[kind].tokens_per_second:{digits}.0f}"

    def right(row: Drafted) -> str:
        answers = [answer for r in row.kinds.values() for answer in r.right]
        return f"{sum(answers)}/{len(answers)}"

    return table(
        title,
        rows,
        {
            "draft": lambda r: escape(names.get(r.name, r.name)),
            **{f"{kind}\nτ tok/s": of_kind(kind) for kind in rows[0].kinds},
            "all\ntok/s": lambda r: f"{r.tokens_per_second:.0f}",
            "×\nAR": lambda r: f"{r.tokens_per_second / plain:.2f}",
            "×\nsingle": lambda r: f"{r.tokens_per_second / single:.2f}",
            "\nright": right,
        },
    )


def promise_table(found: Sequence[Promise], title: str, names: Mapping[str, str]) -> Table:
    """Strategies where nothing can be predicted. ``names`` are what to call those whose own name is too long."""

    def interval(over: Ratio) -> str:  # two runs have no spread
        return f"{over.median:.3f}" + (f" ({over.low:.3f}–{over.high:.3f})" if over.pairs >= 3 else "")

    return table(
        title,
        found,
        {
            "draft": lambda r: escape(names.get(r.name, r.name)),
            "text": lambda r: r.text,
            "τ": lambda r: f"{r.tau:.2f}",
            "as it is": lambda r: f"{r.fixed.median:.2f}",
            "adaptive": lambda r: interval(r.adaptive),
            "AR again": lambda r: interval(r.again),
        },
        text=("draft", "text"),
    )


@command
def bench_batch(
    context: typer.Context,
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time; may be given several times.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="How many requests in all: held-out problems of all kinds.")
    ] = 64,
    policy: Rules = None,
    draft: DraftOption = None,
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
    """Throughput, latency and memory for 1 to 64 requests at a time, autoregressive, by exact speculation and by other
    rules."""
    with ranks_of(context) as ranks:
        check_plot(plot)
        sizes, rules = size or [1, 2, 4, 8, 16, 32, 64], rules_of(policy)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels}
        options |= {"cache_tokens": max(sizes) * 1024, "ranks": ranks}
        plain = LLM(model, **options)
        draft = draft or usual_draft(model)
        fast = LLM(plain, draft, **options)
        if ranks is not None:
            loaded(ranks)
        settings = settings_of(plain, fast, k, rules)
        each = [list(draw_problems(kind, "heldout", 0, -(-requests // len(KINDS)))) for kind in KINDS]
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
        wrapped=("decoding",),
        ends=lambda load: load is by_size[load.size][-1],
        padding=(0, 1, 0, 0),
    )


bench = typer.Typer(help="Speed, as ratios within one run.", no_args_is_help=True)

_COMMANDS = bench_policy, bench_drafts, bench_plan, bench_batch, bench_speed, bench_peers, bench_twins, bench_gpu
for _command in _COMMANDS:
    bench.command(_command.__name__.removeprefix("bench_"))(_command)
