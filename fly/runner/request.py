"""One request: its tokens so far, why each was kept, and statistics of its speculation. Knows nothing of models."""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

from fly.policies.base import AcceptancePolicy
from fly.types import Account, SamplingParams, Why

if TYPE_CHECKING:
    from fly.runner.structured import Matcher

__all__ = [
    "BadWords",
    "Gate",
    "Row",
    "Stats",
    "Token",
    "by_policy",
    "most_drafted",
]


@dataclass(frozen=True)
class BadWords:
    """Sequences of tokens that must not appear in a text."""

    words: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def _starts(self) -> dict[int | None, list[tuple[list[int], int]]]:
        """The bad words, each as its tokens before the last one, and the last one. The key is the last token but one
        (None: the word has a single token)."""
        starts: dict[int | None, list[tuple[list[int], int]]] = {}
        for *start, last in self.words:
            starts.setdefault(start[-1] if start else None, []).append((start, last))
        return starts

    def __bool__(self) -> bool:
        return bool(self.words)

    def next(self, text: list[int]) -> list[int]:
        """Return the tokens that must not follow ``text``, each once."""
        begun = [pair for token in (None, *text[-1:]) for pair in self._starts.get(token, ())]
        return sorted({last for start, last in begun if text[len(text) - len(start) :] == start})


class Token(NamedTuple):
    """Provenance of one emitted token.

    Attributes:
        id: the token.
        why: why it was kept.
        clause: for a relaxed token, the conditions that excused it.
        target_choice: the target's most likely token there.
        prob: with ``SamplingParams.explain``, the target's probability of the token (unprocessed, as the next two).
        choice_prob: the target's probability of its own choice.
        entropy: the target's entropy, in nats.
    """

    id: int
    why: Why
    clause: str | None = None
    target_choice: int | None = None
    prob: float | None = None
    choice_prob: float | None = None
    entropy: float | None = None


@dataclass
class Summed:
    """Numbers that add up field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass
class Gate(Summed):
    """What one clause of a relaxation did: at how many mismatches it was ``asked``, and how often it held (``passed``).
    It *decided* a mismatch if the opposite answer would have changed the outcome. ``excused`` counts tokens that were
    kept because the clause held, ``refused`` those that were rejected because it alone did not hold."""

    asked: int = 0
    passed: int = 0
    excused: int = 0
    refused: int = 0


@dataclass(repr=False)
class Stats(Account):
    """Statistics of one request, or the sums over several.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached: how many of them were in the cache already, from other requests.
        preempted: how often the request made room for others and started again from its tokens.
        generated: tokens of the output.
        rounds: target forwards after the prompt's.
        emitted: tokens that rounds emitted: all but the first, which the prompt's forward gives.
        drafted: drafted tokens that the target verified.
        accepted: how many of them were emitted.
        relaxed, nats, spent: how many of these the relaxed rule alone kept, and what they cost (``fly.types.Account``).
        gates: what each clause of a relaxation did, by its text (``Gate``).
        tau: mean number of tokens that a round emits.
        acceptance_rate: share of drafted tokens that were emitted.
        silent_gates: clauses that never held.
    """

    prompt_tokens: int = 0
    cached: int = 0
    preempted: int = 0
    generated: int = 0
    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    gates: dict[str, Gate] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the counts that are not 0."""
        shown = {name: value for name, value in vars(self).items() if value} | {"tau": round(self.tau, 2)}
        if self.gates:
            shown["gates"] = list(self.gates)
        return f"Stats({', '.join(f'{name}={value}' for name, value in shown.items())})"

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens emitted per target forward, at most K+1; 0 before the first round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that were emitted; 0 if none was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def silent_gates(self) -> list[str]:
        """Clauses that were asked at least 20 times and never held: a gate that never opens relaxes nothing."""
        return [name for name, gate in self.gates.items() if gate.asked >= 20 and not gate.passed]

    def count_gates(self, held: Mapping[str, bool], excused: bool, turns: Collection[str], times: int = 1) -> None:
        """Count the clauses' answers (``held``) at ``times`` equal mismatches.

        Args:
            excused: whether the mismatches were excused.
            turns: the clauses that decided them (``Condition.deciding``).
        """
        for name, passed in held.items():
            gate = self.gates.setdefault(name, Gate())
            gate.asked += times
            gate.passed += times * passed
            if name in turns:
                gate.excused += times * excused
                gate.refused += times * (not excused)

    def __add__(self, other: Stats) -> Stats:
        clauses, budgets = {**self.gates, **other.gates}, {**self.spent, **other.spent}
        counts = {name: value + getattr(other, name) for name, value in vars(self).items() if name not in _BY_NAME}
        return Stats(
            **counts,
            gates={name: self.gates.get(name, Gate()) + other.gates.get(name, Gate()) for name in clauses},
            spent={name: self.cost(name) + other.cost(name) for name in budgets},
        )


_BY_NAME = "gates", "spent"  # fields of ``Stats`` that are no counts

_ids = itertools.count()


@dataclass(eq=False)
class Row:
    """One request in flight: its tokens so far, and everything that decides how it goes on.

    Every cache is rolled back to ``tokens``. A strategy that speculates further works on a ``fork``, which has the same
    ``id`` (and so the same caches) but its own list of tokens.
    """

    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    policy: AcceptancePolicy
    seed: int
    k: int
    stop_ids: frozenset[int] = frozenset()  # tokens that end it: end-of-sequence and the request's own
    id: int = field(default_factory=_ids.__next__)
    provenance: list[Token] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)  # from ``prompt_logprobs_start`` on
    stats: Stats = field(default_factory=Stats)
    relaxed_at: list[int] = field(default_factory=list)  # the positions of its relaxed tokens in ``tokens``, ascending
    drafts: list[tuple[int, int]] = field(default_factory=list)  # per round with a draft: drafted, kept
    finish_reason: str | None = None
    bad: BadWords = field(default_factory=BadWords)
    priority: int = 0  # smaller goes first
    client: str = ""  # who made the request: clients share the engine fairly
    draft: str = ""  # the name of the strategy that drafts for it; empty: the first, or the only one
    parent: Row | None = None  # has the same prompt, and prefills it for both
    error: Exception | None = None  # the error that ended it, if any
    matcher: Matcher | None = None  # for the form of its output; forks share it, since it follows their tokens
    on_token: Callable[[int], bool] | None = None  # is told each emitted token, in order; True ends the row there

    @property
    def generated(self) -> int:
        """Number of tokens emitted so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def greedy(self) -> bool:
        """Whether it is at temperature 0."""
        return self.params.temperature == 0

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing."""
        return self.params.prompt_logprobs is not None and self._next_score < self.prompt_length

    @property
    def _next_score(self) -> int:
        return max(1, self.params.prompt_logprobs_start) + len(self.prompt_logprobs)

    def scored(self, start: int, count: int) -> range:
        """Return which prompt tokens get log-probabilities when ``count`` tokens from ``start`` on are fed."""
        first = self._next_score if self.scores else self.prompt_length
        return range(max(first, start + 1), min(start + count + 1, self.prompt_length))

    @property
    def shareable(self) -> int:
        """How many first tokens may come from the cache, because no output of the model after them is needed."""
        return min(self._next_score, len(self.tokens)) - 1 if self.scores else len(self.tokens) - 1

    def sample(self, seed: int) -> Row:
        """Make another completion of the same request, before anything is generated."""
        return replace(
            self,
            id=next(_ids),
            parent=self,
            seed=seed,
            tokens=list(self.tokens),
            provenance=[],
            logprobs=[],
            prompt_logprobs=[],
            drafts=[],
            relaxed_at=[],
            stats=replace(self.stats, gates={}, spent={}),
            matcher=None if self.matcher is None else self.matcher.fresh(),
        )

    def fork(self, policy: AcceptancePolicy, seed: int) -> Row:
        """Make a scratch copy with the same id, to speculate with another policy and another seed."""
        scratch = copy(self)  # a cascade forks every round, and ``replace`` takes four times as long
        scratch.tokens = list(self.tokens)
        scratch.policy = policy
        scratch.seed = seed
        scratch.provenance = []
        scratch.logprobs = []
        scratch.drafts = []
        scratch.relaxed_at = []
        scratch.stats, scratch.finish_reason = Stats(), None
        return scratch


def most_drafted(k: int, left: int) -> int:
    """Return the most tokens to draft in a round for a row that drafts at most ``k`` and may still emit ``left``
    tokens: a round emits one token beyond its draft."""
    return max(0, min(k, left - 1))


def by_policy(rows: abc.Sequence[Row]) -> list[tuple[AcceptancePolicy, list[int]]]:
    """Return each policy with the numbers of its rows. Policies that hold the same are one object where requests are
    made (``LLM``), so they are told apart as objects here."""
    groups: dict[int, tuple[AcceptancePolicy, list[int]]] = {}
    for b, row in enumerate(rows):
        _, numbers = groups.setdefault(id(row.policy), (row.policy, []))
        numbers.append(b)
    return list(groups.values())
