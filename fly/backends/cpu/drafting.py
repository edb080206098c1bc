"""Drafts by compiled code. Most take one call of the library (src/calls.cpp: fly_draft): its arguments and its result.

Shape legend: T packed tokens, B rows, K longest draft, F hidden states side by side, V vocabulary.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from array import array
from collections import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fly.backends.cpu.host import c_sampling, uniforms
from fly.backends.cpu.library import CLookup, CStops, chosen, spans
from fly.backends.cpu.packed import PackedLlama
from fly.ops import Stream
from fly.runner.constraints import constrains
from fly.runner.drafting import draft_apart
from fly.runner.executor import Batch, Drafted, DraftSpec, Executor, Head
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling

__all__ = ["CompiledBlockHead", "CompiledHead", "draft_compiled"]


class CompiledHead(Head):
    """A trained head on compiled kernels. The class after it among the bases drafts step by step, for the rows that
    compiled code does not draft for."""

    own_threads = True

    @property
    @abstractmethod
    def packed(self) -> PackedLlama:
        """The packed weights."""

    def draft(
        self,
        batch: Batch,
        states_TF: Tensor,
        spec: DraftSpec,
        rows: abc.Sequence[Row],
        max_len: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted:
        states_TF = states_TF.to(self.dtype).contiguous()
        step_by_step = super().draft  # type: ignore[safe-super]
        return draft_compiled(
            self.packed, step_by_step, batch, spec, rows, max_len, sampling, seeds, states_TF=states_TF
        )


class CompiledBlockHead(CompiledHead):
    """A block drafter on compiled kernels. Its weights are packed, and rounded as its kernels say, when it shares the
    target's. It copies those, and keeps no other copy of its own."""

    def __init__(self, head: Any, variant: str) -> None:
        super().__init__(head)
        self.kernels = chosen(variant)
        self._packed: PackedLlama | None = None
        self._target: Executor | None = None  # whose matrices it has

    @property
    def packed(self) -> PackedLlama:
        """The packed head. Raises ``ValueError`` before ``share``."""
        if self._packed is None:
            raise ValueError("the head has no target yet: call share()")
        return self._packed

    @property
    def weight_bytes(self) -> float:
        return self.dtype.itemsize if self._packed is None else self._packed.weight_bytes

    @abstractmethod
    def pack(self, target: Executor) -> PackedLlama:
        """Pack the head's weights, and what it lacks of the target's."""

    def share(self, target: Executor) -> None:
        if target is self._target:
            return
        if self._packed is not None:
            raise ValueError("the head drafts for another target already; load it again")
        self._target = target
        super().share(target)
        self._packed = self.pack(target)
        self.head = self.head.without_layers()


def draft_compiled(
    packed: PackedLlama,
    step_by_step: Callable[..., Drafted],
    batch: Batch,
    spec: DraftSpec,
    rows: abc.Sequence[Row],
    max_len: abc.Sequence[int],
    sampling: BatchSampling | None,
    seeds: abc.Sequence[int],
    lookup: CLookup | None = None,
    states_TF: Tensor | None = None,
) -> Drafted:
    """Draft as ``Executor.extend`` does, or as ``Head.draft`` does if the target's hidden states ``states_TF`` are
    given.

    Rows draft in one call of the library. Two kinds draft by ``step_by_step`` instead, which takes the arguments of the
    method in question: trees, and rows with penalties, bans or forms, which change logits in Python.
    """

    def part_of(numbers: list[int]) -> tuple[Batch, Tensor | None]:
        """Return the batch of some rows, and the hidden states of their tokens."""
        part = batch.rows(numbers)
        return part, states_TF if part is batch or states_TF is None else states_TF[batch.places(numbers)]

    def draft_in_steps(numbers: list[int], some_rows: abc.Sequence[Row], spec: DraftSpec, *columns: Any) -> Drafted:
        part, part_TF = part_of(numbers)
        return step_by_step(part, *([] if part_TF is None else [part_TF]), spec, some_rows, *columns)

    def draft_in_one_call(numbers: list[int], some_rows: abc.Sequence[Row], spec: DraftSpec, *columns: Any) -> Drafted:
        part, part_TF = part_of(numbers)
        return _call_library(packed, lookup, part, part_TF, spec, some_rows, *columns)

    if spec.tree is not None:
        return draft_in_steps([*range(len(rows))], rows, spec, max_len, sampling, seeds)
    is_constrained = list(map(constrains, rows))
    return draft_apart(is_constrained, draft_in_steps, draft_in_one_call, rows, spec, max_len, sampling, seeds)


def _call_library(
    packed: PackedLlama,
    lookup: CLookup | None,
    batch: Batch,
    states_TF: Tensor | None,
    spec: DraftSpec,
    rows: abc.Sequence[Row],
    max_len: abc.Sequence[int],
    sampling: BatchSampling | None,
    seeds: abc.Sequence[int],
) -> Drafted:
    """Draft for all rows in one call."""
    call = packed.batch(array("q", batch.tokens), array("q", batch.positions), batch.kv)
    longest, count = max(max_len, default=0), len(max_len)
    stops = [array("q", row.stop_ids) for row in rows]
    drafted, counts = array("q", bytes(8 * count * longest)), array("i", bytes(4 * count))
    how: Any = None
    coins: array[float] | None = None
    size = count, longest, packed.config.vocab_size
    probs_BKV = None if sampling is None else torch.empty(size)
    logits_BKV = torch.empty(size) if spec.with_logits else None
    if sampling is not None:
        each = [(seed, len(row.tokens) + n) for seed, row in zip(seeds, rows) for n in range(longest)]
        coins = uniforms([seed for seed, _ in each], [at for _, at in each], Stream.SAMPLE, 1)
        how = c_sampling(sampling)
    texts = None if lookup is None else [array("i", row.tokens[:start]) for row, start in zip(rows, batch.kv.starts)]
    packed.library.fly_draft(
        packed.handle, ctypes.byref(call), longest, array("i", max_len), spans(stops), drafted, counts,
        how, coins, probs_BKV, None if logits_BKV is None else spans(logits_BKV.unbind()),
        None if lookup is None else ctypes.byref(lookup), None if texts is None else spans(texts),
        CStops.of_rows(spec, count), states_TF,
    )  # fmt: skip
    chains = [drafted[b * longest : b * longest + n].tolist() for b, n in enumerate(counts)]
    return Drafted(chains, probs_BKV, logits_BKV)
