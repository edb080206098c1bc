"""The executor on CUDA: rounds as graphs, everything else as on any device, with as few waits as possible.

Shape legend: T packed tokens, N places, B rows, W pages of a row, K longest draft, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fly.backends.cuda.attention import PagedAttention, Slots, flash_takes, listed
from fly.backends.cuda.drafting import draft, score_few
from fly.backends.cuda.fused import Fused
from fly.backends.cuda.graphs import Awaited, Captures
from fly.backends.cuda.head import CudaHead
from fly.backends.cuda.packing import may_relax, nats_of, pack, unpack
from fly.backends.cuda.rounds import LONGEST, Works, take_rounds
from fly.backends.cuda.shape import Taken
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.executor import (
    Answer,
    Batch,
    Drafted,
    DraftSpec,
    Executor,
    Question,
    RoundPlan,
    Rounds,
    Scores,
    TokenByToken,
)
from fly.models.llama import Llama, Through, noting
from fly.ops import Stream, uniforms, upload
from fly.policies import AcceptancePolicy, verify
from fly.policies.base import accepts_exactly
from fly.request import Sequence, by_policy
from fly.sampling import BatchSampling
from fly.types import Decision, Draft, Noise, Target

__all__ = ["CudaExecutor"]

_FEW, _FEW_IN_ALL = 32, 512  # tokens of a row, unless it has a tree, and of a batch that a graph takes


class _Part(NamedTuple):
    """What a policy decided about its rows: ``packed`` [B, columns] int32, as ``pack`` gives it."""

    packed: Tensor
    draft: Draft
    clauses: list[str]
    relaxes: bool
    deep: int  # tokens of the longest path, of trees


class CudaExecutor(TorchExecutor):
    """Runs a ``fly.models.Llama`` on a CUDA device.

    Rounds of chains by one draft model or head, by prompt lookup or without a draft are graphs: of the draft's
    forwards, of the target's, and of what the policies decide. A rule that a graph cannot hold runs between them
    operation by operation (``fly.backends.cuda.waits``). Trees, other strategies, forms and log-probabilities take the
    plain way.

    Args:
        fuses: whether layers may be compiled.
        awaited: entered around each wait, of a model that this process shares with others: then rounds are counted, not
            timed, since all take the same.
    """

    # Compiling takes some ten seconds for each number of tokens, the first time on a machine: as long as these rounds
    # took, so that compiling at most doubles the time of short work.
    often = 2000

    def __init__(
        self,
        model: Any,
        fuses: bool = True,
        awaited: Awaited = nullcontext,
    ) -> None:
        super().__init__(model)
        self.captures, self._fused = Captures(awaited), Fused() if fuses else None
        self._works: WeakKeyDictionary[PagedKVCache, Works] = WeakKeyDictionary()

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, kv: Any, compiled: bool = False, taken: Taken | None = None
    ) -> Tensor:
        """Final hidden states [T, C], and others as they are ``taken``; ``compiled``: by compiled layers, where these
        can be had."""
        states, model = {} if taken is None else taken, cast(Llama, self.model)

        def run(through: Through) -> Tensor:
            found: Tensor = model(tokens_T, positions_T, kv, through=through)
            return found

        hidden_TC = None
        if compiled and self._fused is not None:
            hidden_TC = self._fused.hidden(len(tokens_T), lambda layers: run(partial(layers, states=states)))
        return run(noting(states)) if hidden_TC is None else hidden_TC

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Whether its layers can be compiled here."""
        return self._fused is not None and self._fused.there

    def deterministic(self) -> Executor:
        """Never compiled: which operations compute a token must not depend on how often other shapes came up."""
        return TokenByToken(CudaExecutor(self.model, False, self.captures.awaited))

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """[T, V] float32."""
        return self.model.logits(hidden_TC)

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        """Without a wait. A few tokens of each row are a graph. For more, all that the forward needs from the host is
        uploaded at once. Many tokens beside a tree, or in a cache that FlashAttention does not take, go row by row
        (``PagedBatch.attend``)."""
        kv = batch.kv
        trees = any(mask is not None for mask in kv.masks or ())
        # A token alone with a mask is one of a tree whose others are stored before it (``TokenByToken``).
        if trees and min(kv.counts) == max(kv.counts) == 1:
            return super().score(batch, places, states)
        if (trees or max(kv.counts) <= _FEW) and len(kv.counts) * max(kv.counts) <= _FEW_IN_ALL:
            return score_few(self, batch, places, self._works_of(kv.cache), trees, tuple(states))
        if trees or not flash_takes(kv.cache):
            return super().score(batch, places, states)
        size, tables = kv.cache.allocator.block_size, kv.tables()
        width, slots, ends = max(map(len, tables)), [], [0]
        for table, start, count in zip(tables, kv.starts, kv.counts):
            slots += [table[at // size] * size + at % size for at in range(start, start + count)]
            ends.append(ends[-1] + count)
        used = [start + count for start, count in zip(kv.starts, kv.counts)]
        parts = [batch.tokens, batch.positions, slots, [] if places is None else list(places), used, ends]
        parts.append([page for table in listed(tables, width, 0) for page in table])
        there = upload([number for part in parts for number in part], self.device)
        tokens_T, positions_T, slots_T, places_N, *rest = there.split([len(part) for part in parts])
        used_B, ends_B1, pages = (numbers.to(torch.int32) for numbers in rest)
        found = Slots(slots_T, used_B, ends_B1, pages.view(-1, width), max(kv.counts), False)
        taken = dict.fromkeys(states, positions_T)
        hidden_TC = self.hidden(tokens_T, positions_T, PagedAttention(kv.cache, found, True), taken=taken)
        states_TF = torch.cat([taken[number] for number in states], -1) if states else None
        if places is not None and not len(places):
            return Scores(torch.zeros(0, self.config.vocab_size, device=self.device), None, states_TF)
        return Scores(self.logits(hidden_TC if places is None else hidden_TC[places_N]), None, states_TF)

    def judge(self, rows: abc.Sequence[Sequence], target: Target, draft: Draft) -> list[Decision]:
        """By the policies' tensors, and one download of all decisions."""
        draft = draft.to(self.device)
        seeds, starts = [row.seed for row in rows], [len(row.tokens) for row in rows]
        parts, found = list[_Part](), dict[int, Decision]()
        groups = by_policy(rows)
        for policy, numbers in groups.items():
            own, proposed = target, draft
            if len(groups) > 1:
                index_B = self.numbers(numbers)
                own, proposed = target.rows(index_B, numbers), draft.rows(index_B, numbers)
            those = [seeds[b] for b in numbers], [starts[b] for b in numbers]
            parts.append(self._decided(policy, own, proposed, *those))
        for numbers, decisions in zip(groups.values(), self._told(parts)):
            found |= zip(numbers, decisions)
        return [found[b] for b in range(len(rows))]

    def decide(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        """By the policy's tensors, and one download of the decisions."""
        return self._told([self._decided(policy, target, draft, seeds, starts)])[0]

    def _decided(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> _Part:
        noise: Noise | None = None
        if not (target.all_greedy and accepts_exactly(policy)):
            seed_B, start_B = upload([*seeds, *starts], self.device).chunk(2)
            accept_BK = uniforms(seed_B, start_B, Stream.ACCEPT, draft.shape[1])
            noise = Noise(accept_BK, uniforms(seed_B, start_B, Stream.SAMPLE, 1).squeeze(1))
        verdict = verify(policy, target, draft, noise)
        relaxes = may_relax(policy)
        packed = pack(draft, target.argmax_BK, verdict, nats_of(target, draft) if relaxes else None)
        deep = 0 if verdict.path_BK is None else verdict.path_BK.shape[1]
        return _Part(packed, draft, list(verdict.clauses), relaxes, deep)

    def _told(self, parts: abc.Sequence[_Part]) -> list[list[Decision]]:
        """The decisions of each part, by one download."""
        if not parts:
            return []
        with self.captures.awaited():
            whole = torch.cat([part.packed.flatten() for part in parts]).cpu()
        found = []
        for part, own in zip(parts, whole.split([part.packed.numel() for part in parts])):
            lines = own.view(part.packed.shape)
            trees: abc.Sequence[list[int] | None] = part.draft.trees or [None] * len(lines)
            each = zip(lines.tolist(), lines.view(torch.float32).tolist(), trees)
            how = part.draft.shape[1], part.clauses, part.relaxes
            found.append([unpack(values, nats, *how, tree, part.deep) for values, nats, tree in each])
        return found

    def extend(
        self,
        batch: Batch,
        spec: DraftSpec,
        rows: abc.Sequence[Sequence],
        most: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted | None:
        """Of rows of two tokens or more, which all have after their prompt, and drafts that a graph holds."""
        if spec.says or any(len(row.tokens) < 2 for row in rows) or max(most) > LONGEST:
            return None
        return draft(self, batch, spec, rows, most, sampling, seeds, self._works_of(batch.kv.cache))

    def may_extend(self, row: Sequence) -> bool:
        """Penalties, biases and bans are worked out on the device, and a form is looked at before and after."""
        return True

    def may_round(self, row: Sequence) -> bool:
        """What a form allows is known to the host alone."""
        return row.matcher is None

    def joins(self, drafter: Executor, spec: DraftSpec) -> bool:
        return isinstance(drafter, (CudaExecutor, CudaHead)) and drafter.device == self.device and spec.tree is None

    def rounds(
        self,
        rules: abc.Sequence[tuple[AcceptancePolicy, bool]],
        plan: Callable[[], RoundPlan | None],
        ask: Callable[[list[Decision], Question], Answer | None],
    ) -> Rounds | None:
        """Graphs are found by their policies: those without a hash take the plain way."""
        try:
            hash(tuple(rules))
        except TypeError:
            return None
        if (made := plan()) is None:
            return None
        drafter = made.drafter
        assert drafter is None or isinstance(drafter, (CudaExecutor, CudaHead))  # see ``joins``
        return take_rounds(self, drafter, made, self._works_of(made.kv.cache))

    def _works_of(self, cache: PagedKVCache) -> Works:
        if (works := self._works.get(cache)) is None:
            works = self._works[cache] = Works(self.captures)
        return works
