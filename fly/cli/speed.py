"""``fly bench speed``, ``peers`` and ``twins``: speed compared with the machine's limits, other libraries, and a
formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from fly.bench.clock import Timing
from fly.bench.limits import Limits, dtype_name, measure_limits
from fly.bench.loaded import NARROW, runs_compiled, settings_of, shape_subject, subjects_of, target_of
from fly.bench.peers import MOST_SURE, SURE, Lineup, Match, asked_of, line_up, measure_prompts, usual_amount
from fly.bench.plot import check_plot, save_lines
from fly.bench.shapes import forward_operations, matrix_parameters
from fly.bench.speed import (
    CONTEXT,
    LONGEST,
    PROMPTS,
    Forward,
    Rounds,
    context_slope,
    measure_models,
    measure_rounds,
    one_token,
    predict,
)
from fly.bench.twins import PAIRS, Twins, measure_twins, parse_pair
from fly.bundled import usual_draft
from fly.cli.options import Device, DraftLength, Dtype, Json, Kernels, Model, Rules, Turns, output
from fly.cli.run import alone, kernels_of, rules_of
from fly.cli.show import console, grouped, note, progress, ratio, table, write_json
from fly.drafts import parse_draft
from fly.llm import LLM
from fly.models.loading import resolve_device
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
            help=f"Random models beside it, WIDTHxLAYERSxVOCABULARY, in 8 bits with :int8 or :w8a8 after it ({SHAPE}, "
            f"each way); '{NO_SHAPE}' for none."
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
        output(help="Write plots: NAME.png gives NAME-k.png, NAME-context.png, NAME-rows.png, NAME-size.png."),
    ] = None,
    json_: Json = None,
) -> None:
    """The machine's limits, and every forward and round compared with them."""

    check_plot(plot)
    rules = rules_of(policy)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels}
    shapes = [] if shape == [NO_SHAPE] else shape or [SHAPE]
    if draft is None:
        draft = usual if (usual := usual_draft(model)) == "none" else f"model({usual})"
    plain = LLM(model, **options)
    fast = LLM(plain, parse_draft(draft, trusted=True, **options), **options)
    target = target_of(plain)
    if shape is None and runs_compiled(target):
        shapes += [f"{SHAPE}:{kind}" for kind in NARROW]
    own = subjects_of(fast, model, draft)
    subjects = own + [shape_subject(name, target, kernels) for name in shapes]
    for subject in subjects:
        if (room := subject.config.max_position_embeddings) < CONTEXT + k + 1:
            raise ValueError(
                f"--k {k}: a draft and the token before it, after the {CONTEXT} tokens that forwards are timed "
                f"after, exceed {subject.name}'s context of {room}"
            )
    with progress(1, "limits") as advance:
        limits = measure_limits(target.device)
        advance()
    with progress((turns + 1) * len(subjects), "forwards") as advance:
        forwards, steps = measure_models(subjects, k, turns, advance)
    with progress(1, "limits again") as advance:  # what disturbs them only ever makes them look lower
        limits = limits.best(measure_limits(target.device))
        advance()
    console.print(limits_table(limits, kernels_of(plain)))
    for subject in subjects:
        found = [forward for forward in forwards if forward.model == subject.name]
        console.print(forwards_table(found, limits))
        if (slope := context_slope(found)) is None:
            note("context: what keys and values cost does not show beside the weights")
        else:
            share = slope / limits.bandwidth
            note(f"context: {slope / 1e9:,.1f} GB/s of keys and values, {share:.0%} of the bandwidth")
        console.print()

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
        "ms: the best, as in all ratios · of limit: the least time for its bytes and\n"
        "operations over what it took, by what memory gave in the same turn; the median\n"
        "of all turns, above 100% where caches hold a part or products are faster than\n"
        "PyTorch's, which the rate is measured by · v: over the forward of one token ·\n"
        "c: a drafted token over the same · rest: share of a round that is neither\n"
        "target nor draft · formula: τ / (K·c + v(K)) / t(1), of forwards timed alone,\n"
        "which find other weights in the caches than their own; rounds one after another\n"
        "are faster, v below 1 for one token · tokens/s: best and median"
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
    """Of a rate: the best, which was disturbed least, and the median."""
    return f"{rate.high:,.0f}/{rate.median:,.0f}"


def limits_table(limits: Limits, kernels: str) -> Table:
    """The machine's limits, and which kernels are held against them."""
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
    """A model's forwards by rows, context and tokens, each against its limit."""

    single = one_token(forwards, forwards[0])
    stored = dtype_name(single.dtype) + (" with weights of 8 bits" if single.weight_bytes == 1 else "")
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
    """Where a round's time goes, and whether the formula foretells it; the first is autoregressive."""
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
    """One file a sweep: draft length, context, rows, and the size of models."""

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


@alone
def bench_peers(
    model: Model = "fly-target",
    draft: Annotated[
        str | None,
        typer.Option(
            help="The draft checkpoint for all libraries that take one, or 'none'. Default: fly-draft for fly-target."
        ),
    ] = None,
    policy: Rules = None,
    k: DraftLength = 15,
    shape: Annotated[
        str | None,
        typer.Option(help=f"A random model of WIDTHxLAYERSxVOCABULARY instead, autoregressive only; or '{NO_SHAPE}'."),
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="How many prompts. Default: 24, or 8 for a model of 100M parameters or more."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="The most tokens of an answer. Default: 400, fewer for such a model (110M: 160, from 270M on: 64).",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Prompts decoded together, by the libraries that can.")] = 1,
    skip_prompts: Annotated[
        bool, typer.Option("--skip-prompts", help="Do not time the reading of long prompts.")
    ] = False,
    turns: Turns = 3,
    dtype: Dtype = "auto",
    kernels: Kernels = "auto",
    json_: Json = None,
) -> None:
    """transformers and llama.cpp on the same checkpoints, prompts, draft length, dtype and threads, side by side.

    On kernels of 8 bits (--kernels w8a8), llama.cpp gets its own of 8 bits, Q8_0.
    """

    rules, cpu = rules_of(policy), resolve_device("cpu")
    shape = None if shape == NO_SHAPE else shape
    with TemporaryDirectory() as temporary:
        draft = draft or usual_draft(model)
        lineup = line_up(model, draft, rules, k, Path(temporary), shape, problems, tokens, dtype, kernels, rows)
        limits = measure_limits(cpu)
        with progress(turns * -(-len(lineup.prompts) // rows) * len(lineup.contenders), "peers") as advance:
            matches, cut = lineup.measure(turns, advance)
        limits = limits.best(measure_limits(cpu))
        title = f"{shape or f'{model}, {draft}, k {k}'}, {lineup.precision}, {limits.threads} threads"
        title += f", {len(lineup.prompts)} prompts, at most {lineup.tokens} tokens each, temperature 0, batch {rows}"
        console.print(peers_table(matches, title))
        longest = min(lineup.config.max_position_embeddings, LONGEST)
        lengths = [length for length in PROMPTS if length < longest and not skip_prompts]
        reading: dict[str, dict[int, Timing]] = {}
        if lengths:
            with progress(1, "long prompts") as advance:
                reading = measure_prompts(lineup.contenders, lineup.config.vocab_size, lengths, min(turns, 3))
                advance()
            console.print(prompts_table(reading, limits, lineup))
    limit = limits.seconds(lineup.token_bytes())
    note(
        f"tokens/s: best/median of {turns} turns; ratios of the best · alike: fly over this,\n"
        "autoregressive beside autoregressive, its fastest lossless speculation beside\n"
        "speculation · fastest: fly's fastest decoding of all over this · same: outputs\n"
        "like fly's autoregressive ones · agree: tokens before the first that differs ·\n"
        f"(to {SURE}): up to {max(k, MOST_SURE)} tokens, while one has at least {SURE}, as in (own K) ·\n"
        f"limit of one token's bytes, read again and again: {1 / limit:,.0f} tokens/s"
    )
    if shape is None and cut:
        console.print()
        note(f"answers are not checked, as {lineup.tokens} tokens are too few for them")
    for reason in lineup.skipped:
        console.print(f"[yellow]{escape(reason)}[/]", highlight=False)
    record = {"limits": limits.as_json(), "skipped": lineup.skipped, "title": title}
    record["prompts"] = {name: {n: rate.as_json() for n, rate in rates.items()} for name, rates in reading.items()}
    write_json(json_, {**record, "contenders": [match.as_json(matches[0]) for match in matches]})


def peers_table(matches: Sequence[Match], title: str) -> Table:
    """The speed of all libraries, what they answer, and fly's speed over each peer's of the same kind."""
    by_library = grouped(matches, lambda match: match.contender.library)
    own = by_library["fly"]

    def over(match: Match, rivals: Sequence[Match]) -> str:
        """The fastest of fly's ``rivals`` over a peer."""
        if match in own:
            return ""
        fastest = max((rival.tokens_per_second().high for rival in rivals), default=None)
        return ratio(fastest, match.tokens_per_second().high)

    def alike(match: Match) -> list[Match]:
        kind = match.contender.speculative
        return [each for each in own if each.contender.speculative == kind and not each.contender.lossy]

    return table(
        title,
        matches,
        {
            "library": lambda m: m.contender.library if m is by_library[m.contender.library][0] else "",
            "decoding": lambda m: escape(m.contender.name),
            "tokens/s": lambda m: best_median(m.tokens_per_second()),
            "alike": lambda m: over(m, alike(m)),
            "fastest": lambda m: over(m, own),
            "same": lambda m: f"{m.agreement(matches[0])[0]}/{len(m.outputs)}",
            "agree": lambda m: f"{m.agreement(matches[0])[1]:.0%}",
            "right": lambda m: f"{sum(m.right)}/{len(m.right)}" if m.right else "–",
        },
        text=("library", "decoding"),
        ends=lambda m: m is by_library[m.contender.library][-1],
    )


def prompts_table(reading: dict[str, dict[int, Timing]], limits: Limits, lineup: Lineup) -> Table:
    """How fast each library reads long prompts, and what that is of the machine's rate of multiplying."""
    config, products = lineup.config, torch.int8 if lineup.narrow == "w8a8" else None
    columns: dict[str, Callable[[str], str]] = {"library": lambda name: name}
    for length in next(iter(reading.values())):
        operations = forward_operations(config, lineup.dtype, tokens=length, products=products)
        # of the head for the last token alone
        operations[products or lineup.dtype] -= 2 * config.hidden_size * config.vocab_size * (length - 1)
        least = limits.seconds(0, operations)

        def shown(name: str, length: int = length) -> str:
            return best_median(reading[name][length])

        def over(name: str, length: int = length) -> str:
            own = reading["fly"][length].high
            return "" if name == "fly" else ratio(own, reading[name][length].high)

        def share(name: str, length: int = length, least: float = least) -> str:
            return f"{reading[name][length].high * least / length:.0%}"

        columns |= {f"{length}\ntokens/s": shown, f"{length}\nfly over": over}
        columns[f"{length}\nof matmul"] = share
    return table(
        "Reading a prompt of random tokens, to the first token after it", list(reading), columns, text=("library",)
    )


@alone
def bench_twins(
    pair: Annotated[
        list[str] | None,
        typer.Option(
            help="The cost ratio: 70b:8b, 405b:8b, or a number such as 0.05; repeatable. Default: both names."
        ),
    ] = None,
    model: Model = "fly-target",
    draft: Annotated[str, typer.Option(help="Draft checkpoint.")] = "fly-draft",
    policy: Rules = None,
    k: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Draft length to measure; repeatable. Default: those published for the pair."),
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="How many times as wide both models are made; 4 is exact.")] = 4,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 24,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    json_: Json = None,
) -> None:
    """What a pair gains at the cost ratio of a large pair, measured on twins: the same functions at a higher cost.

    Acceptance and answers are those of the small pair; only the time is a larger pair's.
    """

    rules = rules_of(policy)
    records = []
    for name in pair or list(PAIRS):
        cost, published = parse_pair(name)
        lengths = k or [published]
        turns = 1 + len(rules) * (2 * len(lengths) + 1)
        with TemporaryDirectory() as temporary, progress(turns * problems, "twins") as advance:
            twins = measure_twins(
                *(model, draft, cost, lengths, rules, problems, Path(temporary), width),
                *(dtype, device, kernels, SURE, advance),
            )
        console.print(twins_table(twins, f"Twins of {model} and {draft} at the cost ratio of {name}: c {cost:.3f}"))
        records.append({"pair": name, "cost": cost, **twins.as_json()})
    note(
        "every figure is a twin's: texts and acceptance of the small pair, time of a\n"
        "larger one, after each prompt; 'with prompts' is over AR with those in ·\n"
        "formula: τ / (K·c + v(K)), where c is the time of a drafted token and v that of\n"
        "a forward of K + 1, each timed alone, over a token of plain decoding · over\n"
        "exact: over the fastest exact speculation · rest: share of that time that is\n"
        f"neither target nor draft · (to {SURE}): while the draft has at least that\n"
        "probability · recovery: accuracy over autoregressive's"
    )
    write_json(json_, records)


def twins_table(twins: Twins, title: str) -> Table:
    """Speed, acceptance and accuracy of every setting on a pair of twins; the first is autoregressive."""
    lengths = "; ".join(f"K {k}: c {twins.cost(k):.3f}, v {twins.verification(k):.2f}" for k in twins.draft)
    plain = twins.results[0]
    right = f"{len(plain.right)} held-out problems, of which autoregressive decoding solves {sum(plain.right)}"
    fastest = max(result.decoding_speed for result in twins.results if twins.exact(result))
    return table(
        f"{title}\n{twins.describe()}\n{lengths}\n{right}",
        twins.results,
        {
            "decoding (twin)": lambda r: "AR" if r is plain else escape(r.setting.name),
            "K": lambda r: "–" if r is plain else str(r.setting.k),
            "τ": lambda r: f"{r.stats.tau:.2f}",
            "tok/s": lambda r: f"{r.decoding_speed:,.0f}",
            "over\nAR": lambda r: ratio(r.decoding_speed, plain.decoding_speed),
            "formula": lambda r: ratio(twins.predicted(r)),
            "over\nexact": lambda r: "–" if r is plain else ratio(r.decoding_speed, fastest),
            "rest": lambda r: "–" if r.times.overhead is None else f"{r.times.overhead:.1%}",
            "with\nprompts": lambda r: ratio(r.tokens_per_second, plain.tokens_per_second),
            "recovery": lambda r: f"{r.accuracy / plain.accuracy:.1%}" if plain.accuracy else "–",
        },
    )
