"""Loads each kind of trained draft head, for the kernels that compute it."""

from __future__ import annotations

from pathlib import Path

import torch

from fly.backends import cpu
from fly.backends.cpu.library import TORCH, split
from fly.backends.heads import TorchDFlashHead, TorchHead, TorchPEagleHead
from fly.models.dflash import load_dflash_head
from fly.models.eagle import load_head
from fly.runner.executor import Head

__all__ = ["load_dflash", "load_eagle3", "load_peagle"]


def load_eagle3(path: Path, dtype: torch.dtype | None, device: torch.device, kernels: str) -> Head:
    """Load an EAGLE-3 head, in the dtype of its file if ``dtype`` is None. It runs on the compiled kernels that
    ``kernels`` names, or on PyTorch if they cannot run it."""
    head = load_head(path, dtype, device)
    variant = split(kernels)[0]  # its few weights stay as they are
    compiled = variant != TORCH and cpu.head_refusal(head) is None
    return cpu.CpuHead(head, variant) if compiled else TorchHead(head)


def load_peagle(path: Path, dtype: torch.dtype | None, device: torch.device, kernels: str) -> Head:
    """Load a P-EAGLE head, which runs on PyTorch."""
    return TorchPEagleHead(load_head(path, dtype, device))


def load_dflash(path: Path, dtype: torch.dtype | None, device: torch.device, kernels: str) -> Head:
    """Load a DFlash or DSpark head, as ``load_eagle3`` does."""
    head = load_dflash_head(path, dtype, device)
    compiled = kernels != TORCH and cpu.head_refusal(head) is None
    return cpu.CpuDFlashHead(head, kernels) if compiled else TorchDFlashHead(head)
