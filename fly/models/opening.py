"""Open a checkpoint, whatever its file format."""

from __future__ import annotations

from pathlib import Path

from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.directory import Directory
from fly.models.gguf import GGUF

__all__ = ["open_checkpoint"]


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """Open the checkpoint at ``path``, which is a Hugging Face directory or a GGUF file. Return an open checkpoint as
    it is.

    The checkpoint reads its configuration and its list of tensors when they are needed, but no values. Raises
    ``CheckpointError`` if a part is missing, broken or not supported."""
    if isinstance(path, Checkpoint):
        return path
    path = Path(path)
    if path.is_dir():
        return Directory(path)
    if path.suffix == ".gguf" and path.exists():
        return GGUF(path)
    raise CheckpointError(f"{path}: no such checkpoint: neither a directory nor a file ending in .gguf")
