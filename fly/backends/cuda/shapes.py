"""Keep rounds of several shapes for a cache, and check whether a new one fits into the memory that was left free."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch

from fly.backends.cuda.device_round import DeviceRound, Group
from fly.backends.cuda.drafter import Model
from fly.backends.cuda.footprint import WORKSPACE, Needs, measure_round
from fly.backends.cuda.graphs import GraphPool, Shared
from fly.backends.cuda.table import Shape
from fly.backends.heads import TorchHead
from fly.cache import PagedKVCache

__all__ = ["DeviceRounds", "TooLarge", "add_up"]

_log = logging.getLogger("fly")
_MOST = 64  # shapes kept for a cache
_Key = tuple[bool, Shape, "weakref.ref[PagedKVCache] | None"]  # (whether it decides, shape, drafter's cache)


class TooLarge(MemoryError):
    """A round needs more memory than was left free for it."""


class DeviceRounds:
    """The rounds made so far for batches of one cache, and the forwards that only score. If memory is short, the least
    recently used ones are dropped.

    Args:
        budget: bytes that all of them may take, graphs included. None means a quarter of the memory that is free when
            the first one is made.
    """

    def __init__(self, pool: GraphPool, budget: int | None = None) -> None:
        self.pool = pool
        self.budget = budget
        self.shared = Shared()
        self.made: dict[_Key, DeviceRound] = {}  # the last used at the end
        self.needs: dict[_Key, Needs] = {}

    def find(
        self,
        shape: Shape,
        groups: tuple[Group, ...],
        target: Model,
        cache: PagedKVCache,
        drafter: Model | TorchHead | None = None,
        draft_cache: PagedKVCache | None = None,
    ) -> DeviceRound:
        """Return the round for batches of this shape, whose rules will decide in these ``groups``. Without groups it
        only scores. A round that was launched ``Model.compiles_after`` times is made anew, with compiled layers.

        Raises ``TooLarge`` if the round does not fit even alone.
        """
        key = bool(groups), shape, None if draft_cache is None else weakref.ref(draft_cache)
        device_round = self.made.get(key)
        if device_round is not None and not device_round.shape.compiled:
            often = device_round.rounds >= target.compiles_after
            if often and target.compiles_layers:
                _log.info("compiling layers for %d rows, drafts of %d tokens, which takes a while", shape.rows, shape.k)
                device_round = None
                shape = replace(shape, compiled=True)
        if device_round is None or (groups and groups not in device_round.stages):
            draft_size = None if draft_cache is None else draft_cache.allocator.block_size
            needs = measure_round(shape, groups, target, drafter, cache.allocator.block_size, draft_size)
            self._make_room(key, needs)
        if device_round is None:
            device_round = DeviceRound(shape, target, cache, drafter, draft_cache, self.pool, self.shared)
        self.made.pop(key, None)
        self.made[key] = device_round
        return device_round

    def _make_room(self, key: _Key, needs: Needs) -> None:
        """Drop other rounds until this one fits."""
        if self.budget is None:
            self.budget = torch.cuda.mem_get_info(self.pool.device)[0] // 4
        shape, alone = key[1], add_up([needs])
        if alone > self.budget:
            raise TooLarge(
                f"{shape.rows} rows and drafts of {shape.k} tokens take {alone / 2**30:.2f} GiB, more than the "
                f"{self.budget / 2**30:.2f} GiB that are left free for rounds; a smaller k or max_rows takes less"
            )
        kept = {other: self.needs[other] for other in self.made if other != key}
        while kept and (len(kept) >= _MOST or add_up([needs, *kept.values()]) > self.budget):
            oldest = next(iter(kept))
            _log.info("dropped, for want of memory: %d rows, drafts of %d tokens", oldest[1].rows, oldest[1].k)
            del kept[oldest], self.made[oldest]
        self.needs = {**kept, key: needs}
        _log.info(
            "a new shape of batches, to be captured as graphs: %d rows, drafts of %d tokens, %d kernels, %.0f MiB",
            shape.rows, shape.k, needs.kernels, alone / 2**20,
        )  # fmt: skip


def add_up(needs: Sequence[Needs]) -> int:
    """Add up the bytes of several rounds, which run one after the other. Graphs share one memory pool. Work that runs
    operation by operation, as each round does at first, shares another."""
    shared, peak = (max(getattr(each, name) for each in needs) for name in ("shared", "peak"))
    return 2 * (WORKSPACE + peak) + shared + sum(each.kept + each.graph for each in needs)
