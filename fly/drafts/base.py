"""What a draft strategy is. Knows nothing of HTTP or ranks."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable
from typing import NamedTuple

import torch

from fly.cache import BlockAllocator
from fly.executor import Drafted, DraftSpec, Executor, Spent
from fly.models.config import LlamaConfig
from fly.models.tokenizer import Tokenizer
from fly.request import Sequence
from fly.runner import Drafter, Runner
from fly.types import Draft, Target
from fly.vocabulary import Vocabulary

__all__ = ["Continuation", "DraftStrategy", "Load", "Loaded", "Wrapper", "drafted_of", "pad", "pad_trees", "until_end"]


class Loaded(NamedTuple):
    """A model that a strategy drafts with."""

    executor: Executor
    tokenizer: Tokenizer | None = None
    control_ids: frozenset[int] = frozenset()


# Loads a model by its path or name (``dtype``, ``device``, ``kernels`` as options), or takes a loaded one as it is.
Load = Callable[..., Loaded]


class Continuation(NamedTuple):
    """What a strategy proposes for every row where that is just what one model says, token after token, up to the
    first it is not sure of: the most likely ones, or drawn as ``SingleDraft`` draws. Without a model, what
    ``spec.lookup`` copies."""

    runner: Drafter | None
    most: list[int]  # tokens a round, of each row
    spec: DraftSpec = DraftSpec()
    rounds: int = sys.maxsize  # after which the strategy is to be asked again
    spent: list[Spent] | None = None  # takes what the first round took, and what the others did


class DraftStrategy(ABC):
    """Who proposes. A strategy may keep state by ``row.id``; it must never change a row.

    ``row.tokens`` is always the truth. A level above may call ``propose`` with forks of a row (same ``id``, other
    tokens at the end) several times before it commits: state follows the tokens it is given, by comparing them.
    """

    vocab_size: int | None = None  # ids it may propose are below this; None: only ids it has seen in the row
    tokenizer: Tokenizer | None = None  # of its vocabulary, where it knows it
    vocabulary: Vocabulary | None = None  # what the ids of the rows stand for, once it is bound
    context: int | None = None  # tokens a row may have at most to be drafted for; None: no limit
    learns: bool = False  # whether it remembers past texts, or other rows, on purpose
    device: torch.device = torch.device("cpu")  # of its drafts' tensors
    clock: Callable[[], float] = staticmethod(time.perf_counter)  # of one that decides by time; ranks share the first's
    knows_chances: bool = False  # whether it can tell how likely its tokens stand, and ends a draft by ``worth``
    worth: float = 0.0  # the chance of standing from which on a token pays; set by who asks (``AdaptiveDraft``)
    made_for: LlamaConfig | None = None  # sizes of the only targets that it can draft for; None: any of its vocabulary
    spare: int = 0  # tokens of a tree beside its longest path: room that the caches must have beyond a row's end

    def parts(self) -> list[DraftStrategy]:
        """The strategies that it holds in attributes, by themselves or in a list or tuple."""
        values = (value if isinstance(value, (list, tuple)) else (value,) for value in vars(self).values())
        return [part for several in values for part in several if isinstance(part, DraftStrategy)]

    def resolve(self, load: Load) -> None:
        """Load the models that it holds by name. Called once, by ``LLM``, before ``attach``. The default has none, and
        has its ``parts`` load theirs."""
        for part in self.parts():
            part.resolve(load)

    def bind(self, vocabulary: Vocabulary) -> None:
        """What the ids of the rows that it will draft for stand for. Called once, after ``resolve`` and before
        ``attach``; with its ``parts``, unless these read rows of their own."""
        self.vocabulary = vocabulary
        for part in self.parts():
            part.bind(vocabulary)

    def attach(self, target: Runner) -> None:
        """Called once, by the engine or the level above that it will draft for. The default needs nothing of it.

        Raises ``ValueError`` if it cannot draft for this target, with the reason.
        """

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        """The target takes in each row up to its first so many tokens, of a prompt that comes in by chunks. A strategy
        may do the same, so that it need not take in all at once when it first drafts. The default waits until then."""

    @abstractmethod
    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        """A draft of at most ``max_len[b]`` tokens for each row (along any path, if it is a tree), to follow the row's
        last token.

        Fewer, or none, is always allowed. Where a token was drawn, ``probs_BKV`` holds the distribution it was drawn
        from. How much it proposes must not depend on what it drew, other than by ending after a token that ends the
        row.
        """

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        """Where ``propose`` would just go on with what a model says of each row, or with its text, whatever the target
        says: that. Rounds may then be taken without ``propose`` and ``observe``. None, the default, is any other
        strategy."""
        return None

    @property
    def last(self) -> DraftStrategy:
        """The level whose tokens it proposes: itself, but for a cascade of several."""
        return self

    def restricted(self, allowed: abc.Sequence[int] | None) -> DraftStrategy | None:
        """A strategy that drafts the same with a model, by tokens ``allowed`` only (None: by all): what can be
        translated to another vocabulary. None where there is no such model, as by default."""
        return None

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        """What the target said of a draft of this strategy, before any of it is committed. The default forgets it."""

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        """The rows' tokens are now the truth: roll own state back to it. The default has no state.

        Called after every round in which something was asked of it, and at times after others."""

    def release(self, row: Sequence) -> None:
        """``row`` is over: free what is held for it. The default holds nothing."""

    def choices(self) -> list[str]:
        """Names of which a request may choose one (``Sequence.draft``); none where there is nothing to choose."""
        return []

    def executors(self) -> list[Executor] | None:
        """The models that it drafts with, but for its target's. None, the default: nobody knows."""
        return None

    def allocators(self) -> list[BlockAllocator]:
        """The allocators of its caches, so that requests are admitted only if all of them have room."""
        return []

    def bytes_per_token(self) -> int:
        """Bytes that its caches take for one token, those of a size of their own left out: its part of a budget that it
        shares with the target's cache."""
        return 0

    def reserve(self, tokens: int) -> None:
        """How many tokens its caches are to hold, unless they have a size of their own; called before ``attach``."""


class Wrapper(DraftStrategy):
    """A strategy over others, its ``members``: what concerns them all is passed on to each. With a single one it has
    its vocabulary and its limits."""

    def __init__(self, members: abc.Sequence[DraftStrategy]) -> None:
        self.members = list(members)
        self._follow_members()

    def _follow_members(self) -> None:
        if len(self.members) == 1:
            (member,) = self.members
            self.vocab_size, self.tokenizer = member.vocab_size, member.tokenizer
            self.context, self.spare, self.device = member.context, member.spare, member.device

    @property
    def knows_chances(self) -> bool:  # type: ignore[override]
        return len(self.members) == 1 and self.members[0].knows_chances

    @property
    def worth(self) -> float:
        return self.members[0].worth

    @worth.setter
    def worth(self, worth: float) -> None:
        for member in self.members:
            member.worth = worth

    def resolve(self, load: Load) -> None:
        super().resolve(load)
        self._follow_members()

    def bind(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        for member in self.members:
            member.bind(vocabulary)
        self._follow_members()

    def attach(self, target: Runner) -> None:
        for member in self.members:
            member.attach(target)

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        for member in self.members:
            member.prefill(parts)

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        """Every member hears of the whole block: what the target said of it is true whoever proposed it."""
        for member in self.members:
            member.observe(rows, draft, target)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        for member in self.members:
            member.commit(rows)

    def release(self, row: Sequence) -> None:
        for member in self.members:
            member.release(row)

    def executors(self) -> list[Executor] | None:
        each = [member.executors() for member in self.members]
        return None if None in each else [executor for some in each for executor in some or ()]

    def allocators(self) -> list[BlockAllocator]:
        return [allocator for member in self.members for allocator in member.allocators()]

    def bytes_per_token(self) -> int:
        return sum(member.bytes_per_token() for member in self.members)

    def reserve(self, tokens: int) -> None:
        for member in self.members:
            member.reserve(tokens)


def drafted_of(rows: int, active: list[int], found: Drafted) -> Draft:
    """What was drafted for those of ``rows`` that are ``active``, and nothing for the others."""
    drafted: list[list[int]] = [[] for _ in range(rows)]
    for b, tokens in zip(active, found.tokens):
        drafted[b] = tokens
    proposal = Draft.of(drafted)
    if found.probs_BKV is None and found.logits_BKV is None:
        return proposal

    def of_all(said_AKV: torch.Tensor | None) -> torch.Tensor | None:
        if said_AKV is None:
            return None
        said_AKV = said_AKV[:, : proposal.shape[1]]
        if len(active) == rows:
            return said_AKV
        said_BKV = said_AKV.new_zeros(rows, *said_AKV.shape[1:])
        said_BKV[active] = said_AKV
        return said_BKV

    probs_BKV, logits_BKV = of_all(found.probs_BKV), of_all(found.logits_BKV)
    return Draft(proposal.tokens_BK, proposal.lengths_B, probs_BKV, logits_BKV=logits_BKV)


def until_end(tokens: list[int], row: Sequence) -> list[int]:
    """``tokens`` up to and with the first that ends ``row``: what follows would be drafted in vain."""
    ends = (at for at, token in enumerate(tokens, start=1) if token in row.stop_ids)
    return tokens[: next(ends, len(tokens))]


def pad(drafts: abc.Sequence[list[int]], device: torch.device | str = "cpu") -> Draft:
    """A deterministic ``Draft`` of ragged token lists, which are copied."""
    return Draft.of([[int(token) for token in tokens] for tokens in drafts], device)


def pad_trees(drafts: abc.Sequence[tuple[list[int], list[int]]], device: torch.device | str = "cpu") -> Draft:
    """A deterministic ``Draft`` of ragged trees: the tokens of each row, and their parents."""
    draft = pad([tokens for tokens, _ in drafts], device)
    _, longest = draft.shape
    parents = [tree + [-1] * (longest - len(tree)) for _, tree in drafts]
    parents_BK = torch.tensor(parents, dtype=torch.int64, device=device).reshape(len(drafts), longest)
    return Draft(draft.tokens_BK, draft.lengths_B, parents_BK=parents_BK)
