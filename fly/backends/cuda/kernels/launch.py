"""Where every Triton kernel of this package is launched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["launch"]


def launch(kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
    """Queue ``kernel`` once for each point of ``grid``, on the current stream of the device that holds its tensors.

    Triton launches on the current device, unlike PyTorch's operators, which enter the device of their tensors.
    """
    if not all(grid):
        return
    device = next((x.device for x in args if isinstance(x, Tensor) and x.device.type == "cuda"), None)
    with nullcontext() if device is None else torch.cuda.device(device):
        kernel[tuple(grid)](*args, **options)
