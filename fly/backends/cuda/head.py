"""A draft head on CUDA: its drafts as graphs, alone or as part of its target's rounds."""

from __future__ import annotations

from collections import abc
from weakref import WeakKeyDictionary

from torch import Tensor

from fly.backends.cuda.drafting import draft
from fly.backends.cuda.graphs import Captures
from fly.backends.cuda.rounds import LONGEST, Works
from fly.backends.torch import TorchHead
from fly.cache import PagedKVCache
from fly.executor import Batch, Drafted, DraftSpec
from fly.models.eagle import Eagle3Head
from fly.request import Sequence
from fly.sampling import BatchSampling

__all__ = ["CudaHead"]


class CudaHead(TorchHead):
    """Runs a draft head on a CUDA device. Its one layer is never compiled."""

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__(head)
        self._works: WeakKeyDictionary[PagedKVCache, Works] = WeakKeyDictionary()

    def chains(
        self,
        batch: Batch,
        states_TF: Tensor,
        spec: DraftSpec,
        rows: abc.Sequence[Sequence],
        most: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted | None:
        """Trees too."""
        if max(most) > LONGEST:
            return None
        if (works := self._works.get(batch.kv.cache)) is None:
            works = self._works[batch.kv.cache] = Works(Captures())
        return draft(self, batch, spec, rows, most, sampling, seeds, works, states_TF)

    def may_extend(self, row: Sequence) -> bool:
        """Penalties, biases and bans are worked out on the device; a form is looked at before and after."""
        return True
