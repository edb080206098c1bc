"""Helpers for tensor-like objects [..., V] that hold only some of their values (``__torch_function__``). They tell
which attributes need no values, and index such objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ATTRIBUTES", "at_index"]

ATTRIBUTES = {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
} | {Tensor.size, Tensor.dim, Tensor.__len__, Tensor.numel, Tensor.is_floating_point, Tensor.element_size}


def at_index(
    dims: int, index: Any, like: Callable[[Callable[[Tensor], Tensor]], Any], pick: Callable[[Any, Tensor], Tensor]
) -> Any:
    """Compute ``x[index]`` for such an object x of ``dims`` dimensions. ``index`` selects positions with the whole
    vocabulary, or one token at each position. Returns ``NotImplemented`` for any other index.

    ``like`` applies a function to every part of x. ``pick`` selects one token per position.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) == dims and all(isinstance(part, Tensor) and part.dtype == torch.int64 for part in parts):
        *positions, tokens = torch.broadcast_tensors(*parts)
        return pick(like(lambda part: part[tuple(positions)]), tokens)
    taken = 0
    for part in parts:
        if isinstance(part, Tensor) and part.dtype == torch.bool:
            taken += part.dim()
        elif isinstance(part, (int, slice, Tensor, list)):
            taken += 1
        else:  # an ellipsis or a new dimension
            return NotImplemented
    return NotImplemented if taken >= dims else like(lambda part: part[index])
