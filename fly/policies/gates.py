"""Gates: rules and conditions that look at the target's probability of a token and at the target's certainty.
``fly.policies.formulas`` describes what all rules share.

Shape legend: B rows, K longest draft, J positions with padding, V vocabulary, X = V, or 2 if tokens are merged, N any
leading shape. Positions count from 0 here, from 1 in papers.
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
from fly.policies.conditions import Block, Clause, Condition
from fly.policies.formulas import binary, drafted, gate_distribution, gate_probs, matches, possible, raw_regret
from fly.types import Draft, Target

__all__ = ["BiLD", "Fuzzy", "LogMargin", "Near", "Regret", "RelaxedTopN", "SuffixRegret", "TopRatio", "Typical"]


class _Gate(AcceptancePolicy, Checked):
    """A rule that keeps a token if a gate opens. After a rejection it draws from the target's own distribution."""

    @abstractmethod
    def opens(self, target: Target, draft: Draft) -> Tensor:
        """Return whether the gate keeps each token, bool [B, K]."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        """Return 1 where the gate opens, and at temperature 0 also for the target's argmax; 0 elsewhere."""
        matches_BK = target.greedy_B.unsqueeze(1) & matches(target, draft)
        return drafted(self.opens(target, draft) | matches_BK, draft)

    def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        """Return the target's distribution unchanged."""
        return target_BV


@dataclass(frozen=True)
class Typical(_Gate):
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): keep x if target(x) > min(eps, delta·exp(-H)),
    where H is the target's entropy in nats; otherwise draw from the target.

    Usual values: eps 0.09, delta 0.3 (Medusa: delta = sqrt(eps)). At temperature 0 it uses the raw distribution, and
    always keeps the argmax.
    """

    name: ClassVar[str] = "typical"
    monotone: ClassVar[Mapping[str, int]] = {"eps": -1, "delta": -1}
    eps: Share = 0.09
    delta: Share = 0.3

    def _compile(self) -> Clause:
        return Clause.of("typical", eps=self.eps, delta=self.delta)

    def opens(self, target: Target, draft: Draft) -> Tensor:
        probs_BKV = gate_distribution(target)
        threshold_BK = (self.delta * (-entropy(probs_BKV)).exp()).clamp_max(self.eps)
        return pick(probs_BKV, draft.tokens_BK) > threshold_BK


@dataclass(frozen=True)
class RelaxedTopN(_Gate):
    """Relaxed acceptance (TensorRT-LLM, ``relaxed_topk`` and ``relaxed_delta``): keep x if it is among the target's
    ``n`` most likely tokens and target(x) >= max target - delta; otherwise draw from the target.

    Usual values: n 10, delta 0.6 (in TensorRT-LLM only while a model thinks). Ties with the n-th token count. At
    temperature 0 it uses the raw distribution, and always keeps the argmax.
    """

    name: ClassVar[str] = "topn"
    monotone: ClassVar[Mapping[str, int]] = {"n": 1, "delta": 1}
    n: Annotated[int, Field(ge=1)] = 10
    delta: Share = 0.6

    def _compile(self) -> Clause:
        return Clause.of("topn", n=self.n, delta=self.delta)

    def opens(self, target: Target, draft: Draft) -> Tensor:
        token_BK, peak_BK = gate_probs(target, draft)
        logits_BKV = target.logits_BKV[:, :-1]  # logits are in the same order as probabilities
        among_BK = pick(logits_BKV, draft.tokens_BK) >= top(logits_BKV, self.n).values[..., -1]
        return among_BK & (token_BK >= peak_BK - self.delta) & (token_BK > 0)


@dataclass(frozen=True)
class Near(_Gate):
    """Token-specific cascade (Narasimhan et al., arXiv 2405.19261): keep x if target(x) >= share·max target; otherwise
    draw from the target. vLLM's relaxed acceptance for thinking models (pull request 45229) uses the same test, and
    arXiv 2607.26627 calls the rule truncation-based.

    ``share`` in [0, 1], usually 0.5. The kept tokens are those of a target truncated by min-p = share, but among them
    the draft's distribution decides, not the target's. ``Regret`` is as fast for less (docs/results/rules.md). At
    temperature 0 the rule uses the raw distribution, and always keeps the argmax.
    """

    name: ClassVar[str] = "near"
    monotone: ClassVar[Mapping[str, int]] = {"share": -1}
    share: Share = 0.5

    def _compile(self) -> Clause:
        return Clause.of("near", share=self.share)

    def opens(self, target: Target, draft: Draft) -> Tensor:
        token_BK, peak_BK = gate_probs(target, draft)
        return (token_BK >= self.share * peak_BK) & (token_BK > 0)


@dataclass(frozen=True)
class BiLD(_Gate):
    """BiLD's rollback (Kim et al., arXiv 2302.07863): reject x if -ln target(x) > r and x is not the target's most
    likely token; otherwise keep it. After a rejection, draw from the target.

    ``r`` >= 0, usually 2 to 5. 0 keeps only the target's argmax, and tokens of which the target is certain. At
    temperature 0 the rule uses the raw distribution. (BiLD's fallback policy decides when the draft model stops, so it
    belongs to the draft strategy.)
    """

    name: ClassVar[str] = "bild"
    monotone: ClassVar[Mapping[str, int]] = {"r": 1}
    r: Amount = 3.0

    def _compile(self) -> Clause:
        return Clause.of("bild", r=self.r)

    def opens(self, target: Target, draft: Draft) -> Tensor:
        token_BK, _ = gate_probs(target, draft)
        return (-token_BK.log() <= self.r) | (matches(target, draft) & (token_BK > 0))


_DIVERGENCES = {"js": jensen_shannon, "kl": kl, "tv": total_variation}


@dataclass(frozen=True)
class Fuzzy(_Gate):
    """Fuzzy speculative decoding (arXiv 2502.20704): keep any x if the target's and the draft's distributions are
    close, divergence <= threshold; otherwise draw from the target.

    ``divergence``: ``"js"`` (Jensen-Shannon, at most ln 2), ``"kl"`` (KL(draft || target), infinite if the draft may
    propose a token that the target excludes) in nats, or ``"tv"`` (total variation). ``threshold`` is tuned per pair.

    Above temperature 0 each token comes from the draft's distribution if the two are close, and from the target's
    otherwise, so the emitted distribution stays within the threshold. At temperature 0 the rule compares the raw
    distribution, which bounds nothing (so it is HEURISTIC), and always keeps the argmax.
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
    """The target barely prefers another token: its largest logit exceeds the drafted token's by less than ``tau``.

    This is the gate of llama.cpp's FLy, which uses 0.3 nats: the token is at least 74 % as likely as the first choice.
    The condition uses raw logits; a banned token never passes. ``Exact() | LogMargin(0.3)`` is a policy.
    """

    name: ClassVar[str] = "margin"
    monotone: ClassVar[Mapping[str, int]] = {"tau": 1}
    tau: Amount = 0.3

    def _compile(self) -> Clause:
        return Clause.of("margin", tau=self.tau)

    def evaluate(self, block: Block) -> Tensor:
        return raw_regret(block.target, block.draft) < self.tau


@dataclass(frozen=True)
class Regret(Condition, Checked):
    """The draft costs little over a window: ``window`` more tokens were drafted after the mismatch, and at all of these
    positions together, the target's own choices are at most ``nats`` likelier than the drafted tokens.

    This condition is new in this project (docs/results/rules.md). A margin measures how much the target prefers
    another token. A window tests whether the target agrees with the tokens that follow. This condition measures both in
    nats, by the difference of the logits. So a window may contain a second small mismatch, and a small mismatch needs
    less agreement after it than a large one. The condition uses raw logits; a banned token never passes.
    """

    name: ClassVar[str] = "regret"
    monotone: ClassVar[Mapping[str, int]] = {"nats": 1, "window": -1}
    nats: Amount = 2.3
    window: Count = 4

    def _compile(self) -> Clause:
        return Clause.of("regret", nats=self.nats, window=self.window)

    def evaluate(self, block: Block) -> Tensor:
        regret_BK = raw_regret(block.target, block.draft).masked_fill(~block.draft.mask_BK(), math.inf)
        padded_BJ = torch.nn.functional.pad(regret_BK, (0, self.window), value=math.inf)
        return padded_BJ.unfold(1, self.window + 1, 1).sum(-1) <= self.nats


@dataclass(frozen=True)
class SuffixRegret(Condition, Checked):
    """The mismatch costs little for what it may save: the largest logit exceeds the drafted token's by at most ``nats``
    for each drafted token from here to the end of the draft (ASD, arXiv 2608.03447, with ``nats`` as its g).

    The authors' usual value is 0.25, so the first of 8 tokens may cost 2 nats and the last one 0.25. With 0 the
    condition never holds. It uses raw logits; a banned token never passes.
    """

    name: ClassVar[str] = "suffix_regret"
    monotone: ClassVar[Mapping[str, int]] = {"nats": 1}
    nats: Amount = 0.25

    @property
    def possible(self) -> bool:
        return self.nats > 0

    def _compile(self) -> Clause:
        return Clause.of("suffix_regret", nats=self.nats)

    def evaluate(self, block: Block) -> Tensor:
        remaining_BK = block.draft.lengths_B.unsqueeze(1) - block.columns_K
        return (raw_regret(block.target, block.draft) <= self.nats * remaining_BK) & self.possible


@dataclass(frozen=True)
class TopRatio(Condition, Checked):
    """MARS's margin (arXiv 2601.15498): the drafted token is the target's first choice, or its second choice with a
    logit above ``theta`` times the first.

    ``theta`` in [0, 1], usually 0.9. A constant added to all logits changes their ratio, so ``LogMargin`` is the safer
    gate. The ratio has a meaning only if the largest logit is positive; otherwise only the first choice passes. Tokens
    that tie for second place count as second.
    """

    name: ClassVar[str] = "mars"
    monotone: ClassVar[Mapping[str, int]] = {"theta": -1}
    theta: Share = 0.9

    def _compile(self) -> Clause:
        return Clause.of("mars", theta=self.theta)

    def evaluate(self, block: Block) -> Tensor:
        logits_BKV = block.target.logits_BKV[:, :-1]
        top_BK2 = top(logits_BKV, 2).values
        first_BK, second_BK = top_BK2[..., 0], top_BK2[..., -1]
        token_BK = pick(logits_BKV, block.draft.tokens_BK)
        runner_up_BK = (token_BK >= second_BK) & (token_BK > self.theta * first_BK)  # never if first <= 0
        return runner_up_BK | matches(block.target, block.draft)
