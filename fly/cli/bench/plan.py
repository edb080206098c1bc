"""``fly bench plan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from fly.cli.options import CollectiveTimeout, HeartbeatTimeout, K, Policy, number
from fly.cli.run import command, memory_in_words, ranks_of
from fly.cli.show import console, note, ratio
from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT
from fly.policies import parse_policy

if TYPE_CHECKING:
    from fly.bench.calibrate import Check
    from fly.bench.plan import Device


@command
def bench_plan(
    typed: typer.Context,
    target: Annotated[
        str | None, typer.Option(help="llama-3.1-8b, -70b, -405b, or a checkpoint; none shows the paper's settings.")
    ] = None,
    draft: Annotated[str, typer.Option(help="Likewise, or 'none'.")] = "llama-3.1-8b",
    tau: Annotated[float | None, number(1, help="Tokens a round emits; needed with --target.")] = None,
    draft_tau: Annotated[float, number(1, help="Tokens a forward of the draft gives (multi-level).")] = 1.0,
    k: K = 15,
    device: Annotated[str, typer.Option(help="a100, h100, h200 or mi300x.")] = "h100",
    ranks: Annotated[int, typer.Option(min=1, help="Devices in all.")] = 8,
    per_node: Annotated[int, typer.Option(min=1, help="Devices of one node.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens each has behind it.")] = 2048,
    check: Annotated[
        bool, typer.Option("--check", help="Predict the bundled pair (or --target, --draft) here, and run it.")
    ] = False,
    policy: Policy = "fly",
    dtype: Annotated[str, typer.Option(help="With --check: auto, bfloat16, float16 or float32.")] = "auto",
    draft_placement: Annotated[str, typer.Option(help="With --check: auto, replicated or sharded.")] = "auto",
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT,
    collective_timeout: CollectiveTimeout = COLLECTIVE_TIMEOUT,
) -> None:
    """Whether a setting fits on machines, and what speculation should gain there, by a model of costs.

    --check compares the model with this machine, on as many ranks as torchrun starts.
    """
    with ranks_of(typed) as here:
        from fly.bench.plan import DEVICES, MODELS, PAPER, Machines, Setting, forecast
        from fly.bundled import resolve_checkpoint
        from fly.models import LlamaConfig

        if check:
            from fly.bench.calibrate import check_here

            pair = (target or "fly-target", "fly-draft" if draft in MODELS else draft)
            rule = parse_policy(policy, trusted=True)
            _show_check(check_here(*pair, rule, k, dtype, here, draft_placement), *pair)  # type: ignore[arg-type]
            return
        if device not in DEVICES:
            raise ValueError(f"device {device!r} is unknown; choices: {list(DEVICES)}")

        def sizes(name: str) -> LlamaConfig:
            return MODELS[name] if name in MODELS else LlamaConfig.read(resolve_checkpoint(name))[0]

        common: dict[str, Any] = {"draft_tau": draft_tau, "rows": rows, "context": context}
        small = None if draft == "none" else sizes(draft)
        plans: list[tuple[str, Setting, int, float | None]] = []
        if target is None:
            plans += [(p.name, Setting(MODELS[p.target], small, p.k, p.tau, **common), p.ranks, p.gain) for p in PAPER]
        elif tau is None:
            raise ValueError("--tau is needed with --target: how many tokens a round emits is nothing a plan can tell")
        else:
            plans.append((f"{target} : {draft}", Setting(sizes(target), small, k, tau, **common), ranks, None))
        memory, headings, columns = DEVICES[device].memory, [Column()], []
        for name, setting, count, published in plans:
            found = forecast(setting, Machines(DEVICES[device], count, per_node))
            for placement, step in found.draft.items():
                headings.append(Column(escape(name), justify="right"))
                held = found.memory[placement]
                columns.append(
                    {
                        "ranks": f"{count}",
                        "K": f"{setting.k}",
                        "τ": f"{setting.tau:g}",
                        "draft": placement,
                        "a rank holds": f"{held / 1e9:,.0f} of {memory / 1e9:,.0f} GB"
                        + ("" if held <= memory else "\n[bold red]does not fit[/]"),
                        "plain step": f"{found.step * 1e3:.1f} ms",
                        "verification": f"{found.verify * 1e3:.1f} ms",
                        "draft step": f"{step * 1e3:.1f} ms",
                        "tokens/s plain": f"{1 / found.step:,.0f}",
                        "with draft": f"{setting.tau / found.round(placement):,.0f}",
                        "gain": ratio(found.gain(placement)),
                        "published": ratio(published),
                    }
                )
        shown = Table(*headings, title=f"{device}, {per_node} a node, {rows} × {context} tokens", title_justify="left")
        for name in columns[0]:
            shown.add_row(name, *(column[name] for column in columns))
        console.print(shown)
        note(
            "published: arXiv 2511.22972, on hardware and an engine of its own · gain: over no draft "
            "· a step without graphs, which on 8 ranks costs a small draft most of its time"
        )


def _show_check(found: Check, target: str, draft: str) -> None:
    """Print what was predicted and measured on this machine, and the figures that predicted it."""
    here, beside = found.target.device, found.draft.device
    speeds = Table(
        *_right("", "predicted", "measured", "predicted / measured"),
        title=f"{target} : {draft} on {found.target.ranks} ranks, here",
        title_justify="left",
    )
    for name, predicted, measured in zip(("plain", f"draft, {found.placement}"), found.predicted, found.measured):
        speeds.add_row(name, f"{predicted:,.0f} tokens/s", f"{measured:,.0f} tokens/s", f"{predicted / measured:.2f}")
    gains = [drafted / plain for plain, drafted in (found.predicted, found.measured)]
    speeds.add_row("gain", *map(ratio, gains), f"{gains[0] / gains[1]:.2f}")
    console.print(speeds)
    figures = Table(*_right("", escape(target), escape(draft)), title="figures, of stand-ins for", title_justify="left")
    shown: dict[str, Callable[[Device], str]] = {
        "weights read": lambda d: f"{d.bandwidth / 1e9:.1f} GB/s",
        f"multiplied, {found.tokens} tokens": lambda d: f"{d.flops / 1e9:,.0f} GFLOP/s",
        "keys and values read": lambda d: f"{(d.cached or d.bandwidth) / 1e9:.1f} GB/s",
        "a layer's calls": lambda d: f"{d.layer * 1e6:,.0f} µs",
        "a forward's calls": lambda d: f"{d.forward * 1e6:,.0f} µs",
    }
    for name, figure in shown.items():
        figures.add_row(name, figure(here), figure(beside))
    console.print(figures)
    exchange = f" · all-reduce {here.link.latency * 1e6:,.0f} µs" if found.target.ranks > 1 else ""
    engine = f"a round {here.round * 1e6:,.0f} µs, a drafted token {here.drafted * 1e6:,.0f} µs"
    for line in (f"τ {found.tau:.2f} · engine: {engine}{exchange}", memory_in_words(found.memory)):
        console.print(line, highlight=False, soft_wrap=True)


def _right(*headings: str) -> list[Column]:
    return [Column(heading, justify="right") for heading in headings]
