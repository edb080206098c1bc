"""The executor on CUDA: whole rounds as graphs, and the plain way.

The engine asks ``rounds`` first, which takes the main road: no draft, prompt lookup, a draft model, or a head's chain
(rounds.py). Rows that ask for more go the plain way, as on any device: the strategy drafts token by token, ``score``
runs the forwards, and the rules decide in tensors, operation by operation.

Shape legend: T packed tokens, N places, C hidden width, F hidden states side by side, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
from collections import abc
from functools import cache, partial, wraps
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fly.backends.cuda.attention import PagedAttention, Slots, find_trees, reads_pages, takes_pages
from fly.backends.cuda.device_round import DeviceRounds
from fly.backends.cuda.fused import fuse
from fly.backends.cuda.graphs import GraphPool
from fly.backends.cuda.int4 import Int4Linear
from fly.backends.cuda.rounds import take_rounds
from fly.backends.cuda.sampling import DeviceDistribution
from fly.backends.cuda.table import PADDING, Column, Shape, count_pages, make_line, round_up
from fly.backends.torch import TorchExecutor, TorchHead
from fly.cache import PagedKVCache
from fly.models.compiled import CompiledLayers
from fly.models.llama import Llama, record_states
from fly.ops import upload
from fly.runtime.executor import Batch, DraftSpec, Executor, RoundPlan, Rounds, Scores, TokenByToken, asks_between
from fly.runtime.request import Sequence
from fly.runtime.sampling import BatchSampling, ProcessedDistribution

__all__ = ["CudaExecutor"]

_log = logging.getLogger("fly")
_FEW, _FEW_IN_ALL = 32, 512  # tokens of a row, and of a batch, that ``score`` runs as a graph


def _on_device(method: Any) -> Any:
    """Run a method with the executor's device as the current one, on whichever thread."""

    @wraps(method)
    def run(self: CudaExecutor, *args: Any, **options: Any) -> Any:
        with self.pool.current():
            return method(self, *args, **options)

    return run


class CudaExecutor(TorchExecutor):
    """Runs a ``fly.models.Llama`` on a CUDA device.

    Args:
        compiles: whether layers may be compiled; false once that failed.
        pool: what its graphs share; of a model that this process shares with others, entered around each wait. A call
            then takes a fixed number of rounds, so that all processes take the same.
    """

    # Compiling takes some ten seconds for each number of tokens, the first time on a machine: as long as these rounds
    # took, so that compiling at most doubles the time of short work.
    often = 2000

    def __init__(self, model: Any, compiles: bool = True, pool: GraphPool | None = None) -> None:
        super().__init__(model)
        self.pool, self.compiles = pool or GraphPool(self.device), compiles
        if isinstance(model, Llama):
            fuse(model)
            if any(isinstance(part, Int4Linear) for part in model.modules()):
                self.kernels = "torch-int4"
        self._compiled_layers = cache(CompiledLayers)  # made when they are needed: that imports torch's compiler
        self._rounds: WeakKeyDictionary[PagedKVCache, DeviceRounds] = WeakKeyDictionary()

    @property
    def weight_bytes(self) -> float:
        return 0.53 if self.kernels == "torch-int4" else super().weight_bytes  # scales and zeros included

    def deterministic(self) -> Executor:
        """Never compiled: which operations compute a token must not depend on how often other shapes came up."""
        return TokenByToken(CudaExecutor(self.model, False, self.pool))

    def joins(self, drafter: Executor, spec: DraftSpec) -> bool:
        known = isinstance(drafter, (CudaExecutor, TorchHead))
        return known and drafter.device == self.device and spec.tree is None

    def takes(self, rows: abc.Sequence[Sequence]) -> bool:
        """Graphs are found by their rules: one without a hash takes the plain way."""
        return not any(map(asks_between, rows)) and all(_has_hash(row.policy) for row in rows)

    @_on_device
    def rounds(self, plan: RoundPlan) -> Rounds | None:
        return take_rounds(self, plan, self._find_rounds(plan.kv.cache))

    def process(self, sampling: BatchSampling, logits_BJV: Tensor) -> ProcessedDistribution:
        return DeviceDistribution(sampling, logits_BJV)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        kv: Any,
        states: dict[int, Tensor] | None = None,
        compiled: bool = False,
    ) -> Tensor:
        """Final hidden states [T, C]. Each key of ``states`` gets the residual stream after so many layers
        (``fly.models.llama.record_states``). ``compiled``: by compiled layers, unless these have failed."""
        states, model, hidden_TC = {} if states is None else states, cast(Llama, self.model), None
        if compiled and self.compiles:
            try:
                hidden_TC = model(tokens_T, positions_T, kv, through=partial(self._compiled_layers(), states=states))
            except Exception as error:  # Triton or a C compiler is missing, say; any other error comes again below
                self.compiles, reason = False, f"{type(error).__name__}: {error}".splitlines()[0]
                _log.warning("layers are not compiled, and run operation by operation in CUDA graphs: %s", reason)
        if hidden_TC is None:
            hidden_TC = model(tokens_T, positions_T, kv, through=record_states(states))
        return hidden_TC

    def logits(self, hidden_TC: Tensor, exact: bool = True) -> Tensor:
        """[T, V] float32, or as the head computes them, which is enough to find the likeliest tokens."""
        model = cast(Llama, self.model)
        return model.logits(hidden_TC) if exact or model.kept is not None else model.lm_head(hidden_TC)

    @_on_device
    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        """A few tokens of each row are a graph, more of them, and trees, one forward that needs nothing from the host.
        If no attention reads them in place, trees and prompts go row by row, with waits (``PagedBatch.attend``)."""
        kv = batch.kv
        if any(mask is not None for mask in kv.masks or ()):
            if not takes_pages(kv.cache):
                return super().score(batch, places, states)
            return self._score_many(batch, places, states)
        if max(kv.counts) <= _FEW and len(kv.counts) * max(kv.counts) <= _FEW_IN_ALL:
            return self._score_few(batch, places, tuple(states))
        if not reads_pages(kv.cache):
            return super().score(batch, places, states)
        return self._score_many(batch, places, states)

    def _score_few(self, batch: Batch, places: abc.Sequence[int] | None, states: tuple[int, ...]) -> Scores:
        """As in a round whose drafts are the tokens after each row's first one."""
        kv = batch.kv
        ends = itertools.accumulate(kv.counts, initial=0)
        new = [batch.tokens[first:end] for first, end in itertools.pairwise(ends)]
        k, rows = round_up(max(kv.counts) - 1), round_up(len(new))
        shape = Shape(rows, 0, k, count_pages(kv, k), states=states)
        round_ = self._find_rounds(kv.cache).find(shape, self, kv.cache)
        lines = [
            make_line({Column.LAST: tokens[0], Column.LENGTH: start + 1, Column.LEFT: 1})
            for tokens, start in zip(new, kv.starts)
        ]
        empty = rows - len(new)
        round_.table.load(lines + [make_line(PADDING)] * empty, kv, None, [*range(len(new)), *[-1] * empty])
        round_.propose([tokens[1:] for tokens in new])
        round_.rounds += 1
        scored = round_.score()
        every = [b * (k + 1) + n for b, count in enumerate(kv.counts) for n in range(count)]
        wanted = every if places is None else [every[place] for place in places]
        logits_NV = scored.logits_RJV.flatten(0, 1)[upload(wanted, self.device)].float()
        if scored.states_RJF is None:
            return Scores(logits_NV)
        return Scores(logits_NV, states_TF=scored.states_RJF.flatten(0, 1)[upload(every, self.device)])

    def _score_many(self, batch: Batch, places: abc.Sequence[int] | None, states: abc.Sequence[int]) -> Scores:
        """All that the forward needs from the host goes up in one copy."""
        kv, tables, slots = batch.kv, batch.kv.tables(), list[int]()
        for seq, start, count in zip(kv.seqs, kv.starts, kv.counts):
            own = kv.cache.slots(seq, start, start + count)
            slots += range(own.start, own.stop) if isinstance(own, slice) else own
        used = [start + count for start, count in zip(kv.starts, kv.counts)]
        ends, width = [*itertools.accumulate(kv.counts, initial=0)], max(map(len, tables))
        parts = [batch.tokens, batch.positions, slots, [] if places is None else list(places), used, ends]
        parts.append([page for table in tables for page in table + [0] * (width - len(table))])
        there = upload([number for part in parts for number in part], self.device)
        tokens_T, positions_T, slots_T, places_N, *rest = there.split([len(part) for part in parts])
        used_B, ends_B1, pages = (numbers.to(torch.int32) for numbers in rest)
        found = Slots(slots_T, used_B, ends_B1, pages.view(-1, width), max(kv.counts))
        attention = PagedAttention(kv.cache, found, find_trees(kv))
        taken = dict.fromkeys(states, positions_T)
        hidden_TC = self.hidden(tokens_T, positions_T, attention, taken)
        states_TF = torch.cat([taken[number] for number in states], -1) if states else None
        if places is not None and not len(places):
            return Scores(torch.zeros(0, self.config.vocab_size, device=self.device), None, states_TF)
        return Scores(self.logits(hidden_TC if places is None else hidden_TC[places_N]), None, states_TF)

    def _find_rounds(self, cache: PagedKVCache) -> DeviceRounds:
        return self._rounds.setdefault(cache, DeviceRounds(self.pool))


def _has_hash(policy: object) -> bool:
    """Whether it can be told from others: a rule with a list among its parameters cannot."""
    try:
        hash(policy)
    except TypeError:
        return False
    return True
