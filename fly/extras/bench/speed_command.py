"""``fly bench speed``: speed compared with the machine's limits, and with a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from rich.markup import escape

from fly.cli.options import LOADING, DraftLength, Json, Rules, Turns, output, takes
from fly.cli.run import alone, kernels_of, rules_of
from fly.cli.show import console, grouped, note, progress, ratio, table, write_json
from fly.cli.terminal import Table
from fly.extras.bench.clock import Timing
from fly.extras.bench.limits import Limits, dtype_name, measure_limits
from fly.extras.bench.loaded import (
    ROUNDINGS,
    Subject,
    runs_compiled,
    settings_of,
    shape_subject,
    subjects_of,
    target_of,
)
from fly.extras.bench.prompts import asked_of, usual_amount
from fly.extras.bench.shapes import matrix_parameters
from fly.extras.bench.speed import (
    CONTEXT,
    Forward,
    Rounds,
    context_slope,
    measure_models,
    measure_rounds,
    one_token,
    predict,
)
from fly.extras.eval import Setting
from fly.extras.eval.plots import save_lines
from fly.llm import LLM
from fly.models.bundled import usual_draft
from fly.runner.executor import Executor
from fly.types import SamplingParams

_Point: TypeAlias = Callable[[Forward], tuple[float, float]]
_Name: TypeAlias = Callable[[Forward], str]
SHAPE, NO_SHAPE = "768x12x32000", "none"


_LEGEND = (
    "ms: the best turn, as in all ratios · of limit: the least time that the bytes and\n"
    "operations need, over the time taken; the median of all turns, each with the\n"
    "bandwidth of that turn (above 100% where caches hold a part, or products are\n"
    "faster than PyTorch's, which give the limit) · v: time over the forward of one\n"
    "token · c: time of a drafted token over the same · rest: share of a round outside\n"
    "the models · formula: τ / (K·c + v(K)) / t(1) with forwards timed alone, which\n"
    "find the caches cold; successive rounds are faster · tokens/s: best and median"
)


@alone
@takes(LOADING)
def bench_speed(
    model: str,
    draft: Annotated[
        str | None,
        typer.Option(
            help="The draft; the formula of a round needs one model alone, 'model(NAME)'. Default: model(fly-draft) "
            "for fly-target, none for any other."
        ),
    ] = None,
    policy: Rules = None,
    k: DraftLength = 15,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Random models beside it, WIDTHxLAYERSxVOCABULARY, in 8 or 4 bits with "
            f"{' or '.join(f':{kind}' for kind in ROUNDINGS)} after it ({SHAPE}, each way); '{NO_SHAPE}' for none."
        ),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="How many prompts rounds are timed on. Default: 12, for a large model 8.")
    ] = None,
    turns: Turns = 15,
    plot: Annotated[
        Path | None,
        output(help="Write plots: NAME.svg gives NAME-k.svg, -context.svg, -rows.svg, -size.svg.", suffix=".svg"),
    ] = None,
    json_: Json = None,
    **running: Any,
) -> None:
    """Measure the machine's limits, and compare every forward and round with them."""
    rules = rules_of(policy)
    if draft is None:
        draft = usual_name if (usual_name := usual_draft(model)) == "none" else f"model({usual_name})"
    # The models: the target with and without its draft, and random ones beside them.
    plain = LLM(model, **running)
    fast = LLM(plain, draft)
    target, loaded = target_of(plain), subjects_of(fast, model, draft)
    subjects = loaded + _random_subjects(shape, target, running["kernels"])
    for subject in subjects:
        if (room := subject.config.max_position_embeddings) < CONTEXT + k + 1:
            raise ValueError(
                f"--k {k}: a draft and the token before it, after the {CONTEXT} tokens that forwards are timed "
                f"after, exceed {subject.name}'s context of {room}"
            )
    # Forwards, compared with the limits.
    limits, forwards, steps = _measure_forwards(subjects, target.device, k, turns)
    console.print(limits_table(limits, kernels_of(plain)))
    for subject in subjects:
        _show_forwards([forward for forward in forwards if forward.model == subject.name], limits)
    # Rounds, compared with what the forwards alone would take.
    settings = settings_of(plain, fast, k, rules)[: None if fast.draft is not None else 1]
    _, prompts = asked_of(plain, model, problems or min(usual_amount(matrix_parameters(target.config))[0], 12))
    single = [f for f in forwards if f.model == model and f.rows == 1 and f.context == CONTEXT]
    rounds = _measure_rounds(settings, prompts, min(turns, 3), target)
    for each in rounds:
        each.predicted = predict(each, single, steps[draft] if len(loaded) == 2 else None)
    title = f"Rounds: {model}, {draft}, k {k}, {len(prompts)} prompt{'s' * (len(prompts) > 1)}, temperature 0, batch 1"
    console.print(rounds_table(rounds, single, title))
    note(_LEGEND)
    if plot is not None:
        _plot(plot, forwards, limits, k)
    record = {
        "limits": limits.as_json(),
        "kernels": kernels_of(plain),
        "forwards": [forward.as_json(limits) for forward in [*forwards, *steps.values()]],
        "rounds": [each.as_json() for each in rounds],
    }
    write_json(json_, record)


def _random_subjects(shapes: list[str] | None, target: Executor, kernels: str) -> list[Subject]:
    """Return models of random weights; by default of one shape, and on compiled kernels also in fewer bits."""
    if shapes is None:
        shapes = [SHAPE, *(f"{SHAPE}:{kind}" for kind in ROUNDINGS if runs_compiled(target))]
    return [shape_subject(name, target, kernels) for name in shapes if shapes != [NO_SHAPE]]


def _measure_forwards(
    subjects: list[Subject], device: torch.device, k: int, turns: int
) -> tuple[Limits, list[Forward], dict[str, Forward]]:
    """Time forwards between two measurements of the limits: what disturbs a limit only makes it look lower."""
    with progress(1, "limits") as advance:
        limits = measure_limits(device)
        advance()
    with progress((turns + 1) * len(subjects), "forwards") as advance:
        forwards, steps = measure_models(subjects, k, turns, advance)
    with progress(1, "limits again") as advance:
        limits = limits.best(measure_limits(device))
        advance()
    return limits, forwards, steps


def _measure_rounds(settings: list[Setting], prompts: list[Any], turns: int, target: Executor) -> list[Rounds]:
    """Time rounds on prompts, with answers of a length that suits the target's size."""
    params = SamplingParams(temperature=0.0, max_tokens=usual_amount(matrix_parameters(target.config))[1])
    with progress(turns * len(prompts) * len(settings), "rounds") as advance:
        return measure_rounds(settings, prompts, params, turns, advance)


def _show_forwards(forwards: list[Forward], limits: Limits) -> None:
    """Print the forwards of one model, and what its context costs."""
    console.print(forwards_table(forwards, limits))
    if (slope := context_slope(forwards)) is None:
        note("context: the cost of keys and values is too small to show beside the weights")
    else:
        share = slope / limits.bandwidth
        note(f"context: {slope / 1e9:,.1f} GB/s of keys and values, {share:.0%} of the bandwidth")
    console.print()


def best_median(rate: Timing) -> str:
    """Return the best of a rate, which was disturbed least, and the median."""
    return f"{rate.high:,.0f}/{rate.median:,.0f}"


def limits_table(limits: Limits, kernels: str) -> Table:
    """Return the limits of the machine."""
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
    """Return the forwards of a model by rows, context and tokens, each compared with its limit."""
    single = one_token(forwards, forwards[0])
    weight_size = single.weight_bytes or single.dtype.itemsize
    narrow = f" with weights of {8 * weight_size:.3g} bits" if weight_size < single.dtype.itemsize else ""
    storage = dtype_name(single.dtype) + narrow
    return table(
        f"Forwards of {single.model}, {storage}, {single.weights / 1e6:,.1f} MB of weights read",
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
    """Return where the time of a round goes, beside the formula's prediction. The first row is autoregressive
    decoding."""
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

    def save(suffix: str, picked: Sequence[Forward], point: _Point, name: _Name, title: str, x: str, y: str) -> None:
        lines = {line: sorted(set(map(point, forwards))) for line, forwards in grouped(picked, name).items()}
        save_lines(path.with_name(f"{path.stem}-{suffix}{path.suffix}"), title, x, y, lines, log_x=True)

    save(
        "k", single, lambda f: (f.tokens, f.timing.low / one_token(forwards, f).timing.low), lambda f: f.model,
        f"Cost of verification, one row after {CONTEXT} tokens", "tokens of the forward, K + 1", "v, over one token",
    )  # fmt: skip
    save(
        "context", [f for f in forwards if f.rows == f.tokens == 1],
        lambda f: (f.context, f.timing.low * 1e3), lambda f: f.model,
        "Cost of context, one token of one row", "tokens stored", "ms",
    )  # fmt: skip
    save(
        "rows", [f for f in at_context if f.tokens == 1], lambda f: (f.rows, f.rows / f.timing.low), lambda f: f.model,
        f"Throughput by rows, a token each after {CONTEXT}", "rows", "tokens/s",
    )  # fmt: skip
    save(
        "size", [f for f in single if f.tokens in (1, k + 1)],
        lambda f: (f.bytes / 1e6, f.of_limit(limits)), lambda f: f"{f.tokens} tokens",
        "Share of the machine's limit, by model size", "MB read", "limit over time taken",
    )  # fmt: skip
