"""Toy models. The kit of rules needs no more of an engine; ``setups.py`` has what drafts need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fly import backends
from fly.models import Llama, LlamaConfig

if TYPE_CHECKING:
    from fly.runner.executor import Executor

__all__ = ["make_executor", "toy_target"]

_POSITIONS = 128  # context length of the toy target


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
    return backends.load(model).executor
