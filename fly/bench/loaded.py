"""All that benches do to a loaded model directly: what it is, its calls, its caches. Knows nothing of clocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch

from fly.backends.cpu import chosen, compiled
from fly.backends.cpu.library import NARROW, split
from fly.bench.shapes import random_model, shape_config
from fly.cache import PagedKVCache
from fly.drafts import DraftStrategy, SingleDraft
from fly.engine import Model, Runner
from fly.eval.timed import Setting, draft_runners
from fly.llm import LLM
from fly.models import Llama, LlamaConfig
from fly.ops import argmax
from fly.policies import AcceptancePolicy, Exact
from fly.policies.base import Relaxed
from fly.request import Sequence as Row
from fly.types import SamplingParams

__all__ = [
    "NARROW",
    "Subject",
    "drafts_alone",
    "drafts_in_one_call",
    "feeding",
    "forward_of",
    "is_divided",
    "narrow_kernels",
    "number_types",
    "rule_name",
    "runners_of",
    "runs_compiled",
    "settings_of",
    "shape_subject",
    "subjects_of",
    "target_of",
]


@dataclass(frozen=True)
class Subject:
    """A model to be timed: a name, a configuration, and ``make``, which gives the model when its turn comes."""

    name: str
    config: LlamaConfig
    make: Callable[[], Model]


def target_of(llm: LLM) -> Model:
    return llm.engine.runner.model


def runners_of(llm: LLM) -> list[Runner]:
    """The target's, and those of the draft models."""
    return [llm.engine.runner, *draft_runners(llm.draft)]


def narrow_kernels(kernels: str) -> str:
    """Which of ``NARROW`` the name of some kernels stands for; empty for none of them."""
    return split(chosen(kernels))[1]


def subjects_of(llm: LLM, target: str, draft: str) -> list[Subject]:
    """The loaded target by the name ``target``, and the draft's model, if it has one alone, by the name ``draft``."""
    models = [runner.model for runner in runners_of(llm)]
    named = dict(zip((target, draft), models if len(models) == 2 else models[:1]))
    return [Subject(name, model.config, partial(lambda loaded: loaded, model)) for name, model in named.items()]


def shape_subject(name: str, like: Model, kernels: str) -> Subject:
    """A random model of ``WIDTHxLAYERSxVOCABULARY``, with ``:int8`` or ``:w8a8`` after it on kernels of that name, in
    the dtype and on the device of ``like``."""
    shape, _, kind = name.rpartition(":")
    shape, kind = (shape, kind) if kind in NARROW else (name, "")
    config = shape_config(shape)

    def make() -> Model:
        wanted = f"{split(chosen(kernels))[0]}-{kind}" if kind else kernels
        return compiled(random_model(config, number_types(like)["dtype"], like.device), wanted)

    return Subject(name, config, make)


def number_types(model: Model) -> dict[str, Any]:
    """``dtype``, of what a model stores; ``weight_bytes``, of one of its weights (None: as many as the dtype's); and
    ``products``, the dtype of what it multiplies."""
    dtype = getattr(model, "dtype", torch.float32)
    products = torch.int8 if split(getattr(model, "kernels", ""))[1] == "w8a8" else dtype
    return {"dtype": dtype, "weight_bytes": getattr(model, "weight_bytes", None), "products": products}


def runs_compiled(model: Model) -> bool:
    return hasattr(model, "kernels")


def drafts_in_one_call(model: Model) -> bool:
    return getattr(model, "draft", None) is not None


def forward_of(
    model: Model, cache: PagedKVCache, rows: int, context: int, tokens: int, drafting: bool = False
) -> Callable[[], object]:
    """A forward of ``tokens`` random tokens in each of ``rows`` rows, after ``context`` stored ones, logits included;
    where ``drafting``, one call that decodes ``tokens`` tokens greedily. Rows are new to ``cache``, and stay in it."""
    fed = 1 if drafting else tokens
    for row in range(rows):
        cache.resize(row, context + tokens)
    tokens_T = torch.randint(0, model.config.vocab_size, (rows * fed,), device=model.device)
    positions_T = torch.arange(context, context + fed, device=model.device).repeat(rows)
    kv = cache.batch([*range(rows)], [context] * rows, [fed] * rows, None)
    call: Callable[..., Any] | None = getattr(model, "draft" if drafting else "score", None)
    if call is None:
        return lambda: model.logits(model(tokens_T, positions_T, kv))
    listed = array("q", tokens_T.tolist()), array("q", positions_T.tolist()), kv
    return partial(call, *listed, [tokens], [()]) if drafting else partial(call, *listed)


def feeding(model: Model, tokens: int, context: int) -> Callable[[], None]:
    """A forward over ``tokens`` after ``context``, and its most likely tokens, as often as one likes."""
    row = Row([1, 2, 3, 4] * (context // 4), context, SamplingParams(temperature=0.0), Exact(), seed=0, k=0)
    runner = Runner(model, PagedKVCache.for_model(model, context + tokens + 64))
    draft = [4] * (tokens - 1)

    def run() -> None:
        argmax(runner.feed([row], [draft])).tolist()
        runner.commit([row])

    return run


def drafts_alone(strategy: DraftStrategy | None) -> TypeGuard[SingleDraft]:
    """Whether it is one model that nobody drafts for."""
    return isinstance(strategy, SingleDraft) and strategy.draft is None


def is_divided(draft: DraftStrategy | None) -> bool:
    """Whether each rank has a part of the draft's one model."""
    model = draft.runner.model if isinstance(draft, SingleDraft) else None
    return isinstance(model, Llama) and model.lm_head.weight.shape[0] < model.config.vocab_size


def rule_name(rule: AcceptancePolicy) -> str:
    """A short name for a table: without parameters, and of what is composed only that there is more."""
    return f"{rule.base.name} | …" if isinstance(rule, Relaxed) else rule.name


def settings_of(plain: LLM, fast: LLM, k: int, rules: Sequence[AcceptancePolicy]) -> list[Setting]:
    """Autoregressive decoding of ``plain``; of ``fast`` exact speculation, and each rule that is another."""
    different = [rule for number, rule in enumerate(rules) if rule not in rules[:number]]
    named = [Setting(rule_name(rule), fast, k, rule) for rule in different if rule != Exact()]
    names = [setting.name for setting in named]
    named = [replace(each, name=str(each.policy)) if names.count(each.name) > 1 else each for each in named]
    return [Setting("autoregressive", plain, 0), Setting("exact", fast, k), *named]
