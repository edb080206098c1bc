"""The executor on CUDA: rounds as graphs, everything else as on any device, with as few waits as there can be.

Shape legend: T packed tokens, N places, B rows, W pages of a row, K longest draft, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fly.backends.cuda.attention import PagedAttention, Slots, flash_takes, listed
from fly.backends.cuda.drafting import draft, score_few
from fly.backends.cuda.graphs import Captures, sent, upload
from fly.backends.cuda.packing import may_relax, nats_of, pack, unpack
from fly.backends.cuda.rounds import LONGEST, Works, take_rounds
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.executor import Answer, Batch, Drafted, DraftSpec, Executor, Question, RoundPlan, Rounds, Scores
from fly.ops import Stream, uniforms
from fly.policies import AcceptancePolicy, verify
from fly.request import Sequence
from fly.sampling import BatchSampling
from fly.types import Decision, Draft, Noise, Target

__all__ = ["CudaExecutor"]

_FEW, _FEW_IN_ALL = 32, 512  # tokens of a row and of a batch that a graph takes


class CudaExecutor(TorchExecutor):
    """Runs a ``fly.models.Llama`` on a CUDA device.

    Rounds of chains by one draft model, by prompt lookup or without a draft are graphs: of the draft's forwards, of the
    target's, and of what the policies decide. A rule that a graph cannot hold runs between them operation by operation
    (``fly.backends.cuda.waits``). Prompt lookup below a draft model changes no token of it, and is left out: a graph
    always takes K forwards. Trees, other strategies, penalties, forms and log-probabilities take the plain way.
    """

    def __init__(self, model: Any, layers: abc.Sequence[int] | None = None) -> None:
        super().__init__(model, layers)
        self.captures = Captures()
        self._works: WeakKeyDictionary[PagedKVCache, Works] = WeakKeyDictionary()

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, kv: Any) -> Tensor:
        """Final hidden states [T, C]."""
        found: Tensor = self.model(tokens_T, positions_T, kv, **self._options)
        return found

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """[T, V] float32."""
        return self.model.logits(hidden_TC)

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        """Without a wait. A few tokens of each row are a graph; of more, all that the forward needs of the host goes up
        at once. Hidden states, trees, and prompts in caches that FlashAttention does not take, go row by row
        (``PagedBatch.attend``)."""
        kv = batch.kv
        if states or any(mask is not None for mask in kv.masks or ()):
            return super().score(batch, places, states)
        if max(kv.counts) <= _FEW and len(kv.counts) * max(kv.counts) <= _FEW_IN_ALL:
            logits_NV = score_few(self, batch, places, self._works_of(kv.cache))
            return Scores(logits_NV)
        if not flash_takes(kv.cache):
            return super().score(batch, places)
        size, tables = kv.cache.allocator.block_size, kv.tables()
        width, slots, ends = max(map(len, tables)), [], [0]
        for table, start, count in zip(tables, kv.starts, kv.counts):
            slots += [table[at // size] * size + at % size for at in range(start, start + count)]
            ends.append(ends[-1] + count)
        used = [start + count for start, count in zip(kv.starts, kv.counts)]
        parts = [batch.tokens, batch.positions, slots, [] if places is None else list(places), used, ends]
        parts.append([page for table in listed(tables, width, 0) for page in table])
        sent = upload([number for part in parts for number in part], self.device)
        tokens_T, positions_T, slots_T, places_N, *rest = sent.split([len(part) for part in parts])
        used_B, ends_B1, pages = (numbers.to(torch.int32) for numbers in rest)
        found = Slots(slots_T, used_B, ends_B1, pages.view(-1, width), max(kv.counts), False)
        hidden_TC = self.hidden(tokens_T, positions_T, PagedAttention(kv.cache, found, True))
        if places is not None and not len(places):
            return Scores(torch.zeros(0, self.config.vocab_size, device=self.device))
        return Scores(self.logits(hidden_TC if places is None else hidden_TC[places_N]))

    def numbers(self, values: abc.Sequence[int]) -> Tensor:
        return upload(values, self.device)

    def judge(self, rows: abc.Sequence[Sequence], target: Target, draft: Draft) -> list[Decision]:
        if draft.parents_BK is None and draft.tokens_BK.device != self.device:
            tokens_BK, lengths_B = (sent(column, self.device) for column in (draft.tokens_BK, draft.lengths_B))
            draft = Draft(tokens_BK, lengths_B, None if draft.probs_BKV is None else draft.probs_BKV.to(self.device))
        return super().judge(rows, target, draft)

    def decide(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        """By the policy's tensors, and one download of what came of it."""
        if draft.parents_BK is not None:
            return super().decide(policy, target, draft, seeds, starts)
        longest, relaxes = draft.shape[1], may_relax(policy)
        seed_B, start_B = upload([*seeds, *starts], self.device).chunk(2)
        accept_BK = uniforms(seed_B, start_B, Stream.ACCEPT, longest)
        verdict = verify(policy, target, draft, Noise(accept_BK, uniforms(seed_B, start_B, Stream.SAMPLE, 1)[:, 0]))
        packed = pack(draft, target.argmax_BK, verdict, nats_of(target, draft) if relaxes else None).cpu()
        labels, nats = list(verdict.clauses), packed.view(torch.float32).tolist()
        return [unpack(*values, longest, labels, relaxes) for values in zip(packed.tolist(), nats)]

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

    def joins(self, drafter: Executor, spec: DraftSpec) -> bool:
        return isinstance(drafter, CudaExecutor) and drafter.device == self.device and spec.tree is None

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
        assert drafter is None or isinstance(drafter, CudaExecutor)  # see ``joins``
        return take_rounds(self, drafter, made, self._works_of(made.kv.cache))

    def _works_of(self, cache: PagedKVCache) -> Works:
        if (works := self._works.get(cache)) is None:
            works = self._works[cache] = Works(self.captures)
        return works
