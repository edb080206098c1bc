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
from fly.ops import upload
from fly.request import Sequence
from fly.runner import Drafter, Runner
from fly.types import Draft, Target
from fly.vocabulary import Vocabulary

__all__ = [
    "Continuation",
    "DraftStrategy",
    "Load",
    "Loaded",
    "Piece",
    "Wrapper",
    "drafted_of",
    "pad",
    "pad_trees",
    "pieces_of",
    "together",
    "unchanged",
    "until_end",
]


class Loaded(NamedTuple):
    """A model that a strategy drafts with."""

    executor: Executor
    tokenizer: Tokenizer | None = None
    control_ids: frozenset[int] = frozenset()


# Loads a model by its path or name (``dtype``, ``device``, ``kernels`` as options), or takes a loaded one as it is.
Load = Callable[..., Loaded]


class Continuation(NamedTuple):
    """The proposal of a strategy that just continues each row with one model: token after token, most likely or drawn
    as ``SingleDraft`` draws, up to the first that it is not sure of. Without a model, what ``spec.lookup`` copies."""

    runner: Drafter | None
    most: list[int]  # tokens a round, of each row
    spec: DraftSpec = DraftSpec()
    rounds: int = sys.maxsize  # after which the strategy is to be asked again
    spent: list[Spent] | None = None  # takes what the first round took, and what the others did


class DraftStrategy(ABC):
    """Proposes the tokens that the target verifies. A strategy may keep state by ``row.id``; it must never change a
    row.

    ``row.tokens`` is always the truth. A level above may call ``propose`` with forks of a row (same ``id``, other
    tokens at the end) several times before it commits: state follows the tokens it is given, by comparing them.
    """

    vocab_size: int | None = None  # ids it may propose are below this; None: only ids it has seen in the row
    tokenizer: Tokenizer | None = None  # the tokenizer of its vocabulary, if it knows one
    vocabulary: Vocabulary | None = None  # what the ids of the rows stand for, once it is bound
    context: int | None = None  # tokens a row may have at most to be drafted for; None: no limit
    learns: bool = False  # whether it remembers past texts, or other rows, on purpose
    device: torch.device = torch.device("cpu")  # of its drafts' tensors
    clock: Callable[[], float] = staticmethod(time.perf_counter)  # of one that decides by time; ranks share the first's
    knows_chances: bool = False  # whether it knows how likely its tokens are kept, and ends a draft by ``worth``
    worth: float = 0.0  # the chance of being kept from which on a token pays; set by ``AdaptiveDraft``
    made_for: LlamaConfig | None = None  # sizes of the only targets that it can draft for; None: any of its vocabulary
    spare: int = 0  # tokens of a tree outside its longest path: room that the caches need beyond a row's end

    def parts(self) -> list[DraftStrategy]:
        """The strategies in its attributes, alone or in a list or tuple."""
        values = (value if isinstance(value, (list, tuple)) else (value,) for value in vars(self).values())
        return [part for several in values for part in several if isinstance(part, DraftStrategy)]

    def resolve(self, load: Load) -> None:
        """Load the models that it holds by name. Called once, by ``LLM``, before ``attach``. The default has none, and
        calls it for its ``parts``."""
        for part in self.parts():
            part.resolve(load)

    def bind(self, vocabulary: Vocabulary) -> None:
        """Take the vocabulary of the rows that it will draft for. Called once, after ``resolve`` and before ``attach``;
        for its ``parts`` too, unless these read rows of their own."""
        self.vocabulary = vocabulary
        for part in self.parts():
            part.bind(vocabulary)

    def attach(self, target: Runner) -> None:
        """Called once, by the engine or the level above that it will draft for. The default needs nothing of it.

        Raises ``ValueError`` if it cannot draft for this target, with the reason.
        """

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        """The target reads a prompt in chunks, up to so many tokens of each row now. A strategy may do the same, so
        that it need not read everything when it first drafts. The default waits until then."""

    @abstractmethod
    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        """A draft of at most ``max_len[b]`` tokens for each row (along any path, if it is a tree), to follow the row's
        last token.

        Fewer, or none, is always allowed. If a token was drawn, ``probs_BKV`` holds the distribution it was drawn from.
        The length of a draft must not depend on what was drawn, except that it may end after a token that ends the row.
        """

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        """For a strategy that just continues each row with a model, or with its own text, whatever the target says:
        how. Rounds may then be taken without ``propose`` and ``observe``. None, the default, is any other strategy."""
        return None

    @property
    def last(self) -> DraftStrategy:
        """The level whose tokens it proposes: itself, except for a cascade."""
        return self

    def restricted(self, size: int | None) -> DraftStrategy | None:
        """The same strategy with a model that uses only ids below ``size`` (None: all), so that it can be translated to
        another vocabulary. None, the default, if there is no such model."""
        return None

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        """Learn what the target said about a draft of this strategy, before any of it is committed. The default ignores
        it."""

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        """The rows' tokens are now the truth: roll own state back to it. The default has no state.

        Called after every round in which it was asked to propose, and sometimes after others."""

    def release(self, row: Sequence) -> None:
        """``row`` is over: free what is held for it. The default holds nothing."""

    def choices(self) -> list[str]:
        """The names that a request may choose from (``Sequence.draft``); empty if there is no choice."""
        return []

    def executors(self) -> list[Executor] | None:
        """The models that it drafts with, except its target's. None, the default: unknown."""
        return None

    def allocators(self) -> list[BlockAllocator]:
        """The allocators of its caches, so that requests are admitted only if all of them have room."""
        return []

    def bytes_per_token(self) -> int:
        """Bytes that its caches take for one token, without caches that have a size of their own: its part of a budget
        that it shares with the target's cache."""
        return 0

    def reserve(self, tokens: int) -> None:
        """Set how many tokens its caches hold, unless they have a size of their own; called before ``attach``."""


class Wrapper(DraftStrategy):
    """A strategy over others, its ``members``: calls are passed on to each. With a single member it has that one's
    vocabulary and limits."""

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
        """Every member observes the whole block: the target's output is valid whichever member proposed it."""
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


def unchanged(strategy: DraftStrategy, kind: type[DraftStrategy]) -> bool:
    """Whether ``strategy`` proposes, and learns, as strategies of this kind do, whatever else a subclass changes."""
    own = type(strategy)
    return own.propose is kind.propose and own.observe is kind.observe


def drafted_of(rows: int, active: list[int], found: Drafted) -> Draft:
    """What was drafted for those of ``rows`` that are ``active``, and nothing for the others."""
    if found.parents is not None:
        grown = dict(zip(active, zip(found.tokens, found.parents)))
        return pad_trees([grown.get(b, ([], [])) for b in range(rows)])
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
        return said_BKV.index_copy_(0, upload(active, said_AKV.device), said_AKV)

    probs_BKV, logits_BKV = of_all(found.probs_BKV), of_all(found.logits_BKV)
    return Draft(proposal.tokens_BK, proposal.lengths_B, probs_BKV, logits_BKV=logits_BKV)


def until_end(tokens: list[int], row: Sequence) -> list[int]:
    """``tokens`` up to and including the first that ends ``row``: the rest would be drafted in vain."""
    ends = (at for at, token in enumerate(tokens, start=1) if token in row.stop_ids)
    return tokens[: next(ends, len(tokens))]


def pad(drafts: abc.Sequence[list[int]], device: torch.device | str = "cpu") -> Draft:
    """A deterministic ``Draft`` of ragged token lists, which are copied."""
    return Draft.of([[int(token) for token in tokens] for tokens in drafts], device)


def pad_trees(drafts: abc.Sequence[tuple[list[int], list[int]]]) -> Draft:
    """A deterministic ``Draft`` of ragged trees: the tokens of each row, and their parents."""
    draft = pad([tokens for tokens, _ in drafts])
    _, longest = draft.shape
    parents = [tree + [-1] * (longest - len(tree)) for _, tree in drafts]
    parents_BK = torch.tensor(parents, dtype=torch.int64).reshape(len(drafts), longest)
    return Draft(draft.tokens_BK, draft.lengths_B, parents_BK=parents_BK)


class Piece(NamedTuple):
    """What is proposed for one row, without padding."""

    tokens: list[int]
    parents: list[int] | None = None  # None is a chain
    probs_NV: torch.Tensor | None = None  # that each was drawn from; None = deterministic


def pieces_of(draft: Draft) -> list[Piece]:
    """A draft row by row."""
    probs_BKV = draft.probs_BKV
    return [
        Piece(
            tokens,
            None if draft.trees is None else draft.trees[b],
            None if probs_BKV is None else probs_BKV[b, : len(tokens)],
        )
        for b, tokens in enumerate(draft.chains)
    ]


def together(pieces: abc.Sequence[Piece]) -> Draft:
    """One draft of several rows' pieces. If any is a tree, chains are trees of one path; if any was drawn, the others
    get one-hot distributions."""
    tokens = [piece.tokens for piece in pieces]
    draft = pad(tokens)
    if any(piece.parents is not None for piece in pieces):
        trees = [range(-1, len(piece.tokens) - 1) if piece.parents is None else piece.parents for piece in pieces]
        draft = pad_trees([(own, list(tree)) for own, tree in zip(tokens, trees)])
    drawn = next((piece.probs_NV for piece in pieces if piece.probs_NV is not None), None)
    if drawn is None:
        return draft
    probs_BKV = drawn.new_zeros(*draft.shape, drawn.shape[-1])
    for b, piece in enumerate(pieces):
        own_NV = probs_BKV[b, : len(piece.tokens)]
        if piece.probs_NV is None:
            own_NV.scatter_(1, upload(piece.tokens, drawn.device).unsqueeze(1), 1.0)
        else:
            own_NV.copy_(piece.probs_NV)
    return Draft(draft.tokens_BK, draft.lengths_B, probs_BKV, draft.parents_BK)
