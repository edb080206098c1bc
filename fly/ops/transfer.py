"""Copies from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["sent", "upload"]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to ``device``. A copy to CUDA uses pinned memory, so that the host does not wait."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy ``values`` to ``device`` as an int64 tensor, by ``sent``."""
    return sent(torch.tensor(values, dtype=torch.int64), device)
