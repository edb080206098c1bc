"""``fly bench`` and its command ``drafts``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from fly.cli.options import LOADING, K, Policy, takes
from fly.cli.run import alone
from fly.cli.show import console, note, progress, table
from fly.cli.terminal import Table
from fly.config import DEFAULT_K
from fly.extras.bench.drafts import PROMISE, STRATEGIES, Drafted, Promise, Ratio, measure_drafts, measure_promise
from fly.extras.bench.plan_command import bench_plan
from fly.extras.bench.speed_command import bench_speed
from fly.models.bundled.tasks import KINDS
from fly.policies import AcceptancePolicy, parse_policy


@alone
@takes(K, LOADING)
def bench_drafts(
    draft: Annotated[list[str] | None, typer.Option(help="A strategy; repeatable. Default: all.")] = None,
    k: int = DEFAULT_K,
    policy: Policy = "exact",
    problems: Annotated[int, typer.Option(min=1, help="How many problems of each kind, and unpredictable texts.")] = 8,
    repeats: Annotated[
        int, typer.Option(min=0, help="How often an adaptive(...) draft decodes each unpredictable text; 0 for never.")
    ] = 3,
    **setup: Any,
) -> None:
    """Measure draft strategies on every kind of task, and adaptive ones on texts that nothing predicts."""
    names, rule = tuple(draft or STRATEGIES), parse_policy(policy, trusted=True)
    show_drafts(names, rule, problems, k, **setup)
    adapted_drafts = [name[len("adaptive(") : -1] for name in names if re.fullmatch(r"adaptive\(.*\)", name)]
    if adapted_drafts and repeats:
        _show_promise(adapted_drafts, rule, problems, repeats, k, **setup)


def show_drafts(names: Sequence[str], rule: AcceptancePolicy, problems: int, k: int, **setup: Any) -> None:
    """Measure strategies, with the single draft model first, and print the table. ``setup`` are the options of
    ``measure_drafts``."""
    names = tuple(dict.fromkeys((STRATEGIES[0], *names)))
    with progress((len(names) + 1) * len(KINDS) * problems, "drafting") as advance:
        rows = measure_drafts(names, rule, problems, k, advance=advance, **setup)
    title = f"{rule}, {problems} held-out problems a kind, temperature 0, k {k}, batch 1"
    console.print(drafts_table(rows, title))
    note(
        f"τ: tokens a target forward emits · tok/s: prompt included · × AR, × single: speed over autoregressive "
        f"decoding and over {names[0]} · right: answers"
    )


def _show_promise(
    names: Sequence[str], rule: AcceptancePolicy, problems: int, repeats: int, k: int, **setup: Any
) -> None:
    """Measure strategies, as they are and adaptive, where nothing can be predicted, and say whether adaptive ones keep
    the promise."""
    with progress(2 * len(names) * problems * repeats, "where nothing can be predicted") as advance:
        promises = measure_promise(names, rule, problems, repeats, k, advance=advance, **setup)
    title = f"speed over autoregressive decoding, {problems} texts of 256 tokens, {repeats} times each"
    console.print(promise_table(promises, title))
    phrases = {False: "broken by", None: "not decided (too few or too uneven runs) for", True: "kept by"}
    verdicts = [
        f"{phrase} {', '.join(cases)}"
        for kept, phrase in phrases.items()
        if (cases := [f"{row.name} ({row.text})" for row in promises if row.kept is kept])
    ]
    promise = f"Promise, at most {1 - PROMISE:.0%} slower where nothing can be predicted: {'; '.join(verdicts)}"
    console.print(promise, markup=False, highlight=False)
    pairs = problems * repeats
    spread = ", with 95 % intervals" if pairs >= 6 else ", with the least and the most" if pairs >= 3 else ""
    note(
        f"medians over {pairs} pairs of runs{spread} · τ: of the draft as it is · always wrong: a drafter "
        "that costs as much · AR again: what such a ratio is worth here"
    )


def drafts_table(rows: Sequence[Drafted], title: str) -> Table:
    """Return a table of τ and speed by kind of task. The first row is autoregressive decoding, and the second is what
    the others are compared with."""
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
            "draft": lambda r: escape(r.name),
            **{f"{kind}\nτ tok/s": of_kind(kind) for kind in rows[0].kinds},
            "all\ntok/s": lambda r: f"{r.tokens_per_second:.0f}",
            "×\nAR": lambda r: f"{r.tokens_per_second / plain:.2f}",
            "×\nsingle": lambda r: f"{r.tokens_per_second / single:.2f}",
            "\nright": right,
        },
    )


def promise_table(promises: Sequence[Promise], title: str) -> Table:
    """Return a table of the speeds where nothing can be predicted."""

    def interval(over: Ratio) -> str:  # there is no interval for fewer than three pairs
        return f"{over.median:.3f}" + (f" ({over.low:.3f}–{over.high:.3f})" if over.pairs >= 3 else "")

    return table(
        title,
        promises,
        {
            "draft": lambda r: escape(r.name),
            "text": lambda r: r.text,
            "τ": lambda r: f"{r.tau:.2f}",
            "as it is": lambda r: f"{r.fixed.median:.2f}",
            "adaptive": lambda r: interval(r.adaptive),
            "AR again": lambda r: interval(r.again),
        },
        text=("draft", "text"),
    )


bench = typer.Typer(help="Measure speed, as ratios within one run.", no_args_is_help=True)

for _command in (bench_speed, bench_drafts, bench_plan):
    bench.command(_command.__name__.removeprefix("bench_"))(_command)
