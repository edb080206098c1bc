"""``fly train-head``: a draft head for a target, from prompts to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fly.calls import one_bar
from fly.cli.options import Device, Dtype, Kernels, Model
from fly.cli.run import alone
from fly.cli.show import console, note, print_list
from fly.llm import LLM
from fly.train import Plan, answers, card, prompts_of, train_head
from fly.types import SamplingParams


@alone
def train_head_command(
    out: Annotated[Path, typer.Argument(help="The head's directory; training that was begun there is continued.")],
    model: Model = "fly-target",
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of prompts: .jsonl (texts, messages, or objects with either), or one prompt a line."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Instead of --prompts, a kind of the bundled tasks: arithmetic, text, code or all."),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="The most prompts. [default: all; of a task 2000]")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 512,
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
    seed: Annotated[int, typer.Option(help="Seed of the problems, the first weights and the order.")] = Plan.seed,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
) -> None:
    """Train an EAGLE-3 draft head for a target on its own answers, and write it in the published layout.

    If it is killed, the same command continues: answers and checkpoints are in the directory.
    """
    try:
        layers = None if states is None else tuple(int(part) for part in states.split(","))
    except ValueError:
        raise ValueError(f"--states {states!r} must be numbers with commas, as 1,2,4") from None
    plan = Plan(
        width, intermediate, layers, draft_vocabulary, steps, batch, length, test_steps,
        learning_rate=learning_rate,
        precision=precision, save_every=save_every, seed=seed,
    )  # fmt: skip
    asked = prompts_of(prompts, task, count, seed)
    llm = LLM(model, dtype=dtype, device=device, kernels=kernels, max_rows=64)
    if llm.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, so it can answer no prompts")
    out.mkdir(parents=True, exist_ok=True)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with one_bar(), Progress(*columns, console=console, transient=True) as bars:
        answering = bars.add_task("answers by the target", total=len(asked))
        given = answers(llm, asked, params, out / "answers.jsonl", lambda n: bars.advance(answering, n))
        training = bars.add_task("training", total=steps)

        def advance(n: int, said: str) -> None:
            bars.update(training, advance=n, description=f"training {said}".strip())

        executor = llm.engine.runner.executor
        llm.close()
        head, trained = train_head(executor, given, plan, out, advance)
    source = f"{len(given):,} prompts of the bundled task `{task}`" if prompts is None else f"{len(given):,} prompts"
    tokens = sum(len(one.answer) for one in given)
    data = f"{source}, answered at temperature {temperature:g}, up to {max_tokens} tokens each."
    (out / "README.md").write_text(card(out.name, model, data, tokens, head, plan, trained), encoding="utf-8")
    rows = [(str(n + 1), f"{share:.1%}") for n, share in enumerate(trained.held_out)]
    print_list(rows, "depth", "accepted", title=f"{out}: held-out acceptance, where all before stood")
    note(f"written to {out}; draft with it: --draft {out}")
