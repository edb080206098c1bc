"""A checkpoint of any file format: its configuration, its tensors (by Hugging Face's names), settings and tokenizer.

``fly.models.directory`` and ``fly.models.gguf`` implement it. Knows nothing of models or devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer
from torch import Tensor

from fly.models.config import CheckpointError, LlamaConfig

__all__ = ["Checkpoint", "Cut", "Stored", "check_tensors"]

Cut = tuple[slice, ...]  # one slice per dimension
Shapes = Mapping[str, tuple[int, ...]]  # by the names of tensors


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. Each read maps only the tensor's own bytes, and only while the result is in use."""

    path: Path
    offset: int  # where its bytes begin in the file
    nbytes: int
    shape: tuple[int, ...]
    kind: str  # the type of its values, as the file format names it
    dtype: torch.dtype | None  # the dtype of its values if ``read`` maps them; None if ``read`` computes them

    def bytes(self) -> np.ndarray[Any, Any]:
        """Map the tensor's bytes, uint8 [nbytes]. Writing to them changes only a copy, not the file."""
        if not self.nbytes:
            return np.zeros(0, dtype=np.uint8)
        return np.memmap(self.path, dtype=np.uint8, mode="c", offset=self.offset, shape=(self.nbytes,))

    def blocks(self) -> Tensor:
        """Map the bytes of each row of the model's tensor, uint8 [rows, bytes]."""
        return torch.from_numpy(self.bytes()).view(self.shape[0], -1)

    def read(self, cut: Cut = ()) -> Tensor:
        """Return the tensor, or a cut of it."""
        assert self.dtype is not None
        return torch.from_numpy(self.bytes()).view(self.dtype).view(self.shape)[cut]

    def copy_to(self, to: Tensor, cut: Cut = ()) -> None:
        """Copy the tensor, or a cut of it, into ``to``, which has the same shape and any dtype and device."""
        to.copy_(self.read(cut))


class Checkpoint(ABC):
    """A model on disk. Each part is read when it is needed.

    Every member raises ``CheckpointError`` if a part is missing, broken or not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path  # the directory, or the file
        self._context: int | None = None

    @property
    @abstractmethod
    def raw(self) -> dict[str, Any]:
        """The contents of ``config.json``. Formats without this file build the same dictionary."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors by Hugging Face's names."""

    @cached_property
    def _full_config(self) -> LlamaConfig:
        return LlamaConfig.from_hf(self.raw, self.place_of("config.json"))

    @property
    def config(self) -> LlamaConfig:
        """The model's configuration. Its context is at most the one that ``limit`` sets."""
        most, config = self._context, self._full_config
        if most is None or most >= config.max_position_embeddings:
            return config
        return config.model_copy(update={"max_position_embeddings": most})

    def limit(self, context: int | None) -> None:
        """Use only positions below ``context``. None uses all positions of the model."""
        if context is not None and context < 1:
            raise ValueError(f"context {context} must be at least 1")
        self._context = context

    @abstractmethod
    def settings(self, name: str) -> dict[str, Any]:
        """Read the JSON file of this name, such as ``generation_config.json``. The result is empty if there is none."""

    @abstractmethod
    def place_of(self, name: str) -> str:
        """Return the place where ``settings(name)`` are stored, for error messages."""

    @property
    @abstractmethod
    def has_tokenizer(self) -> bool: ...

    @abstractmethod
    def raw_tokenizer(self) -> RawTokenizer:
        """Load the tokenizer. The checkpoint must have one."""

    @property
    @abstractmethod
    def special_names(self) -> dict[str, str]:
        """The special tokens by the names that chat templates use, such as ``bos_token``."""

    @abstractmethod
    def templates(self) -> dict[str, str]:
        """Read the chat templates that have their own files, by name. ``default`` is the template for conversations."""

    @property
    def nbytes(self) -> int:
        """The size of the stored weights in bytes."""
        return sum(stored.nbytes for stored in self.tensors.values())


def check_tensors(source: Path, present: Shapes, expected: Shapes, optional: Shapes = MappingProxyType({})) -> None:
    """Raise ``CheckpointError`` unless a checkpoint has all ``expected`` tensors, with the right shapes, and no others
    except ``optional`` ones."""
    if missing := sorted(expected.keys() - present.keys()):
        raise CheckpointError(f"{source}: tensors are missing: {join_names(missing)}")
    allowed = {**optional, **expected}
    if surplus := sorted(present.keys() - allowed.keys()):
        raise CheckpointError(f"{source}: unexpected tensors for this configuration: {join_names(surplus)}")
    for key, shape in present.items():
        if shape != allowed[key]:
            raise CheckpointError(
                f"{source}: {key} has shape {list(shape)}, the configuration asks {list(allowed[key])}"
            )


def join_names(items: list[str], most: int = 4) -> str:
    """Join the first names of a list, and append how many more there are."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
