"""The small checkpoints that ship with the package, their task generators, and what a checkpoint's name stands for."""

from __future__ import annotations

import os
from pathlib import Path

from fly.errors import meant
from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.hub import HubName, fetch, hub_name
from fly.models.opening import open_checkpoint

__all__ = [
    "BUNDLED",
    "HEADS",
    "find_checkpoint",
    "is_here",
    "names_a_checkpoint",
    "open_model",
    "resolve_checkpoint",
    "usual_draft",
]

CHECKPOINTS = Path(__file__).parent / "checkpoints"
BUNDLED = ("fly-target", "fly-draft", "fly-tiny")
HEADS = ("fly-eagle3",)  # draft heads, each for ``fly-target``


def find_checkpoint(name: str | Path) -> Path | HubName:
    """What a name stands for: a bundled checkpoint; a directory or a GGUF file that exists; or a name on the Hugging
    Face hub, recognised by its form alone, without asking the hub.

    Raises ``CheckpointError`` (a ``ValueError``) naming all that was tried.
    """
    if str(name) in (*BUNDLED, *HEADS):
        return CHECKPOINTS / str(name)
    if is_here(name):
        return Path(name)
    if (wanted := hub_name(str(name))) is not None:
        return wanted
    hint = meant(str(name), (*BUNDLED, *HEADS))
    raise CheckpointError(
        f"{str(name)!r} is neither a bundled checkpoint{hint}, nor a directory or .gguf file that exists, nor a name "
        f"on the Hugging Face hub (owner/name); bundled: {[*BUNDLED, *HEADS]}"
    )


def resolve_checkpoint(name: str | Path, weights: bool = True) -> Path:
    """Where the checkpoint lies that a name stands for (``find_checkpoint``); files from the hub are fetched if they
    are not here yet; of a directory without the weights if these are not wanted.

    Raises ``CheckpointError``, also for what cannot be fetched (``fly.models.hub.fetch``).
    """
    found = find_checkpoint(name)
    return fetch(found, weights) if isinstance(found, HubName) else found


def open_model(name: str | Path | Checkpoint) -> Checkpoint:
    """The checkpoint that a name stands for; one that is open, as it is. Raises ``CheckpointError``."""
    return name if isinstance(name, Checkpoint) else open_checkpoint(resolve_checkpoint(name))


def is_here(name: str | Path) -> bool:
    """Whether a checkpoint can be at this path: a directory, or a GGUF file."""
    return os.path.isdir(name) or (str(name).endswith(".gguf") and os.path.isfile(name))


def usual_draft(model: str | Path | None) -> str:
    """The default draft of a model: for ``fly-target`` its draft model, for any other none."""
    return BUNDLED[1] if str(model) == BUNDLED[0] else "none"


def names_a_checkpoint(name: str) -> bool:
    """Whether a text can be a checkpoint's name. Does not use the network."""
    return name in (*BUNDLED, *HEADS) or is_here(name) or hub_name(name) is not None
