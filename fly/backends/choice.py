"""Which backend runs a loaded model. A further backend is chosen here, and known nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fly.backends.cpu import CpuExecutor, PackedLlama, available, chosen
from fly.backends.cpu.host import HostDecisions
from fly.backends.cpu.library import TORCH
from fly.backends.cpu.packed import refusal
from fly.backends.torch import Model, TorchExecutor
from fly.bundled import resolve_checkpoint
from fly.drafts.base import Loaded
from fly.executor import Executor
from fly.models import Llama, load_model
from fly.models.tokenizer import Tokenizer, read_eos_ids

__all__ = ["LoadExecutor", "executor_of", "load", "load_executor"]

LoadExecutor = Callable[..., Executor]  # as ``load_executor``


def executor_of(model: Any, kernels: str = "auto", consume: bool = False) -> Executor:
    """What runs ``model`` by the kernels that ``kernels`` stands for (``fly.backends.cpu.chosen``): an executor as it
    is, a ``Llama`` on compiled kernels or on PyTorch, anything else on PyTorch.

    ``"auto"`` takes PyTorch for what there is no compiled code for: another device, another dtype, no ``Llama``. To
    ``consume`` takes a Llama's matrices away one by one as they are packed, so that the weights never lie in memory
    twice; the model itself is of no use then.

    Raises ``ValueError`` for kernels that are unknown, not available here, or not for this model.
    """
    variant = chosen(kernels)
    if isinstance(model, Executor):
        if kernels != "auto" and variant != model.kernels:
            raise ValueError(f"kernels {kernels!r}: this model was loaded for {model.kernels!r}")
        return model
    if variant == TORCH:
        return _on_torch(model)
    reason = refusal(model) if isinstance(model, Llama) else f"there is no compiled code for {type(model).__name__}"
    if reason is not None:
        if kernels == "auto":
            return _on_torch(model)
        raise ValueError(f"kernels {kernels!r}: {reason}")
    return CpuExecutor(PackedLlama(model, variant, consume))


class TorchOnHost(HostDecisions, TorchExecutor):
    """PyTorch's forwards on the CPU, with decisions on the host."""


def _on_torch(model: Model) -> Executor:
    return TorchOnHost(model) if model.device.type == "cpu" and available() != [TORCH] else TorchExecutor(model)


def load_executor(
    directory: Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto", kernels: str = "auto"
) -> Executor:
    """A checkpoint, ready to run; arguments and errors as of ``fly.models.load_model`` and ``executor_of``."""
    return executor_of(load_model(directory, dtype, device), kernels, consume=True)


def load(
    model: object,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
    by: LoadExecutor = load_executor,
) -> Loaded:
    """A model by the path or bundled name of a checkpoint, or a loaded one as it is, on PyTorch where it is no
    executor.

    Args:
        by: loads a checkpoint's directory.

    Raises ``ValueError`` (``CheckpointError``) for a checkpoint that cannot be used.
    """
    if isinstance(model, Executor):
        return Loaded(model)
    if not isinstance(model, (str, Path)):
        return Loaded(executor_of(model, TORCH))
    directory = resolve_checkpoint(model)
    executor, tokenizer = by(directory, dtype, device, kernels=kernels), Tokenizer.load(directory)
    control_ids = read_eos_ids(directory, executor.config.vocab_size)
    return Loaded(executor, tokenizer, control_ids | (tokenizer.control_ids if tokenizer else frozenset()))
