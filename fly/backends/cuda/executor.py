"""The executor on CUDA: rounds as graphs, everything else as on any device, with as few waits as possible.

Shape legend: T packed tokens, N places, B rows, W pages of a row, K longest draft, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fly.backends.cuda.attention import PagedAttention, Slots, flash_takes, listed
from fly.backends.cuda.drafting import draft, score_few
from fly.backends.cuda.fused import Fused
from fly.backends.cuda.graphs import Awaited, Captures, sent, upload
from fly.backends.cuda.packing import may_relax, nats_of, pack, unpack
from fly.backends.cuda.rounds import LONGEST, Works, take_rounds
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
from fly.ops import Stream, uniforms
from fly.policies import AcceptancePolicy, verify
from fly.request import Sequence, by_policy
from fly.sampling import BatchSampling
from fly.types import Decision, Draft, Noise, Target

__all__ = ["CudaExecutor"]

_FEW, _FEW_IN_ALL = 32, 512  # tokens of a row and of a batch that a graph takes


class CudaExecutor(TorchExecutor):
    """Runs a ``fly.models.Llama`` on a CUDA device.

    Rounds of chains by one draft model, by prompt lookup or without a draft are graphs: of the draft's forwards, of the
    target's, and of what the policies decide. A rule that a graph cannot hold runs between them operation by operation
    (``fly.backends.cuda.waits``). Trees, other strategies, forms, bad words and log-probabilities take the plain way.

    Args:
        fuses: whether layers may be compiled.
        awaited: entered around each wait, of a model that this process shares with others: then rounds are counted, not
            timed, since all take the same.
    """

    def __init__(
        self,
        model: Any,
        fuses: bool = True,
        awaited: Awaited = nullcontext,
    ) -> None:
        super().__init__(model)
        self.captures, self._fused = Captures(awaited), Fused() if fuses else None
        self._works: WeakKeyDictionary[PagedKVCache, Works] = WeakKeyDictionary()

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, kv: Any, compiled: bool = False) -> Tensor:
        """Final hidden states [T, C]; ``compiled``: by compiled layers, where these can be had."""

        def run(**through: Any) -> Tensor:
            found: Tensor = self.model(tokens_T, positions_T, kv, **through)
            return found

        hidden_TC = None
        if compiled and self._fused is not None:
            hidden_TC = self._fused.hidden(len(tokens_T), lambda layers: run(through=layers))
        return run() if hidden_TC is None else hidden_TC

    @property
    def compiles(self) -> bool:
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
        uploaded at once. Hidden states, trees, and prompts in caches that FlashAttention does not take, go row by row
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

    def numbers(self, values: abc.Sequence[int] | Tensor) -> Tensor:
        return sent(values, self.device) if isinstance(values, Tensor) else upload(values, self.device)

    def judge(self, rows: abc.Sequence[Sequence], target: Target, draft: Draft) -> list[Decision]:
        """By the policies' tensors, and one download of all decisions."""
        if draft.parents_BK is not None or not rows:
            return super().judge(rows, target, draft)
        if draft.tokens_BK.device != self.device:
            tokens_BK, lengths_B = (sent(column, self.device) for column in (draft.tokens_BK, draft.lengths_B))
            draft = Draft(tokens_BK, lengths_B, None if draft.probs_BKV is None else draft.probs_BKV.to(self.device))
        groups, parts, labels = by_policy(rows), list[Tensor](), list[list[str]]()
        for policy, numbers in groups.items():
            own, proposed = target, draft
            if len(groups) > 1:
                index_B = self.numbers(numbers)
                own, proposed = target.rows(index_B, numbers), draft.rows(index_B)
            seeds, starts = [rows[b].seed for b in numbers], [len(rows[b].tokens) for b in numbers]
            part, names = self._decided(policy, own, proposed, seeds, starts)
            parts.append(part)
            labels.append(names)
        with self.captures.awaited():
            whole = torch.cat([part.flatten() for part in parts]).cpu()
        found: dict[int, Decision] = {}
        for (policy, numbers), part, names in zip(
            groups.items(), whole.split([part.numel() for part in parts]), labels
        ):
            found |= zip(numbers, _told(part.view(len(numbers), -1), policy, draft.shape[1], names))
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
        if draft.parents_BK is not None:
            return super().decide(policy, target, draft, seeds, starts)
        packed, names = self._decided(policy, target, draft, seeds, starts)
        with self.captures.awaited():
            here = packed.cpu()
        return _told(here, policy, draft.shape[1], names)

    def _decided(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> tuple[Tensor, list[str]]:
        """[B, columns] int32, as ``pack`` gives, and the names of the policy's clauses."""
        seed_B, start_B = upload([*seeds, *starts], self.device).chunk(2)
        accept_BK = uniforms(seed_B, start_B, Stream.ACCEPT, draft.shape[1])
        verdict = verify(policy, target, draft, Noise(accept_BK, uniforms(seed_B, start_B, Stream.SAMPLE, 1)[:, 0]))
        nats_BK = nats_of(target, draft) if may_relax(policy) else None
        return pack(draft, target.argmax_BK, verdict, nats_BK), list(verdict.clauses)

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
        """Penalties, biases and ends are worked out on the device. What a form allows is known to the host alone, so a
        form is taken only at temperature 0 and where no distribution is wanted. Bad words have several tokens, so what
        they ban depends on the text: they are not taken."""
        asks = row.params.penalises or row.params.min_tokens > 0
        return not row.bad and (row.matcher is None or (row.greedy and not asks))

    def may_round(self, row: Sequence) -> bool:
        return row.matcher is None and self.may_extend(row)

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


def _told(packed: Tensor, policy: AcceptancePolicy, longest: int, names: list[str]) -> list[Decision]:
    """The decisions about rows, from what was downloaded."""
    relaxes, lines = may_relax(policy), zip(packed.tolist(), packed.view(torch.float32).tolist())
    return [unpack(*line, longest, names, relaxes) for line in lines]
