"""What a checkpoint is, whatever its files: configuration, tensors by Hugging Face's names, settings, tokenizer.

Two kinds make one: ``fly.models.directory`` and ``fly.models.gguf``. Knows nothing of models or devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer
from torch import Tensor

from fly.models.config import CheckpointError, LlamaConfig

__all__ = ["Checkpoint", "Stored", "names"]

Cut = tuple[slice, ...]  # a slice for each dimension


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. Each reading maps only its own bytes, as long as the result is in use."""

    path: Path
    offset: int  # where its bytes begin in the file
    nbytes: int
    shape: tuple[int, ...]
    kind: str  # how its values are stored, as its format calls it
    dtype: torch.dtype | None  # of what ``read`` gives where that is the file's own memory; None: it is computed

    def bytes(self) -> np.ndarray[Any, Any]:
        """All of it as it lies in the file, uint8 [nbytes]. Writing there would change a copy."""
        if not self.nbytes:
            return np.zeros(0, dtype=np.uint8)
        return np.memmap(self.path, dtype=np.uint8, mode="c", offset=self.offset, shape=(self.nbytes,))

    def read(self, cut: Cut = ()) -> Tensor:
        """The tensor, or a cut of it."""
        assert self.dtype is not None
        whole = torch.from_numpy(self.bytes()).view(self.dtype).view(self.shape)
        return whole[cut] if cut else whole

    def copy_to(self, to: Tensor, cut: Cut = ()) -> None:
        """Fill a tensor of the same shape, of any dtype and device, with it, or with a cut of it."""
        to.copy_(self.read(cut))


class Checkpoint(ABC):
    """A model on disk; each part is read when it is needed.

    All of it raises ``CheckpointError`` for parts that are missing, broken or not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path  # the directory, or the file
        self._context: int | None = None

    @property
    @abstractmethod
    def raw(self) -> dict[str, Any]:
        """The facts of a ``config.json``."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Stored]:
        """By Hugging Face's names."""

    @cached_property
    def _full_config(self) -> LlamaConfig:
        return LlamaConfig.from_hf(self.raw, self.where("config.json"))

    @property
    def config(self) -> LlamaConfig:
        """Of the model, as far as its context is used."""
        most, config = self._context, self._full_config
        if most is None or most >= config.max_position_embeddings:
            return config
        return config.model_copy(update={"max_position_embeddings": most})

    def limit(self, context: int | None) -> None:
        """Use positions below ``context`` only, if the model has more; None is all of them."""
        if context is not None and context < 1:
            raise ValueError(f"context {context} must be at least 1")
        self._context = context

    @abstractmethod
    def settings(self, name: str) -> dict[str, Any]:
        """The contents of a JSON file of this name, such as ``generation_config.json``; empty if there is none."""

    @abstractmethod
    def where(self, name: str) -> str:
        """Where ``settings(name)`` come from, for errors."""

    @property
    @abstractmethod
    def has_tokenizer(self) -> bool: ...

    @abstractmethod
    def raw_tokenizer(self) -> RawTokenizer | None:
        """The tokenizer, or None if it has none."""

    @abstractmethod
    def templates(self) -> dict[str, str]:
        """Chat templates that lie in files of their own, by name; ``default`` is of conversations."""

    @property
    def nbytes(self) -> int:
        """Of the weights, as they are stored."""
        return sum(stored.nbytes for stored in self.tensors.values())

    def check_tensors(self, expected: Mapping[str, tuple[int, ...]], allowed: frozenset[str] = frozenset()) -> None:
        """Raise ``CheckpointError`` unless it has exactly the tensors that are expected, with their shapes, and perhaps
        those ``allowed``."""
        if missing := sorted(set(expected) - set(self.tensors)):
            raise CheckpointError(f"{self.path}: tensors are missing: {names(missing)}")
        if surplus := sorted(set(self.tensors) - set(expected) - allowed):
            raise CheckpointError(f"{self.path}: tensors this configuration has no place for: {names(surplus)}")
        for key, shape in expected.items():
            if (found := self.tensors[key].shape) != shape:
                raise CheckpointError(
                    f"{self.path}: {key} has shape {list(found)}, the configuration asks {list(shape)}"
                )


def names(items: list[str], most: int = 4) -> str:
    """The first of a list of names, and how many more there are."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
