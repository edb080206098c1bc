"""The small checkpoints that ship with the package, and the task generators they were trained on."""

from __future__ import annotations

from pathlib import Path

from fly.errors import meant
from fly.models.config import CheckpointError

__all__ = ["BUNDLED", "resolve_checkpoint"]

CHECKPOINTS = Path(__file__).parent / "checkpoints"
BUNDLED = ("fly-target", "fly-draft", "fly-tiny")


def resolve_checkpoint(name: str | Path) -> Path:
    """The directory of a bundled checkpoint's name, or ``name`` itself if it is a directory.

    Raises ``CheckpointError`` (a ``ValueError``) naming the choices if it is neither.
    """
    if Path(name).is_dir():
        return Path(name)
    if str(name) in BUNDLED:
        return CHECKPOINTS / str(name)
    hint = meant(str(name), BUNDLED)
    raise CheckpointError(
        f"{str(name)!r} is neither a directory nor a bundled checkpoint{hint}; bundled: {list(BUNDLED)}"
    )
