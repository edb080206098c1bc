"""``fly bench speed``, ``peers`` and ``twins``: what they ask and show; the measuring is in the modules beside."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fly import cli
from fly.cli import Device, DraftOption, Dtype, Json, Kernels, Model, Policy, bench, console

if TYPE_CHECKING:
    from fly.bench.limits import Limits, Timing
    from fly.bench.peers import Match
    from fly.bench.speed import Forward, Rounds
    from fly.bench.twins import Twins

K = Annotated[int, typer.Option(min=1, help="Most tokens drafted a round.")]
Turns = Annotated[int, typer.Option(min=1, help="Times that everything is measured, in turns.")]
SHAPE, NO_SHAPE = "768x12x32000", "none"


@bench.command("speed")
def bench_speed(
    model: Model = "fly-target",
    draft: DraftOption = "fly-draft",
    policy: Policy = "fly",
    k: K = 15,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Random models beside it, WIDTHxLAYERSxVOCABULARY, of 8 bits with :int8 or :w8a8 behind ({SHAPE}, "
            f"each way); '{NO_SHAPE}' for none."
        ),
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems that the rounds are timed on.")] = 12,
    turns: Turns = 15,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write plots: NAME.png gives NAME-k.png, NAME-context.png, NAME-rows.png, NAME-size.png.",
            callback=cli.to_be_written,
        ),
    ] = None,
    json_: Json = None,
) -> None:
    """The machine's limits, and every forward and every round held against them."""
    with cli._plain_errors(alone=True):
        from fly.backends import executor_of
        from fly.backends.cpu import chosen
        from fly.backends.cpu.library import NARROW, split
        from fly.bench.limits import measure_limits
        from fly.bench.plot import check_plot
        from fly.bench.shapes import random_model, shape_config
        from fly.bench.speed import Forwards, measure_rounds, predict
        from fly.bundled.tasks import problems as draw_problems
        from fly.drafts import parse_draft
        from fly.eval.timed import Setting, draft_runners
        from fly.llm import LLM
        from fly.policies import Exact, parse_policy
        from fly.types import SamplingParams

        check_plot(plot)
        rule = parse_policy(policy, trusted=True)
        shapes = [] if shape == [NO_SHAPE] else shape or [SHAPE]
        # what stands behind a colon, if it is known, says how many bits
        bits = {name: next((kind for kind in NARROW if name.endswith(f":{kind}")), "") for name in shapes}
        configs = {name: shape_config(name.removesuffix(f":{bits[name]}")) for name in shapes}
        options: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels}
        plain = LLM(model, **options)
        fast = LLM(plain, draft=parse_draft(draft, trusted=True, **options), **options)
        levels = draft_runners(fast.draft)
        target: Any = fast.engine.runner.executor
        if shape is None and target.kernels != "torch":
            for kind in NARROW:
                shapes.append(name := f"{SHAPE}:{kind}")
                bits[name], configs[name] = kind, configs[SHAPE]
        models = [(model, target)] + ([(draft, levels[0].executor)] if len(levels) == 1 else [])
        for name, config in {**{name: made.config for name, made in models}, **configs}.items():
            if config.max_position_embeddings < _CONTEXT + k + 1:
                raise ValueError(
                    f"--k {k}: a draft and the token before it, behind the {_CONTEXT} tokens that forwards are timed "
                    f"behind, exceed {name}'s context of {config.max_position_embeddings}"
                )
        with _progress("limits", 1) as advance:
            limits = measure_limits(target.device)
            advance()

        swept: list[Forward] = []
        steps: dict[str, Forward] = {}
        with _progress("forwards", (turns + 1) * (len(models) + len(shapes))) as advance:
            for name in (*dict(models), *shapes):
                made = dict(models).get(name)
                if made is None:
                    wanted = f"{split(chosen(kernels))[0]}-{bits[name]}" if bits[name] else kernels
                    made = executor_of(random_model(configs[name], target.dtype, target.device), wanted)
                sweep = _sweep(made.config.max_position_embeddings, k)
                room = 16 * (_CONTEXT + k + 17) + made.config.max_position_embeddings  # its last page may not be full
                forwards = Forwards(name, made, room)
                found = forwards.measure(sweep, [(_CONTEXT, k)], turns, advance)
                swept += [forward for forward in found if not forward.drafting]
                steps[name] = next(forward for forward in found if forward.drafting)
        with _progress("limits again", 1) as advance:  # what disturbs them only ever makes them look lower
            limits = limits.best(measure_limits(target.device))
            advance()
        console.print(limits_table(limits, cli.kernels_of(plain)))
        for name in (*dict(models), *shapes):
            found = [forward for forward in swept if forward.model == name]
            console.print(forwards_table(found, limits))
            slope = context_slope(found)
            console.print(
                f"[dim]context: {slope / 1e9:,.1f} GB/s of keys and values, {slope / limits.bandwidth:.0%} of the "
                "bandwidth[/]\n",
                highlight=False,
            )

        settings = [Setting("autoregressive", plain, 0), Setting("exact", fast, k, Exact())]
        if rule != Exact():
            settings.append(Setting(cli.rule_name(rule), fast, k, rule))
        asked = list(draw_problems(None, "heldout", 0, problems))
        again = min(turns, 3)
        with _progress("rounds", again * len(asked) * len(settings)) as advance:
            rounds = measure_rounds(settings, asked, SamplingParams(temperature=0.0, max_tokens=400), again, advance)
        own = [f for f in swept if f.model == model and f.rows == 1 and f.context == _CONTEXT]
        predicted = [predict(each, own, steps[draft] if len(levels) == 1 else None) for each in rounds]
        title = f"Rounds: {model}, {draft}, k {k}, {problems} problems, temperature 0, batch 1"
        console.print(rounds_table(rounds, predicted, own, title))
        console.print(
            "[dim]ms: the best, as in all ratios · of limit: the least time for its bytes and\n"
            "operations over that, above 100% where caches hold a part · v: over the forward\n"
            "of one token · c: a drafted token over the same · rest: share of a round that\n"
            "is neither target nor draft · formula: τ / (K·c + v(K)) / t(1), of forwards\n"
            "timed alone, which find other weights in the caches than their own; rounds one\n"
            "after another are faster, v below 1 for one token · tokens/s: best and median[/]",
            highlight=False,
        )
        if plot is not None:
            _plot(plot, swept, limits, k)
        if json_ is not None:
            record = {
                "limits": limits.as_json(),
                "kernels": cli.kernels_of(plain),
                "forwards": [forward.as_json(limits) for forward in [*swept, *steps.values()]],
                "rounds": [_rounds_as_json(each, speed) for each, speed in zip(rounds, predicted)],
            }
            json_.write_text(json.dumps(record, indent=2), encoding="utf-8")


_SURE, _MOST_SURE = 0.4, 20  # how transformers drafts when told nothing: least probability, most tokens
_CONTEXT = 256  # stored tokens behind which draft lengths and rows are compared


def _sweep(positions: int, k: int) -> list[tuple[int, int, int]]:
    """(rows, context, tokens) of the forwards to time: over draft length, context and rows."""
    lengths = sorted({1, 2, 4, 8, 16, 32, k + 1})
    contexts = [context for context in (64, 512, 896, 2048, 3968) if context < positions]
    sweep = [(1, _CONTEXT, tokens) for tokens in lengths if _CONTEXT + tokens <= positions]
    sweep += [(1, context, 1) for context in contexts]
    sweep += [(rows, _CONTEXT, tokens) for rows in (4, 16) for tokens in (1, k + 1)]
    return sweep


@contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda *_: progress.advance(task)


def _table(title: str, *headings: str) -> Table:
    """A table whose first column is text and the others numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _best_median(rate: Timing) -> str:
    """Of a rate: the best, which was disturbed least, and the median."""
    return f"{rate.high:,.0f}/{rate.median:,.0f}"


def limits_table(limits: Limits, kernels: str) -> Table:
    """The machine's limits, and which kernels are held against them."""
    table = _table(f"Limits: {limits.device}, {limits.threads} threads, kernels {kernels}", "", "best", "median")
    for name, best, median, unit in limits.rows():
        table.add_row(name, f"{best / 1e9:,.1f} G{unit}", f"{median / 1e9:,.1f} G{unit}")
    return table


def forwards_table(forwards: Sequence[Forward], limits: Limits) -> Table:
    """A model's forwards by rows, context and tokens, each against its limit."""
    single = _one_token(forwards, forwards[0])
    title = f"Forwards of {escape(single.model)}, {_dtype(single)}, {single.weights / 1e6:,.1f} MB of weights read"
    table = _table(title, "rows", "context", "tokens", "ms", "median", "v", "tokens/s", "GB/s", "of limit")
    for forward in forwards:
        seconds = forward.timing.low
        table.add_row(
            str(forward.rows),
            f"{forward.context:,}",
            str(forward.tokens),
            f"{seconds * 1e3:,.3f}",
            f"{forward.timing.median * 1e3:,.3f}",
            f"{seconds / single.timing.low:.2f}",
            f"{forward.rows * forward.tokens / seconds:,.0f}",
            f"{forward.bytes / seconds / 1e9:,.1f}",
            f"{forward.of_limit(limits):.0%}",
        )
    return table


def context_slope(forwards: Sequence[Forward]) -> float:
    """Bytes of stored keys and values read a second: the slope of least squares of time over context, inverted."""
    points = [(f.context_bytes, f.timing.low) for f in forwards if f.rows == f.tokens == 1]
    slope, _ = statistics.linear_regression(*zip(*points))
    return 1 / slope


def _dtype(forward: Forward) -> str:
    narrow = " with weights of 8 bits" if forward.weight_bytes == 1 else ""
    return str(forward.dtype).removeprefix("torch.") + narrow


def _one_token(forwards: Sequence[Forward], forward: Forward) -> Forward:
    """The forward of one token of one row that ``forward`` is a multiple of."""
    return next(f for f in forwards if (f.model, f.rows, f.context, f.tokens) == (forward.model, 1, _CONTEXT, 1))


def rounds_table(
    rounds: Sequence[Rounds], predicted: Sequence[float | None], forwards: Sequence[Forward], title: str
) -> Table:
    """Where a round's time goes, and whether the formula foretells it; the first is autoregressive."""
    table = _table(title, "decoding", "τ", "ms", "target", "draft", "rest", "v", "c", "formula", "tokens/s", "over\nAR")
    single = next(forward.timing.low for forward in forwards if forward.tokens == 1)
    plain = rounds[0].tokens_per_second().high
    for each, speed in zip(rounds, predicted):
        target, draft, rest = each.each()
        whole = target + draft + rest
        rate = each.tokens_per_second()
        table.add_row(
            "AR" if each is rounds[0] else escape(each.setting.name),
            f"{each.stats.tau:.2f}",
            f"{whole * 1e3:,.2f}",
            *(f"{part / whole:.0%}" for part in (target, draft, rest)),
            f"{target / single:.2f}",
            f"{draft / each.drafted / single:.3f}" if draft else "–",
            "–" if speed is None else f"{speed:,.0f}",
            _best_median(rate),
            f"{rate.high / plain:.2f}×",
        )
    return table


def _rounds_as_json(rounds: Rounds, predicted: float | None) -> dict[str, Any]:
    target, draft, rest = rounds.each()
    return {
        "decoding": rounds.setting.name,
        "policy": str(rounds.setting.policy),
        "k": rounds.setting.k,
        "tau": rounds.stats.tau,
        "drafted": rounds.drafted,
        "seconds": {"target": target, "draft": draft, "rest": rest},
        "tokens_per_second": rounds.tokens_per_second().as_json(),
        "predicted": predicted,
    }


def _plot(path: Path, forwards: Sequence[Forward], limits: Limits, k: int) -> None:
    """One file a sweep: draft length, context, rows, and the size of models."""
    from fly.bench.plot import save_lines

    names = list(dict.fromkeys(forward.model for forward in forwards))

    def lines(pick: Any, point: Any) -> dict[str, list[tuple[float, float]]]:
        return {name: sorted({point(f) for f in forwards if f.model == name and pick(f)}) for name in names}

    def save(suffix: str, title: str, x: str, y: str, drawn: dict[str, list[tuple[float, float]]]) -> None:
        save_lines(path.with_name(f"{path.stem}-{suffix}{path.suffix}"), title, x, y, drawn, log_x=True)

    save(
        "k",
        f"Cost of verification, one row behind {_CONTEXT} tokens",
        "tokens of the forward, K + 1",
        "v, over one token",
        lines(
            lambda f: f.rows == 1 and f.context == _CONTEXT,
            lambda f: (f.tokens, f.timing.low / _one_token(forwards, f).timing.low),
        ),
    )
    save(
        "context",
        "Cost of context, one token of one row",
        "tokens stored",
        "ms",
        lines(lambda f: f.rows == f.tokens == 1, lambda f: (f.context, f.timing.low * 1e3)),
    )
    save(
        "rows",
        f"Throughput by rows, a token each behind {_CONTEXT}",
        "rows",
        "tokens/s",
        lines(lambda f: f.tokens == 1 and f.context == _CONTEXT, lambda f: (f.rows, f.rows / f.timing.low)),
    )
    sizes = {
        f"{tokens} tokens": sorted(
            (f.bytes / 1e6, f.of_limit(limits))
            for f in forwards
            if f.rows == 1 and f.context == _CONTEXT and f.tokens == tokens
        )
        for tokens in sorted({1, k + 1})
    }
    save("size", "Share of the machine's limit, by model size", "MB read", "limit over time taken", sizes)


@bench.command("peers")
def bench_peers(
    model: Model = "fly-target",
    draft: Annotated[str, typer.Option(help="Draft checkpoint for all who take one.")] = "fly-draft",
    policy: Policy = "fly",
    k: K = 15,
    shape: Annotated[
        str | None,
        typer.Option(help=f"A random model of WIDTHxLAYERSxVOCABULARY instead, autoregressive only; or '{NO_SHAPE}'."),
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="Held-out problems. If not given 24, and 8 for a --shape of 100M parameters or more."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Most tokens a problem. If not given 400, and fewer for such a --shape (110M: 160).",
        ),
    ] = None,
    turns: Turns = 3,
    dtype: Dtype = "auto",
    kernels: Kernels = "auto",
    json_: Json = None,
) -> None:
    """transformers and llama.cpp on the same checkpoints, prompts, draft length, dtype and threads, side by side.

    On kernels of 8 bits (--kernels w8a8), llama.cpp gets its own of 8 bits, Q8_0.
    """
    with cli._plain_errors(alone=True), TemporaryDirectory() as temporary:
        import random

        from fly.backends.cpu import chosen
        from fly.backends.cpu.library import split
        from fly.bench.limits import measure_limits
        from fly.bench.peers import fly_contender, load_peers, measure_matches, usual_amount
        from fly.bench.shapes import forward_bytes, matrix_parameters, random_model, shape_config
        from fly.bundled import resolve_checkpoint
        from fly.bundled.tasks import check_many
        from fly.bundled.tasks import problems as draw_problems
        from fly.drafts import SingleDraft
        from fly.eval import Setting
        from fly.llm import LLM
        from fly.models import LlamaConfig, save_model
        from fly.models.loading import resolve_device, resolve_dtype
        from fly.policies import Exact, parse_policy

        rule = parse_policy(policy, trusted=True)
        shape = None if shape == NO_SHAPE else shape
        cpu = resolve_device("cpu")
        if shape is not None:
            config = shape_config(shape)
            number = resolve_dtype("bfloat16" if dtype == "auto" else dtype, {})
            source, helper = Path(temporary) / "model", None
            save_model(random_model(config, number), source, number)
        else:
            source, helper = resolve_checkpoint(model), resolve_checkpoint(draft)
            config, raw = LlamaConfig.read(source)
            number = resolve_dtype(dtype, raw)
        if helper is not None and k >= config.max_position_embeddings:
            raise ValueError(f"--k {k} must be below {model}'s context of {config.max_position_embeddings}")
        usual = usual_amount(0 if shape is None else matrix_parameters(config))
        count, most = usual[0] if problems is None else problems, usual[1] if tokens is None else tokens
        asked = list(draw_problems(None, "heldout", 0, count))
        options: dict[str, Any] = {"dtype": number, "device": "cpu", "kernels": kernels}
        plain = LLM(source, **options)
        settings = [Setting("autoregressive", plain, 0)]
        if helper is not None:
            # of the same weights: a copy for each would drive the others from the caches of the processor
            fast, lookup = LLM(plain, str(helper), **options), LLM(plain, "ngram", **options)
            levels = LLM(plain, f"ngram+{helper}", **options)
            surely = LLM(plain, SingleDraft(helper, confidence=_SURE, dtype=number, device="cpu", kernels=kernels))
            sure, most_sure = f" (to {_SURE})", max(k, _MOST_SURE)
            settings += [Setting("exact", fast, k, Exact()), Setting("exact, n-gram", lookup, k, Exact())]
            settings.append(Setting("exact" + sure, surely, most_sure, Exact()))
            if rule != Exact():
                name = cli.rule_name(rule)
                settings += [Setting(name, fast, k, rule), Setting(f"{name}, multi-level", levels, k, rule)]
                settings.append(Setting(name + sure, surely, most_sure, rule))
            prompts = [plain.chat_prompt(problem.prompt) for problem in asked]
        else:
            rng = random.Random(0)
            prompts = [[rng.randrange(config.vocab_size) for _ in range(32)] for _ in asked]
        contenders = [fly_contender(setting, shape is not None) for setting in settings]
        narrow = split(chosen(kernels))[1]
        others, skipped = load_peers(source, helper, k, number, Path(temporary), shape is not None, bool(narrow))
        contenders += others
        limits = measure_limits(cpu)
        with _progress("peers", turns * len(prompts) * len(contenders)) as advance:
            matches = measure_matches(contenders, prompts, most, turns, advance)
        limits = limits.best(measure_limits(cpu))
        right: list[list[bool]] = []
        cut = any(len(ids) == most for ids in matches[0].outputs)
        if shape is None and plain.tokenizer is not None and not cut:
            for match in matches:
                texts = [plain.tokenizer.decode(ids) for ids in match.outputs]
                right.append(check_many(list(zip(asked, texts))))
        limit = limits.seconds(forward_bytes(config, number, 1, 128, 1 if narrow else None), 0, number)
        precision = str(number).removeprefix("torch.")
        precision += f" (fly {narrow}, llama.cpp Q8_0)" if narrow else ""
        title = f"{shape or f'{model}, {draft}, k {k}'}, {precision}, {limits.threads} threads"
        title += f", {count} prompts, at most {most} tokens each, temperature 0, batch 1"
        console.print(peers_table(matches, right, title))
        console.print(
            f"[dim]tokens/s: best/median of {turns} turns; ratios of the best · alike: fly over this,\n"
            "autoregressive beside autoregressive, its fastest lossless speculation beside\n"
            "speculation · fastest: fly's fastest decoding of all over this · same: outputs\n"
            "like fly's autoregressive ones · agree: tokens before the first that differs ·\n"
            f"(to {_SURE}): up to {max(k, _MOST_SURE)} tokens, while one has at least {_SURE}, as in (own K) ·\n"
            f"limit of one token's bytes, read again and again: {1 / limit:,.0f} tokens/s[/]",
            highlight=False,
        )
        if shape is None and cut:
            console.print(f"\n[dim]answers are not checked, as {most} tokens are too few for them[/]", highlight=False)
        for reason in skipped:
            console.print(f"[yellow]{escape(reason)}[/]", highlight=False)
        if json_ is not None:
            record = {"limits": limits.as_json(), "skipped": skipped, "title": title}
            rows = [_match_as_json(match, matches[0], right[n] if right else []) for n, match in enumerate(matches)]
            json_.write_text(json.dumps({**record, "contenders": rows}, indent=2), encoding="utf-8")


def peers_table(matches: Sequence[Match], right: Sequence[Sequence[bool]], title: str) -> Table:
    """Everybody's speed, what they answer, and fly's speed over each peer's of the same kind."""
    table = _table(title, "library", "decoding", "tokens/s", "alike", "fastest", "same", "agree", "right")
    table.columns[1].justify = "left"
    own = [match for match in matches if match.contender.library == "fly"]
    for number, match in enumerate(matches):
        contender, rate = match.contender, match.tokens_per_second()
        same, share = match.agreement(matches[0])
        alike = [m for m in own if m.contender.speculative == contender.speculative and not m.contender.lossy]
        rivals = [] if contender.library == "fly" else [alike, own]
        fastest = [max((rival.tokens_per_second().high for rival in each), default=None) for each in rivals]
        ratios = ["–" if speed is None else f"{speed / rate.high:.2f}×" for speed in fastest] or ["", ""]
        first = number == 0 or matches[number - 1].contender.library != contender.library
        last = number + 1 == len(matches) or matches[number + 1].contender.library != contender.library
        table.add_row(
            contender.library if first else "",
            escape(contender.name),
            _best_median(rate),
            *ratios,
            f"{same}/{len(match.outputs)}",
            f"{share:.0%}",
            f"{sum(right[number])}/{len(right[number])}" if right else "–",
            end_section=last,
        )
    return table


def _match_as_json(match: Match, reference: Match, right: Sequence[bool]) -> dict[str, Any]:
    same, share = match.agreement(reference)
    return {
        "library": match.contender.library,
        "decoding": match.contender.name,
        "speculative": match.contender.speculative,
        "tokens_per_second": match.tokens_per_second().as_json(),
        "prompts": len(match.outputs),
        "same_outputs": same,
        "agreement": share,
        "right": sum(right) if right else None,
    }


@bench.command("twins")
def bench_twins(
    pair: Annotated[
        list[str] | None,
        typer.Option(help="Whose cost ratio: 70b:8b, 405b:8b (both if none is given), or a number such as 0.05."),
    ] = None,
    model: Model = "fly-target",
    draft: Annotated[str, typer.Option(help="Draft checkpoint.")] = "fly-draft",
    policy: Policy = "fly",
    k: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Draft lengths to measure; those published for the pair if none is given."),
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="Both are made this many times as wide; 4 is exact.")] = 4,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 24,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    json_: Json = None,
) -> None:
    """What a pair gains at the cost ratio of a large pair, measured on twins: its functions at a multiple of the cost.

    Acceptance and answers are those of the small pair; only the time is a larger pair's.
    """
    with cli._plain_errors(alone=True):
        from fly.bench.twins import PAIRS, measure_twins, parse_pair
        from fly.policies import parse_policy

        rule = parse_policy(policy, trusted=True)
        records = []
        for name in pair or list(PAIRS):
            cost, published = parse_pair(name)
            lengths = k or [published]
            with (
                TemporaryDirectory() as temporary,
                _progress("twins", (4 * len(lengths) + 3) * problems) as advance,
            ):
                twins = measure_twins(
                    *(model, draft, cost, lengths, rule, problems, Path(temporary), width),
                    *(dtype, device, kernels, _SURE, advance),
                )
            console.print(twins_table(twins, f"Twins of {model} and {draft} at the cost ratio of {name}: c {cost:.3f}"))
            records.append({"pair": name, "cost": cost, **twins.as_json()})
        console.print(
            "[dim]every figure is a twin's: texts and acceptance of the small pair, time of a\n"
            "larger one, behind each prompt; 'with prompts' is over AR with those in ·\n"
            "formula: τ / (K·c + v(K)), where c is the time of a drafted token and v that of\n"
            "a forward of K + 1, each timed alone, over a token of plain decoding · over\n"
            "exact: over the fastest exact speculation · rest: share of that time that is\n"
            f"neither target nor draft · (to {_SURE}): while the draft has at least that\n"
            "probability · recovery: accuracy over autoregressive's[/]",
            highlight=False,
        )
        if json_ is not None:
            json_.write_text(json.dumps(records, indent=2), encoding="utf-8")


def twins_table(twins: Twins, title: str) -> Table:
    """Speed, acceptance and accuracy of every setting on a pair of twins; the first is autoregressive."""
    lengths = "; ".join(f"K {k}: c {twins.cost(k):.3f}, v {twins.verification(k):.2f}" for k in twins.draft)
    plain = twins.results[0]
    right = f"{len(plain.right)} held-out problems, of which autoregressive decoding solves {sum(plain.right)}"
    table = _table(
        f"{title}\n{twins.describe()}\n{lengths}\n{right}",
        *("decoding (twin)", "K", "τ", "tok/s", "over\nAR", "formula"),
        *("over\nexact", "rest", "with\nprompts", "recovery"),
    )
    fastest = max(result.decoding_speed for result in twins.results if twins.exact(result))
    for result in twins.results:
        k, alone = result.setting.k, result is plain
        predicted = twins.predicted(result)
        table.add_row(
            "AR" if alone else escape(result.setting.name),
            "–" if alone else str(k),
            f"{result.stats.tau:.2f}",
            f"{result.decoding_speed:,.0f}",
            f"{result.decoding_speed / plain.decoding_speed:.2f}×",
            "–" if predicted is None else f"{predicted:.2f}×",
            "–" if alone else f"{result.decoding_speed / fastest:.2f}×",
            "–" if result.times.overhead is None else f"{result.times.overhead:.1%}",
            f"{result.tokens_per_second / plain.tokens_per_second:.2f}×",
            f"{result.accuracy / plain.accuracy:.1%}" if plain.accuracy else "–",
        )
    return table
