"""Toy setups, runners and engines for draft strategies."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from fly.backends.choice import load
from fly.cache import PagedKVCache
from fly.drafts.base import DraftSetup, DraftStrategy, Loaded, LoadModel
from fly.drafts.setup import TranslatingSetup
from fly.llm import LLM
from fly.runner.executor import Executor
from fly.runner.runner import Runner
from fly.testing.blocks import toy_vocabulary
from fly.vocabulary import Vocabulary

__all__ = ["LoadOnce", "make_llm", "make_runner", "make_setup"]

_CONTEXTS = 64  # how many full contexts a runner's cache holds


class LoadOnce:
    """Loads models by name, each only once."""

    def __init__(self) -> None:
        self.loaded: list[Loaded] = []
        self._known: dict[str, Loaded] = {}

    def __call__(self, model: object, **options: Any) -> Loaded:
        is_name = isinstance(model, (str, Path))
        key = f"{model} {sorted(options.items(), key=itemgetter(0))}" if is_name else f"{id(model)}"
        if key not in self._known:
            self._known[key] = load(model, **options)
            self.loaded.append(self._known[key])
        return self._known[key]


def make_setup(executor: Executor, load: LoadModel) -> DraftSetup:
    """Make a setup for draft strategies: a target over toy tokens, with a cache for many rows."""
    return TranslatingSetup(make_runner(executor), toy_vocabulary(executor.config.vocab_size), load)


def make_runner(executor: Executor) -> Runner:
    """Make a runner of ``executor`` with a cache for many rows."""
    return Runner(executor, PagedKVCache.for_model(executor, _CONTEXTS * executor.config.max_position_embeddings))


class _ToyLLM(LLM):
    """An ``LLM`` with the toy vocabulary."""

    def _vocabulary_of(self, size: int, device: torch.device) -> Vocabulary:
        return toy_vocabulary(size)


def make_llm(executor: Executor, strategy: DraftStrategy) -> LLM:
    """Make an ``LLM`` for speculative decoding by the exact rule over toy tokens."""
    return _ToyLLM(executor, strategy)
