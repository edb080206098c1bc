"""``fly train-head``: from prompts to a draft head for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fly.cli.options import GRID, LOADING, option, takes
from fly.cli.run import alone, grid_of, options_of
from fly.cli.show import note, print_list, progress
from fly.extras.train import Plan, card, train_head
from fly.extras.train.answering import PROMPTS, answer_prompts, numbers_of
from fly.extras.train.plan import KINDS


def _of(name: str, kind: Any, help: str, **look: Any) -> tuple[Any, Any]:
    """Return the option of a setting that only some kinds of heads have."""
    kinds = [each for each, settings in KINDS.items() if name in settings]
    return option(kind, f"Of {' and '.join(kinds)}: {help} Default: {KINDS[kinds[0]][name]:g}.", **look)


_HEAD = {
    "kind": option(str, "What is trained: eagle3, or the block drafters dflash and dspark.", default=Plan.kind),
    "width": option(int, "The head's width. Default: the target's, whose embedding it then shares.", min=32),
    "intermediate": option(int, "Width of its feed-forward. Default: 8/3 of its width.", min=1),
    "states": option(str, "The layers after which the head reads the target's hidden states, such as 1,2,4."),
    "draft_vocabulary": option(int, "Tokens it can draft; at most 32000.", min=1),
    "steps": option(int, "Steps of the optimiser.", min=1, default=Plan.steps),
    "batch": option(int, "Answers per step.", min=1, default=Plan.batch),
    "length": option(int, "The most tokens of a prompt and its answer.", min=8, default=Plan.length),
    "test_steps": _of("test_steps", int, "The head's own steps in the training-time test.", min=1),
    "layers": _of("layers", int, "Layers of the head.", min=1),
    "block_size": _of("block_size", int, "Places of a block.", min=2),
    "anchors": _of("anchors", int, "Blocks of each answer that a step learns from.", min=1),
    "gamma": _of("gamma", float, "The draft after j others counts exp(-j / gamma)."),
    "markov_rank": _of("markov_rank", int, "Rank of the correction by the token before.", min=1),
    "learning_rate": option(float, "The highest learning rate of AdamW.", default=Plan.learning_rate),
    "precision": option(str, "Precision of products in training: bfloat16 or float32.", default=Plan.precision),
    "save_every": option(int, "Steps between two checkpoints.", min=1, default=Plan.save_every),
    "seed": option(int, "Seed of the first weights and the order.", default=Plan.seed),
}


@alone
@takes(PROMPTS, _HEAD, LOADING, GRID)
def train_head_command(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="The head's directory; training that was begun there is continued.")],
    states: str | None,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of the target's answers; 0 is greedy.")] = 0.0,
    **options: Any,
) -> None:
    """Train a draft head for a target on its own answers: EAGLE-3, or the block drafters DFlash and DSpark.

    The head is written in a published layout. If the command is killed, the same one continues: answers and checkpoints
    are in the directory.
    """
    plan = Plan(**{**options_of(context, _HEAD), "states": numbers_of("--states", states)})
    grid = grid_of(**options_of(context, GRID))
    llm, answers, data = answer_prompts(
        out, temperature, options_of(context, PROMPTS), options_of(context, LOADING), grid
    )
    with progress(plan.steps, "training") as advance:
        executor = llm.engine.runner.executor
        head, trained = train_head(executor, answers, plan, out, lambda n, text: advance(text, n))
    tokens = sum(len(answer.answer) for answer in answers)
    (out / "README.md").write_text(card(out.name, options["model"], data, tokens, head, plan, trained), "utf-8")
    depths = range(1, len(trained.held_out) + 1)
    rows = [(str(n), f"{share:.1%}", f"{tau:.2f}") for n, share, tau in zip(depths, trained.held_out, trained.tau)]
    print_list(rows, "depth", "accepted", "τ", title=f"{out}: held-out acceptance, where all tokens before were kept")
    note(f"written to {out}; draft with it: --draft {out}")
