"""The small values that pass between roles. Knows nothing of models, files, HTTP or ranks.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor

from fly.ops import argmax, log_mass, pick, top

__all__ = [
    "Draft",
    "Guarantee",
    "LazyDistribution",
    "Noise",
    "SamplingParams",
    "StructuredOutput",
    "Target",
    "Told",
    "ToldVerdict",
    "Verdict",
    "Why",
    "depths",
    "first_branch",
]


class Guarantee(Enum):
    """What an acceptance policy promises about the distribution of the emitted text."""

    LOSSLESS = "lossless"  # exactly the target's processed distribution
    BOUNDED = "bounded"  # within a stated divergence of it
    HEURISTIC = "heuristic"  # no stated bound


class Why(IntEnum):
    """Why a token stands (or, for a drafted token, does not)."""

    REJECTED = 0  # drafted, and not emitted
    MATCH = 1  # drafted, kept by the lossless core
    RELAXED = 2  # drafted, a mismatch the policy excused
    CORRECTION = 3  # the target's own, in place of the first rejected draft
    BONUS = 4  # the target's own, after a draft that stood whole (an empty one included)


class StructuredOutput(BaseModel):
    """The form that an output must have: exactly one of these.

    ``json_schema``: valid JSON under a schema (a dictionary, or its JSON text; properties come in the schema's order).
    ``json_object``: any JSON object. ``regex``: a text that the whole regular expression matches (the syntax of Rust's
    regex, with no look-around and no backreferences). ``grammar``: a context-free grammar as llguidance takes it, in a
    variant of Lark's syntax.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    json_schema: str | None = None  # JSON text
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    @property
    def kind(self) -> str:
        """The name of the one field that is given."""
        (kind,) = self._given()
        return kind

    def _given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_is_an_object(cls, value: object) -> object:
        if value is None:
            return None
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            if isinstance(schema, dict):
                return value if isinstance(value, str) else json.dumps(schema, ensure_ascii=False)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{value!r} is no JSON: {error}") from None
        raise ValueError(f"a schema is an object, or the JSON text of one, not {value!r}")

    @model_validator(mode="after")
    def _one_form(self) -> StructuredOutput:
        if len(given := self._given()) != 1:
            raise ValueError(f"give exactly one of {list(type(self).model_fields)}, not {given}")
        return self


class SamplingParams(BaseModel):
    """How one request is sampled and when it ends. Unknown fields and values out of range are errors.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` None draws a fresh
    one. Output ends exactly at the first stop token id, end-of-sequence (unless ``ignore_eos``), stop string or
    ``max_tokens``; before ``min_tokens`` no stop token id can be drawn. ``logprobs`` n gives the target's
    log-probability of each token and of the n most likely ones (of the unprocessed distribution). ``explain`` notes in
    the provenance how likely each token was, and how undecided the target.

    ``presence_penalty`` and ``frequency_penalty`` (OpenAI's, in [-2, 2]) are subtracted from the logits of tokens that
    were generated before, once and for every time. ``repetition_penalty`` (Keskar et al. 2019; 1 is off) divides
    positive and multiplies negative logits of tokens of the prompt or the output. ``logit_bias`` is added by token id
    (in [-100, 100]). ``bad_words`` are texts that never come up, unless split over tokens in an unusual way. They hold
    in this order, at every drafted position by the tokens before it, and nothing excuses a bad word.

    ``n`` is the number of completions; all but the first have seeds derived from that of the first.

    ``structured`` gives the output a form, such as ``{"regex": "yes|no"}`` (see ``StructuredOutput``), which holds at
    every drafted position too, whatever the policy. End-of-sequence tokens, and stop tokens that are control tokens,
    are allowed exactly where the form may be complete; where nothing else may follow, the output ends with one, even
    under ``ignore_eos`` (which else keeps it going as long as the form allows) and before ``min_tokens``. So an output
    has its form if ``finish_reason`` is ``"stop"``, unless a stop string or a stop token that is text cut it, as
    ``max_tokens`` does (``"length"``). Where bad words leave nothing of what the form allows, the form wins.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int = Field(default=256, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0)
    explain: bool = False
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] = Field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    n: int = Field(default=1, ge=1)
    structured: StructuredOutput | None = None

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the text before them, or on the request, in any way but through the model."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return any(penalties) or bool(self.logit_bias) or bool(self.bad_words)

    @field_validator("bad_words")
    @classmethod
    def _bad_words_say_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty bad word would forbid every output")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stops_say_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every output before it began")
        return value

    @model_validator(mode="after")
    def _lengths_agree(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self


def depths(parents: list[int]) -> list[int]:
    """How many tokens of its tree come before each token: 0 for those that follow the row itself."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def first_branch(parents: list[int]) -> list[int]:
    """Numbers of a tree's tokens along the branch that is tried first at every fork."""
    branch: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (branch[-1] if branch else -1):
            branch.append(node)
    return branch


@dataclass(frozen=True)
class Draft:
    """What a strategy proposes for a batch, right-padded: chains of tokens, or trees.

    In a tree every token names the one it follows: ``parents_BK`` [B, K] is its number, which is smaller than the
    token's own, or -1 for the row's last token. Siblings stand in the order in which they are to be tried, and are
    different tokens if the draft is deterministic. None is the special case of a chain: each follows the one before.
    """

    tokens_BK: Tensor  # int64
    lengths_B: Tensor  # int64, 0..K
    probs_BKV: Tensor | None = None  # the *processed* distribution each token was drawn from; None = deterministic
    parents_BK: Tensor | None = None  # int64; None = chains

    @staticmethod
    def empty(rows: int, device: torch.device | str = "cpu") -> Draft:
        """No proposal for any of ``rows`` rows."""
        return Draft.of([[] for _ in range(rows)], device)

    @staticmethod
    def of(chains: list[list[int]], device: torch.device | str = "cpu") -> Draft:
        """A deterministic proposal of ragged token lists."""
        return ListedDraft(chains).to(torch.device(device))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and the longest draft with its padding: B, K."""
        rows, longest = self.tokens_BK.shape
        return rows, longest

    @cached_property
    def chains(self) -> list[list[int]]:
        """The tokens of each row, without padding. Asks the host, once."""
        return [tokens[:n] for tokens, n in zip(self.tokens_BK.tolist(), self.lengths_B.tolist())]

    @cached_property
    def trees(self) -> list[list[int]] | None:
        """The parents of each row's tokens; None of chains. Asks the host, once."""
        if self.parents_BK is None:
            return None
        return [tree[: len(tokens)] for tree, tokens in zip(self.parents_BK.tolist(), self.chains)]

    def rows(self, index_B: Tensor) -> Draft:
        """The proposal of some rows only, ``index_B`` int64."""
        return Draft(
            self.tokens_BK[index_B],
            self.lengths_B[index_B],
            None if self.probs_BKV is None else self.probs_BKV[index_B],
            None if self.parents_BK is None else self.parents_BK[index_B],
        )

    def to(self, device: torch.device) -> Draft:
        """The proposal on ``device``: a strategy may live on another than the target."""
        if self.tokens_BK.device == torch.device(device):
            return self
        probs = None if self.probs_BKV is None else self.probs_BKV.to(device)
        parents = None if self.parents_BK is None else self.parents_BK.to(device)
        return Draft(self.tokens_BK.to(device), self.lengths_B.to(device), probs, parents)

    def own_probs_BK(self) -> Tensor:
        """[B, K] the chance with which each token was drafted: 1 if the draft is deterministic, and never 0 (which
        occurs on padding only)."""
        if self.probs_BKV is None:
            return torch.ones_like(self.tokens_BK, dtype=torch.float32)
        return pick(self.probs_BKV, self.tokens_BK).clamp_min(torch.finfo(self.probs_BKV.dtype).tiny)

    def mask_BK(self) -> Tensor:
        """True where a token was drafted, False on padding."""
        columns_K = torch.arange(self.tokens_BK.shape[1], device=self.tokens_BK.device)
        return columns_K < self.lengths_B.unsqueeze(1)


class ListedDraft(Draft):
    """Chains that were proposed as lists on the host, deterministic, and become tensors where somebody asks for them:
    between two forwards of a small model, making tensors takes longer than what is done with them. A copy with other
    columns (``dataclasses.replace``) is a plain ``Draft``."""

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
        return self if device.type == "cpu" else Draft(self.tokens_BK.to(device), self.lengths_B.to(device))


class LazyDistribution(Protocol):
    """A processed distribution [B, K+1, V] that is worked out only where somebody looks
    (``fly.sampling.ProcessedDistribution``)."""

    def dense(self) -> Tensor:
        """[B, K+1, V], all of it."""

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """[N, V], at some positions of some rows."""

    def of(self, tokens_BK: Tensor) -> Tensor:
        """[B, K], the probability of token j at position j."""

    def top(self, n: int) -> Tensor:
        """[B, K+1, min(n, V)], the largest probabilities at each position, largest first."""

    def rows(self, index_B: Tensor) -> LazyDistribution:
        """Some rows only."""


class Target:
    """What the target says about a block: position j's distribution of the next token given the draft before it.

    Ask ``probs_of``, ``top_probs`` and ``probs_at`` where they are enough: a whole ``probs_BKV`` costs passes over the
    vocabulary.
    ``all_greedy`` and ``some_greedy`` say on the host whether all rows are, or some may be, at temperature 0.

    Args:
        logits_BKV: [B, K+1, V] float32, raw but for bans (a banned token has logit -inf).
        probs: the distribution after temperature, top-k, top-p and min-p (one-hot at temperature 0), as a tensor [B,
            K+1, V] or a ``LazyDistribution``; None builds the one-hot distribution.
        greedy_B: [B] bool, rows at temperature 0; None means all where ``probs`` is None, and none otherwise.
        control_V: [V] bool, end-of-sequence, end-of-turn and other control tokens; None protects nothing.
        generated_B, relaxed_B, nats_B: [B], what each row has behind it: tokens emitted, how many of them were
            relaxed (int64), and the sum of -ln target(x) over those (float32). Tensors, or functions that build
            them when a rule first asks; None is zero.
        history: the tokens of each row before this block, its prompt included; None if nobody says.
        choices: ``argmax_BK`` as lists, where somebody knows it already.
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
        history: list[list[int]] | None = None,
        choices: list[list[int]] | None = None,
    ) -> None:
        self.logits_BKV = logits_BKV
        self._probs = probs
        self.some_greedy = probs is None or greedy_B is not None
        self._greedy = greedy_B
        self.all_greedy = probs is None
        self.control_V = control_V
        self.history = history
        self._generated, self._relaxed, self._nats = generated_B, relaxed_B, nats_B
        self._argmax: Tensor | None = None
        if choices is not None:
            self.__dict__["choices"] = choices

    @property
    def lazy_distribution(self) -> LazyDistribution | None:
        """The processed distribution, where it is worked out only as far as somebody looks."""
        return None if self._probs is None or isinstance(self._probs, Tensor) else self._probs

    @property
    def greedy_B(self) -> Tensor:
        """[B] bool, rows at temperature 0."""
        if self._greedy is None:
            logits_BKV = self.logits_BKV
            self._greedy = torch.full(logits_BKV.shape[:1], self.all_greedy, dtype=torch.bool, device=logits_BKV.device)
        return self._greedy

    @property
    def argmax_BK(self) -> Tensor:
        """[B, K+1] int64, the target's most likely token at each position (the lowest id among equals)."""
        if self._argmax is None:
            known = self.__dict__.get("choices")
            self._argmax = (
                argmax(self.logits_BKV) if known is None else torch.tensor(known, device=self.logits_BKV.device)
            )
        return self._argmax

    def allowed(self, tokens_BK: Tensor) -> Tensor:
        """[B, K] bool: where token j is not banned at position j (an end before ``min_tokens``, say), by a logit of
        -inf. Nothing excuses a banned token."""
        return pick(self.logits_BKV[:, : tokens_BK.shape[1]], tokens_BK) > -torch.inf

    @cached_property
    def choices(self) -> list[list[int]]:
        """``argmax_BK`` as lists. Asks the host, once."""
        found: list[list[int]] = self.argmax_BK.tolist()
        return found

    @property
    def probs_BKV(self) -> Tensor:
        """[B, K+1, V] the processed distribution; built on first use."""
        if self._probs is None:
            self._probs = torch.zeros_like(self.logits_BKV).scatter_(-1, self.argmax_BK.unsqueeze(-1), 1.0)
        elif not isinstance(self._probs, Tensor):
            self._probs = self._probs.dense()
        return self._probs

    def probs_of(self, tokens_BK: Tensor) -> Tensor:
        """[B, K] the processed distribution's probability of token j at position j (as if the tokens before it
        stood)."""
        if self._probs is None:
            return (self.argmax_BK[:, : tokens_BK.shape[1]] == tokens_BK).to(self.logits_BKV.dtype)
        if isinstance(self._probs, Tensor):
            return pick(self._probs[:, : tokens_BK.shape[1]], tokens_BK)
        return self._probs.of(tokens_BK)

    def probs_at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """[N, V] the processed distribution at position ``positions_N`` of row ``rows_N`` (int64, 0-based)."""
        if self._probs is None or isinstance(self._probs, Tensor):
            return self.probs_BKV[rows_N, positions_N]
        return self._probs.at(rows_N, positions_N)

    def top_probs(self, n: int) -> Tensor:
        """[B, K+1, min(n, V)] the largest probabilities of the processed distribution at each position, largest
        first."""
        if self._probs is None or isinstance(self._probs, Tensor):
            return top(self.probs_BKV, n).values
        return self._probs.top(n)

    def log_mass(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """[N] ln of the sum of exp(logit - largest logit) over the vocabulary: minus the log-probability, in the
        unprocessed distribution, of the most likely token."""
        logits_RV, positions = self.logits_BKV.flatten(0, 1), self.logits_BKV.shape[1]
        peak_N = self.logits_BKV[rows_N, positions_N, self.argmax_BK[rows_N, positions_N]]
        return log_mass(logits_RV, peak_N, at_N=rows_N * positions + positions_N)

    @property
    def generated_B(self) -> Tensor:
        """[B] int64, tokens each row has emitted before this block."""
        self._generated = self._column(self._generated, torch.int64)
        return self._generated

    @property
    def relaxed_B(self) -> Tensor:
        """[B] int64, how many of them were relaxed."""
        self._relaxed = self._column(self._relaxed, torch.int64)
        return self._relaxed

    @property
    def nats_B(self) -> Tensor:
        """[B] float32, the sum of -ln target(x) over the relaxed ones: what relaxing has cost so far."""
        self._nats = self._column(self._nats, torch.float32)
        return self._nats

    def _column(self, value: Tensor | Callable[[], Tensor] | None, dtype: torch.dtype) -> Tensor:
        if value is None:
            return torch.zeros(self.logits_BKV.shape[0], dtype=dtype, device=self.logits_BKV.device)
        return value() if callable(value) else value

    def rows(self, index_B: Tensor, numbers: list[int] | None = None) -> Target:
        """Some rows only, ``index_B`` int64 (``numbers`` are the same on the host, where the caller has them)."""
        probs = self._probs
        if probs is not None:
            probs = probs[index_B] if isinstance(probs, Tensor) else probs.rows(index_B)
        rows = self.about(index_B, self.logits_BKV[index_B], probs, numbers)
        # a one-hot distribution may have been built since
        rows.all_greedy, rows.some_greedy = self.all_greedy, self.some_greedy
        return rows

    def about(
        self,
        rows_N: Tensor,
        logits_NJV: Tensor,
        probs: Tensor | LazyDistribution | None,
        numbers: list[int] | None = None,
    ) -> Target:
        """What is said about other positions of the same rows: new row n is row ``rows_N[n]`` (int64) of this one."""
        history = None
        if self.history is not None:
            history = [self.history[b] for b in (rows_N.tolist() if numbers is None else numbers)]
        return Target(
            logits_NJV,
            probs,
            greedy_B=self.greedy_B[rows_N] if self.some_greedy else None,
            control_V=self.control_V,
            generated_B=lambda: self.generated_B[rows_N],
            relaxed_B=lambda: self.relaxed_B[rows_N],
            nats_B=lambda: self.nats_B[rows_N],
            history=history,
        )


@dataclass(frozen=True)
class Noise:
    """Randomness as data: uniforms in [0, 1), drawn once per row from the row's own seed."""

    accept_BK: Tensor  # the coin of each drafted token
    sample_B: Tensor  # draws the correction or the bonus

    def rows(self, index_B: Tensor) -> Noise:
        """Some rows only, ``index_B`` int64."""
        return Noise(self.accept_BK[index_B], self.sample_B[index_B])


class Told(NamedTuple):
    """What a ``Verdict`` says, as lists."""

    accepted: list[int]
    following: list[int]
    why: list[list[int]]
    asked: list[list[bool]]
    held: dict[str, list[list[bool]]]


@dataclass(frozen=True)
class Verdict:
    """What stands of a block.

    ``clauses`` names each condition of a relaxation and where it held ([B, K] bool, right at least at ``asked_BK``, and
    missing where nothing was asked); ``asked_BK`` marks the mismatches on which the outcome of the block hung: those in
    the accepted path, and what was tried after it.
    """

    accepted_B: Tensor  # int64, length of the accepted prefix (in a tree: of the accepted path)
    next_token_B: Tensor  # int64, correction or, where nothing was drafted to follow the accepted prefix, bonus
    why_BK: Tensor  # int8, a ``Why`` for each drafted token
    asked_BK: Tensor
    clauses: dict[str, Tensor] = field(default_factory=dict)
    path_BK: Tensor | None = None  # in a tree, numbers of the tokens of the accepted path; None = 0, 1, 2, ...

    def paths(self) -> list[list[int]]:
        """For each row, the numbers of the drafted tokens that stand, in order. Asks the host."""
        if self.path_BK is None:
            return [list(range(n)) for n in self.told.accepted]
        return [path[:n] for path, n in zip(self.path_BK.tolist(), self.told.accepted)]

    @cached_property
    def told(self) -> Told:
        """All of it as lists, but for the paths. Asks the host, once."""
        held = {name: held_BK.tolist() for name, held_BK in self.clauses.items()}
        why, asked = self.why_BK.tolist(), self.asked_BK.tolist()
        return Told(self.accepted_B.tolist(), self.next_token_B.tolist(), why, asked, held)


class ToldVerdict(Verdict):
    """A verdict that was worked out as lists on the host, and becomes tensors where somebody asks for them. It is made
    of lists alone: ``dataclasses.replace`` cannot copy it."""

    def __init__(self, told: Told) -> None:
        self.__dict__["told"] = told

    @cached_property
    def accepted_B(self) -> Tensor:
        return torch.tensor(self.told.accepted)

    @cached_property
    def next_token_B(self) -> Tensor:
        return torch.tensor(self.told.following)

    @cached_property
    def why_BK(self) -> Tensor:
        return torch.tensor(self.told.why, dtype=torch.int8)

    @cached_property
    def asked_BK(self) -> Tensor:
        return torch.tensor(self.told.asked, dtype=torch.bool)

    @cached_property
    def clauses(self) -> dict[str, Tensor]:
        return {name: torch.tensor(held) for name, held in self.told.held.items()}
