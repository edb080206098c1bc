"""``fly bench speed``: speed compared with the machine's limits, and with a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fly.bench.clock import Timing
from fly.bench.limits import Limits, dtype_name, measure_limits
from fly.bench.loaded import ROUNDINGS, runs_compiled, settings_of, shape_subject, subjects_of, target_of
from fly.bench.prompts import asked_of, usual_amount
from fly.bench.shapes import matrix_parameters
from fly.bench.speed import (
    CONTEXT,
    Forward,
    Rounds,
    context_slope,
    measure_models,
    measure_rounds,
    one_token,
    predict,
)
from fly.bundled import usual_draft
from fly.cli.options import Device, DraftLength, Dtype, Json, Kernels, Model, Rules, Turns, output
from fly.cli.run import alone, kernels_of, rules_of
from fly.cli.show import console, grouped, note, progress, ratio, table, write_json
from fly.drafts import parse_draft
from fly.eval.plots import save_lines
from fly.llm import LLM
from fly.types import SamplingParams

SHAPE, NO_SHAPE = "768x12x32000", "none"


@alone
def bench_speed(
    model: Model = "fly-target",
    draft: Annotated[
        str | None,
        typer.Option(
            help="Who proposes; the formula of a round needs one model alone, 'model(NAME)'. [default: "
            "model(fly-draft) for fly-target, none for any other]",
            show_default=False,
        ),
    ] = None,
    policy: Rules = None,
    k: DraftLength = 15,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Random models beside it, WIDTHxLAYERSxVOCABULARY, in 8 or 4 bits with :int8, :w8a8 or :w4a8 after it "
            f"({SHAPE}, each way); '{NO_SHAPE}' for none."
        ),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="How many prompts rounds are timed on. Default: 12, for a large model 8.")
    ] = None,
    turns: Turns = 15,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    plot: Annotated[
        Path | None,
        output(help="Write plots: NAME.svg gives NAME-k.svg, -context.svg, -rows.svg, -size.svg.", suffix=".svg"),
    ] = None,
    json_: Json = None,
) -> None:
    """The machine's limits, and every forward and round compared with them."""
    rules = rules_of(policy)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels}
    shapes = [] if shape == [NO_SHAPE] else shape or [SHAPE]
    if draft is None:
        draft = usual if (usual := usual_draft(model)) == "none" else f"model({usual})"
    # The models: the target with and without its draft, and random ones beside them.
    plain = LLM(model, **options)
    fast = LLM(plain, parse_draft(draft, trusted=True, **options), **options)
    target = target_of(plain)
    if shape is None and runs_compiled(target):
        shapes += [f"{SHAPE}:{kind}" for kind in ROUNDINGS]
    own = subjects_of(fast, model, draft)
    subjects = own + [shape_subject(name, target, kernels) for name in shapes]
    for subject in subjects:
        if (room := subject.config.max_position_embeddings) < CONTEXT + k + 1:
            raise ValueError(
                f"--k {k}: a draft and the token before it, after the {CONTEXT} tokens that forwards are timed "
                f"after, exceed {subject.name}'s context of {room}"
            )
    # Forwards, between two measurements of the limits: what disturbs a limit only makes it look lower.
    with progress(1, "limits") as advance:
        limits = measure_limits(target.device)
        advance()
    with progress((turns + 1) * len(subjects), "forwards") as advance:
        forwards, steps = measure_models(subjects, k, turns, advance)
    with progress(1, "limits again") as advance:
        limits = limits.best(measure_limits(target.device))
        advance()
    console.print(limits_table(limits, kernels_of(plain)))
    for subject in subjects:
        found = [forward for forward in forwards if forward.model == subject.name]
        console.print(forwards_table(found, limits))
        if (slope := context_slope(found)) is None:
            note("context: the cost of keys and values is too small to show beside the weights")
        else:
            share = slope / limits.bandwidth
            note(f"context: {slope / 1e9:,.1f} GB/s of keys and values, {share:.0%} of the bandwidth")
        console.print()

    # Rounds, compared with what the forwards alone would take.
    settings = settings_of(plain, fast, k, rules)[: None if fast.draft is not None else 1]
    count, tokens = usual_amount(matrix_parameters(target.config))
    _, asked = asked_of(plain, model, problems or min(count, 12))
    again = min(turns, 3)
    with progress(again * len(asked) * len(settings), "rounds") as advance:
        rounds = measure_rounds(settings, asked, SamplingParams(temperature=0.0, max_tokens=tokens), again, advance)
    single = [f for f in forwards if f.model == model and f.rows == 1 and f.context == CONTEXT]
    for each in rounds:
        each.predicted = predict(each, single, steps[draft] if len(own) == 2 else None)
    title = f"Rounds: {model}, {draft}, k {k}, {len(asked)} prompt{'s' * (len(asked) > 1)}, temperature 0, batch 1"
    console.print(rounds_table(rounds, single, title))
    note(
        "ms: the best turn, as in all ratios · of limit: the least time that the bytes and\n"
        "operations need, over the time taken; the median of all turns, each with the\n"
        "bandwidth of that turn (above 100% where caches hold a part, or products are\n"
        "faster than PyTorch's, which give the limit) · v: time over the forward of one\n"
        "token · c: time of a drafted token over the same · rest: share of a round outside\n"
        "the models · formula: τ / (K·c + v(K)) / t(1) with forwards timed alone, which\n"
        "find the caches cold; successive rounds are faster · tokens/s: best and median"
    )
    if plot is not None:
        _plot(plot, forwards, limits, k)
    record = {
        "limits": limits.as_json(),
        "kernels": kernels_of(plain),
        "forwards": [forward.as_json(limits) for forward in [*forwards, *steps.values()]],
        "rounds": [each.as_json() for each in rounds],
    }
    write_json(json_, record)


def best_median(rate: Timing) -> str:
    """The best of a rate, which was disturbed least, and the median."""
    return f"{rate.high:,.0f}/{rate.median:,.0f}"


def limits_table(limits: Limits, kernels: str) -> Table:
    """The limits of the machine."""
    return table(
        f"Limits: {limits.device}, {limits.threads} threads, kernels {kernels}",
        limits.rows(),
        {
            "": lambda row: row[0],
            "best": lambda row: f"{row[1] / 1e9:,.1f} G{row[3]}",
            "median": lambda row: f"{row[2] / 1e9:,.1f} G{row[3]}",
        },
    )


def forwards_table(forwards: Sequence[Forward], limits: Limits) -> Table:
    """The forwards of a model by rows, context and tokens, each compared with its limit."""
    single = one_token(forwards, forwards[0])
    each = single.weight_bytes or single.dtype.itemsize
    narrow = f" with weights of {8 * each:.3g} bits" if each < single.dtype.itemsize else ""
    stored = dtype_name(single.dtype) + narrow
    return table(
        f"Forwards of {escape(single.model)}, {stored}, {single.weights / 1e6:,.1f} MB of weights read",
        forwards,
        {
            "rows": lambda f: str(f.rows),
            "context": lambda f: f"{f.context:,}",
            "tokens": lambda f: str(f.tokens),
            "ms": lambda f: f"{f.timing.low * 1e3:,.3f}",
            "median": lambda f: f"{f.timing.median * 1e3:,.3f}",
            "v": lambda f: f"{f.timing.low / single.timing.low:.2f}",
            "tokens/s": lambda f: f"{f.rows * f.tokens / f.timing.low:,.0f}",
            "GB/s": lambda f: f"{f.bytes / f.timing.low / 1e9:,.1f}",
            "of limit": lambda f: f"{f.of_limit(limits):.0%}",
        },
    )


def rounds_table(rounds: Sequence[Rounds], forwards: Sequence[Forward], title: str) -> Table:
    """Where the time of a round goes, beside the formula's prediction. The first row is autoregressive decoding."""
    single = next(forward.timing.low for forward in forwards if forward.tokens == 1)
    plain = rounds[0].tokens_per_second().high

    def share(which: int) -> Callable[[Rounds], str]:
        return lambda r: f"{r.each()[which] / sum(r.each()):.0%}"

    return table(
        title,
        rounds,
        {
            "decoding": lambda r: "AR" if r is rounds[0] else escape(r.setting.name),
            "τ": lambda r: f"{r.stats.tau:.2f}",
            "ms": lambda r: f"{sum(r.each()) * 1e3:,.2f}",
            **{part: share(which) for which, part in enumerate(("target", "draft", "rest"))},
            "v": lambda r: f"{r.each()[0] / single:.2f}",
            "c": lambda r: f"{r.each()[1] / r.drafted / single:.3f}" if r.each()[1] else "–",
            "formula": lambda r: "–" if r.predicted is None else f"{r.predicted:,.0f}",
            "tokens/s": lambda r: best_median(r.tokens_per_second()),
            "over\nAR": lambda r: ratio(r.tokens_per_second().high, plain),
        },
    )


def _plot(path: Path, forwards: Sequence[Forward], limits: Limits, k: int) -> None:
    """Write four plots: over draft length, context, rows, and the size of models."""
    at_context = [f for f in forwards if f.context == CONTEXT]
    single = [f for f in at_context if f.rows == 1]

    def save(
        *texts: str, picked: Sequence[Forward], point: Callable[[Forward], Any], name: Callable[[Forward], str]
    ) -> None:
        suffix, title, x, y = texts
        lines = {line: sorted(set(map(point, forwards))) for line, forwards in grouped(picked, name).items()}
        save_lines(path.with_name(f"{path.stem}-{suffix}{path.suffix}"), title, x, y, lines, log_x=True)

    save(
        "k",
        f"Cost of verification, one row after {CONTEXT} tokens",
        "tokens of the forward, K + 1",
        "v, over one token",
        picked=single,
        point=lambda f: (f.tokens, f.timing.low / one_token(forwards, f).timing.low),
        name=lambda f: f.model,
    )
    save(
        "context",
        "Cost of context, one token of one row",
        "tokens stored",
        "ms",
        picked=[f for f in forwards if f.rows == f.tokens == 1],
        point=lambda f: (f.context, f.timing.low * 1e3),
        name=lambda f: f.model,
    )
    save(
        "rows",
        f"Throughput by rows, a token each after {CONTEXT}",
        "rows",
        "tokens/s",
        picked=[f for f in at_context if f.tokens == 1],
        point=lambda f: (f.rows, f.rows / f.timing.low),
        name=lambda f: f.model,
    )
    save(
        "size",
        "Share of the machine's limit, by model size",
        "MB read",
        "limit over time taken",
        picked=[f for f in single if f.tokens in (1, k + 1)],
        point=lambda f: (f.bytes / 1e6, f.of_limit(limits)),
        name=lambda f: f"{f.tokens} tokens",
    )
