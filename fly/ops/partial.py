"""What tensors [..., V] whose values are not all at hand have in common (``__torch_function__``): which questions are
about their shape alone, and how they are indexed."""

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
    """``x[index]`` of such a tensor x of ``dims`` dimensions: positions with the whole vocabulary, or one token at each
    of them. ``like`` makes another of x, each part of it changed; ``pick`` takes one token at each position.
    ``NotImplemented`` where an index needs more."""
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
        else:  # an ellipsis, a new dimension
            return NotImplemented
    return NotImplemented if taken >= dims else like(lambda part: part[index])
