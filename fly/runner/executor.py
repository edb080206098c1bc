"""The seam between the engine and a backend: what a loaded model does on one kind of device. Depends on no backend.

An executor must implement ``score``, which runs one forward. It may also have its own way to draft (``extend``), to
decide (``decide_group``) and to run whole rounds (``rounds``). If the executor ``takes`` the rows, the engine runs
several rounds in one call of ``rounds``. Otherwise it runs one round by ``extend``, ``score`` and ``decide``.

Shape legend: T packed tokens, N places, B rows, J positions of a row, K longest draft, F hidden states side by side, C
hidden width, U draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections import abc
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fly.cache import PagedBatch
from fly.models.config import LlamaConfig
from fly.ops import Stream, sent, spread, uniforms, upload
from fly.policies.base import AcceptancePolicy, Promise, accepts_exactly
from fly.policies.verification import decide
from fly.runner.constraints import constrains
from fly.runner.drafting import (
    Batch,
    Drafted,
    DraftSpec,
    DraftStart,
    Follow,
    Growth,
    Lookup,
    Marginals,
    Scores,
    draft_apart,
    draft_at_once,
    draft_by_forwards,
    draft_chains,
    ends_of,
)
from fly.runner.request import Row, by_policy, most_drafted
from fly.runner.sampling import BatchSampling, ProcessedDistribution
from fly.types import Account, Decision, Draft, Guarantee, Noise, Target

__all__ = [
    "WARM_ROWS",
    "Batch",
    "BlockHead",
    "DraftSpec",
    "Drafted",
    "Executor",
    "Growth",
    "Head",
    "HeadInput",
    "HeadOptions",
    "Lookup",
    "OpenBlocks",
    "RoundPlan",
    "RoundRow",
    "Rounds",
    "Scores",
    "SerialHead",
    "Spent",
    "TokenByToken",
    "Workload",
    "Wrapped",
    "asks_between",
]

_UNITS = 256  # unit vectors whose logits are computed at once

WARM_ROWS = 1, 2, 4, 8, 16, 32  # the batch sizes that a warm-up prepares


def asks_between(row: Row) -> bool:
    """Whether Python must do something for ``row`` between two rounds: apply penalties, bans or a form, or record
    log-probabilities or explanations."""
    return constrains(row) or row.params.logprobs is not None or row.params.explain


class Spent(NamedTuple):
    """How long a number of rounds took, in seconds."""

    rounds: int
    total: float
    target: float  # in the target
    draft: float  # in the drafter


@dataclass(frozen=True)
class RoundRow:
    """A row as plain values, for rounds in one call."""

    tokens: list[int]
    left: int  # how many tokens it may still emit, at least 1
    k: int  # its draft length; ``longest`` are drafted
    stop_ids: Collection[int]
    policy: AcceptancePolicy
    seed: int
    greedy: bool
    generated: int = 0  # tokens it has emitted so far
    account: Account = field(default_factory=Account)  # of the relaxed ones among these
    relaxed_at: abc.Sequence[int] = ()  # the positions of the relaxed ones in ``tokens``, ascending

    @property
    def longest(self) -> int:
        """The most tokens to draft in the first round."""
        return most_drafted(self.k, self.left)

    @staticmethod
    def of(row: Row, left: int, k: int) -> RoundRow:
        """Copy the present values of ``row``, which may still emit ``left`` tokens and drafts at most ``k`` a round."""
        past = row.generated, row.stats, row.relaxed_at
        return RoundRow(row.tokens, left, k, row.stop_ids, row.policy, row.seed, row.greedy, *past)

    @property
    def history(self) -> list[int]:
        """The row's tokens, by the name that conditions use (``fly.policies.conditions.Past``)."""
        return self.tokens


class HeadInput(NamedTuple):
    """The target's hidden states, from which a draft head drafts."""

    first: list[int]  # for each row, the number of the first token that the head caches
    states_TF: Tensor  # the hidden states before each token that the head has not cached yet, row after row


@dataclass
class RoundPlan:
    """Several rounds of speculative decoding (draft, score, decide, emit) to run in one call. They end when a row ends,
    or when a cache has no room for the next round. No further round starts after ``seconds``, after ``rounds`` rounds,
    or while ``hurry`` is not 0.
    """

    rows: list[RoundRow]
    kv: PagedBatch  # each row's last token, which is not cached yet, with room for the tokens of all rounds
    rooms: list[int]  # for each row, how many tokens its pages have room for
    control_V: Tensor  # bool, the control tokens of the vocabulary
    sampling: BatchSampling | None  # None if all rows are greedy
    spec: DraftSpec = field(default_factory=DraftSpec)
    drafter: Executor | None = None  # None: ``spec.lookup`` drafts, if there is one
    draft_kv: PagedBatch | None = None  # the tokens that the drafter has not cached, with room as in ``kv``
    draft_context: int = sys.maxsize  # the most tokens that a text may have for the drafter
    draft_longest: int = sys.maxsize  # the most tokens that a ``Head`` drafts; a lookup beside it may go on
    rounds: int = sys.maxsize
    seconds: float = 0.0
    hurry: array[int] | None = None
    head_input: HeadInput | None = None  # for a drafter that is a ``Head``
    states: tuple[int, ...] = ()  # the layers whose hidden states to return (``Executor.score``)


@dataclass(frozen=True)
class OpenBlocks:
    """Blocks that were drafted and scored in a call, but are left for ``Executor.decide``: the rule is known to
    Python alone, or the decision met a NaN."""

    rows: list[int]  # which rows of the batch
    draft: Draft
    logits_BJV: Tensor
    choices: list[list[int]] | None  # the target's most likely token at each place; None if one is a NaN

    def only(self, index: list[int]) -> OpenBlocks:
        """Select blocks by their index in ``rows``."""
        index_B = torch.tensor(index, dtype=torch.int64, device=self.logits_BJV.device)
        choices = None if self.choices is None else [self.choices[i] for i in index]
        rows = [self.rows[i] for i in index]
        return OpenBlocks(rows, self.draft.rows(index_B, index), self.logits_BJV[index_B], choices)


@dataclass(frozen=True)
class Rounds:
    """The result of a ``RoundPlan``."""

    decisions: list[list[Decision]]  # for each row, one for each round; an open block has none
    texts: list[list[int]]  # for each row, the cached tokens, the last draft included
    draft_cached: list[int]  # how many of these the drafter has cached
    spent: tuple[Spent, Spent]  # the first round, and all others
    # For each row, if the plan asks for ``states``: the number of the first token fed, and hidden states from it on.
    states: list[tuple[int, Tensor]] = field(default_factory=list)
    open: OpenBlocks | None = None  # the blocks of the last round, if they are not decided yet


@dataclass(frozen=True)
class Workload:
    """The most work that an engine will give its target."""

    rows: int  # in a round
    k: int  # drafted tokens of a row; 0 without a draft
    policy: AcceptancePolicy
    step_tokens: int  # prompt tokens in a step
    scored: int  # prompt tokens in a step that get log-probabilities
    block_size: int  # tokens in a page of the caches
    drafter: Executor | None = None


class Executor(ABC):
    """Runs one loaded model on one kind of device."""

    config: LlamaConfig
    device: torch.device
    dtype: torch.dtype
    kernels = "torch"  # what computes its forwards
    own_threads = False  # whether forwards use threads of their own, which torch's threads would disturb
    batch_invariant = False  # whether a token's logits have the same bits, whatever else is in the batch
    gives_states = False  # whether ``score`` can give hidden states
    keeps_guarantees = True  # whether a rule keeps its guarantee on this model; if not, every rule is heuristic
    compiles_layers = False  # whether layers may be compiled, for shapes that come often
    compiles_after = 0  # the number of rounds of a shape after which its layers are compiled
    captures = False  # whether it prepares work of each shape, which a warm-up can do before the first request

    @property
    def weight_bytes(self) -> float:
        """Bytes that a forward reads for each weight."""
        return self.dtype.itemsize

    @abstractmethod
    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        """Run one forward over the batch, and cache the keys and values of all its tokens.

        Args:
            places: the packed tokens (by number) after which to return logits; None: all.
            states: also return the residual stream after each of these numbers of layers (0 is the embedding), side by
                side [T, F]. This needs an executor that ``gives_states``.

        Raises:
            IndexError: a token id outside the vocabulary, or a position outside the context.
        """

    def check_states(self, states: abc.Sequence[int]) -> None:
        """Raise ``ValueError`` if this executor gives no hidden states, or if one of these numbers of layers is out of
        range."""
        most = self.config.num_hidden_layers
        if not self.gives_states:
            raise ValueError(
                f"{self.model_name} on {self.kernels!r} kernels gives no hidden states, but a trained head needs them"
            )
        if not states or not all(0 <= number <= most for number in states):
            raise ValueError(f"hidden states after {list(states)} layers: this model has {most}, so 0 to {most}")

    def extend(
        self,
        batch: Batch,
        spec: DraftSpec,
        rows: abc.Sequence[Row],
        max_len: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted:
        """Draft: feed the batch, then choose and feed each row's next token, again and again.

        A row's draft ends after ``max_len[b]`` tokens (at least 1), after a token that ends the row, or after the first
        token that the model is not sure of (``spec``). Then all its tokens but the last are cached. With ``spec.tree``,
        draft a tree of at most ``max_len[b]`` levels instead. What the cache holds after each row's text is then
        undefined.

        The default runs one forward for each token or level, and ignores ``spec.lookup``.

        Args:
            rows: the rows of the batch; their tokens are the text so far. The cache has room for ``max_len[b]`` - 1
                more tokens of each row, or for ``spec.tree.spare``.
            sampling: None chooses the most likely token (the lowest id among equals). Otherwise tokens are drawn as
                ``fly.ops.draw`` does, with ``uniforms(seeds[b], length of the row so far, Stream.SAMPLE, 1)``. Either
                way the row's penalties, bans and form apply.
        """
        logits_BV = self.score(batch, ends_of(batch.kv)).logits_NV

        def step(drafted: Batch, x_TC: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return self.score(drafted).logits_NV, None

        return draft_by_forwards(self, DraftStart.after(batch, logits_BV), step, spec, rows, max_len, sampling, seeds)

    def looks_up(self, rows: abc.Sequence[Row]) -> bool:
        """Whether a lookup (``DraftSpec.lookup``) saves forwards in ``extend`` for these rows."""
        return False

    def takes(self, rows: abc.Sequence[Row]) -> bool:
        """Whether ``rounds`` can run these rows, whatever drafts for them. The default: no."""
        return False

    def rounds(self, plan: RoundPlan) -> Rounds | None:
        """Run several rounds in one call, for rows that it ``takes`` and a drafter that it ``joins``. The rows
        themselves do not change; the result has the decisions. If a decision must be made in Python, the rounds end,
        and the block comes back ``open``.

        Returns None, and changes nothing, if this round must be run by ``score`` and ``decide``. The default always
        returns None.
        """
        return None

    def joins(self, drafter: Executor) -> bool:
        """Whether ``rounds`` can run with ``drafter``."""
        return False

    def numbers(self, values: abc.Sequence[int] | Tensor) -> Tensor:
        """Put ``values`` on the device of the logits, as int64 unless they are a tensor of another type."""
        return sent(values, self.device) if isinstance(values, Tensor) else upload(values, self.device)

    def process(self, sampling: BatchSampling, logits_BJV: Tensor) -> ProcessedDistribution:
        """Return the processed distribution of ``logits_BJV`` (temperature, top-k, top-p, min-p)."""
        return sampling.on(logits_BJV)

    def decide_group(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        """Decide what ``policy`` keeps of every row's block. Coins depend on the rows' ``seeds`` and lengths
        (``starts``) alone."""
        noise: Noise | None = None
        if not (target.all_greedy and accepts_exactly(policy)):
            device = target.logits_BKV.device
            seed_B = torch.tensor(seeds, device=device)
            start_B = torch.tensor(starts, device=device)
            accept_BK = uniforms(seed_B, start_B, Stream.ACCEPT, draft.shape[1])
            noise = Noise(accept_BK, uniforms(seed_B, start_B, Stream.SAMPLE, 1).squeeze(1))
        return decide(policy, target, draft, noise)

    def promise(self, policy: AcceptancePolicy) -> Promise:
        """Return what ``policy`` promises on this model."""
        return Promise.of(policy) if self.keeps_guarantees else Promise(Guarantee.HEURISTIC)

    def decide(self, rows: abc.Sequence[Row], target: Target, draft: Draft) -> list[Decision]:
        """Decide every row's block by its own policy; rows of the same policy are decided together."""
        draft = draft.to(target.logits_BKV.device)
        seeds = [row.seed for row in rows]
        starts = [len(row.tokens) for row in rows]
        groups = by_policy(rows)
        if len(groups) == 1:
            return self.decide_group(groups[0][0], target, draft, seeds, starts)
        decisions: dict[int, Decision] = {}
        for policy, numbers in groups:
            index_B = self.numbers(numbers)
            target_part = target.rows(index_B, numbers)
            draft_part = draft.rows(index_B, numbers)
            some_seeds = [seeds[b] for b in numbers]
            some_starts = [starts[b] for b in numbers]
            decisions |= zip(numbers, self.decide_group(policy, target_part, draft_part, some_seeds, some_starts))
        return [decisions[b] for b in range(len(rows))]

    def embedding(self) -> Tensor:
        """Return the embedding table [V, C] without the model family's scaling. Draft heads may share it.

        Raises ``ValueError`` if this executor does not expose it.
        """
        raise ValueError(f"{self.model_name} on {self.kernels!r} kernels does not show its embedding")

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Return the logits [N, V], float32, of hidden states after the last norm. Draft heads may share the output
        matrix. Raises ``ValueError`` if this executor does not expose it."""
        raise ValueError(f"{self.model_name} on {self.kernels!r} kernels does not show its output matrix")

    def output(self) -> Tensor:
        """Return the output matrix [V, C] of ``logits``, as its kernels round it, in the model's dtype. Raises
        ``ValueError`` if this executor does not expose it. The default takes it from the logits of unit vectors."""
        width = self.config.hidden_size
        output_VC = torch.empty(self.config.vocab_size, width, dtype=self.dtype, device=self.device)
        units = torch.eye(width, dtype=self.dtype, device=self.device).split(_UNITS)
        for units_NC, output_VN in zip(units, output_VC.split(_UNITS, 1)):
            output_VN.copy_(self.logits(units_NC).T)
        return output_VC

    @property
    def model_name(self) -> str:
        """What messages call the model."""
        return type(self).__name__

    def deterministic(self) -> Executor:
        """Return an executor of the same model whose logits do not depend on what else is in the batch, to the last
        bit. That is this executor if it is ``batch_invariant``, else one that feeds one token at a time."""
        return self if self.batch_invariant else TokenByToken(self)

    def reserve(self, work: Workload, most: int) -> tuple[int, int]:
        """Return how many bytes of device memory ``work`` takes beside weights and caches, and for how many rows: all
        rows of ``work``, or as many as fit in ``most`` bytes, at least one. The default returns 0 bytes for all
        rows."""
        return 0, work.rows

    def describe(self) -> list[str]:
        """Return phrases for a start-up line: what is used on the device, and what is not used, with the reason."""
        return []

    @property
    def prepared(self) -> int:
        """How many runs so far prepared or captured something new. A warm-up is complete once this stops growing."""
        return 0

    def enter_thread(self) -> None:
        """Prepare the calling thread, which will make all further calls."""


class HeadOptions(Protocol):
    """What a head needs from its target (``fly.models.eagle.HeadConfig``, ``fly.models.dflash.DFlashConfig``)."""

    @property
    def target_hidden_size(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def some_layers(self) -> int:
        """A number of layers that a target may have."""

    def states_of(self, layers: int) -> tuple[int, ...]: ...


class Head(Executor):
    """Runs a loaded draft head on one kind of device. ``config`` describes its layers.

    It reads each token together with the target's hidden states at the token before it, so a row's first token is never
    cached.
    """

    options: HeadOptions
    to_target_U: Tensor  # for each token of the draft vocabulary, its id in the target's

    def __init__(self, head: Any) -> None:
        """Run ``head``, a ``fly.models.heads.TrainedHead`` that has a ``config``."""
        self.head = head
        self.options = head.config
        self.config = head.config.layer
        self.device = head.device
        self.dtype = head.dtype
        self.to_target_U = head.to_target_U

    @property
    def model_name(self) -> str:
        return type(self.head).__name__

    def share(self, target: Executor) -> None:
        """Use the target's embedding and output matrix where the head has none of its own. Raises ``ValueError`` if
        they do not fit."""
        if self.head.shares:
            self.head.share(target.embedding())

    @abstractmethod
    def read(self, batch: Batch, states_TF: Tensor) -> None:
        """Cache the tokens of the batch, given the target's hidden states before each (``Scores.states_TF``)."""

    @abstractmethod
    def room(self, drafts: int, spec: DraftSpec) -> int:
        """Return how many slots a draft of at most ``drafts`` tokens takes in the cache, after the tokens read."""

    @abstractmethod
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
        """Read the batch (``read``), then draft as ``extend`` does. What the cache holds after the batch is then
        undefined."""

    def spread(self, logits_NU: Tensor) -> Tensor:
        """Spread logits over the target's vocabulary [N, V]. Tokens outside the draft vocabulary get minus infinity, so
        they are never drafted."""
        return spread(logits_NU, self.to_target_U, self.config.vocab_size)

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        """Raise ``ValueError``: a head drafts, and scores nothing."""
        raise ValueError("a draft head drafts by its target's hidden states, and cannot score alone")


class SerialHead(Head):
    """A head that drafts token after token (``fly.models.eagle``, EAGLE-3). It feeds drafted tokens with its own
    features in place of the target's hidden states."""

    @abstractmethod
    def begin(self, batch: Batch, states_TF: Tensor, places: abc.Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed the batch, each token with the target's hidden states before it. Return logits [N, U] over the draft
        vocabulary and features [N, C], both after the tokens at ``places``."""

    @abstractmethod
    def step(self, batch: Batch, x_TC: Tensor, places: abc.Sequence[int]) -> tuple[Tensor, Tensor]:
        """Do the same as ``begin``, with the head's own features in place of the target's hidden states."""

    def read(self, batch: Batch, states_TF: Tensor) -> None:
        self.begin(batch, states_TF, ends_of(batch.kv))

    def room(self, drafts: int, spec: DraftSpec) -> int:
        return (drafts - 1) * (1 if spec.tree is None else spec.tree.follow)

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
        logits_BU, x_BC = self.begin(batch, states_TF, ends_of(batch.kv))

        def step(drafted: Batch, x_TC: Tensor | None) -> tuple[Tensor, Tensor | None]:
            assert x_TC is not None
            logits_TU, x_TC = self.step(drafted, x_TC, range(len(drafted.tokens)))
            return self.spread(logits_TU), x_TC

        start = DraftStart.after(batch, self.spread(logits_BU), x_BC)
        return draft_by_forwards(self, start, step, spec, rows, max_len, sampling, seeds)


class BlockHead(Head):
    """A head that drafts a block of tokens in one forward (``fly.models.dflash``, and P-EAGLE heads of
    ``fly.models.eagle``).

    Each place of the block has a distribution of its own, perhaps corrected by the token drawn before it. Tokens are
    drawn from these distributions one after another, and these are what the draft reports, so a lossless rule stays
    lossless.
    """

    longest: int | None  # the most tokens that it drafts; None: any number

    def __init__(self, head: Any) -> None:
        super().__init__(head)
        self.longest = head.config.drafts

    def trim(self, kept: list[int]) -> None:
        """Draft only these tokens of the target. Call it before ``share``. Raises ``ValueError`` if the head has none
        of them, or if heads of this kind are not trimmed."""
        raise ValueError(f"vocabulary trims models, DFlash and DSpark heads; {self.model_name} is neither")

    @abstractmethod
    def block(self, batch: Batch, states_TF: Tensor, anchors: abc.Sequence[int], max_len: abc.Sequence[int]) -> Follow:
        """Read the batch, and run one forward over a block of each row. ``anchors`` are the rows' last tokens. Return
        what the head says of each place, one place after another: ``Marginals``, unless it depends on the tokens
        before. Logits are spread over the target's vocabulary."""

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
        follow = self.block(batch, states_TF, [row.tokens[-1] for row in rows], max_len)
        if not isinstance(follow, Marginals):
            return draft_chains(self, follow, spec, rows, max_len, sampling, seeds)
        logits_BKV = follow.logits_BKV

        def logits_of(numbers: list[int]) -> Tensor:
            return logits_BKV if len(numbers) == len(rows) else logits_BKV[self.numbers(numbers)]

        return draft_apart(
            list(map(constrains, rows)),
            lambda numbers, some_rows, spec, *columns: draft_chains(
                self, Marginals(logits_of(numbers)), spec, some_rows, *columns
            ),
            lambda numbers, some_rows, spec, *columns: draft_at_once(
                self, logits_of(numbers), spec, some_rows, *columns
            ),
            rows, spec, max_len, sampling, seeds,
        )  # fmt: skip


class Wrapped(Executor):
    """An executor around another one, to which it passes every call that a subclass does not override."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.config = inner.config
        self.device = inner.device
        self.dtype = inner.dtype
        self.kernels = inner.kernels
        self.own_threads = inner.own_threads
        self.gives_states = inner.gives_states
        self.captures = inner.captures
        self.keeps_guarantees = inner.keeps_guarantees

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

    def decide_group(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        return self.inner.decide_group(policy, target, draft, seeds, starts)

    def embedding(self) -> Tensor:
        return self.inner.embedding()

    def logits(self, hidden_NC: Tensor) -> Tensor:
        return self.inner.logits(hidden_NC)

    def output(self) -> Tensor:
        return self.inner.output()

    def reserve(self, work: Workload, most: int) -> tuple[int, int]:
        return self.inner.reserve(work, most)

    def describe(self) -> list[str]:
        return self.inner.describe()

    @property
    def prepared(self) -> int:
        return self.inner.prepared

    def enter_thread(self) -> None:
        self.inner.enter_thread()


class TokenByToken(Wrapped):
    """Feeds a model one token at a time, so that a token's logits have the same bits, whatever else is in the batch.

    Most libraries add up matrix products in an order that depends on the number of rows, so a token's logits differ in
    their last bits between batches. If tokens are fed one at a time, the same kernels compute each of them in the same
    order. This takes one forward for each token."""

    batch_invariant = True

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        scored_places = range(len(batch.tokens)) if places is None else places
        place_set = set(scored_places)
        logits_of = {}
        recorded = list[Tensor]()
        for t, kv in enumerate(batch.kv.tokens()):
            single = Batch(batch.tokens[t : t + 1], batch.positions[t : t + 1], kv)
            scores = self.inner.score(single, None if t in place_set else (), states)
            if t in place_set:
                logits_of[t] = scores.logits_NV
            if scores.states_TF is not None:
                recorded.append(scores.states_TF)
        logits = [logits_of[t] for t in scored_places] or [torch.zeros(0, self.config.vocab_size, device=self.device)]
        return Scores(torch.cat(logits), states_TF=torch.cat(recorded) if recorded else None)
