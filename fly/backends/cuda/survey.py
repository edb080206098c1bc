"""What ``fly doctor`` says of CUDA: the devices, and which kernels run on each."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from fly.cache import block_size_for
from fly.runner.memory import free_memory

__all__ = ["survey"]


def survey() -> Iterator[tuple[str, str, str]]:
    """Yield subjects, each with what was found, and with the reason if fly does not use it (else an empty text)."""
    built, reason = torch.version.cuda, ""
    if built is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        reason = f"torch is built for CUDA {built}, but there is no device, or no driver that this build accepts"
    if reason:
        # Show which kernels would be tried on a device. A device may still refuse them.
        triton = find_spec("triton") is not None
        yield "CUDA", "none", reason
        attention = "our Triton kernels, FlashAttention for prompts" if triton else "FlashAttention, without Triton"
        yield "CUDA attention", attention, "there is no CUDA device to try it on"
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free = free_memory(torch.device("cuda", index))
        memory = f"{free / 1e9:.1f} of {facts.total_memory / 1e9:.1f} GB free"
        yield f"cuda:{index}", f"{facts.name}, compute capability {facts.major}.{facts.minor}, {memory}", ""
        yield from _kernels(torch.device("cuda", index))


def _kernels(device: torch.device) -> Iterator[tuple[str, str, str]]:
    """Yield what runs a bfloat16 model with heads of 128 numbers on a device; each kernel is tried there."""
    from fly.backends.cuda.attention import find_flash  # they take seconds to import
    from fly.backends.cuda.ops import refuse_attention, refuse_layers, refuse_steps

    kind = device, torch.bfloat16, 128
    refused, options = refuse_attention(*kind, block_size_for(device)), find_flash(*kind)
    yield f"{device} attention", "our Triton kernels", refused or ""
    of_torch = "" if options is not None else f"torch {torch.__version__} does not read pages in place: see the warning"
    yield f"{device} attention of prompts", "FlashAttention of PyTorch", of_torch
    if refused and options is None:
        yield f"{device} attention", "PyTorch's, over copies of pages", ""
    yield f"{device} layers", "fused by our Triton kernels", refuse_layers(device, torch.bfloat16) or ""
    yield f"{device} steps of a round", "fused by our Triton kernels", refuse_steps(device) or ""
