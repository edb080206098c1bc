"""``fly bench policy``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from fly.cli.options import Device
from fly.cli.run import alone
from fly.cli.show import console, progress
from fly.models.loading import resolve_device, resolve_dtype
from fly.policies import parse_policy


@alone
def bench_policy(
    policy: Annotated[list[str] | None, typer.Option(help="Policies; may be given several times.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes B.")] = None,
    k: Annotated[list[int] | None, typer.Option(min=1, help="Draft lengths K.")] = None,
    vocab: Annotated[list[int] | None, typer.Option(min=16, help="Vocabulary sizes V.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
) -> None:
    """What a decision costs, for B × K × V, beside the verification forward it follows (12 layers of width 768)."""
    from fly.bench.policy import measure_decisions

    rules = [parse_policy(text, trusted=True) for text in policy or ["exact", "fly"]]
    shapes = [(b, n, v) for v in vocab or [32_000, 128_256, 262_144] for b in rows or [1, 8] for n in k or [15]]
    where = {"dtype": resolve_dtype(dtype, {}), "device": resolve_device(device)}
    table = Table("policy", "B", "K", "V", "forward", "greedy", "share", "sampled", "share")
    with progress(len(rules) * len(shapes), "measuring") as advance:
        for rule in rules:
            for cost in measure_decisions(rule, shapes, **where):  # type: ignore[arg-type]
                table.add_row(
                    *(str(rule), f"{cost.rows}", f"{cost.k}", f"{cost.vocab:,}", f"{cost.forward * 1e3:,.1f} ms"),
                    *(f"{cost.greedy * 1e3:,.2f} ms", f"{cost.greedy / cost.forward:.1%}"),
                    *(f"{cost.sampled * 1e3:,.2f} ms", f"{cost.sampled / cost.forward:.1%}"),
                )
                advance()
    console.print(table)
    console.print(
        "[dim]share: the decision's time over the forward's, medians of 9; sampled: temperature 0.8, top-p 0.95[/]"
    )
