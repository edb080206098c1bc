"""The executor on compiled kernels: forwards, drafts and whole rounds in one call each, decisions on the host.

Shape legend: N places, B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import abc
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from fly.backends.cpu.clauses import Clause, clauses_of
from fly.backends.cpu.host import HostDecisions, c_sampling, uniforms
from fly.backends.cpu.library import CLookup, Sampling, Sure, address
from fly.backends.cpu.packed import PackedLlama, keep_threads
from fly.backends.cpu.rounds import take_rounds
from fly.executor import Answer, Batch, Drafted, DraftSpec, Executor, Lookup, Question, RoundPlan, Rounds, Scores
from fly.ops import Stream
from fly.policies.base import AcceptancePolicy, accepts_exactly, draws_exactly
from fly.request import Sequence
from fly.sampling import BatchSampling
from fly.types import Decision

__all__ = ["CpuExecutor"]

_MOST = 2**31 - 1


class CpuExecutor(HostDecisions):
    """Runs a packed Llama."""

    batch_invariant = True
    own_threads = True

    def __init__(self, packed: PackedLlama) -> None:
        self.packed = packed
        self.config, self.device, self.dtype = packed.config, packed.device, packed.dtype
        self.kernels = packed.kernels
        self._layers: abc.Sequence[int] | None = None  # all
        self._lookups: dict[Lookup, CLookup] = {}  # with what was learned of how well they do

    @property
    def weight_bytes(self) -> int:
        return self.packed.weight_bytes

    @property
    def model_name(self) -> str:
        return "Llama"

    def enter_thread(self) -> None:
        keep_threads()

    def with_layers(self, layers: abc.Sequence[int]) -> Executor:
        part = copy(self)
        part._layers, part._lookups = list(layers), {}
        return part

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None) -> Scores:
        tokens, positions = array("q", batch.tokens), array("q", batch.positions)
        call, _kept = self.packed.batch((address(tokens), address(positions)), len(tokens), batch.kv, self._layers)
        which = None if places is None else array("i", places)
        count = len(tokens) if which is None else len(which)
        logits_NV, argmax = torch.empty(count, self.packed.vocab), array("i", bytes(4 * count))
        self.packed.check(
            self.packed.library.fly_score(
                self.packed.handle,
                ctypes.byref(call),
                None if which is None else address(which),
                count,
                logits_NV.data_ptr(),
                address(argmax),
            )
        )
        return Scores(logits_NV, argmax.tolist())

    def extend(
        self,
        batch: Batch,
        spec: DraftSpec,
        rows: abc.Sequence[Sequence],
        most: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted:
        tokens, positions = array("q", batch.tokens), array("q", batch.positions)
        call, _kept = self.packed.batch((address(tokens), address(positions)), len(tokens), batch.kv, self._layers)
        longest, count = max(most, default=0), len(most)
        limits, stops, stop_at = array("i", most), array("q"), array("i", [0])
        for row in rows:
            stops.extend(row.stop_ids)
            stop_at.append(len(stops))
        drafted, counts = array("q", bytes(8 * count * longest)), array("i", bytes(4 * count))
        addresses: list[int | None] = [address(values) for values in (limits, stops, stop_at, drafted, counts)]
        probs_BKV: Tensor | None = None
        logits_BKV: Tensor | None = None
        if sampling is None and spec.says:
            logits_BKV = torch.empty(count, longest, self.config.vocab_size)
            shown = (Sampling * count)(*[Sampling(-1.0)] * count)  # held until after the call
            addresses += [ctypes.addressof(shown), None, logits_BKV.data_ptr()]
        elif sampling is None:
            addresses += [None, None, None]
        else:
            each = [(seed, len(row.tokens) + n) for seed, row in zip(seeds, rows) for n in range(longest)]
            coins = uniforms([seed for seed, _ in each], [at for _, at in each], Stream.SAMPLE, 1)
            probs_BKV = torch.empty(count, longest, self.config.vocab_size)
            how = c_sampling(sampling)  # held until after the call
            addresses += [ctypes.addressof(how), coins.buffer_info()[0], probs_BKV.data_ptr()]
        if spec.lookup is None:
            addresses += [None, None]
        else:
            texts = [array("i", row.tokens[:start]) for row, start in zip(rows, batch.kv.starts)]
            places = array("Q", [address(text) for text in texts])
            addresses += [ctypes.addressof(self._c_lookup(spec.lookup)), address(places)]
        sure = Sure.each(spec, count)  # held until after the call
        addresses.append(ctypes.addressof(sure))
        library = self.packed.library
        self.packed.check(library.fly_draft(self.packed.handle, ctypes.byref(call), longest, *addresses))
        found = [drafted[b * longest : b * longest + n].tolist() for b, n in enumerate(counts)]
        return Drafted(found, probs_BKV, logits_BKV)

    def joins(self, drafter: Executor) -> bool:
        return isinstance(drafter, CpuExecutor) and drafter._layers is None

    def rounds(
        self,
        rules: abc.Sequence[tuple[AcceptancePolicy, bool]],
        plan: Callable[[], RoundPlan | None],
        ask: Callable[[list[Decision], Question], Answer | None],
    ) -> Rounds | None:
        """In one call, for policies that keep and draw what the exact rule does. What else they excuse is asked of
        compiled code (``clauses_of``, at temperature 0) or, of a row alone, of the policy itself."""
        clauses: list[list[Clause]] | None = []
        for policy, greedy in rules:
            if not accepts_exactly(policy) or not (greedy or draws_exactly(policy)):
                return None
            known: list[Clause] | None = []
            if policy.relaxation is not None:
                known = clauses_of(policy.relaxation) if greedy else None
            if clauses is not None and known is not None:
                clauses.append(known)
            else:
                clauses = None
        if (clauses is None and len(rules) > 1) or self._layers is not None or (made := plan()) is None:
            return None
        drafter = made.drafter
        assert drafter is None or isinstance(drafter, CpuExecutor)  # see ``joins``
        lookup = None if made.spec.lookup is None else (drafter or self)._c_lookup(made.spec.lookup)
        return take_rounds(self.packed, None if drafter is None else drafter.packed, made, lookup, clauses, ask)

    def _c_lookup(self, lookup: Lookup) -> CLookup:
        if (made := self._lookups.get(lookup)) is None:
            made = CLookup(*(min(value, _MOST) for value in (lookup.longest, lookup.shortest, lookup.k)))
            self._lookups[lookup] = made
        return made
