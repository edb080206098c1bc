"""What the training of each kind of head consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from pathlib import Path
from typing import Any

from torch import Tensor

from fly.extras.train.answers import Answer
from fly.extras.train.lessons import Lessons, Reader

__all__ = ["Course"]


class Course(ABC):
    """Makes a head of one kind for a target, and says what it has to learn from a batch of answers.

    Attributes:
        head: the head (a ``fly.models.heads.TrainedHead`` that has ``fc`` and ``config``).
        states: the target's layers after which the head reads hidden states.
        depths: how many tokens ahead it drafts, or how many of these are measured.
    """

    head: Any
    states: tuple[int, ...]
    depths: int

    @abstractmethod
    def begin(self, reader: Reader, taught: abc.Sequence[Answer]) -> None:
        """Set the scale of hidden states to their root mean square, and weights that should not begin at random."""

    @abstractmethod
    def learn(self, lessons: Lessons, seed: str) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and the cross-entropy to report. ``seed`` decides what is drawn at random."""

    @abstractmethod
    def measure(self, lessons: Lessons, seed: str) -> tuple[Tensor, Tensor]:
        """For each depth, count how often the head's most likely token is the target's, and among how many positions:
        those where this is so at every smaller depth. Both are [``depths``]."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the head in a published layout."""
