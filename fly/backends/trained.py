"""Loads each kind of trained draft head, for the kernels that compute it."""

from __future__ import annotations

from pathlib import Path

import torch

from fly.backends import cpu
from fly.backends.cpu.library import TORCH, split
from fly.backends.heads import TorchDFlashHead, TorchHead, TorchPEagleHead
from fly.models.dflash import DFlashHead, load_dflash_head
from fly.models.eagle import Eagle3Head, load_head
from fly.runner.executor import Head

__all__ = ["load_dflash", "load_eagle3", "load_peagle"]


def load_eagle3(path: Path, dtype: torch.dtype | None, device: torch.device, kernels: str) -> Head:
    """Load an EAGLE-3 head, in the dtype of its file if ``dtype`` is None. It runs on the compiled kernels that
    ``kernels`` names, or on PyTorch if they cannot run it."""
    head = load_head(path, dtype, device)
    variant = split(kernels)[0]  # its few weights stay as they are
    return cpu.CpuHead(head, variant) if _compiles(head, variant) else TorchHead(head)


def load_peagle(path: Path, dtype: torch.dtype | None, device: torch.device, kernels: str) -> Head:
    """Load a P-EAGLE head, as ``load_dflash`` does."""
    head = load_head(path, dtype, device)
    return cpu.CpuPEagleHead(head, kernels) if _compiles(head, kernels) else TorchPEagleHead(head)


def load_dflash(path: Path, dtype: torch.dtype | None, device: torch.device, kernels: str) -> Head:
    """Load a DFlash or DSpark head, as ``load_eagle3`` does."""
    head = load_dflash_head(path, dtype, device)
    return cpu.CpuDFlashHead(head, kernels) if _compiles(head, kernels) else TorchDFlashHead(head)


def _compiles(head: Eagle3Head | DFlashHead, variant: str) -> bool:
    """Whether compiled kernels run a head."""
    return variant != TORCH and cpu.head_refusal(head) is None
