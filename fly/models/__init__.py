"""Models: configuration, the decoder itself, checkpoints on disk and their tokenizers."""

from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from fly.models import chat, traced
    from fly.models.config import CheckpointError, LlamaConfig, RopeScaling
    from fly.models.llama import DenseCausal, Llama
    from fly.models.loading import load_model, save_model
else:
    __getattr__, __dir__ = find_late(__name__)

__all__ = [
    "CheckpointError",
    "DenseCausal",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "chat",
    "load_model",
    "save_model",
    "traced",
]
