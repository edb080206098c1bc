"""The interface of acceptance policies, and how a policy judges a chain. Knows nothing of models, caches or ranks.

Shape legend: B rows, K longest draft, V vocabulary. Positions count from 0 here, and from 1 in papers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fly.ops import draw, one_hot, pick, vectors_at
from fly.policies.binding import Bindable, parts_of
from fly.policies.conditions import Block, Clause, Condition, describe, expression, is_built_in
from fly.policies.reads import DRAFT_LOGITS, Trial, try_rule
from fly.types import IMPOSSIBLE, UNDECIDED, Draft, Guarantee, Noise, Target, Verdict, Why
from fly.vocabulary import Vocabulary

__all__ = [
    "AcceptancePolicy",
    "Bound",
    "ExactCore",
    "Promise",
    "Relaxed",
    "accepts_exactly",
    "draw_next",
    "exact_accept_probs",
    "longest_prefix",
    "mark_nan",
    "verdict_of",
]

P = TypeVar("P", bound="AcceptancePolicy")


@dataclass(frozen=True)
class Bound:
    """A bound on the distance between the distribution of one emitted token and the target's.

    ``measure`` is ``kl``, KL(emitted || target) in nats, or ``tv``, the total variation distance in [0, 1].
    """

    measure: Literal["kl", "tv"]
    value: float

    def __str__(self) -> str:
        return f"{self.measure.upper()} <= {self.value:g}"


class AcceptancePolicy(Bindable, ABC):
    """Decides which drafted tokens are kept.

    A policy is a frozen dataclass whose fields are its parameters. It has no state and changes no input. It judges each
    row by itself, in tensor operations over the batch, and never makes the host wait for a device.

    A subclass implements ``accept_probs``. It may excuse mismatches (``relaxation``, composed of conditions, or
    ``relax``) and change the distribution of the correction (``residual``). ``verify`` does the rest.

    ``name`` is the policy's name in texts and configurations (default: the class name). ``guarantee`` is LOSSLESS,
    BOUNDED (then ``bound`` limits the distance from the target's distribution) or HEURISTIC; ``fly check`` tests it.
    ``monotone`` maps a parameter to +1 if a larger value never accepts less, and to -1 if it never accepts more.
    """

    name: ClassVar[str]
    monotone: ClassVar[Mapping[str, int]] = {}
    guarantee: Guarantee = Guarantee.HEURISTIC

    @property
    def bound(self) -> Bound | None:
        """The bound of a BOUNDED policy; None otherwise."""
        return None

    @property
    def core(self) -> AcceptancePolicy:
        """The policy without its relaxation, or the policy itself if it has none."""
        return self

    @property
    def relaxation(self) -> Condition | None:
        """The condition under which mismatches are excused; None if none are. Computed once for each policy."""
        return None

    @property
    def budgets(self) -> tuple[Any, ...]:
        """The budgets of its relaxation for which the engine records what relaxed tokens cost (``CostBudget``)."""
        return () if self.relaxation is None else self.relaxation.budgets

    @property
    def reads(self) -> frozenset[str]:
        """What the rule reads besides the target's output and the drafted tokens: ``"draft.logits"``
        (``Draft.logits_BKV``), and of each row's past ``"history"``, ``"generated"``, ``"relaxed"``, ``"relaxed_at"``,
        ``"nats"`` and ``"spent"`` (``Target``).

        It is found by letting the rule decide a few small blocks, once, and ``also_reads`` adds to it. The engine
        supplies what is read, at every temperature; a request whose drafts have no logits is refused if its rule reads
        them.
        """
        return self._trial.reads

    @cached_property
    def reads_logits(self) -> bool:
        """Whether the rule reads the draft's logits. No rule of this package does, so that is not tried."""
        return not self.is_built_in and DRAFT_LOGITS in self.reads

    def refuse_failing(self, greedy: bool | None = None) -> None:
        """Raise ``ValueError``, with the error that the rule raises, if it fails to decide the small blocks that show
        what it ``reads``: of rows at temperature 0 (``greedy``), or of rows above it; None means of both. Rules of this
        package are not tried."""
        if self.is_built_in:
            return
        errors = [self._trial.errors.get(kind) for kind in ((True, False) if greedy is None else (greedy,))]
        if None not in errors:
            raise ValueError(f"the rule '{self}' fails on a trial block: {errors[0]}")

    @cached_property
    def _trial(self) -> Trial:
        return try_rule(self)

    @cached_property
    def is_built_in(self) -> bool:
        """Whether the rule and all its parts belong to this package."""
        return all(map(is_built_in, parts_of(self)))

    @property
    def compiled_gate(self) -> Clause | None:
        """Of a rule that keeps a token if and only if a gate opens: the gate, for compiled code. None for other rules.
        As in ``Condition.compiled``, an inherited ``_compile`` does not count."""
        return self._compile() if "_compile" in vars(type(self)) else None

    def _compile(self) -> Clause | None:
        """Return the gate of this rule for compiled code; None: it has none, or only Python knows it."""
        return None

    @abstractmethod
    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        """Return the probability [B, K], in [0, 1], of keeping token j of the ``draft`` if all tokens before it are
        kept. ``target`` is the target's output at the K + 1 positions of the block."""

    def chances(self, target: Target, draft: Draft) -> Tensor:
        """Call ``accept_probs`` and check its shape.

        Raises ``ValueError`` unless it is [B, K]: a tensor [B] or [K] would be broadcast silently.
        """
        chances_BK = self.accept_probs(target, draft)
        if not isinstance(chances_BK, Tensor) or chances_BK.shape != draft.shape:
            shape = list(draft.shape)
            raise ValueError(f"{self}: accept_probs gave {describe(chances_BK)}, not a tensor [B, K] of {shape}")
        if chances_BK.is_complex():
            raise ValueError(f"{self}: accept_probs gave {describe(chances_BK)}, not probabilities")
        return chances_BK

    def corrected(self, target: Target, draft: Draft, at_B: Tensor) -> Tensor:
        """Call ``correction`` and check its shape. A value of a user's rule that is below 0, by more than rounding,
        becomes NaN, since what is drawn from it would depend on the batch.

        Raises ``ValueError`` unless it is [B, V]: a tensor [B, 1] would become a uniform distribution silently.
        """
        residual_BV = self.correction(target, draft, at_B)
        shape = [len(at_B), target.logits_BKV.shape[-1]]
        if not isinstance(residual_BV, Tensor) or list(residual_BV.shape) != shape or residual_BV.is_complex():
            raise ValueError(f"{self}: the correction is {describe(residual_BV)}, not a tensor [B, V] of {shape}")
        if self.is_built_in:
            return residual_BV
        return residual_BV.float().masked_fill(residual_BV < -1e-6, torch.nan)

    def relax(self, target: Target, draft: Draft, agree_BK: Tensor) -> Tensor:
        """Return which mismatches to excuse, bool [B, K]. ``agree_BK`` is True where the lossless core keeps the token,
        and False on padding."""
        return torch.zeros_like(agree_BK)

    @property
    def may_excuse(self) -> bool:
        """Whether the policy may excuse a mismatch. It may if it has a ``relaxation``, or if its class overrides
        ``relax`` or ``excused``."""
        kind, plain = type(self), AcceptancePolicy
        return self.relaxation is not None or kind.relax is not plain.relax or kind.excused is not plain.excused

    def excused(self, block: Block) -> Tensor:
        """Return which mismatches ``relaxation`` excuses, or ``relax`` if there is none, bool [B, K]. A banned token is
        never excused."""
        if self.relaxation is None:
            excused_BK, shape = self.relax(block.target, block.draft, block.agree_BK), block.agree_BK.shape
            if not isinstance(excused_BK, Tensor) or excused_BK.dtype != torch.bool or excused_BK.shape != shape:
                expected = f"a bool tensor [B, K] of {list(shape)}"
                raise ValueError(f"{self}: relax gave {describe(excused_BK)}, not {expected}")
        else:
            excused_BK = self.relaxation.holds(block)
        return excused_BK & block.target.allowed(block.draft.tokens_BK)

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        """Return the unnormalised distribution [B, V] of the correction after a rejection: max(target - draft, 0)
        (Leviathan et al. 2023, eq. 2; Chen et al. 2023).

        For a deterministic draft, ``draft_BV`` is one-hot, so the result is the target's distribution without the
        rejected token.
        """
        return (target_BV - draft_BV).clamp_min(0)

    def correction(self, target: Target, draft: Draft, at_B: Tensor) -> Tensor:
        """Return the unnormalised distribution [B, V] of the correction after drafted token ``at_B`` was rejected.

        Override this, instead of ``residual``, if the distribution depends on which token was rejected.
        """
        rows_B = torch.arange(at_B.shape[0], device=at_B.device)
        target_BV = target.probs_at(rows_B, at_B)
        if draft.probs_BKV is None:
            draft_BV = one_hot(target_BV, draft.tokens_BK[rows_B, at_B])
        else:
            draft_BV = vectors_at(draft.probs_BKV, rows_B, at_B)
        return self.residual(target_BV, draft_BV)

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        """Decide a block of chains. A policy that judges a block as a whole overrides this and nothing else."""
        # Without a draft, as in autoregressive decoding, only draw the next token.
        mask_BK = draft.mask_BK()
        if not mask_BK.shape[1]:
            accepted_B, none_BK = torch.zeros_like(draft.lengths_B), torch.zeros_like(mask_BK, dtype=torch.int8)
            return Verdict(accepted_B, _next_token(self, target, draft, noise, accepted_B), none_BK, mask_BK)
        # Flip the coins: token j is kept if its coin is below its chance (Leviathan et al. 2023, alg. 1).
        chance_BK = self.chances(target, draft)
        kept_BK = (noise.accept_BK < chance_BK) & mask_BK
        # Excuse mismatches, if the policy excuses any.
        block = Block(target, draft, kept_BK)
        stands_BK = kept_BK | (self.excused(block) & mask_BK) if self.may_excuse else kept_BK
        # A kept token counts as relaxed if the exact rule rejects it with the same coin.
        exact_BK = kept_BK
        if self.core.guarantee is not Guarantee.LOSSLESS:
            exact_BK = (noise.accept_BK < exact_accept_probs(target, draft)) & mask_BK
        # Accept the longest prefix of tokens that are kept or excused. A correction or a bonus follows it.
        verdict = longest_prefix(self, target, draft, noise, stands_BK, exact_BK, block.clauses)
        # The exact rule's chances are NaN only if the target or the draft has a NaN, and ``verify`` checks those.
        return verdict if accepts_exactly(self) else mark_nan(verdict, chance_BK, draft)

    def checked_verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        """Call ``verdict``, and check what a subclass has made of it.

        The next token of a row becomes ``IMPOSSIBLE`` if the row keeps less than nothing or more than its draft, or if
        the token is not in the vocabulary. Raises ``ValueError`` for parts of a wrong kind or shape.
        """
        verdict = self.verdict(target, draft, noise)
        if type(self).verdict is AcceptancePolicy.verdict or self.is_built_in:
            return verdict
        if not isinstance(verdict, Verdict):
            raise ValueError(f"{self}: verdict gave {describe(verdict)}, not a Verdict")
        rows, longest = draft.shape
        kinds = {"accepted_B": [rows], "next_token_B": [rows], "why_BK": [rows, longest], "asked_BK": [rows, longest]}
        parts = [(name, getattr(verdict, name), shape) for name, shape in kinds.items()]
        parts += [(f"clauses[{label!r}]", held_BK, [rows, longest]) for label, held_BK in verdict.clauses.items()]
        for name, part, shape in parts:
            if not isinstance(part, Tensor) or list(part.shape) != shape or part.is_floating_point():
                numbers = f"whole numbers of shape {shape}"
                raise ValueError(f"{self}: {name} of its verdict is {describe(part)}, not {numbers}")
        accepted_B, next_token_B = verdict.accepted_B.long(), verdict.next_token_B.long()
        kept_B = accepted_B.clamp_min(0).minimum(draft.lengths_B)
        there_B = (next_token_B >= UNDECIDED) & (next_token_B < target.logits_BKV.shape[-1])
        next_token_B = torch.where((kept_B == accepted_B) & there_B, next_token_B, IMPOSSIBLE)
        return replace(verdict, accepted_B=kept_B, next_token_B=next_token_B)

    def bind(self: P, vocabulary: Vocabulary) -> P:
        bound = super().bind(vocabulary)
        if (relaxation := bound.relaxation) is not None:
            vars(bound)["relaxation"] = relaxation.bind(vocabulary)  # raise for unknown tokens now
        return bound

    def __or__(self, condition: Condition) -> AcceptancePolicy:
        """Return a policy that also excuses mismatches under ``condition``.

        Raises ``TypeError`` if ``condition`` is a policy, since two policies have no common core, or if this policy has
        its own ``verdict`` or ``relax``, which would be ignored.
        """
        if not self._takes_condition("|", condition):
            return NotImplemented
        return Relaxed(self.core, condition if self.relaxation is None else self.relaxation | condition)

    def __and__(self, condition: Condition) -> AcceptancePolicy:
        """Return a policy that excuses mismatches only where ``condition`` also holds.

        Raises ``TypeError`` like ``|``, and if this policy excuses nothing, so that there is nothing to restrict.
        """
        if not self._takes_condition("&", condition):
            return NotImplemented
        if self.relaxation is None:
            raise TypeError(
                f"{self} has no condition after '|', so '& {condition}' has nothing to restrict; write what it "
                "excuses as a Condition: Exact() | MyCondition() & ..."
            )
        return Relaxed(self.core, self.relaxation & condition)

    def __ror__(self, other: object) -> AcceptancePolicy:
        return self._refuse_second("|", other)

    def __rand__(self, other: object) -> AcceptancePolicy:
        return self._refuse_second("&", other)

    def _takes_condition(self, symbol: str, other: object) -> bool:
        """Whether ``other`` is a condition. Raises ``TypeError`` for what must not be combined with this policy."""
        if isinstance(other, AcceptancePolicy):
            parts = "" if other.relaxation is None else f"; what '{other}' excuses is '{other.relaxation}'"
            raise TypeError(
                f"both are policies, and '{symbol}' takes a policy and a condition under which it excuses mismatches"
                f"{parts}"
            )
        if isinstance(other, Condition):
            _check_by_token(self, symbol, other)
        return isinstance(other, Condition)

    def _refuse_second(self, symbol: str, other: object) -> AcceptancePolicy:
        """Raise ``TypeError`` if a condition stands before this policy."""
        if not isinstance(other, Condition):
            return NotImplemented
        raise TypeError(f"the policy stands first: '{self} {symbol} {other}'")

    def __str__(self) -> str:
        return expression(self)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        if isinstance(relaxation := cls.__dict__.get("relaxation"), property):  # compute it once
            cls.relaxation = cached_property(relaxation.fget)  # type: ignore[assignment, arg-type]
            cls.relaxation.__set_name__(cls, "relaxation")  # type: ignore[attr-defined]


class ExactCore(AcceptancePolicy):
    """A policy that keeps the tokens that the exact rule keeps, and may also excuse mismatches."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return exact_accept_probs(target, draft)


@dataclass(frozen=True)
class Relaxed(AcceptancePolicy):
    """A core, and a condition that excuses its mismatches, as in ``Exact() | condition``."""

    name: ClassVar[str] = "relaxed"
    base: AcceptancePolicy
    condition: Condition

    def __post_init__(self) -> None:
        _check_by_token(self.base, "|", self.condition)

    @property
    def guarantee(self) -> Guarantee:  # type: ignore[override]  # depends on the parts
        """The core's guarantee if no mismatch is ever excused; otherwise HEURISTIC."""
        return Guarantee.HEURISTIC if self.condition.possible else self.base.guarantee

    @property
    def bound(self) -> Bound | None:
        return None if self.condition.possible else self.base.bound

    @property
    def core(self) -> AcceptancePolicy:
        return self.base

    @property
    def relaxation(self) -> Condition:
        return self.condition

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return self.base.accept_probs(target, draft)

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return self.base.residual(target_BV, draft_BV)

    def correction(self, target: Target, draft: Draft, at_B: Tensor) -> Tensor:
        return self.base.correction(target, draft, at_B)

    def __str__(self) -> str:
        return f"{self.base} | {self.condition}"


def _check_by_token(policy: AcceptancePolicy, symbol: str, condition: Condition) -> None:
    """Raise ``TypeError`` for a policy that does more than keep or excuse tokens one by one. A composition would
    silently ignore its other methods."""
    kind, plain = type(policy), AcceptancePolicy
    if kind.verdict is not plain.verdict:
        raise TypeError(
            f"{policy} decides on whole blocks (its own 'verdict'), so no single mismatch of it can be excused: write "
            f"'exact | {condition}', or excuse them in its verdict"
        )
    if kind.relax is not plain.relax:
        raise TypeError(
            f"{policy} excuses mismatches in a 'relax' of its own, which '{symbol} {condition}' would replace: give it "
            "a 'relaxation' made of conditions instead"
        )


def exact_accept_probs(target: Target, draft: Draft) -> Tensor:
    """Return min(1, target/draft) for each drafted token, [B, K]. At temperature 0 this is 1 for the target's argmax
    and 0 for other tokens."""
    target_BK = target.probs_of(draft.tokens_BK)
    return target_BK if draft.probs_BKV is None else (target_BK / draft.own_probs_BK()).clamp_max(1.0)


class Promise(NamedTuple):
    """What a policy promises about the distribution of the emitted text: its guarantee, and the bound of a BOUNDED one,
    else None."""

    guarantee: Guarantee
    bound: Bound | None = None

    @staticmethod
    def of(policy: AcceptancePolicy) -> Promise:
        """Return what ``policy`` promises on a model that keeps guarantees (``Executor.keeps_guarantees``)."""
        return Promise(policy.guarantee, policy.bound)


def accepts_exactly(policy: AcceptancePolicy) -> bool:
    """Whether ``policy`` keeps the same tokens as the exact rule, apart from those that its ``relaxation`` excuses."""
    kind, core = type(policy), policy.base if type(policy) is Relaxed else policy
    steps = kind.verdict is AcceptancePolicy.verdict and kind.relax is AcceptancePolicy.relax
    return steps and type(core).accept_probs is ExactCore.accept_probs


def draws_exactly(policy: AcceptancePolicy) -> bool:
    """Whether a policy that ``accepts_exactly`` also draws corrections from the same distribution as the exact rule."""
    kind, plain = type(policy.base if type(policy) is Relaxed else policy), AcceptancePolicy
    return kind.residual is plain.residual and kind.correction is plain.correction


def longest_prefix(
    policy: AcceptancePolicy,
    target: Target,
    draft: Draft,
    noise: Noise,
    stands_BK: Tensor,
    exact_BK: Tensor,
    clauses: dict[str, Tensor] | None = None,
) -> Verdict:
    """Build the verdict from decisions on single tokens. Accept the longest prefix of tokens that stand, and draw the
    correction or the bonus after it.

    ``stands_BK`` marks the tokens that stand, because they are kept or excused. ``exact_BK`` marks the tokens that the
    exact rule keeps. These count as ``match``, and other tokens that stand as ``relaxed``. Both are bool [B, K], and
    False on padding.
    """
    accepted_B = stands_BK.long().cumprod(-1).sum(-1)
    return verdict_of(accepted_B, _next_token(policy, target, draft, noise, accepted_B), exact_BK, draft, clauses)


def verdict_of(
    accepted_B: Tensor, next_token_B: Tensor, exact_BK: Tensor, draft: Draft, clauses: dict[str, Tensor] | None = None
) -> Verdict:
    """Build the verdict from accepted prefixes and next tokens. ``longest_prefix`` describes ``exact_BK``."""
    columns_K = torch.arange(exact_BK.shape[1], device=exact_BK.device)
    codes_BK = torch.where(exact_BK, int(Why.MATCH), int(Why.RELAXED))
    why_BK = torch.where(columns_K < accepted_B.unsqueeze(1), codes_BK, int(Why.REJECTED)).to(torch.int8)
    asked_BK = ~exact_BK & draft.mask_BK() & (columns_K <= accepted_B.unsqueeze(1))
    return Verdict(accepted_B, next_token_B, why_BK, asked_BK, clauses or {})


def mark_nan(verdict: Verdict, chance_BK: Tensor, draft: Draft) -> Verdict:
    """Mark the next token as undecided if the chance of an accepted token, or of the one after, is NaN."""
    columns_K = torch.arange(chance_BK.shape[1], device=chance_BK.device)
    nan_BK = chance_BK.isnan() & draft.mask_BK() & (columns_K <= verdict.accepted_B.unsqueeze(1))
    return replace(verdict, next_token_B=torch.where(nan_BK.any(1), UNDECIDED, verdict.next_token_B))


def _next_token(policy: AcceptancePolicy, target: Target, draft: Draft, noise: Noise, accepted_B: Tensor) -> Tensor:
    if target.all_greedy:
        return pick(target.argmax_BK, accepted_B)
    rows, longest = draft.tokens_BK.shape
    if not longest:
        return draw(target.probs_at(torch.arange(rows, device=accepted_B.device), accepted_B), noise.sample_B)
    residual_BV = policy.corrected(target, draft, accepted_B.clamp_max(longest - 1))
    return draw_next(residual_BV, target, draft, noise, accepted_B)


def draw_next(residual_BV: Tensor, target: Target, draft: Draft, noise: Noise, accepted_B: Tensor) -> Tensor:
    """Draw the token after each accepted prefix, int64 [B]: the correction from ``residual_BV``, or the bonus from the
    target's distribution. The result is UNDECIDED where the distribution of a correction has a NaN."""
    rows_B = torch.arange(accepted_B.shape[0], device=accepted_B.device)
    probs_BV = target.probs_at(rows_B, accepted_B)
    # If target and draft are equal, the residual has no mass. Then only a rounding error can reject a token, and the
    # correction comes from the target's distribution. A NaN anywhere makes the mass NaN.
    mass_B, rejected_B = residual_BV.sum(-1), accepted_B < draft.lengths_B
    probs_BV = torch.where((rejected_B & (mass_B > 0)).unsqueeze(1), residual_BV, probs_BV)
    nan_B = rejected_B & mass_B.isnan()
    if target.some_greedy:
        nan_B = nan_B & ~target.greedy_B  # greedy rows emit the target's argmax
    return torch.where(nan_B, UNDECIDED, draw(probs_BV, noise.sample_B))
