"""Drafting with models: one small model, or a cascade of levels that draft for one another.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import math
import sys
import time
from collections import abc
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fly.backends.cpu import compiled
from fly.backends.cpu.library import Lookup, Sure
from fly.bundled import resolve_checkpoint
from fly.cache import BlockAllocator, OutOfBlocks, PagedKVCache
from fly.constraints import constrain, constrains
from fly.drafts.base import Continuation, DraftStrategy, Wrapper, pad, until_end
from fly.drafts.ngram import NGramDraft
from fly.engine import Model, Runner, judge
from fly.models import load_model
from fly.models.tokenizer import Tokenizer, read_eos_ids
from fly.ops import Stream, argmax, derive, draw, uniforms
from fly.policies import AcceptancePolicy, Exact
from fly.request import Sequence
from fly.sampling import BatchSampling
from fly.types import Draft, Guarantee

__all__ = ["CascadeDraft", "SingleDraft"]


_NEWS = 0.2  # weight of a new measurement
_FIRST_WAIT, _LONGEST_WAIT = 8, 512  # proposals after which the slower way is tried again


class _Ways:
    """Which of two ways to the same tokens takes less time: with the level below (0), or without (1).

    Each is measured twice; then the faster is taken, and the other tried again after more and more proposals.
    """

    def __init__(self) -> None:
        self.seconds, self.seen = [math.inf, math.inf], [0, 0]  # a token; measurements
        self.waited, self.wait = 0, _FIRST_WAIT

    def choose(self) -> int:
        """The way to go now."""
        if min(self.seen) < 2:
            return self.seen.index(min(self.seen))
        faster = self.seconds.index(min(self.seconds))
        self.waited += 1
        if self.waited < self.wait:
            return faster
        self.waited, self.wait = 0, min(2 * self.wait, _LONGEST_WAIT)
        return 1 - faster

    def add(self, way: int, seconds: float) -> None:
        """So long a token took. The first two may have had other things to do, such as to catch up with a text."""
        self.seen[way] += 1
        if self.seen[way] <= 2:
            self.seconds[way] = min(self.seconds[way], seconds)
        else:
            self.seconds[way] += _NEWS * (seconds - self.seconds[way])


class SingleDraft(DraftStrategy):
    """One draft model. Alone it decodes autoregressively; with a ``draft`` strategy of its own, that proposes and
    this model verifies, round after round, until enough tokens stand: a speculative decoder is a draft strategy.

    Args:
        model: a loaded model, or the path or bundled name of a checkpoint.
        draft: who proposes for this model; None for nobody. Where the model can draft in one call (compiled kernels)
            and its policy is lossless, that call does itself what an ``NGramDraft`` would; another ``draft`` is asked,
            at temperature 0, only while that is measured to take less time.
        policy: how this model verifies its own draft. A rule that is not lossless changes the distribution of what it
            proposes in a way nobody knows, so it is refused above temperature 0.
        k: tokens it proposes at most (None: as many as asked).
        confidence: it stops before a token if none has at least this probability there (usually 0.4; 0 never stops).
        entropy: it stops before a token if the entropy there exceeds this many nats (SVIP, arXiv 2411.18462, stops
            where a function of the draft's entropy exceeds a threshold; infinity never stops). Both look at the
            distribution that tokens are drawn from (at temperature 0 at the raw one), not at what was drawn, so a
            lossless rule stays lossless.
        cache_tokens: tokens its cache holds over all rows (None: as many as the target's, see ``LLM``).
        dtype, device, kernels: how a path is loaded and run, as for ``LLM``.
        load: what loads it: ``load(directory, dtype, device)``.
    """

    _lookup: Lookup | None = None  # what the one call that drafts does itself of an n-gram draft below

    def __init__(
        self,
        model: Model | str | Path,
        draft: DraftStrategy | None = None,
        policy: AcceptancePolicy | None = None,
        k: int | None = None,
        confidence: float = 0.0,
        entropy: float = math.inf,
        cache_tokens: int | None = None,
        block_size: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
        load: Callable[..., Model] = load_model,
    ) -> None:
        self._set_limits(k, confidence, entropy)
        control: frozenset[int] = frozenset()
        if isinstance(model, (str, Path)):
            directory = resolve_checkpoint(model)
            loaded: Model = compiled(load(directory, dtype, device), kernels, consume=load is load_model)
            model = loaded
            self.tokenizer = Tokenizer.load(directory)
            control = read_eos_ids(directory, model.config.vocab_size)
            control |= self.tokenizer.control_ids if self.tokenizer else frozenset()
        self.draft, self.policy = draft, policy or Exact()
        self.vocab_size: int = model.config.vocab_size
        self.context: int = model.config.max_position_embeddings
        if draft is not None:
            self.draft = self._understood(draft)
        self._model, self._control = model, control
        self._cache_tokens, self._block_size, self._own_size = cache_tokens, block_size, cache_tokens is not None
        self._attached = False
        self._ways, self.clock = _Ways(), time.perf_counter
        self._lookup = self._lookup_at_once()

    @cached_property
    def runner(self) -> Runner:
        """The model with its cache, which is made when it is first needed: by then its size is known."""
        cache = PagedKVCache.for_model(self._model, self._cache_tokens, self._block_size)
        return Runner(self._model, cache, self._control)

    def attach(self, target: Runner) -> None:
        self._attach_below()

    def _attach_below(self) -> None:
        if self.draft is not None and not self._attached:
            self._attached = True
            self.draft.attach(self.runner)

    def bytes_per_token(self) -> int:
        below = 0 if self.draft is None else self.draft.bytes_per_token()
        if self._own_size:
            return below
        dtype = getattr(self._model, "dtype", torch.float32)
        return below + PagedKVCache.bytes_per_token(self._model.config, dtype)

    def reserve(self, tokens: int) -> None:
        if not self._own_size:
            self._cache_tokens = tokens
        if self.draft is not None:
            self.draft.reserve(tokens)

    def _set_limits(self, k: int | None, confidence: float, entropy: float) -> None:
        if k is not None and k < 1:
            raise ValueError(f"k {k} must be at least 1")
        if not 0 <= confidence <= 1:
            raise ValueError(f"confidence {confidence} must be in [0, 1]")
        if not entropy >= 0:
            raise ValueError(f"entropy {entropy} must be a number of nats, at least 0")
        self.k, self.confidence, self.entropy = k, confidence, entropy
        self._stops = confidence > 0 or entropy < math.inf
        self._least = Sure(confidence, entropy)

    def over(self, draft: DraftStrategy) -> SingleDraft:
        """The same model and cache, with ``draft`` proposing for it."""
        if self.draft is not None:
            raise ValueError("this level has a draft strategy already; a cascade gives it one")
        draft = self._understood(draft)
        level = object.__new__(SingleDraft)
        level.__dict__.update(self.__dict__, draft=draft, _ways=_Ways())
        level._lookup = level._lookup_at_once()
        return level

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        left = [(row, min(end, self.context) - len(self.runner.begin(row))) for row, end in parts if row.k]
        if left := [(row, n) for row, n in left if n > 0]:
            # without room for it now, the row is caught up with when it is drafted for
            with suppress(OutOfBlocks), torch.inference_mode():
                self.runner.feed([], [], prefill=left)
                self.runner.commit(row for row, _ in left)
        if self.draft is not None:
            self.draft.prefill(parts)

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        most = [
            max(0, min(n, self.context - len(row.tokens), n if self.k is None else self.k))
            for row, n in zip(rows, max_len)
        ]
        active = [b for b, n in enumerate(most) if n]
        if not active:
            return Draft.empty(len(rows), self.runner.model.device)
        if self.policy.guarantee is not Guarantee.LOSSLESS and not all(rows[b].greedy for b in active):
            raise ValueError(f"a draft level verified by {self.policy} has no known distribution above temperature 0")
        self._attach_below()  # where nobody attached this level itself
        way, begin = None, 0.0
        if self._may_go_at_once([rows[b] for b in active]):
            if self.draft is not None and self._lookup is None:
                way, begin = self._ways.choose(), self.clock()
            if way != 0 and (proposal := self._at_once(rows, active, most)) is not None:
                if way is not None:
                    self._ways.add(way, (self.clock() - begin) / max(sum(map(len, proposal.chains)), 1))
                return proposal
            if way != 0:
                way = None  # no room to go that way: what follows takes the time of neither
        # What is drawn must be what the one call would have drawn, which other rows of the batch may have ruled out.
        alone = self._lookup is not None and not all(rows[b].greedy for b in active)
        scratch = [row.fork(self.policy, self._seed(row)) for row in rows]
        self.runner.commit(scratch)
        starts = [len(row.tokens) for row in rows]
        distributions: list[list[Tensor]] = [[] for _ in rows]  # per row, the distribution [V] of each of its tokens
        while active:
            left = [starts[b] + most[b] - len(scratch[b].tokens) for b in active]
            new_distributions, sure = self._advance([scratch[b] for b in active], left, None if alone else self.draft)
            for b, row_distributions in zip(active, new_distributions):
                distributions[b] += row_distributions
            active = [b for b, more in zip(active, sure) if more and len(scratch[b].tokens) < starts[b] + most[b]]
            active = [b for b in active if scratch[b].tokens[-1] not in scratch[b].stop_ids]
        if way is not None:
            count = sum(len(row.tokens) - start for row, start in zip(scratch, starts))
            self._ways.add(way, (self.clock() - begin) / max(count, 1))
        proposal = pad([row.tokens[start:] for row, start in zip(scratch, starts)], self.runner.model.device)
        if all(row.greedy for row in rows):
            return proposal
        probs_BKV = torch.zeros(*proposal.tokens_BK.shape, self.vocab_size, device=self.runner.model.device)
        for b, (row, row_distributions) in enumerate(zip(rows, distributions)):
            if row.greedy:
                probs_BKV[b].scatter_(1, proposal.tokens_BK[b].unsqueeze(1), 1.0)
            elif row_distributions:
                probs_BKV[b, : len(row_distributions)] = torch.stack(row_distributions)
        return Draft(proposal.tokens_BK, proposal.lengths_B, probs_BKV)

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        plain = type(self) is SingleDraft and (self.draft is None or self._lookup is not None)
        known = (
            all(row.greedy for row in rows) or self.policy.guarantee is Guarantee.LOSSLESS
        )  # else ``propose`` refuses
        if not plain or not known or not self._may_go_at_once(rows):
            return None
        most = [sys.maxsize if self.k is None else self.k] * len(rows)
        return Continuation(self.runner, most, self._least, self._lookup)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        self.runner.commit(rows)
        if self.draft is not None and self._lookup is None:  # whose index catches up where it is ever needed
            self.draft.commit(rows)

    def release(self, row: Sequence) -> None:
        self.runner.release(row)
        if self.draft is not None:
            self.draft.release(row)

    @property
    def spare(self) -> int:  # type: ignore[override]  # that of the level below
        return 0 if self.draft is None else self.draft.spare

    def allocators(self) -> list[BlockAllocator]:
        below = [] if self.draft is None else self.draft.allocators()
        return [self.runner.cache.allocator, *below]

    def _understood(self, draft: DraftStrategy) -> DraftStrategy:
        """``draft`` in this level's vocabulary."""
        from fly.drafts.translate import translated  # which builds on this class

        return translated(draft, self.tokenizer, self.vocab_size)

    def _may_go_at_once(self, rows: abc.Sequence[Sequence]) -> bool:
        """Whether one call of the model gives what ``_advance`` comes to, over and over."""
        if getattr(self.runner.model, "draft", None) is None or any(map(constrains, rows)):
            return False
        # with another level below, what is drawn would depend on which way was faster
        lossless = self.policy.guarantee is Guarantee.LOSSLESS
        return self.draft is None or (lossless and (self._lookup is not None or all(row.greedy for row in rows)))

    def _lookup_at_once(self) -> Lookup | None:
        """The settings of an n-gram draft below; None where there is none, or no call to do its work."""
        if type(draft := self.draft) is not NGramDraft or getattr(self._model, "draft", None) is None:
            return None
        return Lookup.from_buffer_copy(draft.compiled)  # it learns from what this level sees

    def _at_once(self, rows: abc.Sequence[Sequence], active: list[int], most: list[int]) -> Draft | None:
        """The proposal in one call of the model, for rows ``active``; None where the cache has no room for it."""
        self.runner.commit(rows)  # what was drafted last may still be cached, even for a fork of other tokens
        going, wanted = [rows[b] for b in active], [most[b] for b in active]
        distribution, uniform_BK = None, None
        if not all(row.greedy for row in rows):
            distribution = BatchSampling.of([row.params for row in going])
            longest, starts_B1 = max(wanted), torch.tensor([[len(row.tokens)] for row in going])
            seeds_B1 = torch.tensor([[self._seed(row)] for row in going]).expand(-1, longest)
            steps_BK = (starts_B1 + torch.arange(longest)).flatten()
            uniform_BK = uniforms(seeds_B1.flatten(), steps_BK, Stream.SAMPLE, 1).view(len(going), longest)
        sure = self._least if self._stops else None
        if (found := self.runner.draft(going, wanted, distribution, uniform_BK, self._lookup, sure)) is None:
            return None
        drafted: list[list[int]] = [[] for _ in rows]
        for b, tokens in zip(active, found[0]):
            drafted[b] = tokens
        proposal, probs_AKV = Draft.of(drafted), found[1]
        if probs_AKV is None:
            return proposal
        probs_AKV = probs_AKV[:, : proposal.tokens_BK.shape[1]]
        if len(active) < len(rows):
            probs_BKV = probs_AKV.new_zeros(len(rows), *probs_AKV.shape[1:])
            probs_BKV[active] = probs_AKV
            probs_AKV = probs_BKV
        return Draft(proposal.tokens_BK, proposal.lengths_B, probs_AKV)

    @staticmethod
    def _seed(row: Sequence) -> int:
        """Of what is drawn for a row in this round."""
        return 0 if row.greedy else derive(row.seed, len(row.tokens))

    def _advance(
        self, rows: list[Sequence], left: list[int], draft: DraftStrategy | None
    ) -> tuple[list[list[Tensor]], list[bool]]:
        """Extend every row by one token or more, at most ``left``, up to where this level is unsure; by what ``draft``
        proposes, if it is to be asked. Returns the distributions they were drawn from (sampling only), and whether it
        was sure all the way."""
        if draft is not None:
            return self._round(rows, left, draft)
        logits_BV = constrain(self.runner.feed(rows, [[]] * len(rows)), rows, [[]] * len(rows))[:, 0]
        if all(row.greedy for row in rows):
            sure = self._sure(logits_BV, None)
            for row, token, stands in zip(rows, argmax(logits_BV).tolist(), sure):
                row.tokens += [token] * stands
            return [[] for _ in rows], sure
        device = logits_BV.device
        distribution = BatchSampling.of([row.params for row in rows], device)
        probs_BV = distribution.probs(logits_BV.unsqueeze(1))[:, 0]
        seed_B = torch.tensor([row.seed for row in rows], device=device)
        round_B = torch.tensor([len(row.tokens) for row in rows], device=device)
        tokens = draw(probs_BV, uniforms(seed_B, round_B, Stream.SAMPLE, 1).squeeze(1)).tolist()
        sure = self._sure(logits_BV, torch.where(distribution.greedy_B.unsqueeze(1), logits_BV.softmax(-1), probs_BV))
        for row, token, stands in zip(rows, tokens, sure):
            row.tokens += [token] * stands
        return [[probs_V] * stands for probs_V, stands in zip(probs_BV, sure)], sure

    def _sure(self, logits_NV: Tensor, probs_NV: Tensor | None) -> list[bool]:
        """Whether to draft on, by the distribution at each of N places: ``probs_NV``, or that of the logits."""
        if not self._stops:
            return [True] * len(logits_NV)
        if probs_NV is None:
            probs_NV = logits_NV.softmax(-1)
        entropy_N = -torch.special.xlogy(probs_NV, probs_NV).sum(-1)
        return ((probs_NV.amax(-1) >= self.confidence) & (entropy_N <= self.entropy)).tolist()

    def _round(
        self, rows: list[Sequence], left: list[int], draft: DraftStrategy
    ) -> tuple[list[list[Tensor]], list[bool]]:
        """One round of this level's own speculation."""
        # A round emits one token beyond its draft.
        below = draft.propose(rows, [n - 1 for n in left])
        target, _ = self.runner.score(rows, below)
        draft.observe(rows, below, target)
        proposed, device = below.chains, target.logits_BKV.device
        distributions: list[list[Tensor]] = [[] for _ in rows]
        surely = [True] * len(rows)
        for numbers, verdict in judge(rows, target, below):
            paths, following = verdict.paths(), verdict.told.following
            for i, b in enumerate(numbers):
                new = [*(proposed[b][node] for node in paths[i]), following[i]]
                new = until_end(new, rows[b])
                places_N = torch.tensor([0, *(node + 1 for node in paths[i])][: len(new)], device=device)
                at_N = torch.full_like(places_N, b), places_N
                probs_NV = None if target.all_greedy else target.probs_at(*at_N)
                if self._stops:
                    sure = self._sure(target.logits_BKV[at_N], None if rows[b].greedy else probs_NV)
                    surely[b] = all(sure)
                    new = new if surely[b] else new[: sure.index(False)]
                rows[b].tokens += new
                if probs_NV is not None:
                    distributions[b] += list(probs_NV)[: len(new)]
        self.runner.commit(rows)
        draft.commit(rows)
        return distributions, surely


class CascadeDraft(Wrapper):
    """Levels that draft for one another, cheapest first: ``CascadeDraft([NGramDraft(), SingleDraft(small)])`` is
    FLy's multi-level acceleration (arXiv 2511.22972, section 3.3), to any depth.

    The first level is any strategy; each further one is a ``SingleDraft``, which verifies the level below by its
    own policy (exact by default, so the cascade proposes just what its last level alone would).

    On compiled kernels prompt lookup for a model is part of the model's one call: how many copied tokens go into each
    of its forwards follows from how many stood and what forwards took so far, down to none, and the draft is the
    model's own bit for bit.
    """

    def __init__(self, levels: abc.Sequence[DraftStrategy]) -> None:
        if not levels:
            raise ValueError("a cascade needs at least one level")
        if len(set(map(id, levels))) < len(levels):
            raise ValueError("a level stands twice in a cascade; each needs a cache of its own")
        top = levels[0]
        for number, level in enumerate(levels[1:], start=1):
            if type(level) is not SingleDraft:  # its subclasses draft in ways of their own
                raise ValueError(
                    f"level {number} of a cascade is {type(level).__name__}; "
                    "only a SingleDraft can verify a level below it"
                )
            top = level.over(top)
        super().__init__([top])
        self.top = top

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        return self.top.propose(rows, max_len)

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        return self.top.continuation(rows) if type(self) is CascadeDraft else None
