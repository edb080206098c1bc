"""Conditions under which a mismatch may be excused, and how they combine: ``&``, ``|``, ``~``.

Shape legend: B rows, K longest draft, V vocabulary. Positions are 0-based here, papers count from 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

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


__all__ = ["AgreeingWindow", "Block", "Clause", "Condition", "ControlToken", "EntropyGate", "Room"]

Entropy = Literal["top3", "normalized"]


@dataclass(frozen=True)
class Block:
    """What a condition sees. ``clauses`` collects where each leaf condition held."""

    target: Target
    draft: Draft
    agree_BK: Tensor  # bool, where the lossless core accepts; False on padding
    clauses: dict[str, Tensor] = field(default_factory=dict)

    def at_mismatches(self, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``measure(rows_N, positions_N)`` [N] at mismatches, in a tensor [B, K]; elsewhere False or 0 on the CPU.

        For conditions that read the whole vocabulary. On the CPU only the mismatches are read. An accelerator reads
        every position, since finding the mismatches would make it wait.
        """
        rows_N, positions_N = self._read
        found_N = measure(rows_N, positions_N)
        found_BK = torch.zeros(self.agree_BK.shape, dtype=found_N.dtype, device=self.agree_BK.device)
        return found_BK.index_put_((rows_N, positions_N), found_N)

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor]:
        """[N] int64 each: rows and positions that ``at_mismatches`` reads."""
        (count, longest), device = self.agree_BK.shape, self.agree_BK.device
        if device.type == "cpu":
            drafted_BK = np.arange(longest) < self.draft.lengths_B.numpy()[:, None]
            found = (~self.agree_BK.numpy() & drafted_BK).nonzero()
            return torch.from_numpy(found[0]), torch.from_numpy(found[1])
        rows_N = torch.arange(count, device=device).repeat_interleave(longest)
        return rows_N, torch.arange(longest, device=device).repeat(count)


class Clause(NamedTuple):
    """A condition as compiled code takes it (``fly/backends/cpu/src/decide.cpp`` evaluates each kind)."""

    kind: Literal["entropy", "window", "room", "control"]
    tokens: int = 0  # of a window or a room
    theta: float = 0.0  # of an entropy gate
    processed: bool = False  # whether the entropy is that of the processed distribution
    negated: bool = False


class Condition(Bindable, ABC):
    """A statement about drafted positions, true or false at each. Conditions are frozen dataclasses; they print as
    their expression."""

    name: ClassVar[str]

    @property
    def possible(self) -> bool:
        """Whether it can hold anywhere at all; a relaxation that cannot leaves its core as it is."""
        return True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @abstractmethod
    def evaluate(self, block: Block) -> Tensor:
        """[B, K] bool: where it holds. Values on padding and on agreeing positions do not matter."""

    def says(self, block: Block) -> Tensor:
        """``evaluate``, checked to be a yes or no for each drafted token. Raises ``ValueError`` if not."""
        said_BK, shape = self.evaluate(block), block.agree_BK.shape
        if not isinstance(said_BK, Tensor) or said_BK.dtype != torch.bool or said_BK.shape != shape:
            raise ValueError(f"{self}: evaluate gave {given(said_BK)}, not a bool tensor [B, K] of {list(shape)}")
        return said_BK

    @cached_property
    def label(self) -> str:
        """Its expression, under which it is noted in ``block.clauses``."""
        return str(self)

    def holds(self, block: Block) -> Tensor:
        """``evaluate``, noted in ``block.clauses`` under the condition's expression, once a block."""
        if self.label not in block.clauses:
            block.clauses[self.label] = self.says(block)
        return block.clauses[self.label]

    @property
    def clauses(self) -> tuple[Condition, ...]:
        """The conditions whose answers it notes under their labels."""
        return (self,)

    @property
    def compiled(self) -> list[Clause] | None:
        """The clauses that must all hold, one for each of ``clauses``, for compiled code to evaluate it. None: only
        Python can. They come from a ``_compile`` of the class's own: one that it inherits does not count, since a
        subclass may decide something else."""
        return self._compile() if "_compile" in vars(type(self)) else None

    def _compile(self) -> list[Clause] | None:
        return None

    def decide(self, held: Mapping[str, bool]) -> bool:
        """Its answer at one position, from the answers of its clauses there."""
        return held[self.label]

    def deciding(self, held: Mapping[str, bool]) -> tuple[bool, frozenset[str]]:
        """Its answer from the answers of its clauses, and the clauses whose opposite answer alone would have changed
        it."""
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
    """A chain of one operator is flat."""
    return condition.parts if isinstance(condition, kind) else (condition,)


class _Composite(Condition):
    """Composites are not clauses: only their leaves are noted."""

    def holds(self, block: Block) -> Tensor:
        return self.evaluate(block)

    @property
    @abstractmethod
    def clauses(self) -> tuple[Condition, ...]: ...

    @abstractmethod
    def decide(self, held: Mapping[str, bool]) -> bool: ...


@dataclass(frozen=True)
class _Chain(_Composite):
    """Parts under one operator."""

    parts: tuple[Condition, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts () must hold at least one condition")

    @cached_property
    def clauses(self) -> tuple[Condition, ...]:
        return tuple(clause for part in self.parts for clause in part.clauses)


@dataclass(frozen=True)
class All(_Chain):
    """Every part holds."""

    name: ClassVar[str] = "all"

    def evaluate(self, block: Block) -> Tensor:
        return torch.stack([part.holds(block) for part in self.parts]).all(0)

    def decide(self, held: Mapping[str, bool]) -> bool:
        return all(part.decide(held) for part in self.parts)

    @property
    def possible(self) -> bool:
        return all(part.possible for part in self.parts)

    def _compile(self) -> list[Clause] | None:
        found: list[Clause] = []
        for part in self.parts:
            if (clauses := part.compiled) is None:
                return None
            found += clauses
        return found

    def __str__(self) -> str:
        return " & ".join(f"({p})" if isinstance(p, AnyOf) else str(p) for p in self.parts)


@dataclass(frozen=True)
class AnyOf(_Chain):
    """At least one part holds."""

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
    """The part does not hold. Noted as a clause of its own when the part is a leaf, so pass rates read naturally."""

    name: ClassVar[str] = "not"
    part: Condition

    def evaluate(self, block: Block) -> Tensor:
        return ~self.part.says(block)

    def holds(self, block: Block) -> Tensor:
        return ~self.part.holds(block) if isinstance(self.part, _Composite) else super().holds(block)

    @property
    def clauses(self) -> tuple[Condition, ...]:
        return self.part.clauses if isinstance(self.part, _Composite) else super().clauses

    def decide(self, held: Mapping[str, bool]) -> bool:
        return not self.part.decide(held) if isinstance(self.part, _Composite) else super().decide(held)

    def _compile(self) -> list[Clause] | None:
        if isinstance(self.part, (Not, _Composite)) or (clauses := self.part.compiled) is None:
            return None
        return [clause._replace(negated=True) for clause in clauses]

    def __str__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, _Composite) else f"~{self.part}"


def given(value: object) -> str:
    """What a rule returned instead of the tensor, in words."""
    return f"a {value.dtype} tensor of {list(value.shape)}" if isinstance(value, Tensor) else short(value)


def expression(instance: NamedDataclass, first: bool = False) -> str:
    """``name(other=value)``: the parameters that are not at their default; the first one always, bare, if ``first``."""
    if not is_dataclass(instance):
        raise TypeError(f"{type(instance).__name__} must be a dataclass: write @dataclass(frozen=True) above it")
    shown = []
    for number, parameter in enumerate(f for f in fields(instance) if f.init):
        value = getattr(instance, parameter.name)
        if first and number == 0:
            shown.append(_literal(value))
        elif value != parameter.default:
            shown.append(f"{parameter.name}={_literal(value)}")
    return f"{instance.name}({', '.join(shown)})" if shown else instance.name


def _literal(value: object) -> str:
    """A value as ``parse_policy`` reads it: a plain word needs no quotes."""
    return value if isinstance(value, str) and value.isidentifier() else repr(value)


@dataclass(frozen=True)
class EntropyGate(Condition):
    """The target was undecided: its entropy is at least ``theta`` (FLy, arXiv 2511.22972).

    ``entropy`` is ``"top3"``, the sum of -target·ln target over the three most likely tokens, not renormalised, in nats
    (at most 3/e = 1.104; the authors' code), or ``"normalized"``, the full entropy over ln V, in [0, 1] (the formula in
    their paper). It is taken on the processed distribution if ``processed``, else on the raw logits; rows at
    temperature 0 always use the raw logits, since their processed distribution is one-hot.
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
        # Three probabilities of 1/e each give the largest top-3 sum; a full entropy is at most ln V.
        return self.theta <= (3 / math.e if self.entropy == "top3" else 1.0) + 1e-5

    def _compile(self) -> list[Clause] | None:
        return [Clause("entropy", theta=self.theta, processed=self.processed)] if self.entropy == "top3" else None

    def evaluate(self, block: Block) -> Tensor:
        target = block.target
        raw = not self.processed or target.all_greedy
        measure = self._top3 if self.entropy == "top3" else self._normalized
        if raw or not target.some_greedy:
            return measure(block, raw) >= self.theta
        found_BK = torch.where(target.greedy_B.unsqueeze(1), measure(block, True), measure(block, False))
        return found_BK >= self.theta

    def _top3(self, block: Block, raw: bool) -> Tensor:
        """[B, K]; three logits and the total mass, no softmax over the vocabulary."""
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
    """The target agrees with the ``window`` tokens that follow the mismatch, all of them drafted."""

    name: ClassVar[str] = "window"
    window: int = 6

    def __post_init__(self) -> None:
        check_count("window", self.window)

    def _compile(self) -> list[Clause]:
        return [Clause("window", self.window)]

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
    """At least ``hold`` drafted tokens follow: a mismatch nearer the block's end cannot be judged."""

    name: ClassVar[str] = "room"
    hold: int = 6

    def __post_init__(self) -> None:
        check_count("hold", self.hold)

    def _compile(self) -> list[Clause]:
        return [Clause("room", self.hold)]

    def evaluate(self, block: Block) -> Tensor:
        position_K = torch.arange(1, block.agree_BK.shape[1] + 1, device=block.agree_BK.device)
        return position_K + self.hold <= block.draft.lengths_B.unsqueeze(1)


@dataclass(frozen=True)
class ControlToken(Condition):
    """The drafted token is a control token: end-of-sequence, end-of-turn or another special of the tokenizer."""

    name: ClassVar[str] = "control"

    def _compile(self) -> list[Clause]:
        return [Clause("control")]

    def evaluate(self, block: Block) -> Tensor:
        control_V, tokens_BK = block.target.control_V, block.draft.tokens_BK
        if control_V is None:
            return torch.zeros_like(block.agree_BK)
        return control_V[tokens_BK]


def check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} {value!r} must be an integer of at least 0")
