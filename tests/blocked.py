"""PyTorch twins of kernels that compute with blocks of GGUF files (``fly.backends.cpu.blocks``), which the ``gguf``
library decodes.

Shape legend: T rows, K inputs, N outputs, G groups of 32 inputs."""

from __future__ import annotations

from copy import deepcopy

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fly.backends.cpu.blocks import eight_bits, four_bits
from fly.models import Llama

__all__ = ["best_lines", "bound_of_groups", "decoded", "in_groups", "rounded_to_groups", "with_rounded_inputs"]

STEPS = 14.2, 14.6, 15.0, 15.4  # src/rounding.cpp: line_of


def decoded(blocks_NB: Tensor, kind: str, inputs: int) -> Tensor:
    """What blocks stand for, float32 [N, K]."""
    values = gguf.dequantize(blocks_NB.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values)[:, :inputs]


def best_lines(weight_NK: np.ndarray) -> np.ndarray:
    """What ``four_bits`` makes of weights, by a plain search in float64."""
    n, k = weight_NK.shape
    padded = np.pad(weight_NK.astype(np.float64), ((0, 0), (0, -k % 256))).reshape(-1, 8, 32)
    whole = np.zeros_like(padded)
    for superblock, out in zip(padded, whole):
        lines = np.array([_best_line(group) for group in superblock])
        factors = (lines.max(0) / 63).clip(0).astype(np.float16).astype(np.float64)
        parts = np.round(lines / np.where(factors > 0, factors, 1)).clip(0, 63) * factors
        for g, (scale, minus) in enumerate(parts):
            number = np.round((superblock[g] + minus) / scale).clip(0, 15) if scale > 0 else 0
            out[g] = number * scale - minus
    return whole.reshape(n, -1)[:, :k].astype(np.float32)


def _best_line(group: np.ndarray) -> tuple[float, float]:
    """The scale, and the minimum with its sign turned."""
    least, most = min(group.min(), 0.0), group.max()
    found = [(float(((group - least) ** 2).sum()), 0.0, -least)]
    for steps in STEPS if most > least else ():
        number = np.round((group - least) * (steps / (most - least))).clip(max=15)
        scale, minimum = np.polyfit(number, group, 1) if len(set(number)) > 1 else (0.0, least)
        if minimum > 0:
            scale, minimum = (number @ group) / (number @ number), 0.0
        found.append((float(((number * scale + minimum - group) ** 2).sum()), scale, -minimum))
    return min(found)[1:]


def in_groups(values_TK: Tensor) -> Tensor:
    """Rows rounded as kernels do: each 32 values to whole steps of 1/127 of the largest."""
    width = values_TK.shape[1]
    values_TGX = pad(values_TK.float(), (0, -width % 32)).unflatten(1, (-1, 32))
    peak_TG1 = values_TGX.abs().amax(2, keepdim=True)
    inverse_TG1 = torch.where(peak_TG1 > 0, torch.full_like(peak_TG1, 127) / peak_TG1, 0)
    return ((values_TGX * inverse_TG1).round() * (peak_TG1 / 127)).flatten(1)[:, :width]


def bound_of_groups(values_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """How far rounding the rows may move their products with a matrix, [T, N]: half a step for each input."""
    values_TGX = pad(values_TK.double(), (0, -values_TK.shape[1] % 32)).unflatten(1, (-1, 32))
    weight_NGX = pad(weight_NK.double(), (0, -weight_NK.shape[1] % 32)).unflatten(1, (-1, 32))
    return values_TGX.abs().amax(2) / 254 @ weight_NGX.abs().sum(2).T


def with_rounded_inputs(model: Llama, stored: torch.dtype) -> Llama:
    """``model``, with what its matrices take, ``stored`` as such, rounded in groups."""

    def rounded(linear: nn.Module, taken: tuple[Tensor]) -> tuple[Tensor]:
        return (in_groups(taken[0].to(stored)).to(taken[0].dtype),)

    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        linear.register_forward_pre_hook(rounded)
    return model


def rounded_to_groups(model: Llama, stored: torch.dtype, wide_head: bool) -> Llama:
    """A copy whose matrices are what W4A8 or, without ``wide_head``, W4 takes them for. Its inputs are rounded."""
    twin = deepcopy(model)
    with torch.no_grad():
        for linear in (module for module in twin.modules() if isinstance(module, nn.Linear)):
            rounding, kind = (eight_bits, "Q8_0") if wide_head and linear is twin.lm_head else (four_bits, "Q4_K")
            linear.weight.copy_(decoded(rounding(linear.weight), kind, linear.in_features))
    return with_rounded_inputs(twin, stored)
