"""``fly replay``: try rules on the blocks that a run recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape
from rich.text import Text

from fly.cli.options import Json, Rules, option, output, takes
from fly.cli.run import alone, rules_of
from fly.cli.show import console, narrow, note, ratio, table, warn, write_json
from fly.expressions import grid
from fly.extras.eval.beside import Comparison, Prediction, compare_with_run
from fly.extras.eval.command import DraftCost, VerifyCost, costs_of
from fly.extras.eval.plots import save_lines
from fly.extras.eval.replay import Blocks, Replay, Unknown, load_blocks
from fly.extras.statistics import Estimate
from fly.policies import AcceptancePolicy, parse_policy

_LEGEND = (
    "τ: tokens a round, after the end of a recorded block by the text of exact decoding (beyond: share of tokens kept "
    "there) · over exact: τ beside that of the recorded run · relaxed: share of tokens kept though the exact rule "
    "rejects them · nats: -ln of the target's probability of these, in a thousand tokens · drafted: tokens a round · "
    "speed: over AR if decisions took no time · place in the draft: how often it is kept, in drafts that long"
)


_WAYS = {
    "k": option(list[int], "The most tokens drafted in a round; repeatable. Default: as recorded.", min=1),
    "confidence": option(
        list[float], "The draft stops after a token less probable than this; repeatable.", min=0, max=1
    ),
    "reach": option(
        list[float], "The draft stops once the product of its probabilities is below this; repeatable.", min=0, max=1
    ),
}


@alone
@takes(_WAYS)
def replay(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs that 'fly eval --record' made.", metavar="RUN...")
    ],
    policy: Rules = None,
    measured: Annotated[
        Path | None,
        typer.Option("--beside", help="A run of other rules: shows predicted beside measured figures.", metavar="RUN"),
    ] = None,
    c: DraftCost = None,
    v: VerifyCost = None,
    cases: Annotated[int, typer.Option(min=0, help="How many relaxed tokens of each rule to show.")] = 0,
    plot: Annotated[
        Path | None,
        output(
            help="Write a plot of speed by nats, a line a rule (.svg); of several tasks NAME-TASK.svg.", suffix=".svg"
        ),
    ] = None,
    json_: Json = None,
    **ways: Any,
) -> None:
    """Try any rule on recorded blocks: tokens a round, relaxed tokens, and how fast that would be.

    Exact speculation comes first, so every draft length and stop is compared with it.
    """
    costs = costs_of(c, v)
    rules = rules_of(policy) if policy or measured is None else []
    record: list[dict[str, Any]] = []
    refusals = Refusals(policy)
    for run in runs:
        loaded = load_blocks(run, costs)
        for (task, way), blocks in loaded.items() if rules else ():
            replays = _replay(blocks, rules, cases, refusals, **ways)
            _show(f"{run} · {task} · {way}", blocks, replays)
            if plot is not None and replays:
                _plot(plot if len(loaded) == 1 else plot.with_stem(f"{plot.stem}-{task}"), f"{task}, {way}", replays)
            record += [{"run": str(run), "task": task, "way": way, **_as_json(each)} for each in replays]
        if measured is not None:
            comparison = compare_with_run(loaded, run, measured)
            _show_beside(f"{run} beside {measured}", comparison)
            record += [
                {"run": str(run), "task": each.task, "way": each.way, **_as_json(each.predicted),
                 "measured": each.measured, "measured_relaxed": each.relaxed, "off": each.off,
                 "unchanged_off": each.unchanged}
                for each in comparison.predictions
            ]  # fmt: skip
        tell_stops(loaded)
    refusals.tell()
    if rules:
        note(escape(_LEGEND))
    write_json(json_, record)


def tell_stops(known: Mapping[tuple[str, str], Blocks]) -> None:
    """Say what cannot be replayed because recorded drafts stopped by themselves, or came from a trained head."""
    for (task, way), blocks in known.items():
        if blocks.head:
            warn(
                f"{task}, {way}: a trained head drafts anew in each round, from the target's hidden states; a replayed "
                f"draft that begins inside a recorded one has its guesses, so τ of all but {way} is an estimate"
            )
        if blocks.stopped:
            never = f"{blocks.head or 'model'}(NAME)"
            warn(
                f"{task}, {way}: {blocks.stopped} of {sum(blocks.exact[1])} drafts stopped by themselves, and replayed "
                "drafts end there at the latest: a lower reach or confidence changes nothing, and τ is too low for all "
                f"but {way}; a run recorded with --draft '{never}' has drafts of {blocks.k} tokens"
            )


class Refusals:
    """What could not be replayed. It is said once for each text of the command line, however many rules, draft
    lengths, tasks and runs it stands for."""

    def __init__(self, policies: Sequence[str] | None) -> None:
        self._texts = {str(parse_policy(each, trusted=True)): text for text in policies or () for each in grid(text)}
        self._rules: dict[str, dict[str, str]] = {}
        self._lines: dict[str, None] = {}

    def add(self, error: Unknown, rule: AcceptancePolicy) -> None:
        """Note the rule whose replay raised ``error``."""
        if error.rule is None:
            self._lines[str(error)] = None
        else:
            text = self._texts.get(str(rule), str(rule))
            self._rules.setdefault(text, {}).setdefault(str(rule), str(error))

    def add_lengths(self, lengths: Sequence[int], longest: int) -> None:
        """Note draft lengths above the ``longest`` recorded one."""
        if lengths:
            self._lines[f"k {', '.join(map(str, lengths))}: drafts of {longest} tokens were recorded"] = None

    def tell(self) -> None:
        """Print a line for each text."""
        for text, reasons in self._rules.items():
            suffix = f"; nor can {len(reasons) - 1} more of the rules '{text}'" if len(reasons) > 1 else ""
            warn(f"{next(iter(reasons.values()))}{suffix}")
        for line in self._lines:
            warn(line)


def _replay(
    blocks: Blocks,
    rules: list[AcceptancePolicy],
    cases: int,
    refused: Refusals,
    k: list[int] | None,
    confidence: list[float] | None,
    reach: list[float] | None,
) -> list[Replay]:
    """Replay each rule in each way, except those that are ``refused``."""
    replays = []
    lengths = [blocks.k] if k is None else k
    refused.add_lengths([n for n in lengths if n > blocks.k], blocks.k)
    fitting_lengths = [n for n in lengths if n <= blocks.k]
    for rule, most, least, product_of in product(rules, fitting_lengths, confidence or [0.0], reach or [0.0]):
        try:
            replays.append(blocks.replay(rule, most, least, product_of, cases))
        except Unknown as error:
            refused.add(error, rule)
    return replays


def _as_json(each: Replay) -> dict[str, Any]:
    return {**asdict(each), "policy": str(each.policy)}


def _name(each: Replay) -> str:
    stops = {"confidence": each.confidence, "reach": each.reach}
    return ", ".join([f"{each.policy} k{each.k}", *(f"{name} {value:g}" for name, value in stops.items() if value)])


def _interval(figure: Estimate) -> str:
    return f"{figure.value:.2f} ({figure.low:.2f}–{figure.high:.2f})"


_Row = TypeVar("_Row")


def _print(
    heading: str, rows: list[_Row], name: Callable[[_Row], str], columns: dict[str, Callable[[_Row], str]]
) -> None:
    """Print a table whose first column wraps."""
    console.print(table("", rows, narrow({heading: name, **columns}), show_edge=False))


def _show(title: str, blocks: Blocks, replays: list[Replay]) -> None:
    columns: dict[str, Callable[[Replay], str]] = {
        "τ": lambda each: _interval(each.tau),
        "over exact": lambda each: f"{each.tau.value / each.exact:.3f}×",
        "relaxed": lambda each: f"{each.relaxed:.1%}",
        "nats": lambda each: f"{each.nats:.1f}",
        "beyond": lambda each: f"{each.beyond:.1%}",
        "drafted": lambda each: f"{each.drafted:.1f}",
        "speed": lambda each: ratio(each.speed),
    }
    rounds, completions = sum(blocks.exact[1]), len(blocks.recordings)
    console.print(f"[bold]{escape(title)}[/] · {rounds} blocks of {completions} completions", soft_wrap=True)
    if replays:
        _print("rule", replays, _name, columns)
        places = sorted({at for at in (1, 2, 3, 4, 5, 7, 10, 15, 20, 25, 40, blocks.k) if at <= blocks.k})
        _print("place in the draft", replays, _name, {str(at): _kept_at(at) for at in places})
        seconds = sum(each.seconds for each in replays)
        note(f"{sum(each.rounds for each in replays) / max(seconds, 1e-9):,.0f} rounds replayed a second")
    texts = blocks.vocabulary.texts if any(each.tokens for each in replays) else []
    for each in replays:
        if each.tokens:
            note(f"relaxed by {escape(_name(each))}: what was drafted, in place of what the target wanted")
        for token in each.tokens:
            before, drafted = (
                "".join(texts[i] for i in ids).replace("\n", "⏎") for ids in (token.before, [token.token])
            )
            line = Text.assemble((f"  {token.problem} +{token.place}: ", "dim"), before, (drafted, "bold red"))
            line.append(f"  [{texts[token.choice]!r}, {token.nats:.2f} nats]", "dim")
            console.print(line, soft_wrap=True, highlight=False)


def _plot(path: Path, title: str, replays: list[Replay]) -> None:
    """Plot speed by the cost of relaxed tokens: one line a rule, through its draft lengths and stops."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in replays:
        if each.speed is not None:
            lines.setdefault(str(each.policy), []).append((each.nats, each.speed))
    if not lines:
        note("nothing is plotted: costs are not known; give --draft-cost and --verify-cost")
        return
    lines = {rule: sorted(points) for rule, points in lines.items()}
    save_lines(path, title, "nats of relaxed tokens in a thousand", "speed over autoregression", lines, from_zero=False)


def _kept_at(place: int) -> Callable[[Replay], str]:
    return lambda each: f"{each.curve[place - 1]:.0%}" if len(each.curve) >= place else "–"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _show_beside(title: str, compared: Comparison) -> None:
    columns: dict[str, Callable[[Prediction], str]] = {
        "predicted τ": lambda each: _interval(each.predicted.tau),
        "measured": lambda each: _interval(each.measured),
        "off": lambda each: f"{each.off:+.1%}",
        "τ unchanged": lambda each: f"{each.unchanged:+.1%}",
        "relaxed": lambda each: f"{each.predicted.relaxed:.1%}, {_share(each.relaxed)}",
    }
    predictions = compared.predictions
    problems = f" · {max(each.problems for each in predictions)} problems" if predictions else ""
    console.print(f"[bold]{escape(title)}[/]{problems}", soft_wrap=True)
    if predictions:
        _print("task, way", predictions, lambda each: f"{each.task}, {each.way}", columns)
    reasons: dict[str, list[str]] = {}
    for task, way, reason in compared.left_out:
        reasons.setdefault(reason, []).append(f"{task}, {way}")
    for reason, names in reasons.items():
        warn(f"left out: {'; '.join(names)}: {reason}")
    for line in compared.unlike:
        warn(f"unlike runs: {line}")
    note(
        "off: the error of the prediction; τ unchanged: the error of the guess that a rule has the τ of exact "
        "speculation; relaxed: the predicted share and the measured one"
    )
