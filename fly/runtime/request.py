"""One request: its tokens so far, why each was kept, and what speculation did for it. Knows nothing of models."""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from fly.policies.base import AcceptancePolicy
from fly.types import SamplingParams, Why

__all__ = ["BadWords", "Form", "Gate", "Sequence", "Stats", "Token", "by_policy", "common_prefix"]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix of two token lists."""
    shorter = min(len(a), len(b))
    # the usual case, at C speed, without a copy of the one that is a prefix
    if (a if len(a) == shorter else a[:shorter]) == (b if len(b) == shorter else b[:shorter]):
        return shorter
    # They usually differ near the end: everything before is compared at C speed as well.
    start, window = shorter, 32
    while start and a[:start] != b[:start]:
        start, window = max(shorter - window, 0), 8 * window
    return next(i for i in range(start, shorter) if a[i] != b[i])


@dataclass(frozen=True)
class BadWords:
    """Sequences of tokens that must not appear, found by the last token of a text."""

    words: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def _always(self) -> set[int]:
        return {word[0] for word in self.words if len(word) == 1}

    @cached_property
    def _after(self) -> dict[int, list[tuple[list[int], int]]]:
        found: dict[int, list[tuple[list[int], int]]] = {}
        for *start, last in self.words:
            if start:
                found.setdefault(start[-1], []).append((start, last))
        return found

    def __bool__(self) -> bool:
        return bool(self.words)

    def next(self, text: list[int]) -> list[int]:
        """The tokens that must not follow ``text``, each once."""
        started = self._after.get(text[-1], ()) if text else ()
        return sorted(self._always.union(last for start, last in started if text[-len(start) :] == start))


class Form(Protocol):
    """The form that an output must have, followed token by token (``fly.runtime.structured.Matcher``)."""

    def constrain(
        self,
        logits_JV: Tensor,
        text: list[int],
        draft: list[int],
        parents: abc.Sequence[int],
        raw_JV: Tensor | None = None,
        numbers: abc.Callable[[list[int] | Tensor], Tensor] | None = None,
    ) -> None:
        """Ban (-inf), in place, what may not follow ``text`` and each drafted token."""

    def masks(
        self, text: list[int], draft: list[int], parents: abc.Sequence[int] | None = None
    ) -> dict[int, bytearray]:
        """What may follow ``text``, at 0, and each drafted token j, at j + 1, unless that is forbidden or comes after
        one that is: a bit a token. ``parents`` as in ``Draft``."""

    def check(self, place: int) -> None:
        """Raise ``ValueError`` if the text that is kept up to ``place`` of the last draft cannot go on."""

    def fresh(self) -> Form:
        """The same form, at its start."""

    def close(self) -> None:
        """Free what it holds; it is not asked again."""


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
    """What one clause of a relaxation did: at how many mismatches it was ``asked``, and how often it ``passed``. It
    *decided* a mismatch if its opposite answer would have changed the outcome: ``excused`` counts tokens that were kept
    because it held, ``refused`` those that were rejected because it alone did not."""

    asked: int = 0
    passed: int = 0
    excused: int = 0
    refused: int = 0


@dataclass(repr=False)
class Stats:
    """What speculation did for one request (or, added up, for many).

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached: how many of them were in the cache already, from other requests.
        preempted: how often it had to make room for others and start again from its tokens.
        generated: tokens of the output.
        rounds: target forwards after the prompt's.
        emitted: tokens that rounds emitted: all but the first, which the prompt's forward gives.
        drafted: drafted tokens that the target verified.
        accepted: how many of them were emitted.
        relaxed: how many of these the relaxed rule alone kept.
        nats: sum of -ln target(x) over the relaxed tokens, of the unprocessed distribution.
        gates: what each clause of a relaxation did, by its text (``Gate``).
        layers: of the target, that all rounds went through, where it leaves early (``LLM(exits=...)``); else 0.
        spent: what the relaxed tokens cost by each budget of the rule (``fly.policies.CostBudget``), by its text.
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
    relaxed: int = 0
    nats: float = 0.0
    gates: dict[str, Gate] = field(default_factory=dict)
    layers: int = 0
    spent: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """The counts that are not 0."""
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
        """Note the clauses' answers at a mismatch (``held``), or at ``times`` equal ones, whether it was ``excused``,
        and which clauses decided it (``Condition.deciding``)."""
        for name, passed in held.items():
            gate = self.gates.setdefault(name, Gate())
            gate.asked += times
            gate.passed += times * passed
            if name in turns:
                gate.excused += times * excused
                gate.refused += times * (not excused)

    def __add__(self, other: Stats) -> Stats:
        gates = {name: replace(gate) for name, gate in self.gates.items()}
        for name, gate in other.gates.items():
            gates[name] = gates.get(name, Gate()) + gate
        return Stats(
            self.prompt_tokens + other.prompt_tokens,
            self.cached + other.cached,
            self.preempted + other.preempted,
            self.generated + other.generated,
            self.rounds + other.rounds,
            self.emitted + other.emitted,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.relaxed + other.relaxed,
            self.nats + other.nats,
            gates,
            self.layers + other.layers,
            {
                label: self.spent.get(label, 0.0) + other.spent.get(label, 0.0)
                for label in {**self.spent, **other.spent}
            },
        )


_ids = itertools.count()


@dataclass(eq=False)
class Sequence:
    """One request in flight: its tokens so far, and everything that decides how it goes on.

    ``tokens`` is the truth that every cache is rolled back to. A strategy that speculates further works on a
    ``fork``, which shares the ``id`` (and so the caches) but not the list.
    """

    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    policy: AcceptancePolicy
    seed: int
    k: int
    stop_ids: frozenset[int] = frozenset()  # tokens that end it: end-of-sequence and the request's own
    id: int = field(default_factory=lambda: next(_ids))
    provenance: list[Token] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)  # from the first that was asked for on
    stats: Stats = field(default_factory=Stats)
    drafts: list[tuple[int, int]] = field(default_factory=list)  # per round with a draft: drafted, kept
    finish_reason: str | None = None
    bad: BadWords = field(default_factory=BadWords)
    priority: int = 0  # smaller goes first
    client: str = ""  # its client: clients share the engine
    draft: str = ""  # the name of the strategy that drafts for it, if there are several; empty: the first
    parent: Sequence | None = None  # has the same prompt, and prefills it for both
    error: Exception | None = None  # the error that ended it, if any
    matcher: Form | None = None  # for the form of its output; forks share it, since it follows their tokens

    @property
    def generated(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing."""
        return self.params.prompt_logprobs is not None and self._next_score < self.prompt_length

    @property
    def _next_score(self) -> int:
        return max(1, self.params.prompt_logprobs_start) + len(self.prompt_logprobs)

    def scored(self, start: int, count: int) -> range:
        """The prompt tokens that are scored by the model's output after ``count`` tokens from ``start`` on."""
        first = self._next_score if self.scores else self.prompt_length
        return range(max(first, start + 1), min(start + count + 1, self.prompt_length))

    @property
    def shareable(self) -> int:
        """The number of tokens that need not be fed if they are cached, as no model output after them is needed."""
        return min(self._next_score, len(self.tokens)) - 1 if self.scores else len(self.tokens) - 1

    def sample(self, seed: int) -> Sequence:
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
            stats=replace(self.stats, gates={}, spent={}),
            matcher=None if self.matcher is None else self.matcher.fresh(),
        )

    def fork(self, policy: AcceptancePolicy, seed: int) -> Sequence:
        """Make a scratch copy with the same id, to speculate with another policy and another seed."""
        scratch = copy(self)  # a level does this every round, and ``replace`` takes four times as long
        scratch.tokens, scratch.policy, scratch.seed = list(self.tokens), policy, seed
        scratch.provenance, scratch.logprobs, scratch.drafts = [], [], []
        scratch.stats, scratch.finish_reason = Stats(), None
        return scratch


def by_policy(rows: abc.Sequence[Sequence]) -> dict[AcceptancePolicy, list[int]]:
    """Return the row numbers of each policy."""
    groups: dict[AcceptancePolicy, list[int]] = {}
    for b, row in enumerate(rows):
        groups.setdefault(row.policy, []).append(b)
    return groups
