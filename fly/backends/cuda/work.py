"""One round of a batch of a fixed shape, as work for the device alone: draft, score, decide, go on.

Shape legend: R rows (padding included), K longest draft, J = K + 1 positions, V vocabulary, N new tokens of each row,
W pages of a row, C columns of the state, S tokens that end a row.

What a round must know of a row is one line of a table on the device, which the round itself brings up to date: the
host uploads it once, and then only reads what came of each round. Rows above temperature 0 stand first.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fly.backends.cuda.attention import PagedAttention, Slots, flash_takes, listed
from fly.backends.cuda.graphs import Captures, Download, Kept, Part
from fly.backends.cuda.packing import may_relax, nats_of, pack
from fly.backends.cuda.waits import OnHost
from fly.cache import PagedBatch, PagedKVCache
from fly.executor import Batch, DraftSpec, Scores
from fly.models.config import LlamaConfig
from fly.ops import Stream, argmax, derived, draw, entropy, uniforms
from fly.policies import AcceptancePolicy, verify
from fly.sampling import BatchSampling
from fly.types import Draft, Noise, Target, Why

__all__ = ["Column", "Cuts", "Group", "Model", "Shape", "Work", "fixed", "line", "numbers_of", "padding"]


class Column(IntEnum):
    """The columns of the state, int64; those from ``NATS`` on are float64, bit by bit; ids that end the row follow."""

    BEFORE = 0  # the last token but one
    LAST = 1
    LENGTH = 2  # tokens so far
    LEFT = 3  # that it may still emit; 0 is padding
    K = 4
    CONTEXT = 5  # of the drafter
    SEED = 6
    GENERATED = 7
    RELAXED = 8
    LACKS = 9  # 1 where the drafter is to store the last token but one, 0 where that is stored already
    TOP_K = 10
    NATS = 11
    TEMPERATURE = 12
    TOP_P = 13
    MIN_P = 14
    REACH = 15  # where its draft stops (``DraftSpec.reach``)
    STOPS = 16


def line(
    tokens: list[int],
    counts: list[int],
    nats: float,
    numbers: Sequence[float],
    ends: Collection[int],
    stops: int,
    reach: float = 0.0,
) -> list[int]:
    """The state of a row: its last two tokens, ``counts`` from ``LENGTH`` to ``LACKS``, ``numbers`` of how it is
    drawn (``numbers_of``), where its draft stops, and the ids that end it, of at most ``stops``."""
    top_k, *others = numbers
    bits = struct.unpack("5q", struct.pack("5d", nats, *others, reach))
    return [*tokens, *counts, int(top_k), *bits, *ends, *[-1] * (stops - len(ends))]


def padding(stops: int) -> list[int]:
    """The state of no row: nothing is left to emit."""
    return line([0, 0], [2, 0, 0, 0, 0, 0, 0, 0], 0.0, _GREEDY, (), stops)


def numbers_of(how: BatchSampling | None, rows: int) -> list[Sequence[float]]:
    """Top-k, temperature, top-p and min-p of each row."""
    if how is None:
        return [_GREEDY] * rows
    return list(zip(*(column.tolist() for column in (how.top_k_B, how.temperature_B, how.top_p_B, how.min_p_B))))


_GREEDY = (0.0, 1.0, 1.0, 0.0)


class Model(Protocol):
    """What runs forwards (``fly.backends.cuda.executor.CudaExecutor``)."""

    config: LlamaConfig
    device: torch.device

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, kv: Any) -> Tensor: ...
    def logits(self, hidden_TC: Tensor) -> Tensor: ...
    def score(self, batch: Batch, places: Sequence[int] | None = None) -> Scores: ...


class Cuts(NamedTuple):
    """What rows above temperature 0 are drawn from, as far as that changes the work."""

    top_k: int = 0  # the largest; 0 if none asks for it
    top_p: bool = False
    min_p: bool = False

    @staticmethod
    def of(how: BatchSampling | None) -> Cuts:
        """Top-k rounded up, so that few graphs serve all."""
        if how is None:
            return Cuts()
        return Cuts(1 << (how.most_k - 1).bit_length() if how.most_k else 0, how.top_p, how.min_p)


_ANY, _UNCUT = DraftSpec(), Cuts()


def fixed(spec: DraftSpec) -> DraftSpec:
    """What of it is the same for all rows of a graph: whether there is a ``reach``, which each row has its own of."""
    return replace(spec, lookup=None, reach=(1.0,) if any(spec.reach) else ())


@dataclass(frozen=True)
class Shape:
    """What the memory and the graphs of some work are made for."""

    drawn: int  # rows above temperature 0, which come first
    rows: int
    k: int
    stops: int
    spec: DraftSpec = _ANY
    cuts: Cuts = _UNCUT
    pages: int = 0  # of a row, in the target's cache and in the drafter's
    draft_pages: int = 0
    alone: bool = False  # whether only the draft is asked for, by seeds of its own

    def logit_bytes(self, vocabulary: int) -> int:
        """Of the logits of a round, and of what drafts are drawn from."""
        return 4 * vocabulary * (self.rows * (self.k + 1) + self.drawn * self.k)


class Group(NamedTuple):
    """Rows that one policy decides about, all above temperature 0 or all at it."""

    policy: AcceptancePolicy
    drawn: bool
    rows: int


class Proposal(NamedTuple):
    """What was drafted."""

    tokens_RK: Tensor
    count_R: Tensor
    probs_DKV: Tensor | None  # of the rows above temperature 0, where it was drawn from something


class Found(NamedTuple):
    """What the target says."""

    logits_RJV: Tensor
    choices_RJ: Tensor


class Work:
    """The memory of a batch of a fixed shape, and the parts of its rounds."""

    def __init__(
        self,
        shape: Shape,
        target: Model,
        cache: PagedKVCache,
        drafter: Model | None,
        draft_cache: PagedKVCache | None,
        captures: Captures,
    ) -> None:
        self.shape, self.target, self.drafter, self.captures = shape, target, drafter, captures
        self.device = target.device
        # Graphs know addresses, and need neither object: who forgets the cache frees its memory.
        self._cache, self._draft_cache = weakref.ref(cache), None if draft_cache is None else weakref.ref(draft_cache)
        self.state_RC = torch.zeros(shape.rows, Column.STOPS + shape.stops, dtype=torch.int64, device=self.device)
        self.pages_RW = torch.zeros(shape.rows, shape.pages + shape.draft_pages, dtype=torch.int32, device=self.device)
        self.copies_RJ = torch.zeros(shape.rows, shape.k + 1, dtype=torch.int64, device=self.device)
        self._tables: list[list[int]] = []  # what is in ``pages_RW``
        self.propose = Part(self._propose, captures) if drafter is not None else self._given
        self.score = Part(self._score, captures)
        self._decide: Kept[tuple[Group, ...], Decide] = Kept(16)

    @property
    def logit_bytes(self) -> int:
        return self.shape.logit_bytes(self.target.config.vocab_size)

    def serves(self, cache: PagedKVCache, draft_cache: PagedKVCache | None) -> bool:
        """Whether it was made for these caches."""
        own = None if self._draft_cache is None else self._draft_cache()
        return self._cache() is cache and own is draft_cache

    def decide(self, groups: tuple[Group, ...], control_V: Tensor, why_not: str | None) -> Decide:
        """How the policies of ``groups`` decide; ``why_not`` a graph holds that."""
        return self._decide.get(groups, lambda: Decide(self, groups, control_V, why_not))

    def load(
        self, lines: Sequence[Sequence[int]], kv: PagedBatch | None, draft_kv: PagedBatch | None, order: list[int]
    ) -> None:
        """Upload the state of each row, and the pages where they are others than last time. ``order`` says which row of
        ``kv`` stands in each place; -1 is padding."""
        self.state_RC.copy_(torch.tensor(lines).pin_memory(), non_blocking=True)
        shape, tables = self.shape, []
        for batch, width in ((kv, shape.pages), (draft_kv, shape.draft_pages)):
            if batch is not None:
                each = batch.tables()
                tables.append(listed([each[b] if b >= 0 else [] for b in order], width, batch.cache.nobody))
        joined = [[page for table in parts for page in table] for parts in zip(*tables)]
        if joined != self._tables:
            self.pages_RW.copy_(torch.tensor(joined, dtype=torch.int32).pin_memory(), non_blocking=True)
            self._tables = joined

    def copy(self, lists: list[list[int]]) -> None:
        """Upload what is drafted without a model."""
        k = self.shape.k
        lines = [[*tokens, *[0] * (k - len(tokens)), len(tokens)] for tokens in lists]
        self.copies_RJ.copy_(torch.tensor(lines).pin_memory(), non_blocking=True)

    def column(self, which: Column) -> Tensor:
        """[R], of float64 from ``NATS`` on."""
        column_R = self.state_RC[:, which]
        return column_R.view(torch.float64) if which >= Column.NATS else column_R

    def sampling(self, rows: slice) -> BatchSampling:
        """How some rows above temperature 0 are drawn."""
        cuts = self.shape.cuts
        numbers = (self.column(which)[rows].float() for which in (Column.TEMPERATURE, Column.TOP_P, Column.MIN_P))
        temperature_B, top_p_B, min_p_B = numbers
        return BatchSampling(
            temperature_B, self.column(Column.TOP_K)[rows], top_p_B, min_p_B,
            greedy_B=torch.zeros_like(temperature_B, dtype=torch.bool), some_greedy=False,
            most_k=cuts.top_k, top_p=cuts.top_p, min_p=cuts.min_p,
        )  # fmt: skip

    def _forward(
        self, model: Model, cache: PagedKVCache, table_RW: Tensor, tokens_RN: Tensor, start_R: Tensor, stored_RN: Tensor
    ) -> Tensor:
        """Final hidden states [R, N, C] of new tokens of every row from position ``start_R`` on."""
        slots = Slots.even_rows(table_RW, start_R, stored_RN, cache.allocator.block_size, cache.nobody)
        kv = PagedAttention(cache, slots, flash_takes(cache))
        at_RN = start_R.unsqueeze(1) + torch.arange(tokens_RN.shape[1], device=self.device)
        at_RN = at_RN.clamp(0, model.config.max_position_embeddings - 1)  # padding may stand beyond
        return model.hidden(tokens_RN.flatten(), at_RN.flatten(), kv).unflatten(0, tokens_RN.shape)

    def _given(self) -> Proposal:
        return Proposal(self.copies_RJ[:, :-1], self.copies_RJ[:, -1], None)

    def _propose(self) -> Proposal:
        """K tokens one after the other, by as many forwards. The first is fed the row's last two tokens, since after a
        draft that stood whole the drafter lacks the last but one."""
        model, cache = self.drafter, None if self._draft_cache is None else self._draft_cache()
        assert model is not None and cache is not None
        shape, drawn = self.shape, self.shape.drawn
        length_R, table_RW = self.column(Column.LENGTH), self.pages_RW[:, shape.pages :]
        most_R = torch.minimum(self.column(Column.K), self.column(Column.LEFT) - 1)
        most_R = torch.minimum(most_R, self.column(Column.CONTEXT) - length_R)
        if drawn:
            length_D = length_R[:drawn]
            seed_D = self.column(Column.SEED)[:drawn]
            seed_D = seed_D if shape.alone else derived(seed_D, length_D)
            seed_DK = seed_D.unsqueeze(1).expand(-1, shape.k)
            at_DK = length_D.unsqueeze(1) + torch.arange(shape.k, device=self.device)
            coin_DK = uniforms(seed_DK.flatten(), at_DK.flatten(), Stream.SAMPLE, 1).view(drawn, shape.k)
            sampling = self.sampling(slice(drawn))
        new_RN, start_R = self.state_RC[:, Column.BEFORE : Column.LAST + 1], length_R - 2
        going_R, count_R = most_R > 0, torch.zeros_like(length_R)
        reached_R = torch.ones_like(length_R, dtype=torch.float32)
        tokens, probs = [], []
        for j in range(shape.k):
            stored_RN = (j < most_R).unsqueeze(1)
            if j == 0:
                stored_RN = torch.cat([stored_RN & (self.column(Column.LACKS) > 0).unsqueeze(1), stored_RN], 1)
            hidden_RNC = self._forward(model, cache, table_RW, new_RN, start_R, stored_RN)
            logits_RV = model.logits(hidden_RNC[:, -1])
            token_R = argmax(logits_RV)
            if drawn:
                own_DV = sampling.on(logits_RV[:drawn].unsqueeze(1)).dense().squeeze(1)
                probs.append(own_DV)
                token_R = torch.cat([draw(own_DV, coin_DK[:, j]), token_R[drawn:]])
            going_R = going_R & (j < most_R)
            count_R = count_R + going_R
            if shape.spec.stops:
                seen_RV = logits_RV[drawn:].softmax(-1)
                seen_RV = torch.cat([own_DV, seen_RV]) if drawn else seen_RV
                peak_R = seen_RV.amax(-1)
                reached_R = reached_R * peak_R
                going_R = going_R & (peak_R >= shape.spec.confidence) & (reached_R >= self.column(Column.REACH))
                going_R = going_R & (entropy(seen_RV) <= shape.spec.entropy)
            going_R = going_R & ~(token_R.unsqueeze(1) == self.state_RC[:, Column.STOPS :]).any(1)
            tokens.append(token_R)
            new_RN, start_R = token_R.unsqueeze(1), length_R + j
        return Proposal(torch.stack(tokens, 1), count_R, torch.stack(probs, 1) if drawn else None)

    def _score(self) -> Found:
        """The target's forward over every row's last token and its draft."""
        cache, shape = self._cache(), self.shape
        assert cache is not None
        proposal = self.proposal
        tokens_RJ = torch.cat([self.column(Column.LAST).unsqueeze(1), proposal.tokens_RK], 1)
        fed_RJ = torch.arange(shape.k + 1, device=self.device) <= proposal.count_R.unsqueeze(1)
        fed_RJ = fed_RJ & (self.column(Column.LEFT) > 0).unsqueeze(1)
        table_RW, start_R = self.pages_RW[:, : shape.pages], self.column(Column.LENGTH) - 1
        hidden_RJC = self._forward(self.target, cache, table_RW, tokens_RJ, start_R, fed_RJ)
        logits_RJV = self.target.logits(hidden_RJC.flatten(0, 1)).unflatten(0, tokens_RJ.shape)
        return Found(logits_RJV, argmax(logits_RJV))

    def begin(self) -> None:
        """Draft, which ``finish`` goes on from."""
        self.proposal = self.propose()

    def finish(self) -> None:
        """Score what was drafted."""
        if isinstance(self.propose, Part):
            self.score.follow(self.propose)
        self.found = self.score()


class Decide:
    """How the policies of groups of rows decide, and the state after it. ``labels`` are those of each group's
    clauses."""

    def __init__(self, work: Work, groups: tuple[Group, ...], control_V: Tensor, why_not: str | None) -> None:
        self.work, self.groups, self.control_V = weakref.proxy(work), groups, control_V
        self.labels: list[list[str]] = [[] for _ in groups]
        self.relaxes = [may_relax(group.policy) for group in groups]
        self.run = Part(self._run, work.captures, why_not)
        self.history: list[list[list[int]]] | None = None  # the texts of each group, for what runs outside of a graph
        self.download: Download | None = None

    def begin(self, done: torch.cuda.Event) -> None:
        """Decide, and start to download what came of it."""
        self.run.follow(self.work.score)
        found_RX = self.run()
        if self.download is None:
            self.download = Download(found_RX)
        self.download.begin(found_RX, done)

    def _run(self) -> Tensor:
        """[R, X] int32, as ``pack`` gives; the state is that of the next round then."""
        work, (tokens_RK, count_R, probs_DKV), (logits_RJV, choices_RJ) = self.work, self.work.proposal, self.work.found
        k = work.shape.k
        seed_R, length_R = work.column(Column.SEED), work.column(Column.LENGTH)
        accept_RK = uniforms(seed_R, length_R, Stream.ACCEPT, k)
        sample_R = uniforms(seed_R, length_R, Stream.SAMPLE, 1).squeeze(1)
        packed, accepted, following, relaxed, nats, first = [], [], [], [], [], 0
        for number, (policy, drawn, count) in enumerate(self.groups):
            rows = slice(first, first := first + count)
            history: list[list[int]] | None = OnHost()
            if self.run.why_not is not None:
                history = None if self.history is None else self.history[number]
            target = Target(
                logits_RJV[rows],
                work.sampling(rows).on(logits_RJV[rows]) if drawn else None,
                control_V=self.control_V,
                generated_B=work.column(Column.GENERATED)[rows],
                relaxed_B=work.column(Column.RELAXED)[rows],
                nats_B=work.column(Column.NATS)[rows].float(),
                history=history,
            )
            target._argmax = choices_RJ[rows]
            probs_BKV = probs_DKV[rows] if drawn and probs_DKV is not None else None
            draft = Draft(tokens_RK[rows], count_R[rows], probs_BKV)
            verdict = verify(policy, target, draft, Noise(accept_RK[rows], sample_R[rows]))
            cost_BK = nats_of(target, draft) if self.relaxes[number] else None
            self.labels[number] = list(verdict.clauses)
            packed.append(pack(draft, choices_RJ[rows], verdict, cost_BK))
            accepted.append(verdict.accepted_B)
            following.append(verdict.next_token_B)
            if cost_BK is None:
                relaxed.append(torch.zeros_like(verdict.accepted_B))
                nats.append(torch.zeros_like(verdict.accepted_B, dtype=torch.float64))
            else:
                excused_BK = verdict.why_BK == int(Why.RELAXED)
                relaxed.append(excused_BK.sum(1))
                nats.append(cost_BK.double().masked_fill(~excused_BK, 0.0).sum(1))
        self._go_on(torch.cat(accepted), torch.cat(following), torch.cat(relaxed), torch.cat(nats))
        widest = max(block.shape[1] for block in packed)
        padded = [torch.nn.functional.pad(block, (0, widest - block.shape[1])) for block in packed]
        return torch.cat(padded) if len(padded) > 1 else padded[0]

    def _go_on(self, accepted_R: Tensor, next_R: Tensor, relaxed_R: Tensor, nats_R: Tensor) -> None:
        """The state after the round; padding stays as it is."""
        work, tokens_RK = self.work, self.work.proposal.tokens_RK
        last_R = work.column(Column.LAST)
        active_R = work.column(Column.LEFT) > 0
        emitted_R = torch.where(active_R, accepted_R + 1, 0)
        before_R = last_R
        if tokens_RK.shape[1]:
            drafted_R = tokens_RK.gather(1, (accepted_R - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
            before_R = torch.where(accepted_R > 0, drafted_R, last_R)
        work.column(Column.BEFORE).copy_(torch.where(active_R, before_R, work.column(Column.BEFORE)))
        last_R.copy_(torch.where(active_R, next_R, last_R))
        work.column(Column.LENGTH).add_(emitted_R)
        work.column(Column.LEFT).sub_(emitted_R)
        work.column(Column.GENERATED).add_(emitted_R)
        work.column(Column.RELAXED).add_(torch.where(active_R, relaxed_R, 0))
        work.column(Column.NATS).add_(torch.where(active_R, nats_R, 0.0))
