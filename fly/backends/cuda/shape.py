"""A batch of a fixed shape: its sizes, and the table of what a round must know of each row.

Shape legend: R rows (padding included), K longest draft, V vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fly.executor import Batch, DraftSpec, Scores
from fly.models.config import LlamaConfig
from fly.request import BadWords
from fly.sampling import BatchSampling
from fly.types import SamplingParams

__all__ = [
    "Asked",
    "Asking",
    "Column",
    "Cuts",
    "Model",
    "Shape",
    "Taken",
    "fixed",
    "line",
    "numbers_of",
    "padding",
    "size",
    "text_size",
]

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)


def size(n: int) -> int:
    """The next of a few sizes, so that few graphs serve all batches."""
    return next((size for size in _SIZES if size >= n), n) if n else 0


class Column(IntEnum):
    """The columns of the state, int64; those from ``NATS`` on are float64, bit by bit; ids that end the row follow."""

    BEFORE = 0  # the last token but one
    LAST = 1
    LENGTH = 2  # tokens so far
    LEFT = 3  # that it may still emit; 0 is padding
    K = 4
    CONTEXT = 5  # of the drafter
    SEED = 6
    GENERATED = 7
    RELAXED = 8
    LACKS = 9  # tokens before the last that the drafter is to store; a draft model one at most
    FIRST = 10  # number of the first token that a draft head holds
    TOP_K = 11
    NATS = 12
    TEMPERATURE = 13
    TOP_P = 14
    MIN_P = 15
    REACH = 16  # where its draft stops (``DraftSpec.reach``)
    STOPS = 17


def line(
    tokens: list[int],
    counts: list[int],
    nats: float,
    numbers: Sequence[float],
    ends: Collection[int],
    stops: int,
    reach: float = 0.0,
) -> list[int]:
    """The state of a row: its last two tokens, ``counts`` from ``LENGTH`` to ``FIRST``, ``numbers`` of how it is
    drawn (``numbers_of``), where its draft stops, and the ids that end it, of at most ``stops``."""
    top_k, *others = numbers
    bits = struct.unpack("5q", struct.pack("5d", nats, *others, reach))
    return [*tokens, *counts, int(top_k), *bits, *ends, *[-1] * (stops - len(ends))]


def padding(stops: int) -> list[int]:
    """The state of no row: nothing is left to emit."""
    return line([0, 0], [2, 0, 0, 0, 0, 0, 0, 0, 0], 0.0, _GREEDY, (), stops)


def numbers_of(how: BatchSampling | None, rows: int) -> list[Sequence[float]]:
    """Top-k, temperature, top-p and min-p of each row."""
    if how is None:
        return [_GREEDY] * rows
    return list(zip(*(column.tolist() for column in (how.top_k_B, how.temperature_B, how.top_p_B, how.min_p_B))))


_GREEDY = (0.0, 1.0, 1.0, 0.0)
Taken = dict[int, Tensor]  # hidden states [T, C] after so many layers, which a forward is to fill in


class Model(Protocol):
    """What runs forwards (``fly.backends.cuda.executor.CudaExecutor``)."""

    config: LlamaConfig
    device: torch.device
    often: int  # rounds of one shape after which its layers are compiled

    @property
    def compiles(self) -> bool: ...
    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, kv: Any, compiled: bool = False, taken: Taken | None = None
    ) -> Tensor: ...
    def logits(self, hidden_TC: Tensor) -> Tensor: ...
    def score(self, batch: Batch, places: Sequence[int] | None = None) -> Scores: ...


class Cuts(NamedTuple):
    """The sampling of rows above temperature 0, as far as it changes the work."""

    top_k: int = 0  # the largest; 0 if none asks for it
    top_p: bool = False
    min_p: bool = False

    @staticmethod
    def of(how: BatchSampling | None) -> Cuts:
        """Top-k rounded up, so that few graphs serve all."""
        if how is None:
            return Cuts()
        return Cuts(1 << (how.most_k - 1).bit_length() if how.most_k else 0, how.top_p, how.min_p)


class Asking(Protocol):
    """A row that asks something of its text."""

    @property
    def params(self) -> SamplingParams | None: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def bad(self) -> BadWords: ...


class Asked(NamedTuple):
    """How much the rows of a batch ask at most."""

    ids: int  # that a row biases
    words: int  # bad words of a row
    before: int  # tokens of a bad word before its last

    @staticmethod
    def by(rows: Sequence[Asking]) -> Asked | None:
        """Rounded up, so that few graphs serve all. None: no rows ask."""
        if not rows:
            return None
        words = max(len(row.bad.words) for row in rows)
        before = max((len(word) - 1 for row in rows for word in row.bad.words), default=0)
        ids = size(max(len(row.params.logit_bias) for row in rows if row.params is not None))
        return Asked(ids, 1 << (words - 1).bit_length() if words else 0, size(max(before, 1)) if words else 0)


_ANY, _UNCUT = DraftSpec(), Cuts()
_SHORT = 1024


def fixed(spec: DraftSpec, model: bool) -> DraftSpec:
    """The part of ``spec`` that is the same for all rows of a graph: whether there is a ``reach``, whose value differs
    among rows. Nothing of a draft without a ``model``, which is made on the host."""
    return replace(spec, reach=(1.0,) if any(spec.reach) else ()) if model else _ANY


@dataclass(frozen=True)
class Shape:
    """What the memory and the graphs of some work are made for."""

    drawn: int  # rows above temperature 0, which come first
    rows: int
    k: int
    stops: int
    spec: DraftSpec = _ANY
    cuts: Cuts = _UNCUT
    pages: int = 0  # of a row, in the target's cache and in the drafter's
    draft_pages: int = 0
    alone: bool = False  # whether only the draft is wanted, with separate seeds
    text: int = 0  # tokens of a row that the device knows
    says: Asked | None = None  # what requests ask of single tokens (``Says``)
    forms: bool = False  # whether the first token of a draft is to keep to what is allowed
    trees: bool = False  # whether what is scored are trees
    states: tuple[int, ...] = ()  # the target's hidden states that are wanted (``Executor.score``)
    compiled: bool = False  # whether the layers are compiled

    @property
    def copies(self) -> int:
        """Tokens that prompt lookup copies for a forward of the draft model; the model itself predicts the one after
        them."""
        return min(self.spec.lookup.k, self.k - 1) if self.spec.lookup is not None and self.says is None else 0

    @property
    def paced(self) -> bool:
        """Whether a draft may take fewer than K forwards."""
        return self.k > 1 and (self.spec.stops or self.copies > 0)

    def logit_bytes(self, vocabulary: int) -> int:
        """Of a round's logits, of the distributions that drafts are drawn from, of a level of a tree, and of what
        requests ask."""
        drafted = self.drawn * (self.k + self.copies + 1) + self.rows * (self.copies + 1)
        level = self.rows * (0 if self.spec.tree is None else self.spec.tree.follow)
        drafted += level * (2 + 4 * (self.says is not None))
        return (
            4 * vocabulary * (self.rows * (self.k + 1) + drafted + self.rows * (self.k + 5) * (self.says is not None))
        )


def text_size(longest: int) -> int:
    """Columns for texts of so many tokens: a power of two, so that few graphs serve a text that grows."""
    return max(1 << (longest - 1).bit_length(), _SHORT)
