"""A Llama's layers in few kernels: our Triton kernels replace the small steps between matrix products.

Shape legend: T packed tokens, H query heads, D head width, C hidden width, I width of the feed-forward layer, X outputs
side by side, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fly.backends.cuda.attention import PagedAttention
from fly.backends.cuda.ops import add_norm, gate, multiply_int8, refuse_layers, rotate_store
from fly.models.llama import KV, Attention, LayerOps, Llama, Norm

__all__ = ["FusedOps", "fuse"]

_FEW = 16  # up to so many tokens, our kernel multiplies with int8 weights
_WIDEST = 16384  # the most numbers of a token that one program normalises


class FusedOps(LayerOps):
    """Small steps of a layer by our kernels. Steps without a kernel (other norms and activations, norms of queries and
    keys) run operation by operation, and so do compiled layers."""

    def attend(self, attention: Attention, kv: KV, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        if isinstance(kv, PagedAttention) and not attention.normalised and kv.cache.keys.dtype == x_TC.dtype:
            layer, cache = attention.layer, kv.cache
            qkv_TX = attention.qkv_proj(x_TC)
            q_THD = rotate_store(qkv_TX, cos_T1D, sin_T1D, kv.slots.slots_T, cache.keys[layer], cache.values[layer])
            return kv.attend_stored(layer, q_THD, attention.window, attention.scale).flatten(1)
        return super().attend(attention, kv, x_TC, cos_T1D, sin_T1D)

    def add_norm(self, norm: Any, x_TC: Tensor, out_TC: Tensor) -> tuple[Tensor, Tensor]:
        usual = isinstance(norm, Norm) and not norm.offset and norm.scale == 1 and x_TC.shape[1] <= _WIDEST
        if not usual or torch.compiler.is_compiling():
            return super().add_norm(norm, x_TC, out_TC)
        summed_TC, normed_TC = add_norm(x_TC, out_TC, norm.weight, norm.eps)
        return summed_TC, normed_TC

    def gate(self, both_TX: Tensor, activation: str) -> Tensor:
        if activation != "silu" or torch.compiler.is_compiling():
            return super().gate(both_TX, activation)
        gated_TI: Tensor = gate(both_TX)
        return gated_TI


def fuse(model: Llama) -> None:
    """Make a model on a CUDA device use our kernels, unless they fail on the device (``refuse_layers``)."""
    if refuse_layers(model.device, model.dtype) is not None:
        return
    ops = FusedOps()
    layers: Any = model.layers
    for layer in layers:
        for part in (layer, layer.mlp):
            part.ops = ops
    for linear in model.modules() if model.rounded else ():
        if isinstance(linear, nn.Linear) and hasattr(linear.weight, "qdata"):
            linear.__class__ = Int8Linear


class Int8Linear(nn.Linear):
    """A matrix that torchao has rounded. Our own kernel multiplies a few tokens with its int8 weights."""

    def forward(self, x_TK: Tensor) -> Tensor:
        if len(x_TK) > _FEW:
            return super().forward(x_TK)
        weight: Any = self.weight
        y_TN: Tensor = multiply_int8(x_TK, weight.qdata, weight.scale, self.bias)
        return y_TN
