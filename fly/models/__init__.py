"""Models: configuration, the decoder itself, checkpoints on disk and their tokenizers."""

from fly.models.config import CheckpointError, LlamaConfig, RopeScaling
from fly.models.llama import DenseCausal, Llama
from fly.models.loading import load_model, save_model

__all__ = ["CheckpointError", "DenseCausal", "Llama", "LlamaConfig", "RopeScaling", "load_model", "save_model"]
