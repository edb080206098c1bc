"""``fly demo``, and the measurement of a rule on the bundled tasks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from fly.cli.completion import show_legend, show_stream
from fly.cli.options import RUNNING, DraftLength, Policy, Split, takes
from fly.cli.run import alone
from fly.cli.show import console, note, ratio
from fly.errors import suggest
from fly.extras.bench.plan import DEVICES, MODELS, PAPER, Machines, Setting
from fly.extras.bench.scale import forecast_rounds
from fly.extras.eval.command import run_plan, show_report
from fly.extras.eval.plan import Plan
from fly.extras.eval.report import Report
from fly.llm import LLM
from fly.models.bundled.tasks import SPLITS
from fly.policies import parse_policy
from fly.types import SamplingParams


@alone
@takes({name: RUNNING[name] for name in ("dtype", "kernels")})
def demo(
    problems: Annotated[int, typer.Option(min=1, help="How many problems; their kinds take turns.")] = 48,
    k: DraftLength = 15,
    policy: Policy = "fly",
    split: Split = "heldout",
    **options: Any,
) -> None:
    """Show what speculation gains: one completion in colours, then a table over held-out problems."""
    rule = parse_policy(policy, trusted=True)
    plan = bundled_plan(policy, problems, k, split, **options)
    ((task, _),) = plan.loaded_tasks().values()
    (question,) = task.problems[0].turns
    llm = LLM("fly-target", "fly-draft", k=k, **options)

    console.print(f"[bold]fly-target[/] verifies drafts of [bold]fly-draft[/] by [bold]{escape(str(rule))}[/]\n")
    console.print(Text(question, "italic"))
    console.print()
    stats, elapsed = show_stream(llm, llm.chat_prompt(question), SamplingParams(temperature=0.0, max_tokens=400), rule)
    console.print()
    show_legend(llm, stats, elapsed)
    console.print()
    note(escape(describe_scale(show_plan(plan))))


def bundled_plan(rule: str, count: int, k: int, split: str = "heldout", **options: Any) -> Plan:
    """Return a plan of the first ``count`` bundled problems of a split, on the bundled models."""
    if split not in (test_splits := SPLITS[1:]):  # the models were trained on the first split
        raise ValueError(f"unknown split {split!r}{suggest(split, test_splits)}")
    return Plan.of({"k": k, "policies": [rule], "tasks": [f"bundled-{split}"], "limit": count, **options})


def show_plan(plan: Plan) -> Report:
    """Run a plan, print the tables and return them. Nothing is kept."""
    with tempfile.TemporaryDirectory(prefix="fly-eval-") as folder:
        report = run_plan(plan, Path(folder))
    show_report(report)
    return report


def describe_scale(report: Report) -> str:
    """Return a sentence with the speed that the τ of each way of a report would give with the paper's first pair, one
    request at a time, by the model of costs. Each drafted token counts as a forward of the draft model."""
    pair = PAPER[0]
    setting = Setting(MODELS[pair.target], MODELS[pair.draft], pair.k, pair.tau)
    machines = Machines(DEVICES["h100"], pair.ranks)
    speeds = []
    for row in (row for table in report.tables for row in table.rows):
        if not row.k or row.tau is None or row.drafted is None:  # it drafted nothing
            continue
        rounds = forecast_rounds(setting, machines, row.tau, row.drafted, row.drafted, stops=bool(row.reach))
        speeds.append(f"{row.way} {ratio(rounds.gain())}")
    return (
        f"the same τ at the costs of {pair.target} with {pair.draft} on {pair.ranks} H100: {', '.join(speeds)} over "
        "AR, by the model of 'fly bench plan', not measured (beside this small target drafts and decisions are dear)"
    )
