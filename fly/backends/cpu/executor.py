"""The executor on compiled kernels. One call runs a forward, a draft or several rounds; compiled code decides as well.

The engine asks ``takes`` and ``joins``, and then calls ``rounds`` (rounds.py, src/rounds.cpp). For rows that ``takes``
refuses, it calls ``extend``, ``score`` and ``decide_group`` (host.py) one after another.

Shape legend: T packed tokens, N places, F hidden states side by side, U tokens of a trimmed head, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import abc

import torch
from torch import Tensor

from fly.backends.cpu.drafting import CompiledHead, draft_compiled
from fly.backends.cpu.host import HostDistribution, decide_compiled
from fly.backends.cpu.library import CLookup
from fly.backends.cpu.packed import PackedLlama, keep_threads
from fly.backends.cpu.rounds import take_rounds
from fly.ops import spread
from fly.policies.base import AcceptancePolicy
from fly.runner.constraints import constrains
from fly.runner.executor import Batch, Drafted, DraftSpec, Executor, Lookup, RoundPlan, Rounds, Scores, asks_between
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling, ProcessedDistribution
from fly.types import Decision, Draft, Target

__all__ = ["CpuExecutor"]

_LARGEST = 2**31 - 1


class CpuExecutor(Executor):
    """Runs a packed Llama."""

    batch_invariant = True
    own_threads = True

    def __init__(self, packed: PackedLlama) -> None:
        self.packed = packed
        self.config = packed.config
        self.device = packed.device
        self.dtype = packed.dtype
        self.kernels = packed.kernels
        self._lookups: dict[Lookup, CLookup] = {}  # each has learned how often its copies are right

    @property
    def weight_bytes(self) -> float:
        return self.packed.weight_bytes

    @property
    def gives_states(self) -> bool:  # type: ignore[override]  # false if the residual stream is stored divided
        return self.packed.divided == 1

    @property
    def model_name(self) -> str:
        return "Llama"

    def enter_thread(self) -> None:
        keep_threads()

    def embedding(self) -> Tensor:
        return self.packed.embedding()

    def logits(self, hidden_NC: Tensor) -> Tensor:
        return self.packed.logits(hidden_NC.to(self.dtype))

    def output(self) -> Tensor:
        return self.packed.output()

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        call = self.packed.batch(array("q", batch.tokens), array("q", batch.positions), batch.kv)
        which = None if places is None else array("i", places)
        count = len(batch.tokens) if which is None else len(which)
        logits_NV, argmax = torch.empty(count, self.packed.vocab), array("i", bytes(4 * count))
        after, states_TF = None, None
        if states:
            after = array("i", states)
            width = len(states) * self.config.hidden_size
            states_TF = torch.empty(len(batch.tokens), width, dtype=self.dtype)
        self.packed.library.fly_score(
            self.packed.handle, ctypes.byref(call), which, logits_NV, argmax, after, states_TF
        )
        if (kept := self.packed.kept) is None:
            return Scores(logits_NV, argmax.tolist(), states_TF)
        spread_NV = spread(logits_NV, self.packed.kept_U, self.config.vocab_size)
        return Scores(spread_NV, [kept[at] if at >= 0 else at for at in argmax], states_TF)

    def extend(
        self,
        batch: Batch,
        spec: DraftSpec,
        rows: abc.Sequence[Row],
        max_len: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted:
        lookup = None if spec.lookup is None else self._c_lookup(spec.lookup)
        return draft_compiled(self.packed, super().extend, batch, spec, rows, max_len, sampling, seeds, lookup)

    def process(self, sampling: BatchSampling, logits_BJV: Tensor) -> ProcessedDistribution:
        return HostDistribution(sampling, logits_BJV)

    def decide_group(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        """Decide by compiled code; by tensors if only Python knows the rule."""
        decisions = decide_compiled(policy, target, draft, seeds, starts)
        return super().decide_group(policy, target, draft, seeds, starts) if decisions is None else decisions

    def looks_up(self, rows: abc.Sequence[Row]) -> bool:
        return not any(map(constrains, rows))

    def joins(self, drafter: Executor) -> bool:
        if isinstance(drafter, CompiledHead):
            return drafter.dtype == self.dtype
        return isinstance(drafter, CpuExecutor)

    def takes(self, rows: abc.Sequence[Row]) -> bool:
        """Whether nothing has to be done for a row between two rounds. Rules that only Python knows are no hindrance:
        their blocks come back open, and other rows' blocks are decided all the same."""
        return not any(map(asks_between, rows))

    def rounds(self, plan: RoundPlan) -> Rounds | None:
        drafter = plan.drafter
        assert drafter is None or isinstance(drafter, (CpuExecutor, CompiledHead))  # see ``joins``
        reader = drafter if isinstance(drafter, CpuExecutor) else self  # who learns how often copies are right
        lookup = None if plan.spec.lookup is None else reader._c_lookup(plan.spec.lookup)
        return take_rounds(self.packed, None if drafter is None else drafter.packed, plan, lookup)

    def _c_lookup(self, lookup: Lookup) -> CLookup:
        if lookup not in self._lookups:
            sizes = (min(value, _LARGEST) for value in (lookup.longest, lookup.shortest, lookup.k))
            self._lookups[lookup] = CLookup(*sizes)
        return self._lookups[lookup]
