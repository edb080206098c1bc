"""Matrices of a model on int8 weights, for devices other than the CPU: by torchao, an optional library.

A model that does not fit on a device in bfloat16 may fit in int8: a matrix takes half the bytes. Its weights are whole
numbers with a scale for each output (symmetric absolute maximum quantisation, as in arXiv 2208.07339, section 2.1); a
product is the one with those numbers in the model's dtype, times the scales. Knows nothing of engines."""

from __future__ import annotations

import importlib.util
from copy import deepcopy

import torch
from torch import nn

from fly.models import Llama
from fly.models.loading import Loading

__all__ = ["INT8", "rounded", "rounds"]

INT8 = "torch-int8"  # what executors call such kernels


def rounds(kernels: str, device: torch.device) -> bool:
    """Whether ``kernels`` on ``device`` are these. Raises ``ValueError`` if torchao is missing then."""
    if kernels not in ("int8", INT8) or device.type == "cpu":
        return False
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(f"kernels {kernels!r} on {device}: torchao is not installed (pip install 'flyspec[gpu]')")
    return True


def rounded(model: Llama | Loading) -> Llama:
    """The model with every matrix rounded to int8 weights; an embedding, and a head that is one, stay as they are.

    A model that is being loaded is rounded layer by layer, so that the device holds at most one layer that is not
    rounded. A loaded model is copied.
    """
    if isinstance(model, Loading):
        made = model.whole(_round)
    else:
        made = deepcopy(model)
        for module in (*made.layers, *([] if made.config.tie_word_embeddings else [made.lm_head])):
            _round(module)
    made.rounded = True
    return made


def _round(module: nn.Module) -> None:
    """Round each matrix of a module."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    # Loading a model should not change settings of torch's compiler.
    quantize_(module, Int8WeightOnlyConfig(set_inductor_config=False))
