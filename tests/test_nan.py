"""NaN in what a model, a strategy or a policy says: the request that it concerns ends with an error that names it, and
the others get what they would have got without it."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fly.backends import executor_of
from fly.backends.cpu import CpuExecutor, PackedLlama, available
from fly.backends.cpu.head import CpuHead, head_refusal
from fly.backends.heads import TorchHead
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.drafts import DraftStrategy, Eagle3Draft, NGramDraft, SingleDraft, TreeDraft
from fly.engine import Engine
from fly.engine.scheduler import Scheduler
from fly.models import Llama
from fly.models.eagle import Eagle3Head, HeadConfig
from fly.policies import AcceptancePolicy, Exact, parse_policy
from fly.policies.base import ExactCore, exact_accept_probs
from fly.runner.executor import Batch, Executor, Head
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import Draft, SamplingParams, Target
from tests.kernels import GROUPED, VARIANTS, W8A8
from tests.test_cuda import device, there
from tests.test_cuda_heads import head_there
from tests.test_drafts import perturbed
from tests.test_eagle import randomise
from tests.toys import random_llama

pytestmark = pytest.mark.filterwarnings("ignore:a step failed")
VOCAB, FATAL = 23, 21
MODEL = random_llama(7, vocab_size=VOCAB, hidden=32, heads=2, kv_heads=1, layers=2, max_positions=200)
NEAR = perturbed(MODEL, 0.05)
Make = Callable[[Llama], Executor]


@contextmanager
def emulated() -> Iterator[Make]:
    with device():
        yield there


PLACES: dict[str, Callable[[], Any]] = {
    "torch": lambda: nullcontext(TorchExecutor),
    "compiled": lambda: nullcontext(executor_of),
    "gpu": emulated,
}
if available() == ["torch"]:
    del PLACES["compiled"]
HEADS: dict[str, Callable[[Eagle3Head], Head]] = {
    "compiled": lambda head: CpuHead(head, available()[0]),
    "gpu": head_there,
}
everywhere = pytest.mark.parametrize("place", PLACES)
compiled = pytest.mark.parametrize("kernels", [*VARIANTS, *W8A8, *GROUPED])
at_temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0])


def make_head() -> Eagle3Head:
    """One that never drafts ``FATAL``, as within a block a NaN may spread to the places before it."""
    head = Eagle3Head(
        HeadConfig(layer=MODEL.config.resized(1), draft_vocab_size=VOCAB - 1, target_hidden_size=32, states=(0, 1))
    )
    randomise(head, 1)
    head.to_target_U.copy_(torch.tensor([token for token in range(VOCAB) if token != FATAL]))
    assert head_refusal(head) is None
    return head.eval().requires_grad_(False)


def row_of(prompt: list[int], temperature: float, policy: AcceptancePolicy | None = None, most: int = 14) -> Row:
    params = SamplingParams(temperature=temperature, max_tokens=most)
    return Row(list(prompt), len(prompt), params, policy or Exact(), 3, 4)


def run(executor: Executor, strategy: DraftStrategy | None, rows: list[Row]) -> list[Row]:
    """The rows when all are over, together; everything is free then."""
    scheduler = Scheduler(Engine(Runner(executor, PagedKVCache.for_model(executor, 4000)), strategy))
    for row in rows:
        scheduler.add(row)
    while scheduler:
        scheduler.step()
    assert all(a.num_free == a.num_blocks for a in scheduler.allocators)
    return rows


@dataclass(frozen=True)
class Nan(AcceptancePolicy):
    """Fails once a row has so many tokens."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        late_B1 = (target.generated_B > 6).unsqueeze(1)
        return torch.where(late_B1, torch.nan, exact_accept_probs(target, draft))


@dataclass(frozen=True)
class NanResidual(ExactCore):
    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return (target_BV - draft_BV) * torch.nan


@pytest.mark.parametrize(("place", "drafting"), [*product(PLACES, ["model"]), ("torch", "n-gram"), ("torch", "tree")])
@at_temperatures
def test_a_policy(place: str, drafting: str, temperature: float) -> None:
    prompts = [[1, 2, 1, 2], [7, 7, 7], [3, 4]]
    with PLACES[place]() as make:

        def strategy() -> DraftStrategy:
            if drafting == "tree":
                return TreeDraft(make(NEAR), depth=3, nodes=5, width=2, cache_tokens=4000)
            return NGramDraft(2, 1, 4) if drafting == "n-gram" else SingleDraft(make(NEAR), cache_tokens=4000)

        wanted = run(make(MODEL), strategy(), [row_of(prompt, temperature) for prompt in prompts])
        for policy in (Nan(), NanResidual()) if temperature else (Nan(),):
            rules = [None, policy, None]
            found = run(make(MODEL), strategy(), [row_of(*each) for each in zip(prompts, [temperature] * 3, rules)])
            bad = found.pop(1)
            assert bad.finish_reason == "error" and isinstance(bad.error, ValueError)
            assert str(bad.error).startswith(f"the policy '{policy}' gave NaN for the draft [")
            assert [row.tokens for row in found] == [wanted[0].tokens, wanted[2].tokens]


class NanDraft(DraftStrategy):
    """Drafts by chance, and knows no probabilities for texts that begin with ``FATAL``: of the token itself, or of
    another."""

    vocab_size = VOCAB

    def __init__(self, own: bool) -> None:
        self.own = own

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        tokens_BK = torch.tensor([[(len(row.tokens) + j) % VOCAB for j in range(max(max_len))] for row in rows])
        probs_BKV = torch.full((*tokens_BK.shape, VOCAB), 1 / VOCAB)
        for b, row in enumerate(rows):
            if row.tokens[0] == FATAL:
                probs_BKV[b].scatter_(1, (tokens_BK[b] + (not self.own)).unsqueeze(1) % VOCAB, torch.nan)
        return Draft(tokens_BK, torch.tensor(max_len), probs_BKV)


@everywhere
@pytest.mark.parametrize("rule", ["exact", "block", "lossy(lenience=3)"])
@pytest.mark.parametrize("own", [True, False])
def test_a_strategy(place: str, rule: str, own: bool) -> None:
    prompts, policy = [[1, 2], [FATAL, 2], [3]], parse_policy(rule)
    with PLACES[place]() as make:
        good = [row_of(prompt, 1.0, policy) for prompt in (prompts[0], prompts[2])]
        wanted = [row.tokens for row in run(make(MODEL), NanDraft(own), good)]
        found = run(make(MODEL), NanDraft(own), [row_of(prompt, 1.0, policy) for prompt in prompts])
        bad = found.pop(1)
        assert str(bad.error).startswith("NanDraft proposed a distribution with NaN in it")
        assert [row.tokens for row in found] == wanted


def fatal(model: Llama) -> Llama:
    """The same model, which has no numbers for texts with ``FATAL`` in them."""
    made = perturbed(model, 0.0)
    with torch.no_grad():
        made.embed_tokens.weight[FATAL] = torch.nan
    return made


@everywhere
@at_temperatures
@pytest.mark.parametrize("drafting", [None, "n-gram", "model", "head"])
def test_a_model(place: str, temperature: float, drafting: str | None) -> None:
    prompts = [[1, 2, 3], [7, 7, 7], [2, FATAL], [3, 4], [16]]
    with PLACES[place]() as make:

        def strategy() -> DraftStrategy | None:
            if drafting == "model":
                # Within a block a NaN may spread to the places before it: so what is drafted here is always kept.
                return SingleDraft(make(MODEL), cache_tokens=4000)
            if drafting == "head":
                head = HEADS.get(place, TorchHead)(make_head())
                return Eagle3Draft(head, cache_tokens=4000)
            return NGramDraft(2, 1, 4) if drafting else None

        wanted = run(make(MODEL), strategy(), [row_of(prompt, temperature, most=20) for prompt in prompts])
        found = run(make(fatal(MODEL)), strategy(), [row_of(prompt, temperature, most=20) for prompt in prompts])
        for row, other in zip(found, wanted):
            if FATAL in other.tokens[:-1]:
                assert str(row.error).startswith("the model Llama gave NaN as logits, after ")
                assert row.tokens == other.tokens[: len(row.tokens)]
                assert FATAL not in row.tokens[row.prompt_length : -1]
            else:
                assert row.error is None and row.tokens == other.tokens
        assert 1 < sum(row.error is not None for row in found) < len(prompts)


def scores(model: Llama, kernels: str) -> abc.Sequence[int]:
    """The most likely tokens after each of three tokens."""
    executor = CpuExecutor(PackedLlama(model, kernels))
    cache = PagedKVCache.for_model(executor, 16)
    cache.resize(0, 3)
    argmax = executor.score(Batch([1, 2, 3], [0, 1, 2], cache.batch([0], [0], [3]))).argmax
    assert argmax is not None
    return argmax


@compiled
@pytest.mark.parametrize("vocab", [23, 128])
def test_one_logit_that_is_no_number(kernels: str, vocab: int) -> None:
    """Compiled code chooses no token then, wherever in a vector the logit is."""
    model = random_llama(7, vocab_size=vocab, layers=1)
    assert min(scores(model, kernels)) >= 0
    for token in (0, 5, 15, 16, 22, vocab - 1):
        made = perturbed(model, 0.0)
        with torch.no_grad():
            made.lm_head.weight[token] = torch.nan
        assert max(scores(made, kernels)) < 0, token


@compiled
@pytest.mark.parametrize("head", range(4))
def test_one_head_that_has_no_numbers(kernels: str, head: int) -> None:
    """Rounding the inputs of a matrix to 8 bits loses no NaN."""
    made = perturbed(random_llama(7, hidden=64, heads=4, kv_heads=4, layers=1), 0.0)
    with torch.no_grad():
        made.layers[0].self_attn.qkv_proj.weight[128 + 16 * head] = torch.nan  # of values
    assert max(scores(made, kernels)) < 0
