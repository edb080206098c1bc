"""The cost of a decision, compared with the verification forward before it: ``python -m benchmarks.policy``.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import typer

from fly.backends import executor_of
from fly.cache import PagedKVCache
from fly.cli.options import Rules
from fly.cli.run import alone, rules_of
from fly.cli.show import console, print_list, progress
from fly.drafts.base import pad
from fly.extras.bench.clock import take_turns
from fly.extras.bench.shapes import shape_config
from fly.models import Llama
from fly.models.loading import resolve_device, resolve_dtype
from fly.policies import AcceptancePolicy
from fly.runner.executor import Executor
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.testing.blocks import toy_vocabulary
from fly.types import Draft, SamplingParams, Target


@dataclass(frozen=True)
class Cost:
    """Median seconds of one round's forward and of the decisions about it, for one shape."""

    rows: int
    k: int
    vocab: int
    forward: float
    greedy: float
    sampled: float


def measure_decisions(
    policy: AcceptancePolicy,
    shapes: Sequence[tuple[int, int, int]],
    context: int = 256,
    repeats: int = 9,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Iterator[Cost]:
    """Measure the cost of ``policy`` and of the forward before it, for each ``(rows, k, vocab)`` of ``shapes``.

    The model has 12 layers of width 768 (85M parameters) and random weights. Its logits are scaled until the
    distribution is about as sharp as a trained model's (one to two nats). The draft is the model's own greedy text with
    every fifth token replaced, so that every clause of a rule has mismatches to judge. The decision is everything from
    the logits to the kept tokens: the processed distribution if the rule needs it, coins, and the correction."""
    model: Llama | None = None
    for rows, k, vocab in shapes:
        if model is None or model.config.vocab_size != vocab:
            torch.manual_seed(0)
            config = shape_config(f"768x12x{vocab}", positions=1024).model_copy(update={"num_key_value_heads": 4})
            model = Llama(config).to(device, dtype).eval().requires_grad_(False)
            _sharpen(model)
        runs = executor_of(model)
        with ThreadPoolExecutor(1, initializer=runs.enter_thread) as pool:  # as on the engine's thread
            yield pool.submit(
                _measure, model, runs, policy.bind(toy_vocabulary(vocab)), rows, k, context, repeats
            ).result()


@torch.inference_mode()
def _sharpen(model: Llama) -> None:
    """Scale the last norm so that logits have a standard deviation of 1.3·sqrt(2 ln V). Normally distributed logits
    concentrate on a few tokens above sqrt(2 ln V), and spread over the vocabulary below it."""
    vocab = model.config.vocab_size
    hidden_TC = torch.randn(64, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden_TC = hidden_TC / hidden_TC.square().mean(-1, keepdim=True).sqrt()
    spread = float(model.logits(hidden_TC.to(model.device, model.dtype)).std())
    model.norm.weight.mul_(1.3 * math.sqrt(2 * math.log(vocab)) / spread)


@torch.inference_mode()
def _measure(
    model: Llama, runs: Executor, policy: AcceptancePolicy, rows: int, k: int, context: int, repeats: int
) -> Cost:
    vocab, device = model.config.vocab_size, model.device
    cache = PagedKVCache(model.config, rows * (-(-(context + k + 1) // 16)), 16, model.dtype, device)
    runner = Runner(runs, cache)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocab, (rows, context), generator=generator).tolist()

    def sequences(temperature: float) -> list[Row]:
        params = SamplingParams(temperature=temperature, top_p=0.95 if temperature else 1.0)
        return [Row(list(prompt), context, params, policy, seed=b, k=k, id=b) for b, prompt in enumerate(prompts)]

    def score(batch: list[Row], draft: Draft) -> Target:
        target, _ = runner.score(batch, draft)
        runner.commit(batch)
        return target

    def median(run: Callable[[], object]) -> float:
        (timing,) = take_turns([run], repeats, device)
        return timing.median

    greedy, sampled = sequences(0.0), sequences(0.8)
    score(greedy, Draft.empty(rows, device))  # the prompts
    draft = pad(torch.randint(0, vocab, (rows, k), generator=generator).tolist(), device)
    for _ in range(2):  # draft the model's own choices, so that most tokens agree
        tokens_BK = score(greedy, draft).argmax_BK[:, :-1].clone()
        tokens_BK[:, 4::5] = (tokens_BK[:, 4::5] + 1) % vocab
        draft = Draft(tokens_BK, draft.lengths_B)

    def decide(batch: list[Row]) -> float:
        # Use a new target each time, because it caches distributions. Keep all alive, since freeing one takes time.
        targets = [score(batch, draft) for _ in range(repeats + 1)]
        left = iter(targets)
        return median(lambda: runner.executor.decide(batch, next(left), draft))

    return Cost(rows, k, vocab, median(partial(score, greedy, draft)), decide(greedy), decide(sampled))


@alone
def main(
    policy: Rules = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes B.")] = None,
    k: Annotated[list[int] | None, typer.Option(min=1, help="Draft lengths K.")] = None,
    vocab: Annotated[list[int] | None, typer.Option(min=16, help="Vocabulary sizes V.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
) -> None:
    """The cost of a decision, for B × K × V, beside the verification forward before it (12 layers of width 768)."""
    rules = rules_of(policy)
    shapes = [(b, n, v) for v in vocab or [32_000, 128_256, 262_144] for b in rows or [1, 8] for n in k or [15]]
    where = {"dtype": resolve_dtype(dtype, {}), "device": resolve_device(device)}
    lines = []
    with progress(len(rules) * len(shapes), "measuring") as advance:
        for rule in rules:
            for cost in measure_decisions(rule, shapes, **where):
                sizes = (str(rule), f"{cost.rows}", f"{cost.k}", f"{cost.vocab:,}", f"{cost.forward * 1e3:,.1f} ms")
                greedy = (f"{cost.greedy * 1e3:,.2f} ms", f"{cost.greedy / cost.forward:.1%}")
                sampled = (f"{cost.sampled * 1e3:,.2f} ms", f"{cost.sampled / cost.forward:.1%}")
                lines.append((*sizes, *greedy, *sampled))
                advance()
    print_list(lines, "policy", "B", "K", "V", "forward", "greedy", "share", "sampled", "share")
    console.print(
        "[dim]share: the decision's time over the forward's, medians of 9; sampled: temperature 0.8, top-p 0.95[/]"
    )


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
