"""What a decision costs, beside the verification forward it follows.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.drafts.base import pad
from fly.eval.timed import synchronize
from fly.models import Llama, LlamaConfig
from fly.policies import AcceptancePolicy
from fly.request import Sequence as Row
from fly.runner import Runner
from fly.types import Draft, SamplingParams

__all__ = ["Cost", "measure_decisions", "trunk_config"]


@dataclass(frozen=True)
class Cost:
    """Median seconds of one round's forward and of the decisions on it, for one shape."""

    rows: int
    k: int
    vocab: int
    forward: float
    greedy: float
    sampled: float


def trunk_config(vocab: int) -> LlamaConfig:
    """The model whose verification is measured: 12 layers of width 768 (85M parameters) under ``vocab`` tokens."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


def measure_decisions(
    policy: AcceptancePolicy,
    shapes: Sequence[tuple[int, int, int]],
    context: int = 256,
    repeats: int = 9,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Iterator[Cost]:
    """For each ``(rows, k, vocab)`` of ``shapes``, the cost of ``policy`` and of the forward before it.

    The model has random weights, with logits scaled until the distribution is about as sharp as a trained model's (one
    to two nats); the draft is its own greedy text with every fifth token replaced, so that every clause of a rule has
    mismatches to look at. The decision includes all that happens between logits and verdict:
    the processed distribution where the rule asks for it, coins, and the correction.
    """
    model: Llama | None = None
    for rows, k, vocab in shapes:
        if model is None or model.config.vocab_size != vocab:
            torch.manual_seed(0)
            model = Llama(trunk_config(vocab)).to(device, dtype).eval().requires_grad_(False)
            _sharpen(model)
        yield _measure(model, policy, rows, k, context, repeats)


@torch.inference_mode()
def _sharpen(model: Llama) -> None:
    """Scale the last norm so that logits have a standard deviation of 1.3·sqrt(2 ln V): normal logits freeze into a
    few likely tokens above sqrt(2 ln V), and spread over the vocabulary below it."""
    vocab = model.config.vocab_size
    hidden_TC = torch.randn(64, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden_TC = hidden_TC / hidden_TC.square().mean(-1, keepdim=True).sqrt()
    spread = float(model.logits(hidden_TC.to(model.device, model.dtype)).std())
    model.norm.weight.mul_(1.3 * math.sqrt(2 * math.log(vocab)) / spread)


@torch.inference_mode()
def _measure(model: Llama, policy: AcceptancePolicy, rows: int, k: int, context: int, repeats: int) -> Cost:
    vocab, device = model.config.vocab_size, model.device
    cache = PagedKVCache(model.config, rows * (-(-(context + k + 1) // 16)), 16, model.dtype, device)
    runner = Runner(TorchExecutor(model), cache)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocab, (rows, context), generator=generator).tolist()

    def sequences(temperature: float) -> list[Row]:
        params = SamplingParams(temperature=temperature, top_p=0.95 if temperature else 1.0)
        return [Row(list(prompt), context, params, policy, seed=b, k=k, id=b) for b, prompt in enumerate(prompts)]

    greedy, sampled = sequences(0.0), sequences(0.8)
    runner.score(greedy, Draft.empty(rows, device))  # the prompts
    runner.commit(greedy)
    draft = pad(torch.randint(0, vocab, (rows, k), generator=generator).tolist(), device)
    for _ in range(2):  # follow the model's own choices, so that most of the draft agrees
        target, _ = runner.score(greedy, draft)
        runner.commit(greedy)
        tokens_BK = target.argmax_BK[:, :-1].clone()
        tokens_BK[:, 4::5] = (tokens_BK[:, 4::5] + 1) % vocab
        draft = Draft(tokens_BK, draft.lengths_B)

    def forward() -> None:
        runner.score(greedy, draft)
        runner.commit(greedy)

    def decide(batch: list[Row]) -> Callable[[], None]:
        targets = []
        for _ in range(repeats + 1):  # a fresh target each time: it remembers distributions it has built
            targets.append(runner.score(batch, draft)[0])
            runner.commit(batch)

        def run() -> None:
            runner.executor.judge(batch, targets.pop(), draft)

        return run

    return Cost(
        rows,
        k,
        vocab,
        _median(forward, repeats, device),
        _median(decide(greedy), repeats, device),
        _median(decide(sampled), repeats, device),
    )


def _median(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median seconds of ``repeats`` runs after one warm-up."""
    times = []
    for number in range(repeats + 1):
        start = time.perf_counter()
        run()
        synchronize(device)
        if number:
            times.append(time.perf_counter() - start)
    return statistics.median(times)
