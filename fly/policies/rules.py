"""Acceptance policies: lenient, and FLy.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fly.expressions import Checked
from fly.ops import pick
from fly.policies.base import AcceptancePolicy, ExactCore
from fly.policies.conditions import AgreeingWindow, Condition, ControlToken, Entropy, EntropyGate, Room
from fly.policies.formulas import by_temperature, matches
from fly.policies.gates import SuffixRegret
from fly.policies.lossless import Exact
from fly.policies.schedule import AtMost, RegretBudget
from fly.types import Draft, Guarantee, Target

__all__ = ["FLy", "LossySampling", "asd"]


@dataclass(frozen=True)
class LossySampling(AcceptancePolicy, Checked):
    """Lenience (Leviathan et al. 2023, appendix A.5): keep x with probability min(1, l·target(x)/draft(x)); at
    temperature 0, keep x if l·target(x) >= max target in the raw distribution.

    ``lenience`` l >= 1; 1 is ``Exact``. Usual values are 2 to 5. After a rejection it draws from the exact residual.
    """

    name: ClassVar[str] = "lossy"
    monotone: ClassVar[Mapping[str, int]] = {"lenience": 1}
    lenience: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        logits_BKV, near_BK = target.logits_BKV[:, :-1], matches(target, draft)
        if self.lenience > 1:  # at 1, a token that ties with the argmax is rejected
            # target(x) >= max target / l, in logits, which needs no softmax over the vocabulary.
            gap_BK = pick(logits_BKV, target.argmax_BK[:, :-1]) - pick(logits_BKV, draft.tokens_BK)
            near_BK = near_BK | (gap_BK <= math.log(self.lenience))

        def sampled() -> Tensor:
            return (self.lenience * target.probs_of(draft.tokens_BK) / draft.own_probs_BK()).clamp_max(1.0)

        return by_temperature(target, near_BK.float(), sampled)


@dataclass(frozen=True)
class FLy(ExactCore):
    """FLy, training-free loosely speculative decoding (arXiv 2511.22972, section 3).

    A drafted token is kept if the exact rule keeps it, or if all of these hold:

    - gate: the target was uncertain there, entropy >= ``theta``;
    - window: the target agrees with the next ``window`` drafted tokens (counted *after* the mismatch);
    - room: at least ``hold`` drafted tokens follow;
    - the token is not a control token (not in the paper).

    ``entropy``: ``"top3"`` (nats, over the three likeliest tokens) or ``"normalized"`` (full entropy over ln V).
    ``processed``: use the processed distribution (at temperature 0 it is always the raw logits).

    Presets: ``FLy()`` is ``FLy.vllm()``; ``FLy.reference()`` follows the authors' code; ``FLy.paper()`` follows the
    formula in their paper. The paper's gate of 0.3 means 3.5 nats for a vocabulary of 128k, so it almost never opens on
    large vocabularies: watch its pass rate.

    FLy *is* ``Exact() | (EntropyGate(theta) & AgreeingWindow(window) & Room(hold) & ~ControlToken())``.
    docs/explanation/fly.md explains what it does and where it fails.
    """

    name: ClassVar[str] = "fly"
    monotone: ClassVar[Mapping[str, int]] = {"theta": -1, "window": -1, "hold": -1}
    entropy: Entropy = "top3"
    theta: float = 0.3
    window: int = 6
    hold: int = 6
    processed: bool = True

    def __post_init__(self) -> None:
        _ = self.relaxation  # the conditions check their own parameters

    @classmethod
    def reference(cls) -> FLy:
        """Return the preset for AMD-AGI/FLy's code: top-3 entropy of the raw distribution, five agreeing tokens, and
        room for six."""
        return cls("top3", 0.3, window=5, hold=6, processed=False)

    @classmethod
    def paper(cls) -> FLy:
        """Return the preset for the formula in the paper: entropy divided by ln V."""
        return cls("normalized", 0.3, window=6, hold=6, processed=False)

    @classmethod
    def vllm(cls) -> FLy:
        """Return the preset for AMD's port in vLLM: top-3 entropy of the processed distribution, and six agreeing
        tokens."""
        return cls()

    @property
    def guarantee(self) -> Guarantee:  # type: ignore[override]  # depends on the gate
        return Guarantee.HEURISTIC if self.relaxation.possible else Guarantee.LOSSLESS

    @property
    def core(self) -> AcceptancePolicy:
        return Exact()

    @cached_property
    def relaxation(self) -> Condition:  # computed once
        gate = EntropyGate(self.theta, self.entropy, self.processed)
        return gate & AgreeingWindow(self.window) & Room(self.hold) & ~ControlToken()


def asd() -> AcceptancePolicy:
    """Return approximate speculative decoding (ASD, arXiv 2608.03447, the authors' code) with the authors' values:
    ``exact | suffix_regret(0.25) & at_most(2, per=block) & regret_budget(8) & ~control``. A mismatch is kept if its
    regret is small for the drafted tokens that it may save, a block has at most two, and a request spends at most 8
    nats of regret. (The protection of control tokens is not in the paper.)

    HEURISTIC: the budget limits logits of the target, not its distribution. At temperature 0, for which it was made,
    the relaxed tokens of a request have at most 8 nats of regret in all.
    """
    return Exact() | (SuffixRegret() & AtMost(2, "block") & RegretBudget() & ~ControlToken())
