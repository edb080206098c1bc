"""The interface of draft strategies (``DraftStrategy``), and the setup that they get (``DraftSetup``).

Shape legend: B rows, A rows that draft, K longest draft, N tokens of a row, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from fly.cache import BlockAllocator
from fly.models.bundled import find_checkpoint
from fly.models.checkpoint import Checkpoint
from fly.models.loading import resolve_device, resolve_dtype
from fly.models.tokenizer import Tokenizer
from fly.ops import upload
from fly.runner.continuation import Continuation
from fly.runner.executor import BlockHead, Drafted, Executor, Head
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import Draft, Target
from fly.vocabulary import Vocabulary

__all__ = [
    "Continuation",
    "DraftSetup",
    "DraftStrategy",
    "LoadModel",
    "Loaded",
    "OwnCache",
    "RowDraft",
    "StopsByChance",
    "Wrapper",
    "describe",
    "drafted_of",
    "is_built_in",
    "join_rows",
    "pad",
    "pad_trees",
    "split_rows",
    "until_end",
    "word_of",
]


M = TypeVar("M")


class Loaded(NamedTuple):
    """A loaded model, with its tokenizer and control tokens, and the checkpoint that it was loaded from."""

    executor: Executor
    tokenizer: Tokenizer | None = None
    control_ids: frozenset[int] = frozenset()
    checkpoint: Checkpoint | None = None


# A function that loads a model by its path or name (options: ``dtype``, ``device``, ``kernels``), or returns a loaded
# model unchanged.
LoadModel = Callable[..., Loaded]


class OwnCache(Protocol):
    """A model or head that drafts, with a cache of its own, such as a ``Runner``."""

    @property
    def executor(self) -> Executor: ...

    @property
    def bytes_per_token(self) -> int: ...

    @property
    def context(self) -> int:
        """The longest text, in tokens, that it can draft for."""

    @property
    def allocator(self) -> BlockAllocator: ...

    def reserve(self, tokens: int | None = None, block_size: int | None = None) -> None:
        """Make the cache, for ``tokens`` tokens over all rows."""


def _take(model: object, **options: Any) -> Loaded:
    """Return a loaded model."""
    if isinstance(model, Loaded):
        return model
    if not isinstance(model, Executor):
        raise ValueError(f"{model!r} is no loaded model (fly.backends.load), and only LLM loads one by its name")
    return Loaded(model)


class DraftSetup:
    """What ``attach`` gives a strategy: the target, its vocabulary, and a way to load models that draft.

    Attributes:
        target: the model to draft for. Its cache is made after all strategies are attached.
        tokenizer, vocabulary: the meaning of the target's token ids; ``tokenizer`` is None if there is none.
        clock: returns the time in seconds, for strategies that measure it. Ranks share one clock.
        load_by: the function that loads a model.
        caches: for each loaded model, its cache's size in tokens (None: not chosen yet) and its page size.
    """

    def __init__(
        self,
        target: Runner,
        vocabulary: Vocabulary | None = None,
        load: LoadModel = _take,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.tokenizer = target.tokenizer
        self.clock = clock
        size, device = target.executor.config.vocab_size, target.executor.device
        self.vocabulary = vocabulary or Vocabulary(size, device=device)
        self.load_by = load
        self.caches: list[tuple[OwnCache, int | None, int | None]] = []
        self._kinds: list[type[DraftStrategy]] = []

    def load(
        self,
        model: object,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
        vocabulary: int | str | Path | abc.Collection[int] | None = None,
        cache_tokens: int | None = None,
        block_size: int | None = None,
    ) -> Runner:
        """Load a model that drafts. ``reserve`` makes its cache later.

        Args:
            model: a name, a path, or a loaded model.
            dtype, device, kernels: how to load a name or path; ``"auto"`` follows the target.
            vocabulary: the tokens that its head keeps, as for ``SingleDraft``; None keeps all.
            cache_tokens: how many tokens its cache holds over all rows; None copies the target's number.
            block_size: tokens in a page of its cache; None lets the device decide.

        Raises ``ValueError`` (``CheckpointError`` if the checkpoint cannot be used).
        """
        trimmed = {} if vocabulary is None else {"vocabulary": vocabulary}
        loaded = self.open(model, dtype=dtype, device=device, kernels=kernels, **trimmed)
        if isinstance(loaded.executor, Head):
            word = word_of(loaded.executor)
            raise ValueError(f"{str(model)!r} is a draft head, not a model by itself; write {word}({model})")
        runner = Runner(self.fit_to_target(loaded), None, loaded.control_ids, self.target.share, loaded.tokenizer)
        self.add(runner, cache_tokens, block_size)
        return runner

    def open(self, model: object, **options: Any) -> Loaded:
        """Load a model or a draft head, without a cache."""
        return self.load_by(model, **options, like=self.target.executor)

    def fit_to_target(self, loaded: Loaded) -> Executor:
        """Return what runs a loaded model to draft for the target. (``TranslatingSetup`` may leave out ids.)"""
        return loaded.executor

    def add(self, drafter: OwnCache, cache_tokens: int | None = None, block_size: int | None = None) -> None:
        """Add a drafter. ``reserve`` will make its cache, and requests are admitted only if that has room for them."""
        self.caches.append((drafter, cache_tokens, block_size))

    def attach(self, strategy: DraftStrategy) -> DraftStrategy:
        """Attach a strategy and return it. If its vocabulary differs from the target's, return a strategy around it
        that translates its drafts. A strategy that is made of others attaches them by this method too.

        Raises ``ValueError`` if it cannot draft for this target.
        """
        strategy.attach(self)
        self._kinds.append(type(strategy))
        return self.translate(strategy)

    def translate(self, strategy: DraftStrategy) -> DraftStrategy:
        """Return an attached strategy, or raise ``ValueError`` if its vocabulary is not the target's.
        (``TranslatingSetup`` translates its drafts instead.)"""
        size = self.target.executor.config.vocab_size
        if strategy.vocab_size not in (None, size):
            raise ValueError(f"{type(strategy).__name__} drafts {strategy.vocab_size} ids for a target of {size}")
        return strategy

    def below(self, runner: Runner) -> DraftSetup:
        """Return the setup for a strategy that drafts for ``runner``, a draft model that this setup has loaded."""
        setup, config = copy(self), runner.executor.config
        setup.target, setup.tokenizer = runner, runner.tokenizer
        if runner.tokenizer is not None:
            setup.vocabulary = runner.tokenizer.vocabulary(config.vocab_size, runner.executor.device)
        elif config.vocab_size != self.vocabulary.size:
            setup.vocabulary = Vocabulary(config.vocab_size, device=runner.executor.device)
        return setup

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all caches whose size is not chosen yet."""
        return sum(drafter.bytes_per_token for drafter, tokens, _ in self.caches if tokens is None)

    def reserve(self, tokens: int | None = None) -> None:
        """Make all caches. A cache without a size of its own gets room for ``tokens`` tokens."""
        for drafter, cache_tokens, block_size in self.caches:
            drafter.reserve(tokens if cache_tokens is None else cache_tokens, block_size)

    @property
    def drafters(self) -> list[OwnCache]:
        """The loaded models, in the order of loading."""
        return [drafter for drafter, *_ in self.caches]

    def among_ranks(self, clock: Callable[[], float], load: LoadModel | None = None) -> DraftSetup:
        """Return a setup with the ``clock`` of all ranks, and their way to load models (None: this setup's), for the
        same caches."""
        setup = copy(self)
        setup.clock = clock
        setup.load_by = load or self.load_by
        return setup

    @property
    def all_built_in(self) -> bool:
        """Whether all attached strategies are part of fly. Such strategies compute only through executors."""
        return all(map(is_built_in, self._kinds))


class DraftStrategy(ABC):
    """Proposes the tokens that the target verifies. A subclass must define ``propose``; the other methods are hooks
    that do nothing by default.

    In each round the engine calls ``propose``, then ``observe`` with the target's output, then ``commit``. A strategy
    may keep state by ``row.id``, and must never change a row. In a cascade, the level above may call ``propose``
    several times before ``commit``. It passes forks of a row, which have the same ``id`` but other last tokens. So a
    strategy must compare the tokens that it gets with its state, and update the state where they differ.
    """

    vocab_size: int | None = None  # it proposes ids below this; None: only ids that occur in the row's text
    context: int | None = None  # the longest row, in tokens, that it drafts for; None: no limit
    # Whether its drafts have ``logits_BKV`` for rows whose rule reads them (``row.policy.reads_logits``). If not, such
    # rows are refused.
    gives_logits: bool = False
    learns: bool = False  # whether its proposals depend, on purpose, on past texts or other rows
    spare: int = 0  # cache slots that its trees need beyond a row's longest path
    names: abc.Sequence[str] = ()  # what requests may choose among (``fly.drafts.ChooseDraft``)

    @abstractmethod
    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        """Propose at most ``max_len[b]`` tokens after the last token of each row (in a tree: along any path). Fewer or
        none are always allowed.

        If the tokens were drawn at random, ``probs_BKV`` must hold the distribution of each. The length of a draft must
        not depend on the drawn tokens, except that it may end after a token that ends the row. Lossless rules rely on
        both. If it ``gives_logits``, ``logits_BKV`` must hold the model's logits at each token's place, before
        temperature and the like, if the rule of any row reads them.
        """

    def drafter_of(self, name: str) -> DraftStrategy:
        """Return the strategy that drafts for requests that choose ``name``, to ask for its limits: itself, unless it
        holds several to choose from (``fly.drafts.ChooseDraft``)."""
        return self

    def attach(self, setup: DraftSetup) -> None:
        """Take what the strategy needs from ``setup``, and load its models (``setup.load``). Called once, before all
        other methods.

        Raises ``ValueError`` if it cannot draft for this target, with the reason.
        """

    def prefill(self, parts: abc.Sequence[tuple[Row, int]]) -> None:
        """Read each row's prompt up to the given number of tokens. Called while the target reads prompts chunk by
        chunk. By default a strategy reads a whole prompt when it first drafts for the row."""

    def continuation(self, rows: abc.Sequence[Row]) -> Continuation | None:
        """Describe how this strategy continues rows, so that several rounds can run in one call, without ``propose``
        and ``observe``. Only a strategy that drafts by one model or by prompt lookup, and does not read the target's
        output, can return this. Any other returns None, the default."""
        return None

    def observe(self, rows: abc.Sequence[Row], draft: Draft, target: Target) -> None:
        """Learn from the target's output on a draft of this strategy. Called before the rows grow."""

    def commit(self, rows: abc.Sequence[Row]) -> None:
        """Roll the strategy's state back to the rows' tokens, which now end with the tokens of this round. Called after
        every round in which ``propose`` was called, and sometimes after others."""

    def release(self, row: Row) -> None:
        """Free the state of ``row``, which has ended."""


class StopsByChance(DraftStrategy):
    """A strategy that estimates how likely its tokens are to be kept, and stops drafting when that is too unlikely.

    If it ``stops``, its caller may say where: ``worth`` is the least chance to be kept at which it drafts a token. 0
    means that this is unknown, so that the strategy's own limits hold. A subclass may define ``propose`` and
    ``continuation`` without ``worth``, as those of any strategy: then it is not told.
    """

    stops = True  # whether it regards ``worth``; trees do not
    one_forward = False  # whether a draft takes the same time, however many tokens it has

    @abstractmethod
    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int], worth: float = 0.0) -> Draft: ...

    def continuation(self, rows: abc.Sequence[Row], worth: float = 0.0) -> Continuation | None:
        return None

    def limits(self, method: Callable[..., object], worth: float) -> dict[str, float]:
        """Return ``worth`` as a keyword argument of ``method`` (``propose`` or ``continuation``), if that takes it and
        the strategy regards it."""
        return {"worth": worth} if self.stops and _takes_worth(method.__func__) else {}  # type: ignore[attr-defined]


@cache
def _takes_worth(method: Callable[..., object]) -> bool:
    return "worth" in inspect.signature(method).parameters


def word_of(head: Head) -> str:
    """Return the name of the strategy that drafts by a head."""
    return "block" if isinstance(head, BlockHead) else "eagle3"


def describe(model: M, dtype: str | torch.dtype, device: str | torch.device) -> M | str | Path:
    """Return what to load when a strategy is attached: a path, a hub name or a loaded model. Look names up on disk now,
    but ask the hub later. Raises ``ValueError`` for an unknown dtype or device."""
    if not isinstance(model, (str, Path)):
        return model
    resolve_dtype(dtype, {})
    resolve_device(device)
    checkpoint = find_checkpoint(model)
    return checkpoint if isinstance(checkpoint, Path) else str(checkpoint)


class Wrapper(DraftStrategy):
    """A strategy made of others, its ``members``, which draft for the same target. It passes each call on to them."""

    def __init__(self, members: abc.Sequence[DraftStrategy]) -> None:
        if len(set(map(id, members))) < len(members):
            raise ValueError(f"a strategy stands twice in {type(self).__name__}; each needs a state of its own")
        self.members = list(members)
        self._follow_members()

    def _follow_members(self) -> None:
        """Set the widest of the members' limits. Each member still obeys its own."""
        self.vocab_size = next((each.vocab_size for each in self.members if each.vocab_size is not None), None)
        contexts = [each.context for each in self.members if each.context is not None]
        self.context = max(contexts) if len(contexts) == len(self.members) else None
        self.spare = max(each.spare for each in self.members)
        self.gives_logits = all(each.gives_logits for each in self.members)
        self.names = list(dict.fromkeys(name for each in self.members for name in each.names))

    def drafter_of(self, name: str) -> DraftStrategy:
        """Return this strategy with the limits of the members' drafters for requests that choose ``name``."""
        drafters = [member.drafter_of(name) for member in self.members]
        if all(drafter is member for drafter, member in zip(drafters, self.members)):
            return self
        chosen = copy(self)
        chosen.members = drafters
        chosen._follow_members()
        return chosen

    def attach(self, setup: DraftSetup) -> None:
        self.members = [setup.attach(member) for member in self.members]
        self._follow_members()

    def prefill(self, parts: abc.Sequence[tuple[Row, int]]) -> None:
        for member in self.members:
            member.prefill(parts)

    def observe(self, rows: abc.Sequence[Row], draft: Draft, target: Target) -> None:
        """Let every member learn from the target's output, whichever member proposed the draft."""
        for member in self.members:
            member.observe(rows, draft, target)

    def commit(self, rows: abc.Sequence[Row]) -> None:
        for member in self.members:
            member.commit(rows)

    def release(self, row: Row) -> None:
        for member in self.members:
            member.release(row)


def is_built_in(kind: type[DraftStrategy]) -> bool:
    """Whether a strategy class is part of fly. The methods of any other class, even of a subclass, may do anything."""
    return kind.__module__.startswith("fly.")


def drafted_of(rows: int, active: list[int], drafted: Drafted) -> Draft:
    """Return a draft for all rows: the tokens in ``drafted`` for the ``active`` rows, and no token for the others."""
    if drafted.parents is not None:
        grown = dict(zip(active, zip(drafted.tokens, drafted.parents)))
        return pad_trees([grown.get(b, ([], [])) for b in range(rows)])
    chains = dict(zip(active, drafted.tokens))
    proposal = Draft.of([chains.get(b, []) for b in range(rows)])
    if drafted.probs_BKV is None and drafted.logits_BKV is None:
        return proposal

    def spread_rows(values_AKV: torch.Tensor | None) -> torch.Tensor | None:
        if values_AKV is None:
            return None
        values_AKV = values_AKV[:, : proposal.shape[1]]
        if len(active) == rows:
            return values_AKV
        values_BKV = values_AKV.new_zeros(rows, *values_AKV.shape[1:])
        return values_BKV.index_copy_(0, upload(active, values_AKV.device), values_AKV)

    probs_BKV = spread_rows(drafted.probs_BKV)
    logits_BKV = spread_rows(drafted.logits_BKV)
    return Draft(proposal.tokens_BK, proposal.lengths_B, probs_BKV, logits_BKV=logits_BKV)


def until_end(tokens: list[int], row: Row) -> list[int]:
    """Cut ``tokens`` after the first that ends ``row``."""
    for end, token in enumerate(tokens, start=1):
        if token in row.stop_ids:
            return tokens[:end]
    return tokens


def pad(drafts: abc.Sequence[list[int]], device: torch.device | str = "cpu") -> Draft:
    """Copy token lists of different lengths into a deterministic ``Draft``."""
    return Draft.of([[int(token) for token in tokens] for tokens in drafts], device)


def pad_trees(drafts: abc.Sequence[tuple[list[int], list[int]]]) -> Draft:
    """Make a deterministic ``Draft`` from trees of different sizes, given each row's tokens and their parents."""
    draft = pad([tokens for tokens, _ in drafts])
    _, longest = draft.shape
    parents = [tree + [-1] * (longest - len(tree)) for _, tree in drafts]
    parents_BK = torch.tensor(parents, dtype=torch.int64).reshape(len(drafts), longest)
    return Draft(draft.tokens_BK, draft.lengths_B, parents_BK=parents_BK)


class RowDraft(NamedTuple):
    """The draft for one row, without padding."""

    tokens: list[int]
    parents: list[int] | None = None  # None is a chain
    probs_NV: torch.Tensor | None = None  # the distribution of each token; None: deterministic
    logits_NV: torch.Tensor | None = None  # the logits at each token's place; None: unknown


def split_rows(draft: Draft) -> list[RowDraft]:
    """Split a draft into its rows."""
    trees: abc.Sequence[list[int] | None] = draft.trees or [None] * len(draft.chains)

    def values(of_BKV: torch.Tensor | None, b: int, count: int) -> torch.Tensor | None:
        return None if of_BKV is None else of_BKV[b, :count]

    return [
        RowDraft(tokens, tree, *(values(of_BKV, b, len(tokens)) for of_BKV in (draft.probs_BKV, draft.logits_BKV)))
        for b, (tokens, tree) in enumerate(zip(draft.chains, trees))
    ]


def join_rows(pieces: abc.Sequence[RowDraft]) -> Draft:
    """Join the drafts of several rows. If one is a tree, chains become trees of one path. If one has distributions, the
    others get one-hot ones; if one has logits, the others get NaN."""
    tokens = [piece.tokens for piece in pieces]
    draft = pad(tokens)
    if any(piece.parents is not None for piece in pieces):
        trees = [range(-1, len(piece.tokens) - 1) if piece.parents is None else piece.parents for piece in pieces]
        draft = pad_trees([(chain, list(tree)) for chain, tree in zip(tokens, trees)])
    logits_NV = next((piece.logits_NV for piece in pieces if piece.logits_NV is not None), None)
    if logits_NV is not None:
        logits_BKV = logits_NV.new_full((*draft.shape, logits_NV.shape[-1]), torch.nan)
        for b, piece in enumerate(pieces):
            if piece.logits_NV is not None:
                logits_BKV[b, : len(piece.tokens)] = piece.logits_NV
        draft = Draft(draft.tokens_BK, draft.lengths_B, parents_BK=draft.parents_BK, logits_BKV=logits_BKV)
    drawn = next((piece.probs_NV for piece in pieces if piece.probs_NV is not None), None)
    if drawn is None:
        return draft
    probs_BKV = drawn.new_zeros(*draft.shape, drawn.shape[-1])
    for b, piece in enumerate(pieces):
        row_probs_NV = probs_BKV[b, : len(piece.tokens)]
        if piece.probs_NV is None:
            row_probs_NV.scatter_(1, upload(piece.tokens, drawn.device).unsqueeze(1), 1.0)
        else:
            row_probs_NV.copy_(piece.probs_NV)
    return Draft(draft.tokens_BK, draft.lengths_B, probs_BKV, draft.parents_BK, draft.logits_BKV)
