"""Copies from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fly.devices import kind_of, on_host

__all__ = ["sent", "upload"]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to ``device``. If the device can, it copies from pinned memory, so that the host does
    not wait."""
    if not (kind_of(device).pins and on_host(tensor)):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy ``values`` to ``device`` as an int64 tensor, by ``sent``."""
    return sent(torch.tensor(values, dtype=torch.int64), device)
