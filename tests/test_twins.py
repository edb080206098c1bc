"""Bounds of ``tests/twins.py``: kernels are within them, and with any of these faults they would not be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from fly.backends.cpu import PackedLlama
from fly.models import Llama, LlamaConfig
from tests.kernels import NARROW, VARIANTS, built, paged, text
from tests.toys import build_llama
from tests.twins import Twin, assert_within

# Narrow: of fewer values, fewer lie so near the middle of two steps that a draw takes the other one.
CONFIG = LlamaConfig(
    family="gemma3_text",
    vocab_size=30,
    hidden_size=20,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=16,
    attention_bias=True,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=5,
    query_pre_attn_scalar=30,
    rope_local_base_freq=100.0,
)
ROWS = [text(12, seed, CONFIG.vocab_size) for seed in range(4)]


def one_step(model: Llama) -> None:
    """One weight is one step of 8 bits larger. (Of some weights, the step hides behind others that noise decides.)"""
    weight_NK = model.layers[1].mlp.down_proj.weight
    weight_NK[17, 20] += weight_NK[17].abs().max() / 127


def one_scale(model: Llama) -> None:
    """The scale of one output's group is one step of 6 bits larger."""
    model.layers[0].self_attn.o_proj.weight[3, :32] *= 1 + 1 / 63


def one_logit(model: Llama) -> None:
    """The scale of one output's weights is a step of 8 bits larger."""
    model.lm_head.weight[2] *= 1 + 1 / 127


def no_last_input(model: Llama) -> None:
    """The sum of one output lacks the last input."""
    model.layers[0].mlp.gate_up_proj.weight[30, -1] = 0


def no_bias(model: Llama) -> None:
    """One value of all keys and values has no bias."""
    model.layers[1].self_attn.qkv_proj.bias[-1] = 0


def one_position(model: Llama) -> None:
    """One token is rotated like the next one."""
    for table_P1D in (table for tables in model.rotary() for table in tables):
        table_P1D[3] = table_P1D[4]


def other_window(model: Llama) -> None:
    """A layer sees one token more."""
    model.layers[0].self_attn.window += 1


def other_scale(model: Llama) -> None:
    """The products of queries and keys are 1/256 larger."""
    model.layers[1].self_attn.scale *= 1 + 1 / 256


FAULTS: list[Callable[[Llama], None]] = [
    one_step, one_scale, one_logit, no_last_input, no_bias, one_position, other_window, other_scale,
]  # fmt: skip


@cache
def computed(kernels: str) -> tuple[Llama, list[Tensor]]:
    """A model, and its logits for each of ``ROWS``."""
    reference = build_llama(CONFIG, 1, scale=0.2).bfloat16()
    return reference, paged(PackedLlama(reference, kernels), ROWS, [[len(row)] for row in ROWS])


def check(kernels: str, change: Callable[[Twin], None], cache: torch.dtype | None = None) -> None:
    """The logits are those of a twin that was changed, as if the kernels were wrong."""
    reference, logits = computed(kernels)
    twin = Twin(reference, kernels)
    change(twin)
    for row, logits_TV in zip(ROWS, logits):
        assert_within(logits_TV, partial(twin.logits, row, cache))


@built
@pytest.mark.parametrize("kernels", [*VARIANTS, *NARROW])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault: Callable[[Llama], None], kernels: str) -> None:
    with pytest.raises(AssertionError, match=" > "):
        check(kernels, lambda twin: fault(twin.model))


@built
@pytest.mark.parametrize("kernels", [*VARIANTS, *NARROW])
def test_values_that_are_stored_in_another_type_are_seen(kernels: str) -> None:
    """In the cache, or where a product takes them."""

    def take_other(twin: Twin) -> None:
        twin.taken = torch.float32 if twin.taken == torch.bfloat16 else torch.bfloat16

    check(kernels, lambda twin: None)
    with pytest.raises(AssertionError, match=" > "):
        check(kernels, lambda twin: None, torch.float32)
    with pytest.raises(AssertionError, match=" > "):
        check(kernels, take_other)
