"""Models of given shapes with random weights, and how much a forward of a model has to read and compute."""

from __future__ import annotations

import re
from collections import Counter
from typing import TypeVar

import torch

from fly.cache import PagedKVCache
from fly.models import Llama, LlamaConfig
from fly.models.llama import allocate, skeleton

__all__ = ["forward_bytes", "forward_operations", "matrix_parameters", "random_model", "randomise", "shape_config"]

_Module = TypeVar("_Module", bound=torch.nn.Module)


def shape_config(shape: str, positions: int = 4096) -> LlamaConfig:
    """Return the configuration of a Llama of the shape ``WIDTHxLAYERSxVOCABULARY``, such as 768x12x32000 (110M
    parameters). Its attention heads have a width of 64 and their own keys and values. Its feed-forward width is 8/3 of
    the width, rounded up to a multiple of 64. The embeddings are shared with the output projection.

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
    """Make a model with random weights of standard deviation 0.02. The weights of norms are 1."""
    return randomise(skeleton(config), dtype, device, seed)


def randomise(model: _Module, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> _Module:
    """Allocate a module that has no memory yet, give it weights like those of ``random_model``, and return it. The
    module may be one rank's part of a model."""
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
    """Return the number of weights that multiply every token: those of the layers' matrices and the output projection,
    without the embedding table."""
    head, width = config.head_dim, config.hidden_size
    attention = 2 * width * head * (config.num_attention_heads + config.num_key_value_heads)
    return config.num_hidden_layers * (attention + 3 * width * config.intermediate_size) + width * config.vocab_size


def forward_bytes(
    config: LlamaConfig, dtype: torch.dtype, rows: int = 1, context: int = 0, weight_bytes: float | None = None
) -> int:
    """Return the bytes that a forward of ``rows`` rows has to read, however many new tokens they have. It reads
    every weight once (``weight_bytes`` each; None takes the size of ``dtype``), and for each row the keys and values of
    ``context`` tokens. Norms are left out, and so is everything that is written."""
    cache_bytes = rows * context * PagedKVCache.bytes_per_token(config, dtype)
    return int(matrix_parameters(config) * (weight_bytes or dtype.itemsize)) + cache_bytes


def forward_operations(
    config: LlamaConfig,
    dtype: torch.dtype,
    rows: int = 1,
    context: int = 0,
    tokens: int = 1,
    products: torch.dtype | None = None,
) -> Counter[torch.dtype]:
    """Return the operations of a forward, by dtype. Each weight takes two per token, in ``products`` (None means
    ``dtype``). Attention takes four, in ``dtype``, for each pair of a token and a token that it attends to, and each
    number in the heads."""
    pairs = tokens * context + tokens * (tokens + 1) // 2
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    operations = Counter({dtype: rows * attention})
    operations[products or dtype] += rows * 2 * matrix_parameters(config) * tokens
    return operations
