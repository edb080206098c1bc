"""``fly bench plan``: what speculation should gain on other machines."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Column

from fly.cli.options import K, number, option, takes
from fly.cli.run import alone, refuse_idle, rules_of
from fly.cli.show import note, print_list, progress, ratio
from fly.extras.bench.blocks import DFLASH, QWEN3_8B, TAUS, measure_costs
from fly.extras.bench.plan import DEVICES, MODELS, PAPER, Machines, Setting, forecast
from fly.extras.bench.scale import lengths, replays, scaled
from fly.extras.eval.replay import Replay, Unknown, load_blocks
from fly.extras.eval.replay_command import Refusals, tell_stops
from fly.models import CheckpointError, LlamaConfig
from fly.models.bundled import open_model
from fly.policies import AcceptancePolicy


class _Plan(NamedTuple):
    """A pair of models on some machines, and the gain that was published for it."""

    name: str
    setting: Setting
    machines: Machines
    published: float | None


_SETTING = {
    "target": option(str, "llama-3.1-8b, -70b, -405b, or a checkpoint; none shows the paper's settings."),
    "draft": option(
        str, "The draft, named likewise, 'none', or 'dflash': a block drafter for Qwen3-8B, at costs measured here.",
        default="llama-3.1-8b",
    ),
    "tau": (
        Annotated[float | None, number(1, help="Tokens that a round emits; needed with --target.")], None,
    ),
    "draft_tau": (
        Annotated[float, number(1, help="Tokens that a forward of the draft gives (with several levels).")], 1.0,
    ),
    **K,
    "device": option(str, "a100, h100, h200 or mi300x.", default="h100"),
    "ranks": option(int, "Devices in all.", min=1, default=8),
    "per_node": option(int, "Devices of one node.", min=1, default=8),
    "rows": option(int, "Sequences in a batch.", min=1, default=1),
    "context": option(int, "Tokens of context of each sequence.", min=1, default=2048),
    "kernels": option(str, "With --draft dflash, the target's kernels here.", default="w8a8"),
}  # fmt: skip


@alone
@takes(_SETTING)
def bench_plan(
    typed: typer.Context,
    recorded: Annotated[
        Path | None,
        typer.Option(help="A run of 'fly eval --record': its acceptance gives τ, for each rule.", metavar="RUN"),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="With --recorded, a rule beside exact; repeatable.")] = None,
    **setting: Any,
) -> None:
    """Estimate whether a setting fits on given devices, and what speculation should gain there.

    --recorded takes the acceptance from a run, and shows the best draft length of each rule. --draft dflash is about
    this machine: it times forwards of these shapes with random weights.
    """
    if setting["draft"] == "dflash":
        idle_options = [name for name in _SETTING if name not in ("draft", "tau", "kernels")]
        refuse_idle(typed, (*idle_options, "recorded", "policy"), "with --draft dflash")
        _show_blocks(setting["tau"], setting["kernels"])
        return
    refuse_idle(typed, ("kernels",), "without --draft dflash")
    setting.pop("kernels")
    if recorded is None:
        refuse_idle(typed, ("policy",), "without --recorded")
    else:
        refuse_idle(typed, ("tau", "draft_tau", "k"), "with --recorded")
    if setting["target"] is None:  # the paper's settings have their own
        refuse_idle(typed, ("tau", "k", "ranks"), "without --target")
    if setting["device"] not in DEVICES:
        raise ValueError(f"device {setting['device']!r} is unknown; choices: {list(DEVICES)}")
    if setting["target"] is not None and setting["tau"] is None and recorded is None:
        raise ValueError("--tau is needed with --target: a plan cannot know how many tokens a round emits")
    plans = _plans(**setting)
    if recorded is None:
        _show_forecasts(plans, "{device}, {per_node} a node, {rows} × {context} tokens".format(**setting))
    elif setting["draft"] == "none":
        raise ValueError("--recorded needs a draft model, and '--draft none' is none")
    else:
        _show_recorded(recorded, policy, plans)


def _plans(
    target: str | None, draft: str, tau: float | None, k: int, device: str, ranks: int, per_node: int, **common: Any
) -> list[_Plan]:
    """Return the settings to show: one of the options, or without a target all of the paper."""

    def sizes(name: str) -> LlamaConfig:
        try:
            return MODELS[name] if name in MODELS else open_model(name).config
        except CheckpointError as error:
            raise CheckpointError(f"{error}; known sizes: {list(MODELS)}") from None

    small = None if draft == "none" else sizes(draft)
    settings: list[tuple[str, Setting, int, float | None]]
    if target is None:
        settings = [(p.name, Setting(MODELS[p.target], small, p.k, p.tau, **common), p.ranks, p.gain) for p in PAPER]
    else:
        settings = [(f"{target} : {draft}", Setting(sizes(target), small, k, tau or 1.0, **common), ranks, None)]
    return [
        _Plan(name, setting, Machines(DEVICES[device], count, per_node), gain)
        for name, setting, count, gain in settings
    ]


def _show_forecasts(plans: list[_Plan], title: str) -> None:
    """Print a column for each pair of models and each device of its draft."""
    headings, columns = [Column()], []
    for name, setting, machines, published in plans:
        prediction, memory = forecast(setting, machines), machines.device.memory
        for placement, step in prediction.draft.items():
            headings.append(Column(f"{escape(name)}\n{placement}", justify="right"))
            rank_bytes = prediction.memory[placement]
            columns.append(
                {
                    "ranks": f"{machines.ranks}",
                    "K": f"{setting.k}",
                    "τ": f"{setting.tau:g}",
                    "a rank holds": f"{rank_bytes / 1e9:,.0f} of {memory / 1e9:,.0f} GB"
                    + ("" if rank_bytes <= memory else "\n[bold red]does not fit[/]"),
                    "plain step": f"{prediction.step * 1e3:.1f} ms",
                    "verification": f"{prediction.verify * 1e3:.1f} ms",
                    "draft step": f"{step * 1e3:.1f} ms",
                    "tokens/s plain": f"{1 / prediction.step:,.0f}",
                    "with draft": f"{setting.tau / prediction.round(placement):,.0f}",
                    "gain": ratio(prediction.gain(placement)),
                    "published": ratio(published),
                }
            )
    lines = ((name, *(column[name] for column in columns)) for name in columns[0])
    print_list(lines, *headings, title=title)
    note(
        "replicated, sharded: how the ranks hold the draft · published: arXiv 2511.22972, with its own hardware and "
        "engine · gain: over no draft · nothing here was measured on an accelerator"
    )


def _show_blocks(tau: float | None, kernels: str) -> None:
    """Measure the costs of a block drafter for Qwen3-8B here, and print its gain at the published τ, or at ``tau``."""
    turns = 7
    with progress(turns + 1, "timing forwards of these shapes, with random weights") as advance:
        costs = measure_costs(kernels=kernels, turns=turns, advance=advance)
    taus = TAUS if tau is None else {"--tau": tau}
    lines = [
        (name, f"{each:g}", f"{costs.step * 1e3:,.0f} ms", f"{costs.verify / costs.step:.2f}",
         f"{costs.block / costs.step:.2f}", f"{1 / costs.step:,.1f}", ratio(costs.gain(each)))
        for name, each in taus.items()
    ]  # fmt: skip
    headings = ("τ", "plain step", "verification", "draft", "tokens/s plain", "gain")
    columns = [Column(heading, justify="right") for heading in headings]
    title = f"a plan: Qwen3-8B with DFlash on this machine, blocks of {DFLASH.block_size}"
    print_list(lines, "τ of", *columns, title=title)
    target, drafter = costs.kernels
    note(
        "a plan, not a measurement: neither model was loaded · τ: tokens a round, published for temperature 0, exact "
        "speculation, without thinking · costs: measured here with random weights of these shapes, one row (target "
        f"{target}, drafter {drafter}; few layers stand for all {QWEN3_8B.num_hidden_layers}) · verification, draft: "
        "in plain steps · gain: over no draft, τ / (draft + verification), deciding left out"
    )


def _show_recorded(run: Path, policy: list[str] | None, plans: list[_Plan]) -> None:
    """Print the best draft length and its gain, for each recorded task, rule and pair of models."""
    recorded_blocks = load_blocks(run)
    for (_, way), blocks in recorded_blocks.items():
        if blocks.draft is None:
            raise ValueError(f"{run}: {way} was recorded without a draft model, so its acceptance is unknown")
        if blocks.head:
            raise ValueError(f"{run}: {way} was recorded with a trained head, whose costs this plan does not know")
    refusals = Refusals(policy)
    rules = rules_of(policy)
    # Replay every rule on every task, at all lengths.
    replayed: dict[tuple[str, str, AcceptancePolicy], list[Replay]] = {}
    with progress(
        len(rules) * sum(len(lengths(blocks)) for blocks in recorded_blocks.values()), "replaying"
    ) as advance:
        for (key, blocks), rule in product(recorded_blocks.items(), rules):
            try:
                replayed[*key, rule] = replays(blocks, rule, advance)
            except Unknown as error:
                advance(n=len(lengths(blocks)))
                refusals.add(error, rule)
    refusals.tell()
    # Print a table for each task, with the best length for each rule, pair of models and number of levels.
    for (task, way), blocks in recorded_blocks.items():
        lines: list[list[str]] = []
        replayed_rules = [(rule, replayed[task, way, rule]) for rule in rules if (task, way, rule) in replayed]
        for (rule, rule_replays), plan, levels in product(replayed_rules, plans, (1, 2)):
            best = scaled(rule_replays, plan.setting, plan.machines, levels)
            stop = f"reach {best.replay.reach:g}" if best.replay.reach else "fixed"
            gain = f"{ratio(best.gain.value)} ({best.gain.low:.2f}–{best.gain.high:.2f})"
            drafted, tau = f"{best.replay.drafted:.1f}, {stop}", f"{best.replay.tau.value:.1f}"
            lines.append([str(rule), plan.name, f"{levels}", drafted, tau, gain if best.fits else "does not fit"])
        if lines:
            columns = [Column(heading, justify="right") for heading in ("levels", "drafted, stop", "τ", "gain")]
            title = f"{task}, acceptance of {way}, {len(blocks.recordings)} completions"
            print_list(([*map(escape, line)] for line in lines), "rule", "target : draft", *columns, title=title)
    tell_stops(recorded_blocks)
    published = ", ".join(f"{each.name} {ratio(each.gain)}" for each in PAPER)
    note(
        f"gain: over no draft, on {plans[0].machines.device.name}, by a model of costs, at the best length of those "
        "tried; its interval is that of τ · levels: with 2, prompt lookup drafts for the draft model · drafted: tokens "
        "a round; reach: the draft stops by itself, once the product of its probabilities is below it · published, "
        f"with other acceptance: {published}"
    )
