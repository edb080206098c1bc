"""The decoder's layers in few kernels. torch.compile makes one graph of all operations between two attentions.

Attention itself stays a call to the cache (``fly.models.llama.KV``) and is not traced. Between two matrix products, the
norms, rotation, activation and residuals become one kernel, even across two layers. Knows nothing of devices: the
caller decides when to use it.

Shape legend: T packed tokens, H query heads, G key/value heads, D head width, C hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fly.models.llama import KV, Layer, Norm

__all__ = ["CompiledLayers"]

_SHAPES = 256  # the most different numbers of tokens to compile for


def _before_attention(layer: Layer, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return layer.prepare_attention(x_TC, cos_T1D, sin_T1D)


def _between_attentions(
    layer: Layer, following: Layer, x_TC: Tensor, attended_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_TC = layer.finish(x_TC, attended_TC)
    return x_TC, *following.prepare_attention(x_TC, cos_T1D, sin_T1D)


def _after_attention(layer: Layer, norm: Norm, x_TC: Tensor, attended_TC: Tensor) -> Tensor:
    return norm(layer.finish(x_TC, attended_TC))


class CompiledLayers:
    """Runs the layers by three compiled functions: up to the first attention, between two attentions, and after the
    last. Use it as a ``fly.models.llama.LayerLoop``: ``model(tokens, positions, kv, through=CompiledLayers())``.

    Results are the same as those of the plain loop, up to rounding. Code is compiled for each new number of tokens,
    which takes seconds. So use this for numbers that occur often, as in CUDA graphs, and not for prompts. Layers of the
    same kind share the compiled code. A graph break is an error (``fullgraph``), so nothing runs partly compiled.

    Hooks on the model's matrices become part of the graphs, so torch must be able to trace them. (It can trace
    all-reduce.) Hooks on a whole layer are not called.

    Args:
        options: options of ``torch.compile``, such as ``mode="max-autotune-no-cudagraphs"`` or ``backend="eager"``.
    """

    def __init__(self, **options: Any) -> None:
        compiled = partial(torch.compile, fullgraph=True, dynamic=False, **options)
        self._before_attention = compiled(_before_attention)
        self._between_attentions = compiled(_between_attentions)
        self._after_attention = compiled(_after_attention)

    def __call__(
        self,
        layers: Sequence[Layer],
        norm: Norm,
        x_TC: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        kv: KV,
        states: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the layers. Hidden states are stored in ``states``, as ``fly.models.llama.record_states`` does."""
        states = {} if states is None else states
        if 0 in states:
            states[0] = x_TC
        if not len(layers):
            return norm(x_TC)
        # torch counts one compilation for each number of tokens, and refuses more than its limit.
        with torch._dynamo.config.patch(recompile_limit=_SHAPES, accumulated_recompile_limit=8 * _SHAPES):
            layer = layers[0]
            q_THD, k_TGD, v_TGD = self._before_attention(layer, x_TC, *rotary[layer.rope])
            for number in range(1, len(layers)):
                attended_TC = layer.self_attn.attend(kv, q_THD, k_TGD, v_TGD)
                layer, previous = layers[number], layer
                x_TC, q_THD, k_TGD, v_TGD = self._between_attentions(
                    previous, layer, x_TC, attended_TC, *rotary[layer.rope]
                )
                if number in states:
                    states[number] = x_TC
            attended_TC = layer.self_attn.attend(kv, q_THD, k_TGD, v_TGD)
            if len(layers) in states:  # ``_after_attention`` returns the normed value, so compute the last state here
                states[len(layers)] = layer.finish(x_TC, attended_TC)
            return self._after_attention(layer, norm, x_TC, attended_TC)
