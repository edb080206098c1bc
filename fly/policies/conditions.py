"""Conditions under which a policy excuses mismatches. They combine by ``&``, ``|`` and ``~``.

Shape legend: B rows, K longest draft, V vocabulary, N mismatches. Positions count from 0 here, and from 1 in papers.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fly.devices import on_host
from fly.errors import shorten
from fly.expressions import Amount, Checked, Count
from fly.ops import entropy, log_mass, top, upload, vectors_at
from fly.policies.binding import Bindable
from fly.types import Draft, Target

__all__ = ["AgreeingWindow", "Block", "Clause", "Condition", "ControlToken", "EntropyGate", "Past", "Room"]

T = TypeVar("T")
Entropy = Literal["top3", "normalized"]


@dataclass(frozen=True)
class Block:
    """The input of a condition."""

    target: Target
    draft: Draft
    agree_BK: Tensor  # bool; True where the lossless core keeps the token, False on padding
    clauses: dict[str, Tensor] = field(default_factory=dict)  # for each clause's label, where it held

    @property
    def columns_K(self) -> Tensor:
        """The positions 0, 1, ..., K - 1, int64 [K]."""
        return torch.arange(self.agree_BK.shape[1], device=self.agree_BK.device)

    def relaxed_since(self, marks_V: Tensor) -> Tensor:
        """Count the relaxed tokens at each position and before it, back to the last token of a set, int64 [B, K], as if
        all mismatches up to there were excused.

        A token of the set belongs to what it ends: the count starts anew after it. Without such a token, all relaxed
        tokens of the text so far count.

        Args:
            marks_V: bool, the tokens of the set, on any device (``Vocabulary.where`` makes one).

        Raises ``ValueError`` if the block does not know the text before it.
        """
        if self.target.history is None:
            raise ValueError("relaxed_since needs the text before the block, and this target does not say it")
        rows = list(zip(self.target.history, self.target.relaxed_at))
        tokens_BK = self.draft.tokens_BK
        marks_V = marks_V.to(tokens_BK.device)
        before = []
        for text, places in rows:
            since = len(text)
            if places:  # only what follows the first relaxed token matters
                ends_N = marks_V[upload(text[places[0] :], tokens_BK.device)].nonzero()
                since = places[0] + (int(ends_N[-1]) + 1 if len(ends_N) else 0)
            before.append(sum(place >= since for place in places))
        before_B1 = upload(before, tokens_BK.device).unsqueeze(1)
        # Before the first mark of the block, the count goes on from the text; after a mark it starts anew.
        total_BK = (~self.agree_BK).long().cumsum(-1)
        ended_BK = torch.where(marks_V[tokens_BK], total_BK, -before_B1).cummax(-1).values
        return total_BK - torch.cat([-before_B1, ended_BK], dim=1)[:, :-1]

    def at_mismatches(self, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Compute ``measure(rows_N, positions_N)`` [N] at mismatches, and return [B, K] with False or 0 elsewhere.

        Use it for conditions that read the whole vocabulary. A CPU reads only the mismatches. An accelerator reads
        every position, since listing the mismatches would make the host wait.

        Raises ``ValueError`` unless ``measure`` gives one value for each position.
        """
        rows_N, positions_N = self._read
        measured_N = measure(rows_N, positions_N)
        if not isinstance(measured_N, Tensor) or measured_N.shape != rows_N.shape:
            shape = list(rows_N.shape)
            raise ValueError(f"at_mismatches: measure gave {describe(measured_N)}, not a tensor [N] of {shape}")
        measured_BK = torch.zeros(self.agree_BK.shape, dtype=measured_N.dtype, device=self.agree_BK.device)
        return measured_BK.index_put_((rows_N, positions_N), measured_N)

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor]:
        """The rows and positions that ``at_mismatches`` reads, int64 [N] each."""
        (count, longest), device = self.agree_BK.shape, self.agree_BK.device
        if on_host(device):
            drafted_BK = np.arange(longest) < self.draft.lengths_B.numpy()[:, None]
            rows, positions = (~self.agree_BK.numpy() & drafted_BK).nonzero()
            return torch.from_numpy(rows), torch.from_numpy(positions)
        rows_N = torch.arange(count, device=device).repeat_interleave(longest)
        return rows_N, torch.arange(longest, device=device).repeat(count)


class Costs(Protocol):
    """What the relaxed tokens of a row have cost so far (``fly.types.Account``)."""

    @property
    def relaxed(self) -> int: ...
    @property
    def nats(self) -> float: ...
    def cost(self, label: str) -> float: ...


class Past(Protocol):
    """What a row has done before a block. ``Target`` describes the values."""

    @property
    def generated(self) -> int: ...
    @property
    def account(self) -> Costs: ...
    @property
    def history(self) -> list[int] | None: ...


Value = float | Callable[[Past], float] | Tensor


class Clause(NamedTuple):
    """A single condition, or a rule's gate, in the form that compiled code evaluates.

    ``kind`` and the names of ``values`` are those of a line in ``fly/backends/cpu/src/clauses.h``. A value is a number,
    a function that finds it in the row's past, or a set of tokens as a mask, bool [V].
    """

    kind: str
    values: Mapping[str, Value]
    negated: bool = False

    @staticmethod
    def of(kind: str, **values: Value) -> Clause:
        """Make a clause from its kind and its values."""
        return Clause(kind, values)


class Condition(Bindable, ABC):
    """A statement about each drafted token, true or false.

    A subclass is a frozen dataclass whose fields are its parameters, and it implements ``evaluate``. ``str`` gives the
    expression that builds the condition. ``name`` is its name in texts and configurations (default: the class name).
    ``monotone`` maps a parameter to +1 if the condition holds wherever it holds with a smaller value, and to -1 if it
    holds wherever it holds with a larger one; ``fly check`` tests it.
    """

    name: ClassVar[str]
    monotone: ClassVar[Mapping[str, int]] = {}

    @property
    def possible(self) -> bool:
        """Whether the condition can ever hold. If not, a policy relaxed by it is the same as its core."""
        return True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @abstractmethod
    def evaluate(self, block: Block) -> Tensor:
        """Return where the condition holds, bool [B, K]. Only values at mismatches matter."""

    @cached_property
    def label(self) -> str:
        """The condition's expression, which is its key in ``block.clauses``."""
        return str(self)

    def holds(self, block: Block) -> Tensor:
        """Call ``evaluate`` once per block, and record the result in ``block.clauses``.

        Raises ``ValueError`` unless the result is one bool per drafted token.
        """
        if self.label not in block.clauses:
            block.clauses[self.label] = self._evaluate_checked(block)
        return block.clauses[self.label]

    def _evaluate_checked(self, block: Block) -> Tensor:
        holds_BK, shape = self.evaluate(block), block.agree_BK.shape
        if not isinstance(holds_BK, Tensor) or holds_BK.dtype != torch.bool or holds_BK.shape != shape:
            raise ValueError(f"{self}: evaluate gave {describe(holds_BK)}, not a bool tensor [B, K] of {list(shape)}")
        return holds_BK

    @property
    def clauses(self) -> tuple[Condition, ...]:
        """The conditions whose results are recorded with this one: itself, or the leaves of a composite."""
        return (self,)

    @property
    def budgets(self) -> tuple[Any, ...]:
        """The budgets in this condition for which the engine records what relaxed tokens cost (``CostBudget``)."""
        return ()

    @cached_property
    def compiled(self) -> list[Clause] | None:
        """The condition for compiled code, as one clause for each of ``clauses``; ``table`` says what follows from
        them. None if only Python can evaluate it."""
        clause = self._compile() if self.compiles() else None
        return None if clause is None else [clause]

    @classmethod
    def compiles(cls) -> bool:
        """Whether compiled code may evaluate conditions of this class. An inherited ``_compile`` does not count, since
        a subclass may evaluate something else."""
        return "_compile" in vars(cls)

    def _compile(self) -> Clause | None:
        """Return this condition for compiled code; None: only Python can evaluate it."""
        return None

    @property
    def joins_all(self) -> bool:
        """Whether the condition holds just where all of its ``clauses`` do."""
        return True

    @cached_property
    def table(self) -> int | None:
        """What follows from the ``clauses``, as a number with a bit for each set of them. The set of clauses i, j, ...
        has bit 2^i + 2^j + ..., which is 1 if the condition holds where exactly these clauses hold. None if there are
        too many clauses for 64 bits."""
        labels = [clause.label for clause in self.clauses]
        if len(labels) > 6:
            return None
        table = 0
        for bits in range(2 ** len(labels)):
            outcomes = {label: bool(bits >> n & 1) for n, label in enumerate(labels)}
            table |= self.holds_given(outcomes) << bits
        return table

    def holds_given(self, held: Mapping[str, bool]) -> bool:
        """Return whether the condition holds for one token, given whether each clause holds for it."""
        return held[self.label]

    def deciding(self, held: Mapping[str, bool]) -> tuple[bool, frozenset[str]]:
        """Return whether the condition holds given ``held``, and the clauses that each alone would change the result
        by changing."""
        key = tuple(held.items())
        if (decision := self._deciding.get(key)) is None:
            outcome = self.holds_given(held)
            turns = (name for name, value in key if self.holds_given({**held, name: not value}) != outcome)
            decision = self._deciding[key] = outcome, frozenset(turns)
        return decision

    @cached_property
    def _deciding(self) -> dict[tuple[tuple[str, bool], ...], tuple[bool, frozenset[str]]]:
        return {}

    def __and__(self, other: Condition) -> Condition:
        return All((*_parts(self, All), *_parts(other, All))) if isinstance(other, Condition) else NotImplemented

    def __or__(self, other: Condition) -> Condition:
        return AnyOf((*_parts(self, AnyOf), *_parts(other, AnyOf))) if isinstance(other, Condition) else NotImplemented

    def __invert__(self) -> Condition:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} is neither true nor false by itself: combine conditions by '&', '|' and '~', not by "
            "'and', 'or' and 'not'"
        )

    def __str__(self) -> str:
        return expression(self, first=True)


def _parts(condition: Condition, kind: type[_Chain]) -> tuple[Condition, ...]:
    """Return the parts of a chain of this kind, or the condition itself as the only part. This keeps chains of one
    operator flat."""
    return condition.parts if isinstance(condition, kind) else (condition,)


class _Composite(Condition):
    """A condition made of other conditions. Only the results of its leaves are recorded."""

    @property
    def joins_all(self) -> bool:
        return False

    def holds(self, block: Block) -> Tensor:
        return self.evaluate(block)


@dataclass(frozen=True)
class _Chain(_Composite):
    """Conditions joined by one operator, which works on tensors and on truth values."""

    join: ClassVar[Callable[..., Any]]
    parts: tuple[Condition, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts () must hold at least one condition")
        # What a condition decided is found by its text, so the texts of different conditions must differ.
        clauses: dict[str, Condition] = {}
        for clause in self.clauses:
            if clauses.setdefault(clause.label, clause).keyed != clause.keyed:
                raise ValueError(
                    f"two different conditions are both written {clause.label!r}, and only that text tells apart what "
                    "they decide: give their class a parameter that differs, such as a name"
                )

    def _joined(self, value: Callable[[Condition], T]) -> T:
        return functools.reduce(self.join, map(value, self.parts))

    def evaluate(self, block: Block) -> Tensor:
        return self._joined(lambda part: part.holds(block))

    def holds_given(self, held: Mapping[str, bool]) -> bool:
        return self._joined(lambda part: part.holds_given(held))

    @property
    def possible(self) -> bool:
        return self._joined(lambda part: part.possible)

    @cached_property
    def clauses(self) -> tuple[Condition, ...]:
        return tuple(clause for part in self.parts for clause in part.clauses)

    @cached_property
    def budgets(self) -> tuple[Any, ...]:
        return tuple(budget for part in self.parts for budget in part.budgets)

    @cached_property
    def compiled(self) -> list[Clause] | None:
        clauses = [part.compiled for part in self.parts]
        return None if None in clauses else [clause for part in clauses for clause in part or ()]


@dataclass(frozen=True)
class All(_Chain):
    """Holds where every part holds."""

    name: ClassVar[str] = "all"
    join = operator.and_

    @cached_property
    def joins_all(self) -> bool:
        return all(part.clauses == (part,) for part in self.parts)

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, AnyOf) else str(part) for part in self.parts)


@dataclass(frozen=True)
class AnyOf(_Chain):
    """Holds where at least one part holds."""

    name: ClassVar[str] = "any"
    join = operator.or_

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))


@dataclass(frozen=True)
class Not(Condition):
    """Holds where its part does not. The negation of a single condition counts as a clause."""

    name: ClassVar[str] = "not"
    part: Condition

    def evaluate(self, block: Block) -> Tensor:
        return ~self.part._evaluate_checked(block)

    def holds(self, block: Block) -> Tensor:
        return ~self.part.holds(block) if isinstance(self.part, _Composite) else super().holds(block)

    @property
    def clauses(self) -> tuple[Condition, ...]:
        return self.part.clauses if isinstance(self.part, _Composite) else super().clauses

    @property
    def joins_all(self) -> bool:
        return not isinstance(self.part, _Composite)

    @property
    def budgets(self) -> tuple[Any, ...]:
        return self.part.budgets

    def holds_given(self, held: Mapping[str, bool]) -> bool:
        return not self.part.holds_given(held) if isinstance(self.part, _Composite) else super().holds_given(held)

    @cached_property
    def compiled(self) -> list[Clause] | None:
        clauses = self.part.compiled
        if clauses is None or isinstance(self.part, _Composite):
            return clauses
        return [clause._replace(negated=not clause.negated) for clause in clauses]

    def __str__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, _Composite) else f"~{self.part}"


def describe(value: object) -> str:
    """Describe what a rule returned, for an error."""
    return f"a {value.dtype} tensor of {list(value.shape)}" if isinstance(value, Tensor) else shorten(value)


def is_built_in(rule: object) -> bool:
    """Whether a rule or condition is part of this package, so that readers know its parameters."""
    return type(rule).__module__.startswith("fly.")


def expression(rule: Any, first: bool = False) -> str:
    """Write ``name(other=value)`` with the parameters that differ from their defaults. With ``first``, the first
    parameter is always written, without its name. A user's own class gets all parameters by name.

    Raises ``TypeError`` unless ``rule`` is a dataclass.
    """
    if not is_dataclass(rule):
        raise TypeError(f"{type(rule).__name__} must be a dataclass: write @dataclass(frozen=True) above it")
    shown, ours = [], is_built_in(rule)
    for number, parameter in enumerate(f for f in fields(rule) if f.init):
        value = getattr(rule, parameter.name)
        # Plain words need no quotes where ``parse_policy`` reads them.
        text = value if isinstance(value, str) and value.isidentifier() else repr(value)
        if ours and first and number == 0:
            shown.append(text)
        elif not ours or value != parameter.default:
            shown.append(f"{parameter.name}={text}")
    name: str = getattr(rule, "name")  # noqa: B009
    return f"{name}({', '.join(shown)})" if shown else name


@dataclass(frozen=True)
class EntropyGate(Condition, Checked):
    """The target was uncertain: its entropy is at least ``theta`` (FLy, arXiv 2511.22972).

    ``entropy`` is ``"top3"`` or ``"normalized"``. ``"top3"`` is the sum of -target·ln target over the three likeliest
    tokens, not renormalised, in nats (at most 3/e = 1.104), as in the authors' code. ``"normalized"`` is the entropy of
    the whole distribution divided by ln V, in [0, 1], as in their paper. ``processed`` selects the processed
    distribution instead of the raw one. At temperature 0 the raw one is always used, because the processed distribution
    is one-hot.
    """

    name: ClassVar[str] = "entropy"
    monotone: ClassVar[Mapping[str, int]] = {"theta": -1}
    theta: Amount = 0.3
    entropy: Entropy = "top3"
    processed: bool = True

    @property
    def possible(self) -> bool:
        # The top-3 sum is largest for three probabilities of 1/e. The whole entropy is at most ln V.
        return self.theta <= (3 / math.e if self.entropy == "top3" else 1.0) + 1e-5

    def _compile(self) -> Clause:
        kind = "entropy" if self.entropy == "top3" else "normalized_entropy"
        return Clause.of(kind, theta=self.theta, processed=self.processed)

    def evaluate(self, block: Block) -> Tensor:
        target, measure = block.target, self._top3 if self.entropy == "top3" else self._normalized
        if not self.processed or target.all_greedy:
            return measure(block, raw=True) >= self.theta
        entropy_BK = measure(block, raw=False)
        if target.some_greedy:
            entropy_BK = torch.where(target.greedy_B.unsqueeze(1), measure(block, raw=True), entropy_BK)
        return entropy_BK >= self.theta

    def _top3(self, block: Block, raw: bool) -> Tensor:
        if not raw:
            return entropy(block.target.top_probs(3)[:, :-1])

        def measure(rows_N: Tensor, positions_N: Tensor) -> Tensor:
            # Three logits and the log-mass of all logits give three probabilities, without a full softmax.
            logits_NV = vectors_at(block.target.logits_BKV, rows_N, positions_N)
            top_N3 = top(logits_NV, 3).values
            peak_N = top_N3[:, 0]
            return entropy((top_N3 - (peak_N + log_mass(logits_NV, peak_N)).unsqueeze(1)).exp())

        return block.at_mismatches(measure)

    def _normalized(self, block: Block, raw: bool) -> Tensor:
        def measure(rows_N: Tensor, positions_N: Tensor) -> Tensor:
            if raw:
                probs_NV = vectors_at(block.target.logits_BKV, rows_N, positions_N).softmax(-1)
            else:
                probs_NV = block.target.probs_at(rows_N, positions_N)
            return entropy(probs_NV) / math.log(max(probs_NV.shape[-1], 2))

        return block.at_mismatches(measure)


@dataclass(frozen=True)
class AgreeingWindow(Condition, Checked):
    """The ``window`` drafted tokens after the mismatch exist, and the target agrees with all of them."""

    name: ClassVar[str] = "window"
    monotone: ClassVar[Mapping[str, int]] = {"window": -1}
    window: Count = 6

    def _compile(self) -> Clause:
        return Clause.of("window", window=self.window)

    def evaluate(self, block: Block) -> Tensor:
        if self.window == 0:
            return torch.ones_like(block.agree_BK)
        padded = torch.nn.functional.pad(block.agree_BK, (0, self.window))
        return padded.unfold(1, self.window, 1)[:, 1:].all(-1)


@dataclass(frozen=True)
class Room(Condition, Checked):
    """At least ``hold`` drafted tokens follow. A mismatch nearer to the draft's end cannot be judged."""

    name: ClassVar[str] = "room"
    monotone: ClassVar[Mapping[str, int]] = {"hold": -1}
    hold: Count = 6

    def _compile(self) -> Clause:
        return Clause.of("room", hold=self.hold)

    def evaluate(self, block: Block) -> Tensor:
        return block.columns_K + 1 + self.hold <= block.draft.lengths_B.unsqueeze(1)


@dataclass(frozen=True)
class ControlToken(Condition):
    """The drafted token is a control token: end of sequence, end of turn or another special token."""

    name: ClassVar[str] = "control"

    def _compile(self) -> Clause:
        return Clause.of("control")

    def evaluate(self, block: Block) -> Tensor:
        control_V = block.target.control_V
        return torch.zeros_like(block.agree_BK) if control_V is None else control_V[block.draft.tokens_BK]
