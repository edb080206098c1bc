"""Toy models, and what runs them: the only place of the kits that builds a model, a ``Runner`` or an ``LLM``."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from fly.backends import load
from fly.cache import PagedKVCache
from fly.drafts.base import DraftSetup, DraftStrategy, Load, Loaded
from fly.drafts.translate import TranslatingSetup
from fly.llm import LLM
from fly.models import Llama, LlamaConfig
from fly.runtime.executor import Executor
from fly.runtime.runner import Runner
from fly.testing.blocks import toy_vocabulary
from fly.vocabulary import Vocabulary

__all__ = ["LoadOnce", "make_executor", "make_llm", "make_runner", "make_setup", "toy_target"]

_POSITIONS = 128  # of the toy target
_CONTEXTS = 64  # full ones that a runner's cache holds


def toy_target(vocab_size: int, config: LlamaConfig | None = None) -> Llama:
    """A random Llama of width 16 and two layers, or of other sizes, float32 on the CPU; the same each time."""
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
    """What runs a model, loaded or by its name."""
    return load(model).executor


class LoadOnce:
    """Loads models by their names, each once, however many strategies ask for it."""

    def __init__(self) -> None:
        self.loaded: list[Loaded] = []
        self._known: dict[str, Loaded] = {}

    def __call__(self, model: object, **options: Any) -> Loaded:
        key = (
            f"{model} {sorted(options.items(), key=itemgetter(0))}"
            if isinstance(model, (str, Path))
            else f"{id(model)}"
        )
        if key not in self._known:
            self._known[key] = load(model, **options)
            self.loaded.append(self._known[key])
        return self._known[key]


def make_setup(executor: Executor, load: Load) -> DraftSetup:
    """A target with a cache that many rows fit into, over toy tokens, for strategies to draft for."""
    return TranslatingSetup(make_runner(executor), toy_vocabulary(executor.config.vocab_size), load)


def make_runner(executor: Executor) -> Runner:
    """``executor`` with a cache of its own that many rows fit into."""
    return Runner(executor, PagedKVCache.for_model(executor, _CONTEXTS * executor.config.max_position_embeddings))


class _ToyLLM(LLM):
    """Toy tokens have texts from the start: strategies and rules see no other vocabulary in the kits."""

    def _vocabulary_of(self, size: int, device: torch.device) -> Vocabulary:
        return toy_vocabulary(size)


def make_llm(executor: Executor, strategy: DraftStrategy) -> LLM:
    """Speculative decoding by the exact rule, over toy tokens."""
    return _ToyLLM(executor, strategy)
