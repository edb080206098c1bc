"""The small values that pass between the parts of an engine. Knows nothing of models, files, HTTP or ranks.

Shape legend: B rows, K longest draft, N selected positions, J positions of a row, R all positions, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fly.devices import on_host
from fly.ops import argmax, log_mass, one_hot, pick, sent, top, vectors_at
from fly.params import SamplingParams, StructuredOutput

__all__ = [
    "IMPOSSIBLE",
    "UNDECIDED",
    "Account",
    "Decision",
    "Draft",
    "Guarantee",
    "LazyDistribution",
    "LazyDraft",
    "Mismatch",
    "Noise",
    "SamplingParams",
    "StructuredOutput",
    "Target",
    "Verdict",
    "Why",
]


class Guarantee(Enum):
    """What an acceptance policy promises about the distribution of the emitted text."""

    LOSSLESS = "lossless"  # exactly the target's processed distribution
    BOUNDED = "bounded"  # within a stated divergence of it
    HEURISTIC = "heuristic"  # no stated bound

    def __str__(self) -> str:
        return self.value


class Why(IntEnum):
    """Why a token was kept, or rejected. A number that prints as its name."""

    REJECTED = 0  # drafted, and not emitted
    MATCH = 1  # drafted, kept by the lossless core
    RELAXED = 2  # drafted, a mismatch that the policy excused
    CORRECTION = 3  # the target's own, in place of the first rejected token
    BONUS = 4  # the target's own, after a draft that was kept completely

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        as_number = spec[-1:].isalpha() and spec[-1] != "s"  # such as "d"
        return format(int(self) if as_number else self.name, spec)


@dataclass(frozen=True)
class Draft:
    """What a strategy proposes for a batch, right-padded: chains of tokens, or trees.

    In a tree, ``parents_BK`` has for every token the number of the token that it follows (smaller than its own), or -1
    for the row's last token. Siblings stand in the order in which they are tried; siblings of a deterministic draft are
    different tokens. In chains each token follows the one before.
    """

    tokens_BK: Tensor  # int64
    lengths_B: Tensor  # int64, 0..K
    probs_BKV: Tensor | None = None  # the *processed* distribution each token was drawn from; None = deterministic
    parents_BK: Tensor | None = None  # int64; None = chains
    # The draft model's raw logits at each token's place, at every temperature. None unless a rule reads them
    # (``AcceptancePolicy.reads``), and for drafts that no model makes.
    logits_BKV: Tensor | None = None

    @staticmethod
    def empty(rows: int, device: torch.device | str = "cpu") -> Draft:
        """Make a draft of no tokens for each of ``rows`` rows."""
        return Draft.of([[] for _ in range(rows)], device)

    @staticmethod
    def of(chains: list[list[int]], device: torch.device | str = "cpu") -> Draft:
        """Make a deterministic draft from each row's tokens."""
        return ListedDraft(chains).to(torch.device(device))

    @property
    def shape(self) -> tuple[int, int]:
        """(B, K): the number of rows, and the longest draft with its padding."""
        rows, longest = self.tokens_BK.shape
        return rows, longest

    @cached_property
    def chains(self) -> list[list[int]]:
        """The tokens of each row, without padding. Copied to the host once."""
        return [tokens[:n] for tokens, n in zip(self.tokens_BK.tolist(), self.lengths_B.tolist())]

    @cached_property
    def trees(self) -> list[list[int]] | None:
        """The parents of each row's tokens; None for chains. Copied to the host once."""
        if self.parents_BK is None:
            return None
        return [tree[: len(tokens)] for tree, tokens in zip(self.parents_BK.tolist(), self.chains)]

    def rows(self, index_B: Tensor, numbers: list[int] | None = None) -> Draft:
        """Select rows by their numbers, ``index_B`` (int64), or also as a list ``numbers`` if the caller has it."""
        rows = self._each(lambda column: column[index_B])
        if numbers is not None:
            rows.__dict__.update({name: [values[b] for b in numbers] for name, values in self._known().items()})
        return rows

    def lend_logits(self, part: Draft, change: Callable[[Tensor], Tensor]) -> Draft:
        """Return ``part``, tokens of this draft, with their logits, if it has any: ``change`` selects them."""
        return part if self.logits_BKV is None else replace(part, logits_BKV=change(self.logits_BKV))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Draft:
        """Return a draft of changed columns."""
        parts = (None if part is None else change(part) for part in (self.probs_BKV, self.parents_BK))
        return self.lend_logits(Draft(change(self.tokens_BK), change(self.lengths_B), *parts), change)

    def _known(self) -> dict[str, list[list[int]]]:
        """Return the columns that exist as lists."""
        return {name: self.__dict__[name] for name in ("chains", "trees") if self.__dict__.get(name) is not None}

    def to(self, device: torch.device) -> Draft:
        """Copy to ``device``: a strategy and the target may be on different devices."""
        if self.tokens_BK.device == torch.device(device):
            return self
        moved = self._each(lambda column: sent(column, device))
        moved.__dict__.update(self._known())
        return moved

    def own_probs_BK(self) -> Tensor:
        """Return the probability with which each token was drafted, [B, K]: 1 for a deterministic draft. Never 0, even
        on padding."""
        if self.probs_BKV is None:
            return torch.ones_like(self.tokens_BK, dtype=torch.float32)
        return pick(self.probs_BKV, self.tokens_BK).clamp_min(torch.finfo(self.probs_BKV.dtype).tiny)

    def mask_BK(self) -> Tensor:
        """Return where a token was drafted, bool [B, K]; False on padding."""
        columns_K = torch.arange(self.tokens_BK.shape[1], device=self.tokens_BK.device)
        return columns_K < self.lengths_B.unsqueeze(1)


class ListedDraft(Draft):
    """Deterministic chains as lists on the host, which become tensors when they are first used: for a small model,
    making tensors takes longer than using them. A copy with other columns (``dataclasses.replace``) is a plain
    ``Draft``."""

    def __new__(cls, chains: list[list[int]] | None = None, **columns: Any) -> Any:
        return Draft(**columns) if columns else object.__new__(cls)

    def __init__(self, chains: list[list[int]]) -> None:
        self.__dict__["chains"] = chains

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.chains), max(map(len, self.chains), default=0)

    @cached_property
    def tokens_BK(self) -> Tensor:
        _, longest = self.shape
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in self.chains]
        return torch.tensor(padded, dtype=torch.int64).reshape(self.shape)

    @cached_property
    def lengths_B(self) -> Tensor:
        return torch.tensor([len(tokens) for tokens in self.chains], dtype=torch.int64)

    def to(self, device: torch.device) -> Draft:
        return self if on_host(device) else super().to(device)


class _ReadLogits:
    def __get__(self, draft: Any, kind: type) -> Tensor | None:
        return None if draft is None else draft.read_logits()


@dataclass(frozen=True, eq=False)
class LazyDraft(Draft):
    """A draft whose logits ``read_logits`` returns, whenever they are read.

    They are no field, so that ``dataclasses.replace`` does not read them. What is made of the draft without them (a
    copy with other columns, selected rows, a draft on another device) is lazy too. A copy with logits of its own is a
    plain ``Draft``.
    """

    logits_BKV: ClassVar[Any] = _ReadLogits()  # type: ignore[misc]
    read_logits: Callable[[], Tensor | None] = field(default=lambda: None, kw_only=True)

    def __new__(cls, *columns: Any, **named: Any) -> Any:
        if "logits_BKV" not in named and len(columns) < 5:
            return object.__new__(cls)
        named.pop("read_logits", None)
        return Draft(*columns, **named)

    @staticmethod
    def of_columns(draft: Draft, read_logits: Callable[[], Tensor | None]) -> LazyDraft:
        """Make a lazy draft of the other columns of ``draft``."""
        lazy = LazyDraft(draft.tokens_BK, draft.lengths_B, draft.probs_BKV, draft.parents_BK, read_logits=read_logits)
        lazy.__dict__.update(draft._known())
        return lazy

    def lend_logits(self, part: Draft, change: Callable[[Tensor], Tensor]) -> Draft:
        def read() -> Tensor | None:
            logits_BKV = self.read_logits()
            return None if logits_BKV is None else change(logits_BKV)

        return LazyDraft.of_columns(part, read)


class LazyDistribution(Protocol):
    """A processed distribution [B, K+1, V] that is computed only where it is read
    (``fly.runner.sampling.ProcessedDistribution``)."""

    def dense(self) -> Tensor:
        """Return the whole distribution, [B, K+1, V]."""

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Return the distribution at single positions, [N, V]."""

    def of(self, tokens_BK: Tensor) -> Tensor:
        """Return the probability of token j at position j, [B, K]."""

    def top(self, n: int) -> Tensor:
        """Return the largest probabilities at each position, largest first, [B, K+1, min(n, V)]."""

    def rows(self, index_B: Tensor) -> LazyDistribution:
        """Select rows by their numbers, int64."""


class Target:
    """The target's output for a block: at position j, the distribution of the next token given the draft before it.

    ``probs_BKV`` needs several passes over the vocabulary: use ``probs_of``, ``top_probs`` or ``probs_at`` where they
    are enough. ``all_greedy`` tells whether all rows are at temperature 0, and ``some_greedy`` whether some may be. To
    read these two copies nothing from the device.

    Args:
        logits_BKV: [B, K+1, V] float32, the raw logits, with -inf for banned tokens.
        probs: the distribution after temperature, top-k, top-p and min-p (one-hot at temperature 0), as a tensor [B,
            K+1, V] or a ``LazyDistribution``; None builds the one-hot distribution.
        greedy_B: [B] bool, rows at temperature 0; None means all where ``probs`` is None, and none otherwise.
        control_V: [V] bool, end-of-sequence, end-of-turn and other control tokens; None for none.
        generated_B, relaxed_B, nats_B: [B], for each row the number of tokens emitted so far, how many of them were
            relaxed (int64), and the sum of -ln target(x) over the relaxed ones (float32). Tensors, or functions that
            build them when a rule first asks; None for zero.
        spent: a function that takes a budget's label (``fly.policies.CostBudget``), and returns what the relaxed tokens
            of each row have cost so far; None for zero.
        relaxed_at: for each row, the positions of its relaxed tokens in its text (``history``), ascending; or a
            function that returns them; None for no relaxed tokens.
        history: the tokens of each row before this block, its prompt included; or a function that returns them; None
            if unknown.
        choices: ``argmax_BK`` as lists, if the caller has it. The backend has then checked that no logit is NaN.
    """

    def __init__(
        self,
        logits_BKV: Tensor,
        probs: Tensor | LazyDistribution | None = None,
        *,
        greedy_B: Tensor | None = None,
        control_V: Tensor | None = None,
        generated_B: Tensor | Callable[[], Tensor] | None = None,
        relaxed_B: Tensor | Callable[[], Tensor] | None = None,
        nats_B: Tensor | Callable[[], Tensor] | None = None,
        spent: Callable[[str], Tensor] | None = None,
        relaxed_at: list[list[int]] | Callable[[], list[list[int]]] | None = None,
        history: list[list[int]] | Callable[[], list[list[int]] | None] | None = None,
        choices: list[list[int]] | None = None,
    ) -> None:
        self.logits_BKV = logits_BKV
        self._probs = probs
        self._greedy = greedy_B
        self.all_greedy = probs is None
        self.some_greedy = probs is None or greedy_B is not None
        self.control_V = control_V
        self._history = history
        self._generated = generated_B
        self._relaxed = relaxed_B
        self._nats = nats_B
        self._spent = spent
        self._relaxed_at = relaxed_at
        if choices is not None:
            self.__dict__["choices"] = choices
        self.has_no_nan = choices is not None  # False: nobody has checked

    @property
    def lazy_distribution(self) -> LazyDistribution | None:
        """The processed distribution, if it is lazy; else None."""
        return None if self._probs is None or isinstance(self._probs, Tensor) else self._probs

    @cached_property
    def greedy_B(self) -> Tensor:
        """[B] bool, rows at temperature 0."""
        if self._greedy is not None:
            return self._greedy
        rows, device = self.logits_BKV.shape[0], self.logits_BKV.device
        return torch.full((rows,), self.all_greedy, dtype=torch.bool, device=device)

    @cached_property
    def argmax_BK(self) -> Tensor:
        """[B, K+1] int64, the target's most likely token at each position (the lowest id among equals)."""
        choices = self.__dict__.get("choices")
        return argmax(self.logits_BKV) if choices is None else torch.tensor(choices, device=self.logits_BKV.device)

    def allowed(self, tokens_BK: Tensor) -> Tensor:
        """Return where token j is not banned at position j, bool [B, K]. A banned token has a logit of -inf. An end
        token before ``min_tokens``, for instance, is banned. No rule excuses a banned token."""
        return pick(self.logits_BKV[:, : tokens_BK.shape[1]], tokens_BK) > -torch.inf

    @cached_property
    def choices(self) -> list[list[int]]:
        """``argmax_BK`` as lists. Copied to the host once."""
        tokens: list[list[int]] = self.argmax_BK.tolist()
        return tokens

    @property
    def probs_BKV(self) -> Tensor:
        """[B, K+1, V], the processed distribution. Built on first use."""
        if self._probs is None:
            self._probs = one_hot(self.logits_BKV, self.argmax_BK)
        elif not isinstance(self._probs, Tensor):
            self._probs = self._probs.dense()
        return self._probs

    def probs_of(self, tokens_BK: Tensor) -> Tensor:
        """Return the processed distribution's probability of token j at position j (given the tokens before it),
        [B, K]."""
        if self._probs is None:
            return (self.argmax_BK[:, : tokens_BK.shape[1]] == tokens_BK).to(self.logits_BKV.dtype)
        if isinstance(self._probs, Tensor):
            return pick(self._probs[:, : tokens_BK.shape[1]], tokens_BK)
        return self._probs.of(tokens_BK)

    def probs_at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Return the processed distribution at position ``positions_N`` of row ``rows_N`` (int64), [N, V]."""
        if self._probs is None or isinstance(self._probs, Tensor):
            return vectors_at(self.probs_BKV, rows_N, positions_N)
        return self._probs.at(rows_N, positions_N)

    def top_probs(self, n: int) -> Tensor:
        """Return the largest probabilities of the processed distribution at each position, largest first,
        [B, K+1, min(n, V)]."""
        if self._probs is None or isinstance(self._probs, Tensor):
            return top(self.probs_BKV, n).values
        return self._probs.top(n)

    def log_mass(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Return ln of the sum of exp(logit - largest logit) over the vocabulary, [N]: minus the log-probability of the
        most likely token in the raw distribution."""
        logits_RV, positions = self.logits_BKV.flatten(0, 1), self.logits_BKV.shape[1]
        peak_N = self.logits_BKV[rows_N, positions_N, self.argmax_BK[rows_N, positions_N]]
        return log_mass(logits_RV, peak_N, at_N=rows_N * positions + positions_N)

    def nats_of(self, tokens: list[tuple[int, int, int]]) -> list[float]:
        """Return -ln target(token) in the raw distribution for tokens given as (row, position, id). Copies to the
        host."""
        b_N, positions_N, token_N = torch.tensor(tokens, device=self.logits_BKV.device).unbind(1)
        log_NV = vectors_at(self.logits_BKV, b_N, positions_N).log_softmax(-1)
        nats: list[float] = (-pick(log_NV, token_N)).tolist()
        return nats

    @cached_property
    def generated_B(self) -> Tensor:
        """[B] int64, how many tokens each row has emitted before this block."""
        return self._column(self._generated, torch.int64)

    @cached_property
    def relaxed_B(self) -> Tensor:
        """[B] int64, how many of these tokens were relaxed."""
        return self._column(self._relaxed, torch.int64)

    @cached_property
    def nats_B(self) -> Tensor:
        """[B] float32, the sum of -ln target(x) over the relaxed tokens: the cost of relaxing so far."""
        return self._column(self._nats, torch.float32)

    @cached_property
    def history(self) -> list[list[int]] | None:
        """The tokens of each row before this block, its prompt included; None if unknown."""
        return self._history() if callable(self._history) else self._history

    @cached_property
    def relaxed_at(self) -> list[list[int]]:
        """For each row, the positions of its relaxed tokens in its text, ascending. They count from 0 at the prompt's
        first token, so ``history[b][position]`` is the token."""
        if self._relaxed_at is None:
            return [[] for _ in range(self.logits_BKV.shape[0])]
        return self._relaxed_at() if callable(self._relaxed_at) else self._relaxed_at

    def spent(self, label: str) -> Tensor:
        """Return the cost of the relaxed tokens so far by the budget with this label (``Condition.label``), [B]
        float32."""
        return self._column(None if self._spent is None else self._spent(label), torch.float32)

    def _column(self, value: Tensor | Callable[[], Tensor] | None, dtype: torch.dtype) -> Tensor:
        if value is None:
            return torch.zeros(self.logits_BKV.shape[0], dtype=dtype, device=self.logits_BKV.device)
        return value() if callable(value) else value

    def rows(self, index_B: Tensor, numbers: list[int] | None = None) -> Target:
        """Select rows by their numbers, ``index_B`` (int64), or also as a list ``numbers`` if the caller has it."""
        probs = self._probs
        if probs is not None:
            probs = probs[index_B] if isinstance(probs, Tensor) else probs.rows(index_B)
        rows = self.about(index_B, self.logits_BKV[index_B], probs, numbers)
        # Once a one-hot distribution has been built, ``about`` cannot tell that all rows are greedy.
        rows.all_greedy = self.all_greedy
        rows.some_greedy = self.some_greedy
        rows.has_no_nan = self.has_no_nan
        return rows

    def about(
        self,
        rows_N: Tensor,
        logits_NJV: Tensor,
        probs: Tensor | LazyDistribution | None,
        numbers: list[int] | None = None,
    ) -> Target:
        """Return a ``Target`` for other positions of the same rows. Its row n is row ``rows_N[n]`` (int64) of this
        one."""

        def of_rows(values: list[list[int]]) -> list[list[int]]:
            return [values[b] for b in (rows_N.tolist() if numbers is None else numbers)]

        return Target(
            logits_NJV,
            probs,
            greedy_B=self.greedy_B[rows_N] if self.some_greedy else None,
            control_V=self.control_V,
            generated_B=lambda: self.generated_B[rows_N],
            relaxed_B=lambda: self.relaxed_B[rows_N],
            nats_B=lambda: self.nats_B[rows_N],
            spent=lambda label: self.spent(label)[rows_N],
            relaxed_at=lambda: of_rows(self.relaxed_at),
            history=lambda: None if self.history is None else of_rows(self.history),
        )


@dataclass(frozen=True)
class Noise:
    """Randomness as data: uniforms in [0, 1), drawn once for each row, from the row's own seed."""

    accept_BK: Tensor  # the coin of each drafted token
    sample_B: Tensor  # draws the correction or the bonus

    def rows(self, index_B: Tensor) -> Noise:
        """Select rows by their numbers, int64."""
        return Noise(self.accept_BK[index_B], self.sample_B[index_B])


UNDECIDED = -1  # the next token, if it depends on a NaN
IMPOSSIBLE = -2  # the next token, if a rule kept more tokens than were drafted, or chose one that does not exist


@dataclass(frozen=True)
class Verdict:
    """The decision on a block: which tokens are kept, and what follows them.

    ``asked_BK`` marks the mismatches that decided the block: those in the accepted path, and those tried after it.
    ``clauses`` has the conditions of a relaxation by their labels, and where each held ([B, K] bool, valid at least at
    ``asked_BK``); it is empty if no condition was asked.
    """

    accepted_B: Tensor  # int64, the length of the accepted prefix (in a tree: of the accepted path)
    next_token_B: Tensor  # int64, the correction, or the bonus after a draft that was kept completely; or below 0
    why_BK: Tensor  # int8, a ``Why`` for each drafted token
    asked_BK: Tensor  # bool
    clauses: dict[str, Tensor] = field(default_factory=dict)
    path_BK: Tensor | None = None  # in a tree, the numbers of the tokens of the accepted path; None = 0, 1, 2, ...

    def paths(self) -> list[list[int]]:
        """Return the numbers of the drafted tokens that are kept, in order, for each row. Copies to the host."""
        accepted = self.accepted_B.tolist()
        if self.path_BK is None:
            return [list(range(n)) for n in accepted]
        return [path[:n] for path, n in zip(self.path_BK.tolist(), accepted)]


class Mismatch(NamedTuple):
    """A drafted token that the exact rule rejects, and that decided the block: either it was relaxed, or the policy's
    relaxation was asked about it."""

    node: int  # its number in the draft
    relaxed: bool  # whether it was kept
    held: Mapping[str, bool]  # whether each condition of the relaxation held, by its label
    nats: float  # of a relaxed token: -ln target(token) in the raw distribution
    costs: Mapping[str, float] = {}  # of a relaxed token: its cost by each budget of the rule, by its label


@dataclass
class Account:
    """What the relaxed tokens of a text have cost so far.

    Attributes:
        relaxed: how many there are.
        nats: sum of -ln target(x) over them, of the unprocessed distribution.
        spent: their cost under each budget of the rule (``fly.policies.CostBudget``), by its label.
    """

    relaxed: int = 0
    nats: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def charge(self, token: Mismatch) -> None:
        """Add a relaxed token."""
        self.relaxed += 1
        self.nats += token.nats
        for label, cost in token.costs.items():
            self.spent[label] = self.cost(label) + cost

    def cost(self, label: str) -> float:
        """Return the cost under the budget with this label."""
        return self.spent.get(label, 0.0)


class Decision(NamedTuple):
    """The decision on one row's block as plain values: the same from tensors, the host and compiled code."""

    drafted: list[int]
    path: abc.Sequence[int]  # numbers of the kept drafted tokens, in order; in a chain 0, 1, 2, ...
    next_token: int  # negative if UNDECIDED or IMPOSSIBLE
    bonus: bool  # whether no drafted token follows the path; otherwise the next token is a correction
    choices: list[int]  # the target's most likely token after the row, and after each drafted token
    mismatches: abc.Sequence[Mismatch] = ()

    @property
    def end(self) -> int:
        """The place where the path ends: 0 after the row, node + 1 after a drafted token."""
        return self.path[-1] + 1 if len(self.path) else 0
