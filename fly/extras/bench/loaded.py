"""What benchmarks do with a loaded model: describe it, call it, fill its caches. Clocks are elsewhere."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch

from fly.backends import executor_of
from fly.backends.cpu import chosen
from fly.backends.cpu.library import ROUNDINGS, split
from fly.cache import PagedKVCache
from fly.drafts import DraftStrategy, SingleDraft
from fly.extras.bench.shapes import random_model, shape_config
from fly.extras.eval.timed import Setting, draft_runners
from fly.llm import LLM
from fly.models import LlamaConfig
from fly.policies import AcceptancePolicy, Exact
from fly.runner.executor import Batch, DraftSpec, Executor
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import SamplingParams

__all__ = [
    "ROUNDINGS",
    "Subject",
    "drafts_alone",
    "forward_of",
    "number_types",
    "runners_of",
    "runs_compiled",
    "settings_of",
    "shape_subject",
    "subjects_of",
    "target_of",
]


@dataclass(frozen=True)
class Subject:
    """A model to time: its name, its configuration, and ``make``, which returns the model when its turn comes."""

    name: str
    config: LlamaConfig
    make: Callable[[], Executor]


def target_of(llm: LLM) -> Executor:
    return llm.engine.runner.executor


def runners_of(llm: LLM) -> list[Runner]:
    """Return the runners of the target and of the draft models."""
    return [llm.engine.runner, *draft_runners(llm)]


def subjects_of(llm: LLM, target: str, draft: str) -> list[Subject]:
    """Return the loaded target under the name ``target``, and the draft model (if there is exactly one) under
    ``draft``."""
    models = [runner.executor for runner in runners_of(llm)]
    executors = dict(zip((target, draft), models if len(models) == 2 else models[:1]))
    return [Subject(name, model.config, partial(lambda loaded: loaded, model)) for name, model in executors.items()]


def shape_subject(name: str, like: Executor, kernels: str) -> Subject:
    """Return a random model of the shape ``WIDTHxLAYERSxVOCABULARY``. A suffix such as ``:w8a8``, one of ``ROUNDINGS``,
    selects the kernels of that name. The model has the dtype and the device of ``like``."""
    shape, _, kind = name.rpartition(":")
    shape, kind = (shape, kind) if kind in ROUNDINGS else (name, "")
    config = shape_config(shape)

    def make() -> Executor:
        rounded_kernels = f"{split(chosen(kernels))[0]}-{kind}" if kind else kernels
        return executor_of(random_model(config, like.dtype, like.device), rounded_kernels)

    return Subject(name, config, make)


def number_types(executor: Executor) -> dict[str, Any]:
    """Return the number types of a model: ``dtype``, in which it stores numbers; ``weight_bytes``, the bytes of one
    weight; and ``products``, the type that it multiplies."""
    products = torch.int8 if split(executor.kernels)[1] else executor.dtype
    return {"dtype": executor.dtype, "weight_bytes": executor.weight_bytes, "products": products}


def runs_compiled(executor: Executor) -> bool:
    return executor.kernels != "torch"


def forward_of(
    executor: Executor, cache: PagedKVCache, rows: int, context: int, tokens: int, drafting: bool = False
) -> Callable[[], object]:
    """Make a function that runs a forward of ``tokens`` random tokens in each of ``rows`` rows, after ``context``
    cached tokens, and computes logits. With ``drafting``, the function makes one call that decodes ``tokens`` tokens
    greedily; it returns None if the model has no such call. The rows are new to ``cache``, and stay in it."""
    fed = 1 if drafting else tokens
    for row in range(rows):
        cache.resize(row, context + tokens)
    new_ids = torch.randint(0, executor.config.vocab_size, (rows, fed)).tolist()
    batch = Batch.of(new_ids, cache.batch([*range(rows)], [context] * rows, [fed] * rows))
    if not drafting:
        return lambda: executor.score(batch)
    text = [0] * context + batch.tokens
    row_ = Row(text, len(text), SamplingParams(temperature=0.0), Exact(), seed=0, k=tokens)
    return lambda: executor.extend(batch, DraftSpec(), [row_], [tokens])


def drafts_alone(strategy: DraftStrategy | None) -> TypeGuard[SingleDraft]:
    """Whether the draft is a single model, with no level below it."""
    return isinstance(strategy, SingleDraft) and strategy.draft is None


def settings_of(plain: LLM, fast: LLM, k: int, rules: abc.Sequence[AcceptancePolicy]) -> list[Setting]:
    """Return the settings of a comparison: autoregressive decoding with ``plain``, then speculation with ``fast`` under
    each rule."""
    return [Setting("autoregressive", plain, 0), *(Setting(str(rule), fast, k, rule) for rule in dict.fromkeys(rules))]
