"""Early exit (SpecEE, arXiv 2504.08850). Predictors estimate whether more layers would change the target's choice, and
an executor skips the layers where they would not. ``training`` trains the predictors."""

from pathlib import Path

import torch

from fly.backends import load as load_model
from fly.drafts.base import Loaded
from fly.extras.early_exit.executor import EarlyExit
from fly.extras.early_exit.predictors import ExitConfig, Exits, load_exits, save_exits

__all__ = ["EarlyExit", "ExitConfig", "Exits", "load", "load_exits", "save_exits"]


def load(
    model: object,
    exits: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    max_context: int | None = None,
) -> Loaded:
    """Load a target that exits early by the predictors in the directory ``exits``, which ``fly train-exit`` writes. The
    result is a model for ``fly.LLM``.

    Args:
        model: a model's name or path, an open checkpoint, or a loaded model (``fly.backends.load``).
        dtype, device: as for ``fly.LLM``; ignored for a loaded model.
        max_context: the most tokens of a text; None is the model's own context.

    Raises:
        ValueError: the model or the predictors cannot be read, or do not fit one another. The model must be a Llama on
            PyTorch's kernels.
    """
    loaded = load_model(model, dtype, device, "torch", context=max_context)
    return loaded._replace(executor=EarlyExit(loaded.executor, load_exits(exits)))
