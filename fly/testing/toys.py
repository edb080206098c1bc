"""Toy models and their runners. This is the only file of the kits that builds a model, a ``Runner`` or an ``LLM``."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from fly.backends import load
from fly.cache import PagedKVCache
from fly.drafts.base import DraftSetup, DraftStrategy, Loaded, LoadModel
from fly.drafts.translate import TranslatingSetup
from fly.llm import LLM
from fly.models import Llama, LlamaConfig
from fly.runner.executor import Executor
from fly.runner.runner import Runner
from fly.testing.blocks import toy_vocabulary
from fly.vocabulary import Vocabulary

__all__ = ["LoadOnce", "make_executor", "make_llm", "make_runner", "make_setup", "toy_target"]

_POSITIONS = 128  # context length of the toy target
_CONTEXTS = 64  # how many full contexts a runner's cache holds


def toy_target(vocab_size: int, config: LlamaConfig | None = None) -> Llama:
    """Make a random Llama in float32 on the CPU, the same one each time. It has two layers of width 16, or the sizes in
    ``config``."""
    config = config or LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=_POSITIONS,
    )
    model = Llama(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3, generator=generator)
    return model.eval().requires_grad_(False)


def make_executor(model: object) -> Executor:
    """Load a model, or the checkpoint with the given name, and return its executor."""
    return load(model).executor


class LoadOnce:
    """Loads models by name, each only once."""

    def __init__(self) -> None:
        self.loaded: list[Loaded] = []
        self._known: dict[str, Loaded] = {}

    def __call__(self, model: object, **options: Any) -> Loaded:
        named = isinstance(model, (str, Path))
        key = f"{model} {sorted(options.items(), key=itemgetter(0))}" if named else f"{id(model)}"
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
