"""``fly bench peers``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fly.cli.bench.speed import NO_SHAPE, best_median
from fly.cli.options import DraftLength, Dtype, Json, Kernels, Model, Policy, Turns
from fly.cli.run import alone
from fly.cli.show import console, note, progress, ratio, table, write_json
from fly.policies import parse_policy

if TYPE_CHECKING:
    from fly.bench.contender import Match


@alone
def bench_peers(
    model: Model = "fly-target",
    draft: Annotated[str, typer.Option(help="Draft checkpoint for all who take one.")] = "fly-draft",
    policy: Policy = "fly",
    k: DraftLength = 15,
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
    from fly.bench.limits import measure_limits
    from fly.bench.peers import MOST_SURE, SURE, line_up
    from fly.models.loading import resolve_device

    rule, cpu = parse_policy(policy, trusted=True), resolve_device("cpu")
    shape = None if shape == NO_SHAPE else shape
    with TemporaryDirectory() as temporary:
        lineup = line_up(model, draft, rule, k, Path(temporary), shape, problems, tokens, dtype, kernels)
        limits = measure_limits(cpu)
        with progress(turns * len(lineup.prompts) * len(lineup.contenders), "peers") as advance:
            matches, cut = lineup.measure(turns, advance)
        limits = limits.best(measure_limits(cpu))
    limit = limits.seconds(lineup.token_bytes(), 0, lineup.dtype)
    title = f"{shape or f'{model}, {draft}, k {k}'}, {lineup.precision}, {limits.threads} threads"
    title += f", {len(lineup.prompts)} prompts, at most {lineup.tokens} tokens each, temperature 0, batch 1"
    console.print(peers_table(matches, title))
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
    write_json(json_, {**record, "contenders": [match.as_json(matches[0]) for match in matches]})


def peers_table(matches: Sequence[Match], title: str) -> Table:
    """Everybody's speed, what they answer, and fly's speed over each peer's of the same kind."""
    by_library: dict[str, list[Match]] = {}
    for match in matches:
        by_library.setdefault(match.contender.library, []).append(match)
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
