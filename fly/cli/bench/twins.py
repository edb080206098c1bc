"""``fly bench twins``."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fly.cli.options import Device, Dtype, Json, Kernels, Model, Policy
from fly.cli.run import alone
from fly.cli.show import console, note, progress, ratio, table, write_json
from fly.policies import parse_policy

if TYPE_CHECKING:
    from fly.bench.twins import Twins


@alone
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
    from fly.bench.peers import SURE
    from fly.bench.twins import PAIRS, measure_twins, parse_pair

    rule = parse_policy(policy, trusted=True)
    records = []
    for name in pair or list(PAIRS):
        cost, published = parse_pair(name)
        lengths = k or [published]
        with TemporaryDirectory() as temporary, progress((4 * len(lengths) + 3) * problems, "twins") as advance:
            twins = measure_twins(
                *(model, draft, cost, lengths, rule, problems, Path(temporary), width),
                *(dtype, device, kernels, SURE, advance),
            )
        console.print(twins_table(twins, f"Twins of {model} and {draft} at the cost ratio of {name}: c {cost:.3f}"))
        records.append({"pair": name, "cost": cost, **twins.as_json()})
    note(
        "every figure is a twin's: texts and acceptance of the small pair, time of a\n"
        "larger one, behind each prompt; 'with prompts' is over AR with those in ·\n"
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
