"""Drafting with models: one small model, or a cascade of levels that draft for one another.

Shape legend: B rows, K longest draft, J positions of a row, N places, V vocabulary.
"""

from __future__ import annotations

import sys
from collections import abc
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fly.cache import OutOfBlocks
from fly.drafts.base import (
    Continuation,
    DraftSetup,
    DraftStrategy,
    Loaded,
    StopsByChance,
    describe,
    drafted_of,
    is_built_in,
    until_end,
)
from fly.drafts.limits import check_rule
from fly.drafts.ngram import NGramDraft
from fly.drafts.stops import check_limits, reach_of
from fly.ops import common_prefix, derive, nothing_left, sent
from fly.policies import AcceptancePolicy, Exact
from fly.runner.drafting import Certainty, Drafted, draft_apart, draw_tokens, pad_rows
from fly.runner.executor import DraftSpec, Executor
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.runner.sampling import BatchSampling
from fly.types import Draft, Guarantee, Target

__all__ = ["CascadeDraft", "SingleDraft", "seed_of"]


@dataclass
class _Growing:
    """A row that a level drafts for, round after round."""

    row: Row  # a fork, whose tokens grow
    end: int  # how many tokens it has at most
    certainty: Certainty
    probs: list[Tensor] = field(default_factory=list)  # of each new token: the distribution that it was drawn from
    logits: list[Tensor] = field(default_factory=list)  # of each new token, if they are asked for


class SingleDraft(StopsByChance):
    """One draft model. Alone it decodes autoregressively. It may have a ``draft`` strategy of its own: that strategy
    proposes and this model verifies, round after round, until enough tokens are kept.

    Args:
        model: the name or path of a checkpoint, which is loaded when the strategy is attached, or a loaded model.
        draft: the strategy that proposes for this model, or None. Prompt lookup (``NGramDraft``) changes no token that
            this model drafts, only the number of forwards.
        policy: how this model verifies its own draft. A rule that is not lossless changes the distribution of the
            drafted tokens in an unknown way, so it is refused above temperature 0.
        k: the most tokens it proposes (None: as many as the caller asks for).
        reach: stop after a token if the product of the largest probabilities so far falls below this. That product is
            the model's own estimate of the chance that all these tokens are kept. 0 never stops. None means 0.5 for
            rows under a lossless rule, and 0.1 for other rows, whose rule may need the tokens after a mismatch. (A
            checkpoint's bare name means None.) ``AdaptiveDraft`` sets the limit by measured costs.
        confidence: stop after a token if the largest probability there is below this. 0 never stops. Both limits look
            at the distribution that tokens are drawn from (the raw one at temperature 0), never at the drawn tokens, so
            a lossless rule stays lossless. The last token is proposed too: it is known and costs little to verify.
        cache_tokens: how many tokens its cache holds over all rows (None: as many as the target's, see ``LLM``).
        block_size: tokens in a page of its cache (None: as suits the device).
        dtype, device, kernels: how to load and run a checkpoint, as for ``LLM``; ``"auto"`` follows the target (but for
            a large draft, see ``LLM``).
        vocabulary: the tokens that its head keeps, besides control tokens. The model then reads fewer bytes for each
            drafted token, and never drafts the other tokens; the target still emits them. Give the number of lowest ids
            to keep, a list of ids, or a JSON file with such a list. None keeps all.
    """

    gives_logits = True

    def __init__(
        self,
        model: str | Path | Executor | Loaded | torch.nn.Module,
        draft: DraftStrategy | None = None,
        policy: AcceptancePolicy | None = None,
        k: int | None = None,
        confidence: float = 0.0,
        reach: float | None = 0.0,
        cache_tokens: int | None = None,
        block_size: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
        vocabulary: int | str | Path | abc.Collection[int] | None = None,
    ) -> None:
        check_limits(k, confidence, reach)
        self.k = k
        self.confidence = confidence
        self.reach = reach
        self.with_logits = False  # whether all drafts carry their logits; if so, each round is a call of its own
        self.model = describe(model, dtype, device)
        self.options: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels}
        self.options |= {"cache_tokens": cache_tokens, "block_size": block_size, "vocabulary": vocabulary}
        self.draft = draft
        self.policy = policy or Exact()
        self._runner: Runner | None = None
        self.spare = 0 if draft is None else draft.spare

    def attach(self, setup: DraftSetup) -> None:
        if self._runner is not None:
            raise ValueError(f"this {type(self).__name__} drafts for another model already; make a new one")
        self._runner = setup.load(self.model, **self.options)
        self.vocab_size = self.runner.executor.config.vocab_size
        self.context = self.runner.context
        # The level below drafts for this model, so bind it and this level's rule to this model's vocabulary.
        below = setup.below(self.runner)
        self.policy = self.policy.bind(below.vocabulary)
        if self.draft is not None:
            self.draft = below.attach(self.draft)
            self.spare = self.draft.spare
            check_rule(self.policy, self.draft)

    @property
    def runner(self) -> Runner:
        """The draft model with its cache. Raises ``ValueError`` before the strategy is attached."""
        if self._runner is None:
            raise ValueError(f"the draft model {str(self.model)!r} is not loaded yet: LLM attaches the strategy")
        return self._runner

    def spec(self, rows: abc.Sequence[Row], worth: float = 0.0) -> DraftSpec:
        """Return how the model drafts for ``rows``, including prompt lookup if that is its own draft strategy."""
        lookup = self.draft.lookup if type(self.draft) is NGramDraft and self._lossless else None
        reach = reach_of(rows, self.reach, worth)
        with_logits = self.with_logits or any(row.policy.reads_logits for row in rows)
        return DraftSpec(self.confidence, reach, lookup, with_logits)

    @property
    def _lossless(self) -> bool:
        return self.policy.guarantee is Guarantee.LOSSLESS

    def prefill(self, parts: abc.Sequence[tuple[Row, int]]) -> None:
        context = self.runner.context
        chunks = [(row, min(end, context)) for row, end in parts if row.k]
        if unread := [(row, end) for row, end in chunks if len(self.runner.begin(row)) < end]:
            # If there is no room now, ``propose`` reads the row later.
            with suppress(OutOfBlocks), torch.inference_mode():
                self.runner.feed([], [], prefill=unread)
                self.runner.commit(row for row, _ in unread)
        if self.draft is not None:
            self.draft.prefill(parts)

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int], worth: float = 0.0) -> Draft:
        k = sys.maxsize if self.k is None else self.k
        active = list[int]()
        going = list[Row]()
        lengths = list[int]()
        for b, (row, n) in enumerate(zip(rows, max_len)):
            length = min(n, k, self.runner.context - len(row.tokens))
            if length > 0:
                active.append(b)
                going.append(row)
                lengths.append(length)
        if not active:
            return Draft.empty(len(rows), self.runner.executor.device)
        greedy = all(row.greedy for row in going)
        if not greedy and not self._lossless:
            raise ValueError(f"a draft level verified by {self.policy} has no known distribution above temperature 0")
        spec = self.spec(going, worth)
        self.runner.commit(rows)  # drop an earlier draft that is still cached, perhaps of a fork with other tokens
        looks_up = self.runner.executor.looks_up
        is_alone = [self.draft is None or (spec.lookup is not None and looks_up([row])) for row in going]
        sampling = None
        if not greedy and spec.tree is None:
            sampling = BatchSampling.of([row.params for row in going])
        seeds = [seed_of(row) for row in going]
        drafted = draft_apart(
            is_alone,
            lambda _, *columns: self.runner.extend(*columns),
            lambda _, *columns: self._draft_in_rounds(*columns),
            going, spec, lengths, sampling, seeds,
        )  # fmt: skip
        return drafted_of(len(rows), active, drafted)

    def continuation(self, rows: abc.Sequence[Row], worth: float = 0.0) -> Continuation | None:
        spec = self.spec(rows, worth)
        plain = is_built_in(type(self)) and (self.draft is None or spec.lookup is not None) and not self.with_logits
        supported = all(row.greedy for row in rows) or self._lossless  # otherwise ``propose`` raises
        if not plain or not supported:
            return None
        return Continuation(self.runner, [sys.maxsize if self.k is None else self.k] * len(rows), spec)

    def commit(self, rows: abc.Sequence[Row]) -> None:
        self.runner.commit(rows)
        if self.draft is not None:
            self.draft.commit(rows)

    def release(self, row: Row) -> None:
        self.runner.release(row)
        if self.draft is not None:
            self.draft.release(row)

    def _draft_in_rounds(
        self,
        rows: abc.Sequence[Row],
        spec: DraftSpec,
        max_len: abc.Sequence[int],
        sampling: BatchSampling | None,
        seeds: abc.Sequence[int],
    ) -> Drafted:
        """Run rounds until each row has enough tokens. In each round the strategy below proposes, and this model
        verifies."""
        growing = [
            _Growing(row.fork(self.policy, seed), len(row.tokens) + n, Certainty(spec, reach))
            for row, n, seed, reach in zip(rows, max_len, seeds, spec.reach)
        ]
        active = growing
        assert self.draft is not None
        while active:
            going = [each.row for each in active]
            # Propose and verify. A round emits at most one token more than its draft.
            below = self.draft.propose(going, [each.end - len(each.row.tokens) - 1 for each in active])
            target, raw_BKV = self.runner.score(going, below)
            if target.logits_BKV is not raw_BKV:
                # Where a row's form allows none of the tokens that this model has logits for, the form is left aside;
                # the target will reject the draft.
                lost_BK1 = nothing_left(target.logits_BKV)
                if lost_BK1.any():
                    target = self.runner.view(going, torch.where(lost_BK1, raw_BKV, target.logits_BKV))
            self.draft.observe(going, below, target)
            # Extend each row by the kept tokens. Stop at a token that ends the row, or that the model is not sure of.
            new = self._decide(going, target, below)
            goes_on = []
            for n, (each, (ids, places)) in enumerate(zip(active, new)):
                row = each.row
                ids = until_end(ids, row)
                sure = True
                at_N = sent(torch.tensor([[n] * len(ids), places[: len(ids)]]), target.logits_BKV.device).unbind(0)
                if each.certainty.may_stop:
                    probs_NV = target.logits_BKV[at_N].softmax(-1) if row.greedy else target.probs_at(*at_N)
                    certain = each.certainty.goes_on(probs_NV.amax(-1))
                    sure = all(certain)
                    ids = ids if sure else ids[: certain.index(False) + 1]
                if sampling is not None:
                    each.probs += list(target.probs_at(*at_N))[: len(ids)]
                if spec.with_logits:
                    each.logits += list(target.logits_BKV[at_N])[: len(ids)]
                row.tokens += ids
                if sure and len(row.tokens) < each.end and ids[-1] not in row.stop_ids:
                    goes_on.append(each)
            self.runner.commit(going)
            self.draft.commit(going)
            active = goes_on
        # Return the chains. If their tokens were drawn, add the distributions.
        chains = [each.row.tokens[len(row.tokens) :] for each, row in zip(growing, rows)]
        probs_BKV = None if sampling is None else pad_rows([each.probs for each in growing])
        logits_BKV = pad_rows([each.logits for each in growing]) if spec.with_logits else None
        return Drafted(chains, probs_BKV, logits_BKV)

    def _decide(self, rows: list[Row], target: Target, below: Draft) -> list[tuple[list[int], list[int]]]:
        """Return, for each row, the drafted tokens that this level keeps and its own next token, and their places.

        For deterministic chains under the exact rule, the model has one token of its own at each place: its most likely
        one, or one drawn by that place's own random number. It keeps the draft as long as both agree. So this level
        drafts the same tokens, whatever the level below proposes.
        """
        if below.probs_BKV is None and below.trees is None and type(self.policy) is Exact:
            target_tokens = target.choices if target.all_greedy else _own_tokens(rows, target.probs_BKV)
            new = []
            for chain, tokens in zip(below.chains, target_tokens):
                end = common_prefix(chain, tokens) + 1
                new.append((tokens[:end], list(range(end))))
            return new
        decisions = self.runner.decide(rows, target, below, self.draft)
        return [
            (
                [*(decision.drafted[node] for node in decision.path), decision.next_token],
                [0, *(node + 1 for node in decision.path)],
            )
            for decision in decisions
        ]


def _own_tokens(rows: list[Row], probs_BJV: Tensor) -> list[list[int]]:
    """Draw the model's own token at each place of each row."""
    places = probs_BJV.shape[1]
    lengths = [len(row.tokens) + at for row in rows for at in range(places)]
    tokens = draw_tokens(probs_BJV.flatten(0, 1), [row.seed for row in rows for _ in range(places)], lengths)
    return [tokens[b * places : (b + 1) * places] for b in range(len(rows))]


def seed_of(row: Row) -> int:
    """Return the seed of all tokens that the draft model draws for a row in this round."""
    return 0 if row.greedy else derive(row.seed, len(row.tokens))


class CascadeDraft(SingleDraft):
    """Levels that draft for one another, cheapest first: ``CascadeDraft([NGramDraft(), SingleDraft(small)])`` is
    FLy's multi-level acceleration (arXiv 2511.22972, section 3.3), to any depth.

    The first level is any strategy. Each further level is a ``SingleDraft``, which verifies the level below by its own
    policy. That policy is exact by default, so a cascade proposes the same tokens as its last level would alone. The
    object stands for the last level, and its ``draft`` for the others.
    """

    def __init__(self, levels: abc.Sequence[DraftStrategy]) -> None:
        if len(levels) < 2:
            raise ValueError("a cascade needs at least two levels; one alone is the strategy itself")
        if len(set(map(id, levels))) < len(levels):
            raise ValueError("a level stands twice in a cascade; each needs a cache of its own")
        *below, last = levels
        if type(last) is not SingleDraft:  # a subclass may draft in another way
            raise ValueError(
                f"level {len(below)} of a cascade is {type(last).__name__}; only a SingleDraft can verify a level below"
            )
        if last.draft is not None:
            raise ValueError(f"level {len(below)} has a draft strategy already; a cascade gives it one")
        draft = below[0] if len(below) == 1 else CascadeDraft(below)
        super().__init__(last.model, draft, last.policy, last.k, last.confidence, last.reach, **last.options)
