"""``fly train-head`` and ``fly train-exit``: from prompts to a draft head, or to early exits, for a target."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fly.backends.choice import load
from fly.cli.options import Actors, Device, Dtype, Kernels, Model, RayCluster
from fly.cli.run import alone, grid_of
from fly.cli.show import note, print_list, progress
from fly.llm import LLM
from fly.train import Answer, ExitPlan, Plan, answers, card, exit_card, prompts_of, train_exits, train_head
from fly.types import SamplingParams

Prompts = Annotated[
    Path | None,
    typer.Option(help="A file of prompts: .jsonl (texts, messages, or objects with either), or one prompt a line."),
]
TaskOf = Annotated[
    str | None, typer.Option(help="Instead of --prompts, a kind of the bundled tasks: arithmetic, text, code or all.")
]
Count = Annotated[int | None, typer.Option(min=1, help="The most prompts. Default: all; of a task 2000.")]
MostTokens = Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")]


@alone
def train_head_command(
    out: Annotated[Path, typer.Argument(help="The head's directory; training that was begun there is continued.")],
    model: Model = "fly-target",
    prompts: Prompts = None,
    task: TaskOf = None,
    count: Count = None,
    max_tokens: MostTokens = 512,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of the target's answers; 0 is greedy.")] = 0.0,
    width: Annotated[
        int | None, typer.Option(min=32, help="The head's width; if not given the target's, whose embedding it shares.")
    ] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Width of its feed-forward.")] = None,
    states: Annotated[
        str | None,
        typer.Option(help="The layers after which the head reads the target's hidden states, such as 1,2,4."),
    ] = None,
    draft_vocabulary: Annotated[int | None, typer.Option(min=1, help="Tokens it can draft; at most 32000.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")] = Plan.steps,
    batch: Annotated[int, typer.Option(min=1, help="Answers a step.")] = Plan.batch,
    length: Annotated[int, typer.Option(min=8, help="The most tokens of a prompt and its answer.")] = Plan.length,
    test_steps: Annotated[
        int, typer.Option(min=1, help="The head's own steps in the training-time test.")
    ] = Plan.test_steps,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate of AdamW.")] = Plan.learning_rate,
    precision: Annotated[
        str, typer.Option(help="Precision of products while training: bfloat16 or float32.")
    ] = Plan.precision,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = Plan.save_every,
    seed: Annotated[int, typer.Option(help="Seed of the first weights and the order.")] = Plan.seed,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    ray: RayCluster = None,
    actors: Actors = None,
) -> None:
    """Train an EAGLE-3 draft head for a target on its own answers, and write it in the published layout.

    If it is killed, the same command continues: answers and checkpoints are in the directory.
    """
    plan = Plan(
        width, intermediate, _numbers("--states", states), draft_vocabulary, steps, batch, length, test_steps,
        learning_rate=learning_rate,
        precision=precision, save_every=save_every, seed=seed,
    )  # fmt: skip
    grid = grid_of(ray, actors)
    llm, given, data = _answered(
        out, model, prompts, task, count, max_tokens, temperature, dtype, device, kernels, grid
    )
    with progress(steps, "training") as advance:
        executor = llm.engine.runner.executor
        head, trained = train_head(executor, given, plan, out, lambda n, text: advance(text, n))
    tokens = sum(len(one.answer) for one in given)
    (out / "README.md").write_text(card(out.name, model, data, tokens, head, plan, trained), encoding="utf-8")
    rows = [(str(n + 1), f"{share:.1%}") for n, share in enumerate(trained.held_out)]
    print_list(rows, "depth", "accepted", title=f"{out}: held-out acceptance, where all tokens before were kept")
    note(f"written to {out}; draft with it: --draft {out}")


@alone
def train_exit_command(
    out: Annotated[
        Path, typer.Argument(help="The directory of the exits; answers that are already there are used again.")
    ],
    model: Model = "fly-target",
    prompts: Prompts = None,
    task: TaskOf = None,
    count: Count = None,
    max_tokens: MostTokens = 512,
    layers: Annotated[
        str | None, typer.Option(help="The layers after which it looks, such as 8,16,24; if not given about eight.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=2, help="Tokens that a look compares.")] = ExitPlan.candidates,
    vocabulary: Annotated[
        int, typer.Option(min=2, help="The frequent tokens that candidates are taken from.")
    ] = ExitPlan.vocabulary,
    agreement: Annotated[
        float, typer.Option(min=0, max=1, help="The share of leaving tokens that must equal the target's.")
    ] = ExitPlan.agreement,
    places: Annotated[int, typer.Option(min=100, help="The most tokens of answers to look at.")] = ExitPlan.places,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")] = ExitPlan.steps,
    seed: Annotated[int, typer.Option(help="Seed of the first weights and the order.")] = ExitPlan.seed,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
) -> None:
    """Train early exits (SpecEE) for a target on its own answers: predictors of when more layers change nothing.

    ``--kernels`` are used to answer the prompts. Exits themselves are trained, and run, on PyTorch.
    """
    plan = ExitPlan(
        _numbers("--layers", layers), candidates, vocabulary, agreement=agreement, places=places, steps=steps, seed=seed
    )
    _, given, data = _answered(out, model, prompts, task, count, max_tokens, 0.0, dtype, device, kernels)
    with progress(min(places, sum(len(one.answer) for one in given)), "looking at the answers") as advance:
        executor = load(model, dtype, device, "torch").executor
        exits, looks, passed = train_exits(executor, given, plan, out, lambda n: advance(n=n))
    (out / "README.md").write_text(exit_card(out.name, model, data, exits, plan, looks, passed), encoding="utf-8")
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


def _answered(
    out: Path,
    model: str,
    prompts: Path | None,
    task: str | None,
    count: int | None,
    max_tokens: int,
    temperature: float,
    dtype: str,
    device: str,
    kernels: str,
    grid: Any = None,
) -> tuple[LLM, list[Answer], str]:
    """The target, its answers (kept in ``out``; by the actors of ``grid``, if there are some), and a sentence about
    them for the model card."""
    asked = prompts_of(prompts, task, count)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels, "max_rows": 64}
    llm = LLM(model, **options)
    if llm.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, so it can answer no prompts")
    out.mkdir(parents=True, exist_ok=True)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    with progress(len(asked), "answers by the target") as advance:
        generate = None if grid is None else partial(grid.answer, {"model": model, **options}, params)
        report = lambda n: advance(grid.status if grid else "", n)  # noqa: E731
        given = answers(llm, asked, params, out / "answers.jsonl", report, generate)
    llm.close()
    source = f"{len(given):,} prompts of the bundled task `{task}`" if prompts is None else f"{len(given):,} prompts"
    return llm, given, f"{source}, answered at temperature {temperature:g}, up to {max_tokens} tokens each."
