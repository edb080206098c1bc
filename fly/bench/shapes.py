"""Models of given shapes with random weights, and how much one forward of a model has to read and compute."""

from __future__ import annotations

import re
from collections import Counter

import torch

from fly.cache import PagedKVCache
from fly.models import Llama, LlamaConfig
from fly.models.llama import allocate, skeleton

__all__ = ["forward_bytes", "forward_operations", "matrix_parameters", "random_model", "randomise", "shape_config"]


def shape_config(shape: str, positions: int = 4096) -> LlamaConfig:
    """The Llama of ``WIDTHxLAYERSxVOCABULARY``, as 768x12x32000 (110M parameters): heads of 64, each with its own
    keys and values, a feed-forward width of 8/3 (rounded up to a multiple of 64), embeddings shared with the head.

    Raises ``ValueError`` for a text that is no such shape.
    """
    if not (match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", shape)):
        raise ValueError(f"shape {shape!r} must be WIDTHxLAYERSxVOCABULARY, as 768x12x32000")
    width, layers, vocabulary = map(int, match.groups())
    if not width or width % 64:
        raise ValueError(f"shape {shape!r}: the width must be a multiple of 64")
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )


def random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Llama:
    """A model with random weights of standard deviation 0.02, and norms of one."""
    return randomise(skeleton(config), dtype, device, seed)


def randomise(model: Llama, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Llama:
    """Allocate a module that has no memory yet, give it such weights, and return it. It may be a rank's part of a
    model."""
    allocate(model, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model.eval().requires_grad_(False)


def matrix_parameters(config: LlamaConfig) -> int:
    """The number of weights that every token is multiplied with: the layers' matrices and the output projection,
    without the table of embeddings."""
    head, width = config.head_dim, config.hidden_size
    attention = 2 * width * head * (config.num_attention_heads + config.num_key_value_heads)
    return config.num_hidden_layers * (attention + 3 * width * config.intermediate_size) + width * config.vocab_size


def forward_bytes(
    config: LlamaConfig, dtype: torch.dtype, rows: int = 1, context: int = 0, weight_bytes: float | None = None
) -> int:
    """The bytes that a forward of ``rows`` rows has to read, however many new tokens they have: every weight once (of
    ``weight_bytes`` each; None for those of ``dtype``), and for each row the keys and values of ``context`` tokens.
    Norms are left out, and so is everything that is written."""
    stored = rows * context * PagedKVCache.bytes_per_token(config, dtype)
    return int(matrix_parameters(config) * (weight_bytes or dtype.itemsize)) + stored


def forward_operations(
    config: LlamaConfig,
    dtype: torch.dtype,
    rows: int = 1,
    context: int = 0,
    tokens: int = 1,
    products: torch.dtype | None = None,
) -> Counter[torch.dtype]:
    """The operations of the same forward, by dtype: two for each weight and token, in ``products`` (None for
    ``dtype``); and in ``dtype`` four for each number of a head, token, and token that it attends to."""
    seen = tokens * context + tokens * (tokens + 1) // 2
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seen
    done = Counter({dtype: rows * attention})
    done[products or dtype] += rows * 2 * matrix_parameters(config) * tokens
    return done
