"""Describes what drafts when several rounds run in one call. A strategy returns it (``DraftStrategy.continuation``),
and the runner plans the rounds with it (``Runner.plan``)."""

from __future__ import annotations

import sys
from collections import abc
from collections.abc import Callable
from typing import NamedTuple, Protocol

from fly.cache import PagedBatch
from fly.runner.executor import DraftSpec, Executor, HeadInput, Spent
from fly.runner.request import Row
from fly.runner.states import HiddenStates

__all__ = ["Continuation", "Drafter"]


class Drafter(Protocol):
    """Drafts in rounds that run in one call: a draft model with its cache, or a draft head."""

    @property
    def executor(self) -> Executor: ...

    @property
    def states(self) -> HiddenStates | None:
        """The target's hidden states that it drafts from; None if it needs none."""

    def fits(self, rows: abc.Sequence[Row], rooms: abc.Sequence[int]) -> bool:
        """Whether its cache has pages for ``rooms[b]`` tokens of each row."""

    def prepare(self, rows: abc.Sequence[Row], rooms: abc.Sequence[int]) -> PagedBatch:
        """Make a batch of the uncached tokens of ``rows``, and reserve room for ``rooms[b]`` tokens of each row in all.
        Raises ``OutOfBlocks``, and changes nothing, if there is no room."""

    def read_states(self, rows: abc.Sequence[Row], kv: PagedBatch) -> HeadInput | None:
        """Return the target's hidden states before the tokens of that batch; None if it needs none."""

    def note_cached(self, row: Row, text: list[int]) -> None:
        """Note which tokens of a row are cached after the rounds."""


class Continuation(NamedTuple):
    """How a strategy drafts if it only continues each row with one model. The model proposes its most likely (or drawn)
    tokens, one after another, up to the first that it is not sure of (``spec``). Without a model, ``spec.lookup``
    proposes. Beside a head, it goes on where both begin alike (``fly.drafts.LookupDraft``)."""

    runner: Drafter | None
    max_len: list[int]  # the most tokens to draft in a round, for each row
    spec: DraftSpec = DraftSpec()
    rounds: int = sys.maxsize  # ask the strategy again after this many rounds
    longest: int = sys.maxsize  # the most of these tokens that a head drafts; a lookup beside it may go on
    # Called with the seconds of the first round and of the others, and later with those of deciding an open block.
    report: Callable[[abc.Sequence[Spent]], None] | None = None
