"""Gates: rules and conditions that ask how probable the target finds the token, and how sure it is.
``fly.policies.formulas`` says what all rules have in common.

Shape legend: B rows, K longest draft, V vocabulary, N any leading shape. Positions are 0-based, papers count from 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fly.expressions import Amount, Checked, Count, Share
from fly.ops import entropy, jensen_shannon, kl, pick, top, total_variation
from fly.policies.base import AcceptancePolicy
from fly.policies.conditions import Block, Condition
from fly.policies.formulas import binary, drafted, gate_distribution, gate_probs, matches, possible
from fly.types import Draft, Target

__all__ = ["BiLD", "Fuzzy", "LogMargin", "Regret", "RelaxedTopN", "TopRatio", "Typical"]


class _Gate(AcceptancePolicy, Checked):
    """Rules that do not compare the target's distribution with the draft's: after a rejection the target draws
    afresh."""

    @abstractmethod
    def opens(self, target: Target, draft: Draft) -> Tensor:
        """[B, K] bool: where the gate keeps a token."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        """1 where the gate opens, and for the target's choice at temperature 0 in any case; else 0."""
        own_BK = target.greedy_B.unsqueeze(1) & matches(target, draft)
        return drafted(self.opens(target, draft) | own_BK, draft)

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        """The target's own distribution."""
        return target_BV


@dataclass(frozen=True)
class Typical(_Gate):
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): keep x if target(x) > min(eps, delta·exp(-H)),
    H the entropy of the target in nats; else the target draws afresh.

    Usual values: eps 0.09, delta 0.3 (Medusa: delta = sqrt(eps)). At temperature 0 it uses the raw distribution, and
    always keeps the argmax.
    """

    name: ClassVar[str] = "typical"
    monotone: ClassVar[Mapping[str, int]] = {"eps": -1, "delta": -1}
    eps: Share = 0.09
    delta: Share = 0.3

    def opens(self, target: Target, draft: Draft) -> Tensor:
        probs_BKV = gate_distribution(target)
        threshold_BK = (self.delta * (-entropy(probs_BKV)).exp()).clamp_max(self.eps)
        return pick(probs_BKV, draft.tokens_BK) > threshold_BK


@dataclass(frozen=True)
class RelaxedTopN(_Gate):
    """Relaxed acceptance (TensorRT-LLM, ``relaxed_topk`` and ``relaxed_delta``): keep x if it is among the target's
    ``n`` most likely tokens and target(x) >= max target - delta; else the target draws afresh.

    Usual values: n 10, delta 0.6 (in TensorRT-LLM only while a model thinks). Tokens as likely as the n-th count as
    among them. At temperature 0 it uses the raw distribution, and always keeps the argmax.
    """

    name: ClassVar[str] = "topn"
    monotone: ClassVar[Mapping[str, int]] = {"n": 1, "delta": 1}
    n: Annotated[int, Field(ge=1)] = 10
    delta: Share = 0.6

    def opens(self, target: Target, draft: Draft) -> Tensor:
        token_BK, peak_BK = gate_probs(target, draft)
        logits_BKV = target.logits_BKV[:, :-1]  # their order is that of the distribution, without a softmax
        among_BK = pick(logits_BKV, draft.tokens_BK) >= top(logits_BKV, self.n).values[..., -1]
        return among_BK & (token_BK >= peak_BK - self.delta) & (token_BK > 0)


@dataclass(frozen=True)
class BiLD(_Gate):
    """BiLD's rollback (Kim et al., arXiv 2302.07863): reject x if -ln target(x) > r and x is not the target's most
    likely token; else keep it. After a rejection the target draws afresh.

    ``r`` >= 0, usually 2 to 5; 0 keeps only tokens that the target is certain of, and its own choice. BiLD's fallback
    policy, when the drafter hands over, is a matter of the draft strategy. At temperature 0 it uses the raw
    distribution.
    """

    name: ClassVar[str] = "bild"
    monotone: ClassVar[Mapping[str, int]] = {"r": 1}
    r: Amount = 3.0

    def opens(self, target: Target, draft: Draft) -> Tensor:
        token_BK, _ = gate_probs(target, draft)
        return (-token_BK.log() <= self.r) | (matches(target, draft) & (token_BK > 0))


_DIVERGENCES = {"js": jensen_shannon, "kl": kl, "tv": total_variation}


@dataclass(frozen=True)
class Fuzzy(_Gate):
    """Fuzzy speculative decoding (arXiv 2502.20704): keep any x where the target's and the draft's distributions are
    near (divergence <= threshold); else the target draws afresh.

    ``divergence``: ``"js"`` (Jensen-Shannon, at most ln 2), ``"kl"`` (KL(draft || target), infinite where the draft
    may propose what the target excludes) in nats, or ``"tv"`` (total variation). ``threshold`` is tuned for a pair.

    Above temperature 0 a token's emitted distribution is the draft's where the two are near, else the target's, so
    within the threshold of it; at temperature 0 the raw distribution is compared with the draft's, without such a
    promise: HEURISTIC. The argmax is always kept there.
    """

    name: ClassVar[str] = "fuzzy"
    monotone: ClassVar[Mapping[str, int]] = {"threshold": 1}
    divergence: Literal["js", "kl", "tv"] = "js"
    threshold: Amount = 0.3

    def opens(self, target: Target, draft: Draft) -> Tensor:
        if draft.probs_BKV is None:
            target_BKX, draft_BKX = binary(gate_probs(target, draft)[0])
        else:
            target_BKX, draft_BKX = gate_distribution(target), draft.probs_BKV
        return (_DIVERGENCES[self.divergence](draft_BKX, target_BKX) <= self.threshold) & possible(target, draft)


@dataclass(frozen=True)
class LogMargin(Condition, Checked):
    """The target barely prefers another token: its largest logit is less than ``tau`` above the drafted token's.

    The gate of llama.cpp's FLy (there 0.3 nats, so at least 74 % as likely as the first choice). On the raw logits;
    a banned token never passes. ``Exact() | LogMargin(0.3)`` is a policy.
    """

    name: ClassVar[str] = "margin"
    tau: Amount = 0.3

    def evaluate(self, block: Block) -> Tensor:
        logits_BKV = block.target.logits_BKV[:, :-1]
        peak_BK = pick(logits_BKV, block.target.argmax_BK[:, :-1])
        return peak_BK - pick(logits_BKV, block.draft.tokens_BK) < self.tau


@dataclass(frozen=True)
class Regret(Condition, Checked):
    """The draft costs little from the mismatch to the end of a window: the ``window`` tokens after it were drafted, and
    the logits of all of them lie, in sum, at most ``nats`` below those of the target's own choices.

    First described here (docs/results/real-pair.md). A margin asks how much the target prefers another token, a window
    asks whether it agrees with what follows. This asks both at once, in one currency: how much likelier, in nats, the
    target finds its own choices than the drafted tokens. So a window may contain a second small mismatch, and a near
    miss needs less agreement after it than a far one. On the raw logits; a banned token never passes.
    """

    name: ClassVar[str] = "regret"
    nats: Amount = 2.3
    window: Count = 4

    def evaluate(self, block: Block) -> Tensor:
        logits_BKV = block.target.logits_BKV[:, :-1]
        regret_BK = pick(logits_BKV, block.target.argmax_BK[:, :-1]) - pick(logits_BKV, block.draft.tokens_BK)
        longest = regret_BK.shape[1]
        at_K = torch.arange(longest, device=regret_BK.device)
        regret_BK = regret_BK.masked_fill(at_K >= block.draft.lengths_B.unsqueeze(1), math.inf)
        padded_BJ = torch.nn.functional.pad(regret_BK, (0, self.window), value=math.inf)
        return padded_BJ.unfold(1, self.window + 1, 1).sum(-1) <= self.nats


@dataclass(frozen=True)
class TopRatio(Condition, Checked):
    """MARS's margin (arXiv 2601.15498): the drafted token is the target's first choice, or its second with a logit
    above ``theta`` times the first.

    ``theta`` in [0, 1], usually 0.9. A ratio of logits changes with a constant added to all of them (``LogMargin`` is
    the safer gate), and means nothing unless the largest is positive, so otherwise only the first choice passes.
    Tokens that tie for second count as second.
    """

    name: ClassVar[str] = "mars"
    theta: Share = 0.9

    def evaluate(self, block: Block) -> Tensor:
        logits_BKV = block.target.logits_BKV[:, :-1]
        top_BK2 = top(logits_BKV, 2).values
        first_BK, second_BK = top_BK2[..., 0], top_BK2[..., -1]
        token_BK = pick(logits_BKV, block.draft.tokens_BK)
        runner_up_BK = (token_BK >= second_BK) & (token_BK > self.theta * first_BK)  # never if first <= 0
        return runner_up_BK | matches(block.target, block.draft)
