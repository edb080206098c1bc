"""Conditions under which a mismatch may be excused. They combine by ``&``, ``|`` and ``~``.

Shape legend: B rows, K longest draft, V vocabulary. Positions are 0-based here, papers count from 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fly.errors import short
from fly.ops import entropy, log_mass, top
from fly.policies.binding import Bindable
from fly.types import Draft, Target

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class NamedDataclass(DataclassInstance, Protocol):
        name: ClassVar[str]


__all__ = ["AgreeingWindow", "Block", "Condition", "ControlToken", "EntropyGate", "Room"]

Entropy = Literal["top3", "normalized"]


@dataclass(frozen=True)
class Block:
    """The input of a condition. ``clauses`` records, for each leaf condition, where it held."""

    target: Target
    draft: Draft
    agree_BK: Tensor  # bool, where the lossless core accepts; False on padding
    clauses: dict[str, Tensor] = field(default_factory=dict)

    def at_mismatches(self, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Compute ``measure(rows_N, positions_N)`` [N] at mismatches and return [B, K], with False or 0 elsewhere.

        Use this for conditions that read the whole vocabulary. On the CPU only mismatches are read. An accelerator
        reads every position, since listing the mismatches would make the host wait.
        """
        rows_N, positions_N = self._read
        found_N = measure(rows_N, positions_N)
        found_BK = torch.zeros(self.agree_BK.shape, dtype=found_N.dtype, device=self.agree_BK.device)
        return found_BK.index_put_((rows_N, positions_N), found_N)

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor]:
        """Rows and positions, int64 [N] each, that ``at_mismatches`` reads."""
        (count, longest), device = self.agree_BK.shape, self.agree_BK.device
        if device.type == "cpu":
            drafted_BK = np.arange(longest) < self.draft.lengths_B.numpy()[:, None]
            found = (~self.agree_BK.numpy() & drafted_BK).nonzero()
            return torch.from_numpy(found[0]), torch.from_numpy(found[1])
        rows_N = torch.arange(count, device=device).repeat_interleave(longest)
        return rows_N, torch.arange(longest, device=device).repeat(count)


class Condition(Bindable, ABC):
    """A statement that is true or false at each drafted position. Conditions are frozen dataclasses and print as their
    expression."""

    name: ClassVar[str]

    @property
    def possible(self) -> bool:
        """Whether the condition can hold at all. If not, a relaxation by it leaves the core unchanged."""
        return True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @abstractmethod
    def evaluate(self, block: Block) -> Tensor:
        """Where the condition holds, bool [B, K]. Values on padding and at agreeing positions do not matter."""

    def says(self, block: Block) -> Tensor:
        """Call ``evaluate`` and check its result. Raises ``ValueError`` unless it is one bool per drafted token."""
        said_BK, shape = self.evaluate(block), block.agree_BK.shape
        if not isinstance(said_BK, Tensor) or said_BK.dtype != torch.bool or said_BK.shape != shape:
            raise ValueError(f"{self}: evaluate gave {given(said_BK)}, not a bool tensor [B, K] of {list(shape)}")
        return said_BK

    @cached_property
    def label(self) -> str:
        """The condition's expression, its key in ``block.clauses``."""
        return str(self)

    def holds(self, block: Block) -> Tensor:
        """Evaluate the condition once per block, and record the result in ``block.clauses``."""
        if self.label not in block.clauses:
            block.clauses[self.label] = self.says(block)
        return block.clauses[self.label]

    @property
    def clauses(self) -> tuple[Condition, ...]:
        """The conditions that are recorded when this one is evaluated: itself, or the leaves of a composite."""
        return (self,)

    @property
    def budgets(self) -> tuple[Any, ...]:
        """The conditions among it that keep account of what relaxed tokens cost (``CostBudget``)."""
        return ()

    def decide(self, held: Mapping[str, bool]) -> bool:
        """Whether the condition holds at one position, given which clauses hold there."""
        return held[self.label]

    def deciding(self, held: Mapping[str, bool]) -> tuple[bool, frozenset[str]]:
        """Whether the condition holds, given where its clauses hold, and the clauses whose opposite result alone would
        change that."""
        said = tuple(held.items())
        if (known := self._decided.get(said)) is None:
            outcome = self.decide(held)
            turns = (name for name, passed in said if self.decide({**held, name: not passed}) != outcome)
            known = self._decided[said] = outcome, frozenset(turns)
        return known

    @cached_property
    def _decided(self) -> dict[tuple[tuple[str, bool], ...], tuple[bool, frozenset[str]]]:
        return {}

    def __and__(self, other: Condition) -> Condition:
        if not isinstance(other, Condition):
            return NotImplemented
        return All((*_parts(self, All), *_parts(other, All)))

    def __or__(self, other: Condition) -> Condition:
        if not isinstance(other, Condition):
            return NotImplemented
        return AnyOf((*_parts(self, AnyOf), *_parts(other, AnyOf)))

    def __invert__(self) -> Condition:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} is neither true nor false by itself: combine conditions by '&', '|' and '~', not by "
            "'and', 'or' and 'not'"
        )

    def __str__(self) -> str:
        return expression(self, first=True)  # type: ignore[arg-type]  # subclasses are dataclasses


def _parts(condition: Condition, kind: type[_Chain]) -> tuple[Condition, ...]:
    """The parts of a condition, so that chains of one operator stay flat."""
    return condition.parts if isinstance(condition, kind) else (condition,)


class _Composite(Condition):
    """A condition made of others. Only its leaves are recorded as clauses."""

    def holds(self, block: Block) -> Tensor:
        return self.evaluate(block)

    @property
    @abstractmethod
    def clauses(self) -> tuple[Condition, ...]: ...

    @abstractmethod
    def decide(self, held: Mapping[str, bool]) -> bool: ...


@dataclass(frozen=True)
class _Chain(_Composite):
    """Conditions joined by one operator."""

    parts: tuple[Condition, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts () must hold at least one condition")

    @cached_property
    def clauses(self) -> tuple[Condition, ...]:
        return tuple(clause for part in self.parts for clause in part.clauses)

    @cached_property
    def budgets(self) -> tuple[Any, ...]:
        return tuple(budget for part in self.parts for budget in part.budgets)


@dataclass(frozen=True)
class All(_Chain):
    """Holds where every part holds."""

    name: ClassVar[str] = "all"

    def evaluate(self, block: Block) -> Tensor:
        return torch.stack([part.holds(block) for part in self.parts]).all(0)

    def decide(self, held: Mapping[str, bool]) -> bool:
        return all(part.decide(held) for part in self.parts)

    @property
    def possible(self) -> bool:
        return all(part.possible for part in self.parts)

    def __str__(self) -> str:
        return " & ".join(f"({p})" if isinstance(p, AnyOf) else str(p) for p in self.parts)


@dataclass(frozen=True)
class AnyOf(_Chain):
    """Holds where at least one part holds."""

    name: ClassVar[str] = "any"

    def evaluate(self, block: Block) -> Tensor:
        return torch.stack([part.holds(block) for part in self.parts]).any(0)

    def decide(self, held: Mapping[str, bool]) -> bool:
        return any(part.decide(held) for part in self.parts)

    @property
    def possible(self) -> bool:
        return any(part.possible for part in self.parts)

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts)


@dataclass(frozen=True)
class Not(Condition):
    """Holds where the part does not. The negation of a leaf is recorded as a clause, so that pass rates are its own."""

    name: ClassVar[str] = "not"
    part: Condition

    def evaluate(self, block: Block) -> Tensor:
        return ~self.part.says(block)

    def holds(self, block: Block) -> Tensor:
        return ~self.part.holds(block) if isinstance(self.part, _Composite) else super().holds(block)

    @property
    def clauses(self) -> tuple[Condition, ...]:
        return self.part.clauses if isinstance(self.part, _Composite) else super().clauses

    @property
    def budgets(self) -> tuple[Any, ...]:
        return self.part.budgets

    def decide(self, held: Mapping[str, bool]) -> bool:
        return not self.part.decide(held) if isinstance(self.part, _Composite) else super().decide(held)

    def __str__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, _Composite) else f"~{self.part}"


def given(value: object) -> str:
    """Describe what a rule returned instead of a tensor."""
    return f"a {value.dtype} tensor of {list(value.shape)}" if isinstance(value, Tensor) else short(value)


def is_ours(rule: object) -> bool:
    """Whether a rule or condition comes with this package: its parameters and their defaults are known."""
    return type(rule).__module__.startswith("fly.")


def expression(instance: NamedDataclass, first: bool = False) -> str:
    """Write ``name(other=value)`` with the parameters that differ from their defaults. With ``first``, the first
    parameter is always written, without its name. A user's own class gets all parameters by name, since readers do not
    know its defaults."""
    if not is_dataclass(instance):
        raise TypeError(f"{type(instance).__name__} must be a dataclass: write @dataclass(frozen=True) above it")
    shown, ours = [], is_ours(instance)
    for number, parameter in enumerate(f for f in fields(instance) if f.init):
        value = getattr(instance, parameter.name)
        if ours and first and number == 0:
            shown.append(_literal(value))
        elif not ours or value != parameter.default:
            shown.append(f"{parameter.name}={_literal(value)}")
    return f"{instance.name}({', '.join(shown)})" if shown else instance.name


def _literal(value: object) -> str:
    """Write a value in the form that ``parse_policy`` reads: plain words need no quotes."""
    return value if isinstance(value, str) and value.isidentifier() else repr(value)


@dataclass(frozen=True)
class EntropyGate(Condition):
    """The target was uncertain: its entropy is at least ``theta`` (FLy, arXiv 2511.22972).

    ``entropy`` is ``"top3"``, the sum of -target·ln target over the three likeliest tokens, not renormalised, in nats
    (at most 3/e = 1.104; the authors' code), or ``"normalized"``, the full entropy over ln V, in [0, 1] (the formula in
    their paper). With ``processed`` it is computed from the processed distribution, else from the raw logits. Rows at
    temperature 0 always use the raw logits, because their processed distribution is one-hot.
    """

    name: ClassVar[str] = "entropy"
    theta: float = 0.3
    entropy: Entropy = "top3"
    processed: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.theta, (int, float)) and math.isfinite(self.theta) and self.theta >= 0):
            raise ValueError(f"theta {self.theta!r} must be a finite number of at least 0")
        if self.entropy not in ("top3", "normalized"):
            raise ValueError(f"entropy {self.entropy!r} is unknown; choices: ['top3', 'normalized']")

    @property
    def possible(self) -> bool:
        # The top-3 sum is largest for three probabilities of 1/e. The full entropy is at most ln V.
        return self.theta <= (3 / math.e if self.entropy == "top3" else 1.0) + 1e-5

    def evaluate(self, block: Block) -> Tensor:
        target = block.target
        raw = not self.processed or target.all_greedy
        measure = self._top3 if self.entropy == "top3" else self._normalized
        if raw or not target.some_greedy:
            return measure(block, raw) >= self.theta
        found_BK = torch.where(target.greedy_B.unsqueeze(1), measure(block, True), measure(block, False))
        return found_BK >= self.theta

    def _top3(self, block: Block, raw: bool) -> Tensor:
        """Top-3 entropy [B, K], from three logits and the total mass, without a softmax over the vocabulary."""
        if not raw:
            return entropy(block.target.top_probs(3)[:, :-1])
        target = block.target

        def of_three(rows_N: Tensor, positions_N: Tensor) -> Tensor:
            logits_NV = target.logits_BKV[rows_N, positions_N]
            top_N3 = top(logits_NV, 3).values
            log_share_N3 = top_N3 - (top_N3[:, 0] + log_mass(logits_NV, top_N3[:, 0])).unsqueeze(1)
            return entropy(log_share_N3.exp())

        return block.at_mismatches(of_three)

    def _normalized(self, block: Block, raw: bool) -> Tensor:
        target = block.target

        def share(rows_N: Tensor, positions_N: Tensor) -> Tensor:
            if raw:
                probs_NV = target.logits_BKV[rows_N, positions_N].softmax(-1)
            else:
                probs_NV = target.probs_at(rows_N, positions_N)
            return entropy(probs_NV) / math.log(max(probs_NV.shape[-1], 2))

        return block.at_mismatches(share)


@dataclass(frozen=True)
class AgreeingWindow(Condition):
    """The ``window`` drafted tokens after the mismatch exist, and the target agrees with all of them."""

    name: ClassVar[str] = "window"
    window: int = 6

    def __post_init__(self) -> None:
        check_count("window", self.window)

    def evaluate(self, block: Block) -> Tensor:
        agree_BK = block.agree_BK
        if self.window == 0:
            return torch.ones_like(agree_BK)
        longest = agree_BK.shape[1]
        padded = torch.nn.functional.pad(agree_BK, (0, self.window))
        follows = padded.unfold(1, self.window, 1)[:, 1:].all(-1)
        return follows[:, :longest]


@dataclass(frozen=True)
class Room(Condition):
    """At least ``hold`` drafted tokens follow. A mismatch nearer to the block's end cannot be judged."""

    name: ClassVar[str] = "room"
    hold: int = 6

    def __post_init__(self) -> None:
        check_count("hold", self.hold)

    def evaluate(self, block: Block) -> Tensor:
        position_K = torch.arange(1, block.agree_BK.shape[1] + 1, device=block.agree_BK.device)
        return position_K + self.hold <= block.draft.lengths_B.unsqueeze(1)


@dataclass(frozen=True)
class ControlToken(Condition):
    """The drafted token is a control token: end of sequence, end of turn or another special token."""

    name: ClassVar[str] = "control"

    def evaluate(self, block: Block) -> Tensor:
        control_V, tokens_BK = block.target.control_V, block.draft.tokens_BK
        if control_V is None:
            return torch.zeros_like(block.agree_BK)
        return control_V[tokens_BK]


def check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} {value!r} must be an integer of at least 0")
