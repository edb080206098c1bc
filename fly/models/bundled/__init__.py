"""The checkpoints and problems that ship with the package, and how a name is resolved to a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from fly.errors import did_you_mean
from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.hub import HubName, fetch, hub_name
from fly.models.opening import FORMATS, open_checkpoint

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
HEADS = ("fly-eagle3",)  # the draft heads, all for ``fly-target``


def find_checkpoint(name: str | Path) -> Path | HubName:
    """Find a checkpoint by its name. The name may be a bundled one, the path of a directory or GGUF file, or a name on
    the Hugging Face hub, which is recognised by its form.

    Raises ``CheckpointError`` (a ``ValueError``) that lists everything that was tried.
    """
    if str(name) in (*BUNDLED, *HEADS):
        return CHECKPOINTS / str(name)
    if is_here(name):
        return Path(name)
    if (wanted := hub_name(str(name))) is not None:
        return wanted
    hint = did_you_mean(str(name), (*BUNDLED, *HEADS))
    raise CheckpointError(
        f"{str(name)!r} is neither a bundled checkpoint{hint}, nor a directory or .gguf file that exists, nor a name "
        f"on the Hugging Face hub (owner/name); bundled: {[*BUNDLED, *HEADS]}"
    )


def resolve_checkpoint(name: str | Path, weights: bool = True) -> Path:
    """Return the path of a checkpoint, by its name (``find_checkpoint``). Missing files are downloaded from the hub. If
    ``weights`` is False, the directory need not have the weights.

    Raises ``CheckpointError``, also if a download fails (``fly.models.hub.fetch``).
    """
    place = find_checkpoint(name)
    return fetch(place, weights) if isinstance(place, HubName) else place


def open_model(name: str | Path | Checkpoint) -> Checkpoint:
    """Open a checkpoint by its name; return an open one as it is. Raises ``CheckpointError``."""
    return name if isinstance(name, Checkpoint) else open_checkpoint(resolve_checkpoint(name))


def is_here(name: str | Path) -> bool:
    """Return whether ``name`` is the path of a directory or a GGUF file."""
    return os.path.isdir(name) or (str(name).endswith((*FORMATS,)) and os.path.isfile(name))


def usual_draft(model: str | Path | None) -> str:
    """Return the default draft of a model: the bundled draft model for ``fly-target``, and none for other models."""
    return BUNDLED[1] if str(model) == BUNDLED[0] else "none"


def names_a_checkpoint(name: str) -> bool:
    """Return whether a text has the form of a checkpoint's name. This does not use the network."""
    return name in (*BUNDLED, *HEADS) or is_here(name) or hub_name(name) is not None
