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
from fly.constraints import constrains
from fly.models.config import LlamaConfig
from fly.models.eagle import HeadConfig
from fly.ops import Stream, sent, uniforms, upload
from fly.policies.base import AcceptancePolicy, accepts_exactly
from fly.policies.verification import decide
from fly.request import Sequence, by_policy
from fly.sampling import BatchSampling, ProcessedDistribution
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


@dataclass(frozen=True)
class Batch:
    """New tokens of ragged rows. ``kv`` says which cached tokens come before them, where their own keys and values go
    (block tables), and in a tree what each token sees."""

    tokens: list[int]  # T, one row after the other
    positions: list[int]  # T, of each in its row
    kv: PagedBatch

    @staticmethod
    def of(new: abc.Sequence[list[int]], kv: PagedBatch) -> Batch:
        """The new tokens of each row, which follow the cached ones."""
        if len(new) == 1:
            return Batch(new[0], list(range(kv.starts[0], kv.starts[0] + len(new[0]))), kv)
        positions = [at for start, tokens in zip(kv.starts, new) for at in range(start, start + len(tokens))]
        return Batch([token for tokens in new for token in tokens], positions, kv)


class Scores(NamedTuple):
    """What a model says after some of a batch's tokens."""

    logits_NV: Tensor  # float32
    argmax: list[int] | None = None  # the most likely token of each (of NaN: below 0), if the backend has it anyway
    states_TF: Tensor | None = None  # hidden states of all tokens of the batch, if they were wanted
    layers: list[int] | None = None  # layers that each row of the batch went through, if the executor leaves early


@dataclass(frozen=True)
class Lookup:
    """Prompt lookup as numbers (``fly.drafts.NGramDraft``)."""

    longest: int
    shortest: int
    k: int


@dataclass(frozen=True)
class Growth:
    """How a model drafts a tree, level by level: ``widths[i]`` likeliest tokens after each token of level i - 1 that is
    followed (level 0 is after the row itself). Of each level the ``follow`` likeliest are followed, by the probability
    of the path to them, and of all of them the ``nodes`` likeliest are proposed, where there are more."""

    widths: tuple[int, ...]
    follow: int
    nodes: int

    @staticmethod
    def even(depth: int, width: int, nodes: int) -> Growth:
        """Of so many levels (or as many as so many nodes can make), all of one width."""
        depth = min(depth, nodes)
        return Growth((width,) * depth, width, min(nodes, width + (depth - 1) * width * width))

    @property
    def spare(self) -> int:
        """Tokens that it may store in one of the two caches besides those of a row: the tree, or the followed
        tokens."""
        level, followed = 1, 0
        for width in self.widths[:-1]:
            level = min(level * width, self.follow)
            followed += level
        return max(self.nodes, followed)


@dataclass(frozen=True)
class DraftSpec:
    """How a model drafts: token after token, the most likely or drawn ones, up to the first that it is not sure of; or
    a tree of its likeliest ones (``tree``), which does not stop early and is not drawn.

    ``lookup`` changes no token. It feeds a forward a copy of what followed the last time the text looked like this;
    drafting goes on from the first token that differs.
    """

    confidence: float = 0.0  # it stops after a token if no token had this probability
    entropy: float = float("inf")  # it stops after a token if the entropy was higher, in nats
    # it stops after a token if the product of the largest probabilities up to there is less; of each row, () is never
    reach: tuple[float, ...] = ()
    lookup: Lookup | None = None
    says: bool = False  # whether the logits of the most likely tokens are wanted too
    tree: Growth | None = None

    @property
    def stops(self) -> bool:
        """Whether a draft may stop by itself."""
        return self.confidence > 0 or any(self.reach) or self.entropy < float("inf")


class Drafted(NamedTuple):
    """What a model drafted for each row, and what that was drawn from: [B, K, V], zeros after a row's last token, or
    None where nothing was drawn. Then it may have the logits that tokens are the most likely ones of
    (``DraftSpec.says``), zeros after a row's last. Of trees, the parents of the tokens (as in ``Draft``)."""

    tokens: list[list[int]]
    probs_BKV: Tensor | None = None
    logits_BKV: Tensor | None = None
    parents: list[list[int]] | None = None


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
    def weight_bytes(self) -> int:
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
    ) -> Drafted | None:
        """Feed the batch, then for each row its next token, again and again, in one call: until it has ``most[b]`` (at
        least 1), one that ends the row, or the first it is not sure of (``spec``).

        Without ``sampling`` a token is the most likely one (the lowest id among equals), else it is drawn as
        ``fly.ops.draw`` does, by ``uniforms(seeds[b], length of the row so far, Stream.SAMPLE, 1)``. ``rows`` are the
        batch's, whose tokens are the text so far. There is room in the cache for ``most[b]`` - 1 tokens after them; all
        drafted tokens but the last are cached then. A tree (``spec.tree``) of ``most[b]`` levels at most has room for
        ``spare`` tokens, and leaves anything there. None: this executor cannot do it; nothing has changed.
        """
        return None

    def may_extend(self, row: Sequence) -> bool:
        """Whether ``extend`` keeps to what ``row`` asks of its text: penalties, bans, a form. The default does for rows
        that ask for nothing."""
        return not constrains(row)

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
    ) -> Drafted | None:
        """Feed the batch by the target's hidden states before each token, then for each row its next token by the
        head's own features, again and again, in one call, or a tree; the rest as of ``extend``. None: it cannot."""
        return None

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
    def weight_bytes(self) -> int:
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
