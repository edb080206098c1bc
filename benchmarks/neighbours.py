"""What one request's rule costs the others of its batch: ``python -m benchmarks.neighbours``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.markup import escape
from torch import Tensor

from fly.cli.options import LOADING, K, Rules, takes
from fly.cli.run import command, kernels_of, options_of, rules_of
from fly.cli.show import console, note, progress, table
from fly.engine.job import Job
from fly.extras.bench.clock import take_turns
from fly.extras.statistics import Estimate, median_interval
from fly.llm import LLM
from fly.models.bundled import usual_draft
from fly.models.bundled.tasks import problems as bundled_problems
from fly.policies import AcceptancePolicy, Exact, Near, gate_probs
from fly.types import Draft, SamplingParams, Target


@dataclass(frozen=True)
class NearBest(AcceptancePolicy):
    """The rule of the README, which only Python knows: keep a token that the target finds at least half as likely as
    its own best one."""

    share: float = 0.5

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        own_BK, best_BK = gate_probs(target, draft)
        return own_BK >= self.share * best_BK


def measure(
    llm: LLM,
    prompts: Sequence[list[int]],
    rules: tuple[AcceptancePolicy, AcceptancePolicy],
    k: int,
    tokens: int,
    turns: int,
    **progress: Any,
) -> tuple[Estimate, bool]:
    """Decode all ``prompts`` together, the last of them under one of two ``rules`` in turns, the others under the exact
    rule.

    Returns how fast the others go beside the second rule, as a ratio to their speed beside the first, and whether their
    texts were the same. The last request goes on until the others have ended.
    """
    exact = Exact()
    texts = dict[AcceptancePolicy, list[list[int]]]()

    def run(last: AcceptancePolicy) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        longer = params.changed({"max_tokens": 4 * tokens})
        llm.scheduler.forget()
        others = Job([request for prompt in prompts[:-1] for request in llm.requests([prompt], params, exact, k)])
        neighbour = Job(llm.requests(prompts[-1:], longer, last, k))
        start = time.perf_counter()
        for job in (others, neighbour):
            llm.worker.submit(job)
        try:
            while others.left:
                others.check(others.queue.get())
            seconds = time.perf_counter() - start
        finally:
            for job in (others, neighbour):
                llm.worker.cancel(job, wait=True)
        texts[last] = [request.row.tokens for request in others.requests]
        return seconds

    first, second = rules
    beside_first, beside_second = take_turns([lambda: run(first), lambda: run(second)], turns, **progress)
    ratios = [one / other for one, other in zip(beside_first.times, beside_second.times)]
    return median_interval(ratios), texts[first] == texts[second]


@command
@takes(LOADING, K)
def main(
    context: typer.Context,
    policy: Rules = None,
    draft: Annotated[str | None, typer.Option(help="The draft. Default: the model's usual one.")] = None,
    requests: Annotated[int, typer.Option(min=2, help="How many requests at a time, the neighbour included.")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens each of the others generates.")] = 200,
    turns: Annotated[int, typer.Option(min=1, help="How often each rule is measured beside the exact one.")] = 20,
    *,
    model: str,
    k: int,
    **_: Any,
) -> None:
    """The speed of exact requests beside one request under another rule, over their speed beside an exact one.

    By default that rule is decided in Python. A second row compares it with the same rule in compiled code (`near`). It
    shows the cost of Python alone, since drafts under a relaxed rule are longer, too.
    """
    draft = draft or usual_draft(model)
    llm = LLM(model, draft, **options_of(context, ("dtype", "device", "kernels")))
    prompts = [llm.chat_prompt(problem.prompt) for problem in bundled_problems(None, "heldout", 0, requests)]
    rules = rules_of(policy)[1:] if policy else [NearBest()]
    pairs: list[tuple[AcceptancePolicy, AcceptancePolicy]] = [(Exact(), rule) for rule in rules]
    if not policy:
        pairs.append((Near(), NearBest()))
    with progress(len(pairs) * (turns + 1), "neighbours") as advance:
        rows = [(pair, *measure(llm, prompts, pair, k, tokens, turns, advance=advance)) for pair in pairs]
    columns = {
        "one request under": lambda row: escape(str(row[0][1])),
        "instead of": lambda row: escape(str(row[0][0])),
        "the others' speed": lambda row: f"{row[1].value:.3f} ({row[1].low:.3f}–{row[1].high:.3f})",
        "their texts": lambda row: "the same" if row[2] else "DIFFERENT",
    }
    title = f"{model}, {draft}, {requests} requests, temperature 0, k {k}, kernels {kernels_of(llm)}"
    console.print(table(title, rows, columns, text=("one request under", "instead of", "their texts")))
    note(f"median of {turns} paired turns with its 95 % interval; 1: as fast as beside the other rule")


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
