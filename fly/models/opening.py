"""A path to a checkpoint, whatever its files."""

from __future__ import annotations

from pathlib import Path

from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.directory import Directory
from fly.models.gguf import GGUF

__all__ = ["open_checkpoint"]


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """The checkpoint that lies at ``path``: a Hugging Face directory or a GGUF file. One that is open, as it is.

    Its configuration and the list of its tensors are read, but not their values. Raises ``CheckpointError`` for what is
    missing, broken or not supported."""
    if isinstance(path, Checkpoint):
        return path
    path = Path(path)
    if path.is_dir():
        return Directory(path)
    if path.suffix == ".gguf" and path.exists():
        return GGUF(path)
    raise CheckpointError(f"{path}: no such checkpoint: neither a directory nor a file ending in .gguf")
