"""``fly train-exit``: from prompts to early exits for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fly.backends.choice import load
from fly.cli.options import LOADING, option, takes
from fly.cli.run import alone, options_of
from fly.cli.show import note, print_list, progress
from fly.extras.early_exit.training import ExitPlan, exit_card, train_exits
from fly.extras.train.answering import PROMPTS, answer_prompts, numbers_of

_EXITS = {
    "layers": option(str, "The layers after which it looks, such as 8,16,24. Default: about eight of them."),
    "candidates": option(int, "Tokens that a look compares.", min=2, default=ExitPlan.candidates),
    "vocabulary": option(int, "The frequent tokens that may be candidates.", min=2, default=ExitPlan.vocabulary),
    "agreement": option(
        float,
        "At least this share of the tokens that exit early must equal the target's.",
        min=0,
        max=1,
        default=ExitPlan.agreement,
    ),
    "places": option(int, "The most tokens of answers to look at.", min=100, default=ExitPlan.places),
    "steps": option(int, "Steps of the optimiser.", min=1, default=ExitPlan.steps),
    "seed": option(int, "Seed of the first weights and the order.", default=ExitPlan.seed),
}


@alone
@takes(PROMPTS, _EXITS, LOADING)
def train_exit(
    context: typer.Context,
    out: Annotated[
        Path, typer.Argument(help="The directory of the exits; answers that are already there are used again.")
    ],
    layers: str | None,
    model: str,
    dtype: str,
    device: str,
    **_: Any,
) -> None:
    """Train early exits (SpecEE) for a target on its own answers: predictors of when more layers change nothing.

    The prompts are answered with --kernels. Exits are trained, and run, on PyTorch.
    """
    plan = ExitPlan(numbers_of("--layers", layers), **options_of(context, _EXITS.keys() - {"layers"}))
    answers, data = answer_prompts(out, 0.0, options_of(context, PROMPTS), options_of(context, LOADING))[1:]
    with progress(min(plan.places, sum(len(answer.answer) for answer in answers)), "looking at the answers") as advance:
        executor = load(model, dtype, device, "torch").executor
        exits, looks, passed = train_exits(executor, answers, plan, out, lambda n: advance(n=n))
    (out / "README.md").write_text(exit_card(out.name, model, data, exits, plan, looks, passed), "utf-8")
    rows = [
        (str(look.layer), f"{look.settled:.1%}", f"{look.leave:.1%}", "" if look.agree is None else f"{look.agree:.1%}")
        for look in looks
    ]
    print_list(
        rows, "after layers", "settled", "leave, of those left", "of these agree", title=f"{out}: held-out answers"
    )
    note(f"they go through {passed:.1%} of the layers; written to {out}: early_exit.load({model!r}, {str(out)!r})")
