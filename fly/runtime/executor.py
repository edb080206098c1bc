"""The seam: what a loaded model does on one kind of device. Knows of no backend.

An executor must ``score``. Everything else (drafting several tokens, taking whole rounds, deciding) it may do in its
own way. The engine takes several rounds in one call (``rounds``) where the executor ``takes`` the rows. Else it goes
the plain way: one round, by ``score`` and ``judge``.

Shape legend: T packed tokens, N places, B rows, J positions of a row, K longest draft, V vocabulary.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections import abc
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fly.cache import PagedBatch
from fly.models.config import LlamaConfig
from fly.models.eagle import HeadConfig
from fly.ops import Stream, sent, uniforms, upload
from fly.policies.base import AcceptancePolicy, accepts_exactly
from fly.policies.verification import decide
from fly.runtime.constraints import constrains
from fly.runtime.drafting import (
    Batch,
    Drafted,
    DraftSpec,
    DraftStart,
    Growth,
    Lookup,
    Scores,
    draft_by_forwards,
    ends_of,
)
from fly.runtime.request import Sequence, by_policy
from fly.runtime.sampling import BatchSampling, ProcessedDistribution
from fly.types import Decision, Draft, Noise, Target

__all__ = [
    "Batch",
    "DraftSpec",
    "Drafted",
    "Executor",
    "Given",
    "Growth",
    "Head",
    "Lookup",
    "OpenBlocks",
    "RoundPlan",
    "RoundRow",
    "Rounds",
    "Scores",
    "Spent",
    "TokenByToken",
    "Wrapped",
    "asks_between",
]


def asks_between(row: Sequence) -> bool:
    """Whether something has to be done for ``row`` between two rounds: penalties, bans, a form, log-probabilities,
    explanations."""
    return constrains(row) or row.params.logprobs is not None or row.params.explain


class Spent(NamedTuple):
    """Seconds of some rounds, in all, in the target and in the drafter."""

    rounds: int
    whole: float
    target: float
    draft: float


@dataclass(frozen=True)
class RoundRow:
    """A row that goes through several rounds."""

    tokens: list[int]
    left: int  # tokens it may still emit, at least 1
    k: int  # tokens (or levels of a tree) to draft a round, at most; one fewer than are left, if that is less
    stop_ids: Collection[int]
    policy: AcceptancePolicy
    seed: int
    greedy: bool
    generated: int = 0  # tokens it has emitted so far
    relaxed: int = 0  # how many of them were relaxed
    nats: float = 0.0  # the sum of -ln target(token) over those

    @staticmethod
    def of(row: Sequence, left: int, k: int) -> RoundRow:
        """``row`` as it is now."""
        counts = row.generated, row.stats.relaxed, row.stats.nats
        return RoundRow(row.tokens, left, k, row.stop_ids, row.policy, row.seed, row.greedy, *counts)


class Given(NamedTuple):
    """The target's hidden states, which a draft head needs."""

    first: list[int]  # of each row, the number of the first token that the head holds
    states_TF: Tensor  # before each of those that it has not cached, one row's after another's


@dataclass
class RoundPlan:
    """Rounds of speculative decoding to be taken in one call: draft, score, decide, emit, again and again. They end
    with a round that ends a row or leaves no room for the next. No further round begins after ``seconds``, after
    ``rounds``, or while ``hurry`` is not 0.

    ``kv`` holds each row's last token, which is not cached yet, with room for the tokens of all rounds after it.
    """

    rows: list[RoundRow]
    kv: PagedBatch
    control_V: Tensor
    sampling: BatchSampling | None  # None where all rows are greedy
    spec: DraftSpec = field(default_factory=DraftSpec)
    drafter: Executor | None = None  # None: what ``spec.lookup`` copies, or nothing
    draft_kv: PagedBatch | None = None  # the tokens that the drafter has not cached, with the same room
    draft_context: int = sys.maxsize  # tokens of the longest text that it drafts for
    rounds: int = sys.maxsize
    seconds: float = 0.0
    hurry: array[int] | None = None
    given: Given | None = None  # of a drafter that is a ``Head``
    states: tuple[int, ...] = ()  # hidden states of the target that are wanted (``Executor.score``)


@dataclass(frozen=True)
class OpenBlocks:
    """Blocks that were drafted and scored, and that ``Executor.judge`` has to decide: a rule that only Python knows has
    to say what it keeps, or a NaN stands where the decision looked."""

    rows: list[int]  # numbers of the rows, in the batch
    draft: Draft
    logits_BJV: Tensor
    choices: list[list[int]] | None  # the target's most likely token at each place; None where a NaN is among them

    def only(self, index: list[int]) -> OpenBlocks:
        """Some of the blocks, by their place in ``rows``."""
        index_B = torch.tensor(index, dtype=torch.int64, device=self.logits_BJV.device)
        choices = None if self.choices is None else [self.choices[i] for i in index]
        rows, draft = [self.rows[i] for i in index], self.draft.rows(index_B, index)
        return OpenBlocks(rows, draft, self.logits_BJV[index_B], choices)


@dataclass(frozen=True)
class Rounds:
    """The result of a ``RoundPlan``."""

    decisions: list[list[Decision]]  # of each row, one for each round; the last round is missing where it is open
    texts: list[list[int]]  # the cached tokens of each row, and the last draft
    draft_cached: list[int]  # how many of these tokens the drafter has cached
    spent: tuple[Spent, Spent]  # by the first round, and by the others
    # If they were wanted: the number of the first token that each row was fed, and hidden states from it on.
    states: list[tuple[int, Tensor]] = field(default_factory=list)
    open: OpenBlocks | None = None  # blocks of the last round that are not decided yet


class Executor(ABC):
    """One loaded model, on one kind of device."""

    config: LlamaConfig
    device: torch.device
    dtype: torch.dtype
    kernels = "torch"  # the name of the kernels that compute its forwards
    own_threads = False  # whether forwards run on its own threads, so that torch's would only be in the way
    batch_invariant = False  # whether its logits after a token depend on the tokens before it alone, to the last bit
    gives_states = False  # whether ``score`` can give hidden states
    leaves_early = False  # whether it may skip layers, so that nothing is lossless any more
    compiles, often = False, 0  # whether it compiles layers, and after how many rounds of one shape

    @property
    def weight_bytes(self) -> float:
        """Bytes of each weight as it is read from memory."""
        return self.dtype.itemsize

    @abstractmethod
    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        """One forward over the batch. Keys and values of all its tokens are cached then.

        Args:
            places: the packed tokens to give logits for, by number; None is all of them.
            states: give also the residual stream [T, C] after so many layers (0 is the embedding), for each of these
                numbers in their order, side by side: [T, F]. Only where it ``gives_states``.

        Raises:
            IndexError: a token id outside of the vocabulary, or a position outside of the context.
        """

    def check_states(self, states: abc.Sequence[int]) -> None:
        """Raise ``ValueError`` if it gives no hidden states, or not after so many layers."""
        most = self.config.num_hidden_layers
        if not self.gives_states:
            raise ValueError(
                f"{self.model_name} on {self.kernels!r} kernels gives no hidden states, which a trained head drafts by"
            )
        if not states or not all(0 <= number <= most for number in states):
            raise ValueError(f"hidden states after {list(states)} layers: this model has {most}, so 0 to {most}")

    def extend(
        self,
        batch: Batch,
        spec: DraftSpec,
        rows: abc.Sequence[Sequence],
        most: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted:
        """Feed the batch, then for each row its next token, again and again: until it has ``most[b]`` (at least 1), one
        that ends the row, or the first that the model is not sure of (``spec``). Or draft a tree (``spec.tree``) of
        ``most[b]`` levels at most. The default takes one forward for each token or level, and makes no use of a lookup.

        Without ``sampling`` a token is the most likely one (the lowest id among equals), else it is drawn as
        ``fly.ops.draw`` does, by ``uniforms(seeds[b], length of the row so far, Stream.SAMPLE, 1)``; in both cases of
        what the row allows (penalties, bans, a form). ``rows`` are the batch's, whose tokens are the text so far. The
        cache has room for ``most[b]`` - 1 tokens after them, or of a tree for ``spare``. All tokens of a chain but the
        last are cached then; a tree leaves anything there.
        """
        logits_BV = self.score(batch, ends_of(batch.kv)).logits_NV

        def step(drafted: Batch, x_TC: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return self.score(drafted).logits_NV, None

        return draft_by_forwards(self, DraftStart.after(batch, logits_BV), step, spec, rows, most, sampling, seeds)

    def looks_up(self, rows: abc.Sequence[Sequence]) -> bool:
        """Whether ``extend`` takes fewer forwards for these rows by a lookup (``DraftSpec.lookup``)."""
        return False

    def takes(self, rows: abc.Sequence[Sequence]) -> bool:
        """Whether ``rounds`` takes these rows, whatever drafts for them. The default takes none."""
        return False

    def rounds(self, plan: RoundPlan) -> Rounds | None:
        """Take rows through several rounds in one call, if it ``takes`` them and ``joins`` their drafter. The rows stay
        as they are. Rounds end before a decision that has to be made elsewhere: its block comes back as ``open``.

        None: take this round by ``score`` and ``judge``; nothing has changed. The default does nothing else.
        """
        return None

    def joins(self, drafter: Executor, spec: DraftSpec) -> bool:
        """Whether ``rounds`` may be taken in which ``drafter`` drafts by ``spec``."""
        return False

    def numbers(self, values: abc.Sequence[int] | Tensor) -> Tensor:
        """``values`` where the logits are, int64, or of the type that they have as a tensor."""
        return sent(values, self.device) if isinstance(values, Tensor) else upload(values, self.device)

    def process(self, sampling: BatchSampling, logits_BJV: Tensor) -> ProcessedDistribution:
        """The processed distribution of ``logits_BJV``."""
        return sampling.on(logits_BJV)

    def decide(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        """What ``policy`` keeps of every row's block. The coins come from the rows' ``seeds`` and the number of their
        tokens (``starts``)."""
        noise: Noise | None = None
        if not (target.all_greedy and accepts_exactly(policy)):
            device = target.logits_BKV.device
            seed_B, start_B = torch.tensor(seeds, device=device), torch.tensor(starts, device=device)
            accept_BK = uniforms(seed_B, start_B, Stream.ACCEPT, draft.shape[1])
            noise = Noise(accept_BK, uniforms(seed_B, start_B, Stream.SAMPLE, 1).squeeze(1))
        return decide(policy, target, draft, noise)

    def judge(self, rows: abc.Sequence[Sequence], target: Target, draft: Draft) -> list[Decision]:
        """``decide`` by each row's own policy, rows of one policy together."""
        draft = draft.to(target.logits_BKV.device)
        seeds, starts = [row.seed for row in rows], [len(row.tokens) for row in rows]
        if all(row.policy is rows[0].policy or row.policy == rows[0].policy for row in rows):
            return self.decide(rows[0].policy, target, draft, seeds, starts) if rows else []
        found: dict[int, Decision] = {}
        for policy, numbers in by_policy(rows).items():
            index_B = self.numbers(numbers)
            part, proposed = target.rows(index_B, numbers), draft.rows(index_B, numbers)
            own = [seeds[b] for b in numbers], [starts[b] for b in numbers]
            found |= zip(numbers, self.decide(policy, part, proposed, *own))
        return [found[b] for b in range(len(rows))]

    def embedding(self) -> Tensor:
        """[V, C] what each token of the vocabulary is to the model, before its family's scaling; for draft heads.

        Raises ``ValueError`` where it cannot be had.
        """
        raise ValueError(f"{self.model_name} on {self.kernels!r} kernels does not show its embedding")

    @property
    def model_name(self) -> str:
        """The model's name in messages."""
        return type(self).__name__

    def deterministic(self) -> Executor:
        """An executor of the same model whose logits after a token depend on the tokens before it alone, to the last
        bit: itself if it is ``batch_invariant``, else one that feeds it one token at a time."""
        return self if self.batch_invariant else TokenByToken(self)

    def enter_thread(self) -> None:
        """Called once on the thread that will make all calls, before the first."""


class Head(Executor):
    """A loaded draft head (``fly.models.eagle``) on one kind of device. ``config`` is that of its layer.

    Of a row it caches the tokens from some number on, at least 1: each is fed with the feature of the token before it.
    """

    options: HeadConfig
    to_target_U: Tensor  # the target's ids of the draft vocabulary
    shares: bool  # whether it has no embedding of its own, and is to be given the target's

    @abstractmethod
    def share(self, weight_VC: Tensor) -> None:
        """Take the target's embedding."""

    @abstractmethod
    def begin(self, batch: Batch, states_TF: Tensor, places: abc.Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed the batch, each token with the target's hidden states before it (``Scores.states_TF``). Returns logits
        [N, U] over the draft vocabulary and features [N, C], both after the tokens numbered in ``places``."""

    @abstractmethod
    def step(self, batch: Batch, x_TC: Tensor, places: abc.Sequence[int]) -> tuple[Tensor, Tensor]:
        """The same, each token with a feature of the head's own."""

    def chains(
        self,
        batch: Batch,
        states_TF: Tensor,
        spec: DraftSpec,
        rows: abc.Sequence[Sequence],
        most: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted:
        """Feed the batch, each token with the target's hidden states before it, then draft as ``extend`` does, each
        token by the head's own feature before it."""
        logits_BU, x_BC = self.begin(batch, states_TF, ends_of(batch.kv))

        def step(drafted: Batch, x_TC: Tensor | None) -> tuple[Tensor, Tensor | None]:
            assert x_TC is not None
            logits_TU, x_TC = self.step(drafted, x_TC, range(len(drafted.tokens)))
            return self.spread(logits_TU), x_TC

        start = DraftStart.after(batch, self.spread(logits_BU), x_BC)
        return draft_by_forwards(self, start, step, spec, rows, most, sampling, seeds)

    def spread(self, logits_NU: Tensor) -> Tensor:
        """Logits [N, V] over the target's vocabulary: what is not in the head's is never drafted."""
        spread_NV = logits_NU.new_full((len(logits_NU), self.config.vocab_size), -torch.inf)
        return spread_NV.index_copy_(1, self.to_target_U, logits_NU)

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        """Raises ``ValueError``: a head alone has no scores."""
        raise ValueError("a draft head drafts by its target's hidden states, and scores nothing by itself")


class Wrapped(Executor):
    """An executor around another, like it except for what a subclass changes."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.config, self.device, self.dtype = inner.config, inner.device, inner.dtype
        self.kernels, self.own_threads, self.gives_states = inner.kernels, inner.own_threads, inner.gives_states

    @property
    def weight_bytes(self) -> float:
        return self.inner.weight_bytes

    @property
    def model_name(self) -> str:
        return self.inner.model_name

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        return self.inner.score(batch, places, *([states] if states else []))

    def numbers(self, values: abc.Sequence[int] | Tensor) -> Tensor:
        return self.inner.numbers(values)

    def process(self, sampling: BatchSampling, logits_BJV: Tensor) -> ProcessedDistribution:
        return self.inner.process(sampling, logits_BJV)

    def decide(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        return self.inner.decide(policy, target, draft, seeds, starts)

    def enter_thread(self) -> None:
        self.inner.enter_thread()


class TokenByToken(Wrapped):
    """An executor that feeds its model one token at a time.

    The matrix products of most libraries add up in an order that depends on the number of rows. So the same token gets
    other last bits in a batch, or as one of several drafted tokens. One at a time, every token is computed by
    the same kernels over the same keys in the same order. It costs as many forwards as there are tokens."""

    batch_invariant = True

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        wanted = range(len(batch.tokens)) if places is None else places
        asked, found, taken = set(wanted), {}, list[Tensor]()
        for t, kv in enumerate(batch.kv.tokens()):
            alone = Batch(batch.tokens[t : t + 1], batch.positions[t : t + 1], kv)
            scores = self.inner.score(alone, None if t in asked else (), states)
            if t in asked:
                found[t] = scores.logits_NV
            if scores.states_TF is not None:
                taken.append(scores.states_TF)
        logits = [found[t] for t in wanted] or [torch.zeros(0, self.config.vocab_size, device=self.device)]
        return Scores(torch.cat(logits), states_TF=torch.cat(taken) if taken else None)

    def embedding(self) -> Tensor:
        return self.inner.embedding()
