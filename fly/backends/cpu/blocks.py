"""Matrices in the blocks of GGUF files: which kinds compiled kernels take as they are, and rounding to such blocks.

Shape legend: N outputs, K inputs, n some outputs, G groups of 32 inputs, S superblocks of 8 groups.

The formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. src/blocks.cpp reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["KINDS", "eight_bits", "four_bits"]

# Kinds of blocks that kernels compute with, by the file format's names and numbers.
KINDS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
_GROUP, _GROUPS = 32, 8
_ROWS = 32  # rows rounded at a time, few enough for the processor's caches to hold their float32 values


def eight_bits(weight_NK: Tensor) -> Tensor:
    """Round weights to blocks of Q8_0, uint8 [N, 34 bytes a group]: each to the nearest multiple of its group's scale,
    which is the group's largest absolute value divided by 127, as float16."""
    rows = []
    for weight_nK in weight_NK.detach().split(_ROWS):
        weight_nGX = _grouped(weight_nK)
        scale_nG1 = (weight_nGX.abs().amax(2, keepdim=True) / 127).half()
        step_nG1 = scale_nG1.float()
        whole_nGX = (weight_nGX / step_nG1.where(step_nG1 != 0, 1.0)).round_().clamp_(-127, 127).to(torch.int8)
        rows.append(torch.cat([scale_nG1.view(torch.uint8), whole_nGX.view(torch.uint8)], dim=2).flatten(1))
    return torch.cat(rows)


def four_bits(weight_NK: Tensor) -> Tensor:
    """Round weights to blocks of Q4_K, uint8 [N, 144 bytes a superblock]. Groups beyond K hold zeros, and products skip
    them.

    A weight is scale · number + minimum, with a number from 0 to 15, and the scale and minimum of its group. Two sets
    of numbers are tried: the largest weight becomes 15 in one and 14 in the other. For each set, a linear regression of
    the weights on the numbers gives the scale and minimum with the least squared error, in closed form. The better set
    is kept. Then scales and minima are rounded to 63 steps of the largest in a superblock, and each number is rounded
    anew for the rounded scale and minimum.
    """
    rows = [_four_bits(weight_nK) for weight_nK in weight_NK.detach().split(_ROWS)]
    return torch.cat(rows)


def _grouped(weight_nK: Tensor) -> Tensor:
    """[n, G, 32] in float32, with zeros after the last input."""
    return pad(weight_nK.float(), (0, -weight_nK.shape[1] % _GROUP)).unflatten(1, (-1, _GROUP))


def _four_bits(weight_nK: Tensor) -> Tensor:
    weight_nGX = _grouped(weight_nK)
    n = len(weight_nGX)
    least_nG1 = weight_nGX.amin(2, keepdim=True).clamp_(max=0)  # the format has no minima above 0
    span_nG1 = weight_nGX.amax(2, keepdim=True) - least_nG1
    span_nG1 = span_nG1.where(span_nG1 > 0, 1.0)
    best_error_nG1 = torch.full_like(span_nG1, torch.inf)
    best_scale_nG1, best_least_nG1 = torch.empty_like(span_nG1), torch.empty_like(span_nG1)
    centre_nG1 = weight_nGX.mean(2, keepdim=True)
    for most in (15, 14):
        number_nGX = ((weight_nGX - least_nG1) * (most / span_nG1)).round_()
        # The regression. If its minimum would be above 0, the line goes through 0 instead.
        mean_nG1 = number_nGX.mean(2, keepdim=True)
        square_nG1 = number_nGX.square().sum(2, keepdim=True)
        product_nG1 = (number_nGX * weight_nGX).sum(2, keepdim=True)
        spread_nG1 = square_nG1 - _GROUP * mean_nG1.square()
        scale_nG1 = (product_nG1 - _GROUP * mean_nG1 * centre_nG1) / spread_nG1.clamp(min=1e-6)
        fitted_nG1 = centre_nG1 - scale_nG1 * mean_nG1
        above_nG1 = fitted_nG1 > 0
        scale_nG1 = torch.where(above_nG1, product_nG1 / square_nG1.clamp(min=1e-6), scale_nG1).clamp_(min=0)
        fitted_nG1 = fitted_nG1.where(~above_nG1, 0.0)
        error_nG1 = (number_nGX * scale_nG1 + (fitted_nG1 - weight_nGX)).square_().sum(2, keepdim=True)
        better_nG1 = error_nG1 < best_error_nG1
        best_error_nG1 = torch.where(better_nG1, error_nG1, best_error_nG1)
        best_scale_nG1 = torch.where(better_nG1, scale_nG1, best_scale_nG1)
        best_least_nG1 = torch.where(better_nG1, fitted_nG1, best_least_nG1)
    # Round scales and minima to multiples, from 0 to 63, of their superblock's factor.
    parts, factors, rounded = [], [], []
    for values_nG1 in (best_scale_nG1, -best_least_nG1):
        values_nSG = pad(values_nG1.squeeze(2), (0, -values_nG1.shape[1] % _GROUPS)).unflatten(1, (-1, _GROUPS))
        factor_nS1 = (values_nSG.amax(2, keepdim=True) / 63).half()
        step_nS1 = factor_nS1.float()
        part_nSG = (values_nSG / step_nS1.where(step_nS1 != 0, 1.0)).round_().clamp_(0, 63)
        parts.append(part_nSG.to(torch.uint8))
        factors.append(factor_nS1)
        rounded.append((part_nSG * step_nS1).flatten(1)[:, : values_nG1.shape[1], None])
    scale_nG1, minus_nG1 = rounded
    inverse_nG1 = torch.where(scale_nG1 > 0, scale_nG1.reciprocal(), 0.0)
    number_nGX = ((weight_nGX + minus_nG1) * inverse_nG1).round_().clamp_(0, 15).to(torch.uint8)
    fields = [*(factor.view(torch.uint8) for factor in factors), _six_bits(*parts), _nibbles(number_nGX, n)]
    return torch.cat(fields, 2).flatten(1)


def _six_bits(scale_nSG: Tensor, minus_nSG: Tensor) -> Tensor:
    """Pack scales and minima of 6 bits into 12 bytes [n, S, 12]. Eight bytes hold the first four scales and the first
    four minima, with the upper two bits of the last four above them. Four bytes hold the lower four bits of the last
    four scales and minima."""
    first, last = [x[..., :4] for x in (scale_nSG, minus_nSG)], [x[..., 4:] for x in (scale_nSG, minus_nSG)]
    return torch.cat([*(a | (b >> 4) << 6 for a, b in zip(first, last)), last[0] & 15 | last[1] << 4], 2)


def _nibbles(number_nGX: Tensor, n: int) -> Tensor:
    """Pack numbers into bytes [n, S, 128]. Each 32 bytes hold a group's 32 numbers in their lower halves, and those of
    the next group in their upper halves."""
    number_nGX = pad(number_nGX, (0, 0, 0, -number_nGX.shape[1] % _GROUPS))
    number_nSX = number_nGX.view(n, -1, _GROUPS // 2, 2, _GROUP)
    return (number_nSX[:, :, :, 0] | number_nSX[:, :, :, 1] << 4).flatten(2)
