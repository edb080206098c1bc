"""Matrices in the blocks of GGUF files: which kinds compiled kernels take as they are, and rounding to such blocks.

Shape legend: N outputs, K inputs, B bytes of a row of blocks.

The formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. src/blocks.cpp reads them, and
src/rounding.cpp writes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fly.backends.cpu.library import load

__all__ = ["KINDS", "eight_bits", "four_bits"]

# Kinds of blocks that kernels compute with, by the file format's names and numbers.
KINDS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


def eight_bits(weight_NK: Tensor) -> Tensor:
    """Round weights to blocks of Q8_0, uint8 [N, 34 bytes per group of 32]: each to the nearest multiple of its group's
    scale, which is the group's largest absolute value divided by 127, as float16. A group with a value that is not
    finite gets the scale NaN."""
    return _rounded("Q8_0", weight_NK, 32, 34)


def four_bits(weight_NK: Tensor) -> Tensor:
    """Round weights to blocks of Q4_K, uint8 [N, 144 bytes per superblock of 8 groups]. Groups beyond K hold zeros, and
    products skip them.

    A weight is scale · number + minimum, with a number from 0 to 15, and the scale and minimum of its group. Four sets
    of numbers are tried, in which the largest weight lies 14.2 to 15.4 steps above the smallest. For each set, a linear
    regression of the weights on the numbers gives the scale and minimum with the least squared error, in closed form.
    The best set is kept. Then scales and minima are rounded to 63 steps of the largest in a superblock, and each number
    is rounded anew for the rounded scale and minimum. A superblock with a value that is not finite stands for NaN.
    """
    return _rounded("Q4_K", weight_NK, 256, 144)


def _rounded(kind: str, weight_NK: Tensor, wide: int, size: int) -> Tensor:
    """Round weights to blocks of ``wide`` inputs, uint8 [N, bytes], each of ``size`` bytes."""
    weight_NK = weight_NK.detach()
    if weight_NK.dtype != torch.bfloat16:
        weight_NK = weight_NK.float()
    rows, inputs = weight_NK.shape
    blocks_NB = torch.empty(rows, -(-inputs // wide) * size, dtype=torch.uint8)
    stored = int(weight_NK.dtype == torch.bfloat16)  # src/interface.h: Type
    load().fly_round(KINDS[kind], stored, weight_NK.contiguous(), rows, inputs, blocks_NB)
    return blocks_NB
