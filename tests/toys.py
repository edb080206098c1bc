"""Tiny random models and the strategies that draw their configurations. Imported by the tests of every room."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from fly.backends import load
from fly.backends.torch import TorchExecutor
from fly.cache import BlockAllocator
from fly.drafts.base import DraftStrategy, Loaded
from fly.drafts.setup import TranslatingSetup
from fly.models import DenseCausal, Llama, LlamaConfig, RopeScaling
from fly.models.families import FAMILIES, FULL, SLIDING, Family
from fly.models.tokenizer import Tokenizer
from fly.runner.executor import Batch, Executor, Head, Scores
from fly.runner.runner import Runner

__all__ = [
    "PADDING",
    "PLAIN",
    "HashModel",
    "build_llama",
    "caches",
    "dense_logits",
    "llama_configs",
    "random_llama",
    "ready",
    "rope_scalings",
    "run",
    "save_tokenizer",
]


def build_llama(config: LlamaConfig, seed: int = 0, scale: float | None = None) -> Llama:
    """A float32 ``Llama(config)`` on the CPU, in eval mode and without gradients, weights drawn from ``seed``.

    Matrices and biases are normal with deviation ``scale``, so that the gaps between logits are clear (0.3, and less
    for wide models, whose attention would become so sharp that it magnifies rounding); norm weights lie around one,
    so that a forgotten norm weight shows.
    """
    if scale is None:
        scale = 0.3 * min(1.0, (32 / config.hidden_size) ** 0.5)
    model = Llama(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 - config.traits.norm_offset if name.endswith("norm.weight") else 0.0
            parameter.normal_(centre, scale, generator=generator)
    return model.eval().requires_grad_(False)


def random_llama(
    seed: int = 0,
    vocab_size: int = 37,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 48,
    max_positions: int = 512,
    tied: bool = False,
    scale: float = 0.3,
) -> Llama:
    """A tiny model with random weights of deviation ``scale``; the same arguments give the same model."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
    )
    return build_llama(config, seed, scale)


def dense_logits(model: Llama, tokens: Sequence[int] | Tensor) -> Tensor:
    """Logits [T, V] of one fresh sequence, without any cache."""
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    hidden = model(ids, torch.arange(len(ids)), DenseCausal(1, len(ids)))
    return model.logits(hidden)


@st.composite
def rope_scalings(draw: st.DrawFn) -> RopeScaling:
    """Every rope type with every one of its settings."""
    rope_type = draw(st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]))
    if rope_type == "default":
        return RopeScaling()
    factor = draw(st.sampled_from([1.0, 2.0, 8.0, 32.0]))
    if rope_type in ("linear", "dynamic"):
        return RopeScaling(rope_type=rope_type, factor=factor)
    if rope_type == "yarn":
        return RopeScaling(
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=draw(st.sampled_from([8, 16, 64])),
            attention_factor=draw(st.sampled_from([None, 0.8])),
            beta_fast=draw(st.sampled_from([32.0, 4.0])),
        )
    low = draw(st.sampled_from([0.5, 1.0, 2.0]))
    return RopeScaling(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=low * draw(st.sampled_from([2.0, 4.0])),
        # small, so that some wavelengths of a tiny head lie in each of the three bands
        original_max_position_embeddings=draw(st.sampled_from([8, 16, 64])),
    )


# What compiled kernels and ranks do not refuse.
PLAIN = tuple(family for family in FAMILIES.values() if family.query_norm != "whole")


@st.composite
def llama_configs(
    draw: st.DrawFn, max_positions: int = 64, families: Sequence[Family] = tuple(FAMILIES.values())
) -> LlamaConfig:
    """Configurations of every family over all options: rope types, grouping, head widths of their own, ties, biases,
    eps, theta, windows, multipliers."""
    family = draw(st.sampled_from(families))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    head_dim = draw(st.sampled_from([2, 4, 8, 16]))
    # Any width is fine for us where head_dim is stated; transformers wants a multiple of the heads.
    hidden, layers = heads * draw(st.sampled_from([head_dim, 3, 5, 8])), draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "query_pre_attn_scalar": draw(st.sampled_from([1, head_dim, 9])),
        "rope_local_base_freq": draw(st.sampled_from([50.0, 10000.0])),
        "embedding_multiplier": draw(st.sampled_from([1.0, 12.0])),
        "attention_multiplier": draw(st.sampled_from([1.0, 0.3])),
        "residual_multiplier": draw(st.sampled_from([1.0, 0.22])),
        "logits_scaling": draw(st.sampled_from([1.0, 6.0])),
    }
    kinds = st.sampled_from([FULL, SLIDING])
    usual = set(family.layer_types(family.defaults, 24))  # the kinds of its layers if a file lists none
    types = [draw(kinds)] * layers if usual == {SLIDING} else draw(st.lists(kinds, min_size=layers, max_size=layers))
    if usual == {FULL, SLIDING}:
        types[0] = SLIDING  # transformers runs none of these without a window
    if types != [FULL] * layers:
        options |= {"layer_types": types, "sliding_window": draw(st.sampled_from([1, 3, 8, 30]))}
    scaling = draw(rope_scalings())
    if scaling.rope_type == "dynamic" and head_dim == 2:
        scaling = RopeScaling()  # transformers divides by their difference
    if "rope_scaling" in family.refused:
        scaling = RopeScaling()
    if scaling.rope_type == "yarn":  # a stretched context is the model's
        longest = scaling.factor * scaling.original_max_position_embeddings
        max_positions = max(max_positions, int(longest))
    return LlamaConfig(
        family=family.name,
        vocab_size=draw(st.integers(2, 40)),
        hidden_size=hidden,
        intermediate_size=draw(st.sampled_from([6, 16, 40])),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        rope_theta=draw(st.sampled_from([100.0, 10000.0, 500000.0])),
        rope_scaling=scaling,
        tie_word_embeddings=draw(st.booleans()),
        **{name: value for name, value in options.items() if name in family.options},
    )


def run(model: Any) -> Executor:
    """A loaded model on PyTorch's executor, or an executor as it is."""
    return model if isinstance(model, Executor) else TorchExecutor(model)


def ready(strategy: DraftStrategy, target: Any = None, tokenizer: Tokenizer | None = None) -> Any:
    """``strategy``, attached to a target (None: one of the vocabulary of its own models), with its caches."""
    runner = Runner(run(target or _model_of(strategy) or random_llama()), None, tokenizer=tokenizer)
    setup = TranslatingSetup(runner, load=load)
    made = setup.attach(strategy)
    runner.reserve()
    setup.reserve()
    return made


def caches(strategy: Any) -> list[BlockAllocator]:
    """The allocators of an attached strategy's models."""
    own = [strategy.runner.allocator] if hasattr(strategy, "runner") else []
    parts = [getattr(strategy, "draft", None), *getattr(strategy, "members", [])]
    return own + [allocator for part in parts if part is not None for allocator in caches(part)]


def _model_of(strategy: Any) -> Any:
    parts = [getattr(strategy, "model", None), *map(_model_of, getattr(strategy, "members", []))]
    found = next((part for part in parts if part is not None), None)
    if not isinstance(found, (str, Path, Loaded)):
        return found
    executor = load(found).executor
    return load("fly-target").executor if isinstance(executor, Head) else executor


class HashModel(Executor):
    """An executor that can only score, costs next to nothing, and notices any mistake in its cache.

    The distribution after a text is looked up by a sum of whole numbers, one a token and its position, which attention
    over the paged cache adds up: a key of another sequence, a stale page or a wrong mask changes it. ``noise`` of the
    distributions are those of another seed, so that models of the same ``seed`` agree that much.
    """

    SUMS, VALUES = 1009, 512  # sums below 2^24 are exact in float32

    def __init__(self, seed: int = 0, vocab_size: int = 17, noise: float = 0.0, max_positions: int = 96) -> None:
        self.config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=max_positions,
        )
        self.device, self.dtype = torch.device("cpu"), torch.float32
        draw = torch.Generator().manual_seed(seed)
        self.values = torch.randint(self.VALUES, (vocab_size, max_positions, 8), generator=draw).float()
        self.distributions = 3 * torch.randn(self.SUMS, vocab_size, generator=draw)
        draw.manual_seed(seed + 7919)
        other = torch.rand(self.SUMS, generator=draw) < noise
        self.distributions[other] = 3 * torch.randn(int(other.sum()), vocab_size, generator=draw)

    def score(self, batch: Batch, places: Sequence[int] | None = None) -> Scores:
        positions_T = torch.tensor(batch.positions)
        value_T1D = self.values[torch.tensor(batch.tokens), positions_T].unsqueeze(1)
        mean_TD = batch.kv.attend(0, torch.zeros_like(value_T1D), value_T1D, value_T1D).squeeze(1)
        sum_TD = (mean_TD * (positions_T + 1).unsqueeze(1)).round().long()
        sum_TD = sum_TD if places is None else sum_TD[torch.tensor(places, dtype=torch.int64)]
        return Scores(self.distributions[(sum_TD * torch.arange(1, 9)).sum(-1) % self.SUMS])


PADDING = 3  # rows of the toy models' vocabularies that no token has


def save_tokenizer(directory: Path, pieces: list[str]) -> int:
    """A tokenizer whose text tokens are ``pieces``, then ``<end>`` and ``<turn>``. Returns the number of its tokens."""
    spelled = {piece: number for number, piece in enumerate(pieces)}
    raw = RawTokenizer(models.BPE(spelled, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(["<end>", "<turn>"])
    directory.mkdir(parents=True, exist_ok=True)
    raw.save(str(directory / "tokenizer.json"))
    return len(pieces) + 2
