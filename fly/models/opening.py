"""Open a checkpoint, whatever its file format."""

from __future__ import annotations

from pathlib import Path

from fly.late import Places
from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.directory import Directory

__all__ = ["FORMATS", "open_checkpoint"]

# Formats of a checkpoint in one file, by the ending of its name. Any other checkpoint is a directory.
FORMATS = Places({".gguf": "fly.models.gguf:GGUF"})


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
    if path.suffix in FORMATS and path.exists():
        opened: Checkpoint = FORMATS[path.suffix](path)
        return opened
    raise CheckpointError(
        f"{path}: no such checkpoint: neither a directory nor a file ending in {' or '.join(FORMATS)}"
    )
