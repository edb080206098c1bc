"""The small checkpoints that ship with the package, their task generators, and what a checkpoint's name stands for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fly.errors import meant
from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.hub import fetch, hub_name
from fly.models.opening import open_checkpoint

__all__ = ["BUNDLED", "is_here", "names_a_checkpoint", "open_model", "resolve_checkpoint"]

CHECKPOINTS = Path(__file__).parent / "checkpoints"
BUNDLED = ("fly-target", "fly-draft", "fly-tiny")


def names_a_checkpoint(name: str) -> bool:
    """Whether a text can be a checkpoint's name: a bundled one, a path that exists, or a name on the hub by its form.
    Nothing is asked of the network."""
    return name in BUNDLED or is_here(name) or hub_name(name) is not None


def resolve_checkpoint(name: str | Path) -> Path:
    """Where the checkpoint lies that a name stands for: a bundled one; a directory or a GGUF file that exists; or one
    on the Hugging Face hub (``fly.models.hub``), whose files are fetched where they are not here yet.

    Raises ``CheckpointError`` (a ``ValueError``) naming all that was tried.
    """
    if str(name) in BUNDLED:
        return CHECKPOINTS / str(name)
    if is_here(name):
        return Path(name)
    if (wanted := hub_name(str(name))) is not None:
        return fetch(wanted)
    hint = meant(str(name), BUNDLED)
    raise CheckpointError(
        f"{str(name)!r} is neither a bundled checkpoint{hint}, nor a directory or .gguf file that exists, nor a name "
        f"on the Hugging Face hub (owner/name); bundled: {list(BUNDLED)}"
    )


def open_model(name: str | Path | Checkpoint) -> Checkpoint:
    """The checkpoint that a name stands for; one that is open, as it is. Raises ``CheckpointError``."""
    return name if isinstance(name, Checkpoint) else open_checkpoint(resolve_checkpoint(name))


def is_here(name: str | Path) -> bool:
    """Whether a checkpoint can be at this path: a directory, or a GGUF file."""
    path = Path(name)
    with suppress(OSError):  # a text that is too long for a path
        return path.is_dir() or (path.suffix == ".gguf" and path.is_file())
    return False
