"""Int8 weights on devices other than the CPU, by torchao, an optional library.

Such a matrix takes half the bytes of one in bfloat16. Its weights are whole numbers with a scale for each output
(symmetric absolute maximum quantisation, arXiv 2208.07339, section 2.1). A product is computed with these numbers in
the model's dtype, then multiplied by the scales. Knows nothing of engines."""

from __future__ import annotations

import importlib.util
from copy import deepcopy

import torch
from torch import nn

from fly.models import Llama
from fly.models.loading import Loading

__all__ = ["INT8", "wants_int8", "with_int8_weights"]

INT8 = "torch-int8"  # the name of such kernels


def wants_int8(kernels: str, device: torch.device) -> bool:
    """Whether ``kernels`` asks for int8 weights on a ``device`` that is not the CPU. Raises ``ValueError`` if it does
    and torchao is missing."""
    if kernels not in ("int8", INT8) or device.type == "cpu":
        return False
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(f"kernels {kernels!r} on {device}: torchao is not installed (pip install 'flyspec[gpu]')")
    return True


def with_int8_weights(model: Llama | Loading) -> Llama:
    """Round every matrix of a model to int8 weights. An embedding, and a head tied to it, stay as they are.

    A model that is being loaded is rounded layer by layer, so that the device never holds more than one layer that is
    not rounded. A loaded model is copied.
    """
    if isinstance(model, Loading):
        int8_model = model.load_all(_round)
    else:
        int8_model = deepcopy(model)
        for module in (*int8_model.layers, *([] if int8_model.config.tie_word_embeddings else [int8_model.lm_head])):
            _round(module)
    int8_model.rounded = True
    return int8_model


def _round(module: nn.Module) -> None:
    """Round each matrix of a module."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    # Loading a model should not change settings of torch's compiler.
    quantize_(module, Int8WeightOnlyConfig(set_inductor_config=False))
