"""Int4 weights on CUDA: the matrices of a Llama's layers, rounded as they are loaded.

A weight is (number - zero) · scale, with numbers and zeros from 0 to 15, and a scale and a zero for each group of 128
inputs (64 or 32, where 128 do not divide them). That is the arithmetic of AWQ (arXiv 2306.00978) and GPTQ (arXiv
2210.17323) checkpoints; rounding is to the nearest, without calibration. Products of up to 16 tokens read the numbers
as they are (``ops.multiply_int4``). Products of more tokens widen the matrix for the duration of the product.

Shape legend: T packed tokens, N outputs, K inputs, P = K / 2 pairs of inputs, G groups, X inputs of a group.
"""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fly.backends.cuda.ops import multiply_int4, refuse_layers, widen_int4
from fly.models import Llama
from fly.models.loading import Loading

__all__ = ["Int4Linear", "round_int4", "with_int4_weights"]

_FEW = 16  # the most tokens whose products read int4 weights as they are
_GROUPS = 128, 64, 32


def round_int4(weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of numbers [N, P] (uint8), scales [N, G] (of the weights' dtype) and zeros [N, G] (uint8).

    Raises ``ValueError`` for a number of inputs that 32 does not divide.
    """
    size = next((size for size in _GROUPS if weight_NK.shape[1] % size == 0), 0)
    if not size:
        raise ValueError(f"kernels 'int4': a matrix with {weight_NK.shape[1]} inputs has no groups of 32")
    weight_NGX = weight_NK.float().unflatten(1, (-1, size))
    low_NG, high_NG = weight_NGX.amin(2).clamp_max(0.0), weight_NGX.amax(2).clamp_min(0.0)
    scale_NG = ((high_NG - low_NG) / 15).to(weight_NK.dtype)
    step_NG = scale_NG.float().where(scale_NG != 0, 1.0)
    zero_NG = (-low_NG / step_NG).round().clamp(0, 15)
    number_NGX = (weight_NGX / step_NG.unsqueeze(2) + zero_NG.unsqueeze(2)).round().clamp(0, 15).to(torch.uint8)
    even_NP, odd_NP = number_NGX.flatten(1).unflatten(1, (-1, 2)).unbind(2)
    return even_NP | odd_NP << 4, scale_NG, zero_NG.to(torch.uint8)


class Int4Linear(nn.Module):
    """A matrix of int4 weights, with the ``bias`` of the matrix that it replaces."""

    pairs_NP: Tensor
    scale_NG: Tensor
    zero_NG: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        pairs_NP, scale_NG, zero_NG = round_int4(linear.weight.data)
        for name, values in (("pairs_NP", pairs_NP), ("scale_NG", scale_NG), ("zero_NG", zero_NG)):
            setattr(self, name, nn.Parameter(values, requires_grad=False))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The weights [N, K], widened."""
        return widen_int4(self.pairs_NP, self.scale_NG, self.zero_NG, self.scale_NG.dtype)

    def forward(self, x_TK: Tensor) -> Tensor:
        # Many tokens share the cost of widening; a device that refuses our kernels pays it for few tokens too.
        if len(x_TK) > _FEW or (x_TK.device.type == "cuda" and refuse_layers(x_TK.device, x_TK.dtype) is not None):
            return F.linear(x_TK, self.weight, self.bias)
        y_TN: Tensor = multiply_int4(x_TK, self.pairs_NP, self.scale_NG, self.zero_NG, self.bias)
        return y_TN


def with_int4_weights(model: Llama | Loading) -> Llama:
    """Round the matrices of a model's layers to int4 weights. Embedding and head stay as they are. A model that is
    being loaded is rounded layer by layer, a loaded one is copied."""
    if isinstance(model, Loading):
        return model.load_all(_round)  # an untied head has no matrices below it
    rounded = deepcopy(model)
    for layer in rounded.layers:
        _round(layer)
    return rounded


def _round(module: nn.Module) -> None:
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, Int4Linear(child))
