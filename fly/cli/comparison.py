"""``fly demo``, and what a rule gains on the bundled tasks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from fly.bundled.tasks import problems as draw_problems
from fly.cli.completion import legend, show_stream
from fly.cli.evaluation import run_plan, show_report
from fly.cli.options import DraftLength, Dtype, Kernels, Policy, Seed, Split
from fly.cli.run import alone
from fly.cli.show import console
from fly.eval.plan import Plan
from fly.llm import LLM
from fly.policies import parse_policy
from fly.types import SamplingParams


@alone
def demo(
    problems: Annotated[int, typer.Option(min=1, help="Problems, of all kinds in turn.")] = 48,
    k: DraftLength = 15,
    policy: Policy = "fly",
    split: Split = "heldout",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    kernels: Kernels = "auto",
) -> None:
    """Show what speculation gains: one completion in colours, then a table over held-out problems."""

    rule = parse_policy(policy, trusted=True)
    (question,) = draw_problems(None, split, seed, 1)
    llm = LLM("fly-target", "fly-draft", k=k, dtype=dtype, kernels=kernels)

    console.print(f"[bold]fly-target[/] verifies drafts of [bold]fly-draft[/] by [bold]{escape(str(rule))}[/]\n")
    console.print(Text(question.prompt, "italic"))
    console.print()
    prompt = llm.chat_prompt(question.prompt)
    stats, elapsed = show_stream(llm, prompt, SamplingParams(temperature=0.0, max_tokens=400), rule)
    console.print()
    legend(llm, stats, elapsed)
    console.print()
    compare_on_bundled(policy, problems, k, split, seed, dtype=dtype, kernels=kernels)


def compare_on_bundled(rule: str, count: int, k: int, split: str = "heldout", seed: int = 0, **options: Any) -> None:
    """Run bundled problems through the bundled models by each way, and print the tables. Nothing is kept."""

    task = {"task": f"bundled-{split}", "generated": {"split": split, "seed": seed}, "limit": count}
    plan = Plan.of({"k": k, "policies": [rule], "tasks": [task], **options})
    with tempfile.TemporaryDirectory(prefix="fly-eval-") as folder:
        show_report(run_plan(plan, Path(folder)))
