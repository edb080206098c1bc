"""``fly train-head`` and ``fly train-exit``: from prompts to a draft head, or to early exits, for a target."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fly.backends.choice import load
from fly.cli.options import GRID, LOADING, option, takes
from fly.cli.run import alone, grid_of, options_of
from fly.cli.show import note, print_list, progress
from fly.extras.train import Answer, ExitPlan, Plan, answers, card, exit_card, prompts_of, train_exits, train_head
from fly.llm import LLM
from fly.types import SamplingParams

_PROMPTS = {
    "prompts": option(
        Path, "A file of prompts: .jsonl (texts, messages, or objects with either), or one prompt a line."
    ),
    "task": option(str, "Instead of --prompts, a kind of the bundled tasks: arithmetic, text, code or all."),
    "count": option(int, "The most prompts. Default: all of a file, 2000 of a task.", min=1),
    "max_tokens": option(int, "The most tokens of an answer.", min=1, default=512),
}
_HEAD = {
    "width": option(int, "The head's width. Default: the target's, whose embedding it then shares.", min=32),
    "intermediate": option(int, "Width of its feed-forward. Default: 8/3 of its width.", min=1),
    "states": option(str, "The layers after which the head reads the target's hidden states, such as 1,2,4."),
    "draft_vocabulary": option(int, "Tokens it can draft; at most 32000.", min=1),
    "steps": option(int, "Steps of the optimiser.", min=1, default=Plan.steps),
    "batch": option(int, "Answers per step.", min=1, default=Plan.batch),
    "length": option(int, "The most tokens of a prompt and its answer.", min=8, default=Plan.length),
    "test_steps": option(int, "The head's own steps in the training-time test.", min=1, default=Plan.test_steps),
    "learning_rate": option(float, "The highest learning rate of AdamW.", default=Plan.learning_rate),
    "precision": option(str, "Precision of products in training: bfloat16 or float32.", default=Plan.precision),
    "save_every": option(int, "Steps between two checkpoints.", min=1, default=Plan.save_every),
    "seed": option(int, "Seed of the first weights and the order.", default=Plan.seed),
}
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
@takes(_PROMPTS, _HEAD, LOADING, GRID)
def train_head_command(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="The head's directory; training that was begun there is continued.")],
    states: str | None,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of the target's answers; 0 is greedy.")] = 0.0,
    **options: Any,
) -> None:
    """Train an EAGLE-3 draft head for a target on its own answers, and write it in the published layout.

    If it is killed, the same command continues: answers and checkpoints are in the directory.
    """
    plan = Plan(**{**options_of(context, _HEAD), "states": _numbers("--states", states)})
    grid = grid_of(**options_of(context, GRID))
    llm, given, data = _answer(out, temperature, options_of(context, _PROMPTS), options_of(context, LOADING), grid)
    with progress(plan.steps, "training") as advance:
        executor = llm.engine.runner.executor
        head, trained = train_head(executor, given, plan, out, lambda n, text: advance(text, n))
    tokens = sum(len(one.answer) for one in given)
    (out / "README.md").write_text(card(out.name, options["model"], data, tokens, head, plan, trained), "utf-8")
    rows = [(str(n + 1), f"{share:.1%}") for n, share in enumerate(trained.held_out)]
    print_list(rows, "depth", "accepted", title=f"{out}: held-out acceptance, where all tokens before were kept")
    note(f"written to {out}; draft with it: --draft {out}")


@alone
@takes(_PROMPTS, _EXITS, LOADING)
def train_exit_command(
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
    plan = ExitPlan(_numbers("--layers", layers), **options_of(context, _EXITS.keys() - {"layers"}))
    given, data = _answer(out, 0.0, options_of(context, _PROMPTS), options_of(context, LOADING))[1:]
    with progress(min(plan.places, sum(len(one.answer) for one in given)), "looking at the answers") as advance:
        executor = load(model, dtype, device, "torch").executor
        exits, looks, passed = train_exits(executor, given, plan, out, lambda n: advance(n=n))
    (out / "README.md").write_text(exit_card(out.name, model, data, exits, plan, looks, passed), "utf-8")
    rows = [
        (str(look.layer), f"{look.settled:.1%}", f"{look.leave:.1%}", "" if look.agree is None else f"{look.agree:.1%}")
        for look in looks
    ]
    print_list(
        rows, "after layers", "settled", "leave, of those left", "of these agree", title=f"{out}: held-out answers"
    )
    note(f"they go through {passed:.1%} of the layers; written to {out}: --exits {out}")


def _numbers(option: str, given: str | None) -> tuple[int, ...] | None:
    try:
        return None if given is None else tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ValueError(f"{option} {given!r} must be numbers with commas, as 1,2,4") from None


def _answer(
    out: Path, temperature: float, asked: dict[str, Any], loading: dict[str, Any], grid: Any = None
) -> tuple[LLM, list[Answer], str]:
    """Load the target and have it, or the actors of ``grid``, answer the prompts that were ``asked`` for. Returns the
    target, the answers (kept in ``out``), and a sentence about them for the model card."""
    task, max_tokens = asked["task"], asked["max_tokens"]
    prompts = prompts_of(asked["prompts"], task, asked["count"])
    options = {**loading, "max_rows": 64}
    llm = LLM(**options)
    if llm.tokenizer is None:
        raise ValueError(f"{loading['model']} has no tokenizer, so it can answer no prompts")
    out.mkdir(parents=True, exist_ok=True)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    with progress(len(prompts), "answers by the target") as advance:
        generate = None if grid is None else partial(grid.answer, options, params)
        report = lambda n: advance(grid.status if grid else "", n)  # noqa: E731
        given = answers(llm, prompts, params, out / "answers.jsonl", report, generate)
    llm.close()
    source = f"{len(given):,} prompts" + (f" of the bundled task `{task}`" if asked["prompts"] is None else "")
    return llm, given, f"{source}, answered at temperature {temperature:g}, up to {max_tokens} tokens each."
