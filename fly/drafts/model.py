"""Drafting with models: one small model, or a cascade of levels that draft for one another.

Shape legend: B rows, K longest draft, J positions of a row, N places, V vocabulary.
"""

from __future__ import annotations

import sys
from collections import abc
from contextlib import suppress
from copy import copy
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fly.bundled import find_checkpoint
from fly.cache import BlockAllocator, OutOfBlocks, PagedKVCache
from fly.drafting import Certainty, Drafted, draw_tokens
from fly.drafts.base import Continuation, DraftStrategy, Load, Loaded, Wrapper, drafted_of, unchanged, until_end
from fly.drafts.ngram import NGramDraft
from fly.drafts.stops import check_chance, reach_of
from fly.drafts.translate import translated
from fly.executor import Batch, DraftSpec, Executor, Head, Scores, Wrapped
from fly.models.loading import resolve_device, resolve_dtype
from fly.ops import derive, sent
from fly.policies import AcceptancePolicy, Exact
from fly.request import Sequence, common_prefix
from fly.runner import Runner
from fly.sampling import BatchSampling
from fly.types import Draft, Guarantee, Target
from fly.vocabulary import Vocabulary

__all__ = ["CascadeDraft", "SingleDraft", "seed_of"]


class SingleDraft(DraftStrategy):
    """One draft model. Alone it decodes autoregressively. With a ``draft`` strategy of its own, that strategy proposes
    and this model verifies, round after round, until enough tokens are kept: a speculative decoder is a draft strategy.

    Args:
        model: the path or bundled name of a checkpoint, which ``LLM`` loads, or a loaded model.
        draft: proposes for this model; None for no strategy. Prompt lookup (``NGramDraft``) changes no token that this
            model drafts, only how many forwards that takes.
        policy: how this model verifies its own draft. A rule that is not lossless changes the distribution of the
            drafted tokens in an unknown way, so it is refused above temperature 0.
        k: the most tokens it proposes (None: as many as asked).
        reach: it stops after a token if the product of the largest probabilities, from the first drafted token to that
            one, is less: its own estimate of the chance that all of them are kept (0 never stops). None, which a
            checkpoint's bare name means, is 0.5 for rows under a lossless rule, and 0.1 for others, which may need the
            tokens after a mismatch. ``AdaptiveDraft`` sets it by what tokens cost.
        confidence: it stops after a token if none had at least this probability there (0 never stops).
            Both look at the distribution that tokens are drawn from (at temperature 0 at the raw one), not at what was
            drawn, so a lossless rule stays lossless. The token that is not sure is known by then and costs little to
            verify.
        cache_tokens: tokens its cache holds over all rows (None: as many as the target's, see ``LLM``).
        dtype, device, kernels: how a path is loaded and run, as for ``LLM``.
    """

    knows_chances = True

    def __init__(
        self,
        model: str | Path | Executor | torch.nn.Module,
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
    ) -> None:
        self._set_limits(k, confidence, reach)
        self.model: object = model
        if isinstance(model, (str, Path)):
            found = find_checkpoint(model)
            self.model = found if isinstance(found, Path) else str(found)  # what is on the hub is fetched when loaded
            resolve_dtype(dtype, {})  # what names none is refused at once
            resolve_device(device)
        self.options = {"dtype": dtype, "device": device, "kernels": kernels}
        self.draft, self.policy = draft, policy or Exact()
        self._cache_tokens, self._block_size, self._own_size = cache_tokens, block_size, cache_tokens is not None
        self._loaded: Loaded | None = None
        self._first: SingleDraft | None = None  # the same model without a level below it
        self._attached = False
        self.says = False  # whether greedy drafts come with their logits; rounds are then taken one by one
        if isinstance(model, Executor):
            self._take(Loaded(model))
            self._translate_below()

    def resolve(self, load: Load) -> None:
        super().resolve(load)
        if self._loaded is None and self._first is not None:
            self._first.resolve(load)
            self._loaded = self._first._loaded
        if self._loaded is None:
            self._loaded = load(self.model, **self.options)
        self._take(self._loaded)
        self._translate_below()

    def bind(self, vocabulary: Vocabulary) -> None:
        """Its own vocabulary is that of its model, and the level below and its rule see rows of that."""
        own = vocabulary
        if self.tokenizer is not None and self.vocab_size is not None:
            own = self.tokenizer.vocabulary(self.vocab_size, self.device)
        super().bind(own)
        self.policy = self.policy.bind(own)

    def _translate_below(self) -> None:
        if self.draft is not None and self._loaded is not None:
            self.draft = translated(self.draft, self.tokenizer, self._loaded.executor.config.vocab_size)

    def _take(self, loaded: Loaded) -> None:
        if isinstance(loaded.executor, Head):
            raise ValueError(f"{str(self.model)!r} is a draft head, not a model by itself; write eagle3({self.model})")
        self._loaded, self.tokenizer = loaded, self.tokenizer or loaded.tokenizer
        self.vocab_size = loaded.executor.config.vocab_size
        self.context = loaded.executor.config.max_position_embeddings
        self.device = loaded.executor.device

    @property
    def executor(self) -> Executor:
        """The draft model. Raises ``ValueError`` while it is only a name."""
        if self._loaded is None:
            raise ValueError(f"the draft model {str(self.model)!r} is not loaded yet: LLM loads it (``resolve``)")
        return self._loaded.executor

    @cached_property
    def runner(self) -> Runner:
        """The model with its cache, which is made when it is first needed: by then its size is known."""
        executor, control_ids = self.executor, self._loaded.control_ids if self._loaded else ()
        return Runner(executor, PagedKVCache.for_model(executor, self._cache_tokens, self._block_size), control_ids)

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
        return below + PagedKVCache.bytes_per_token(self.executor.config, self.executor.dtype)

    def reserve(self, tokens: int) -> None:
        if not self._own_size:
            self._cache_tokens = tokens
        if self.draft is not None:
            self.draft.reserve(tokens)

    def _set_limits(self, k: int | None, confidence: float, reach: float | None) -> None:
        if k is not None and k < 1:
            raise ValueError(f"k {k} must be at least 1")
        check_chance("confidence", confidence)
        check_chance("reach", reach)
        self.k, self.confidence, self.reach = k, confidence, reach

    def spec(self, rows: abc.Sequence[Sequence]) -> DraftSpec:
        """How the model drafts for ``rows``, as numbers; with prompt lookup where that is all that drafts for it."""
        lookup = self.draft.lookup if type(self.draft) is NGramDraft and self._lossless else None
        reach = reach_of(rows, self.reach, self.worth)
        return DraftSpec(self.confidence, reach, lookup, self.says)

    @property
    def _lossless(self) -> bool:
        return self.policy.guarantee is Guarantee.LOSSLESS

    def over(self, draft: DraftStrategy) -> SingleDraft:
        """The same model and cache, with ``draft`` proposing for it."""
        if self.draft is not None:
            raise ValueError("this level has a draft strategy already; a cascade gives it one")
        level = copy(self)
        level.draft, level._first = draft, self
        level._translate_below()
        return level

    def restricted(self, size: int | None) -> DraftStrategy:
        if size is None:
            return self
        level = copy(self)
        level._loaded = Loaded(_Restricted(self.executor, size), self.tokenizer)
        level.__dict__.pop("runner", None)  # the cached property; it is made anew, of this model
        level._attached = False
        return level

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        context = self.executor.config.max_position_embeddings
        left = [(row, min(end, context) - len(self.runner.begin(row))) for row, end in parts if row.k]
        if left := [(row, n) for row, n in left if n > 0]:
            # without room for it now, the row is caught up with when it is drafted for
            with suppress(OutOfBlocks), torch.inference_mode():
                self.runner.feed([], [], prefill=left)
                self.runner.commit(row for row, _ in left)
        if self.draft is not None:
            self.draft.prefill(parts)

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        context = self.executor.config.max_position_embeddings
        own = [n if self.k is None else min(n, self.k) for n in max_len]
        most = [max(0, min(n, context - len(row.tokens))) for row, n in zip(rows, own)]
        active = [b for b, n in enumerate(most) if n]
        if not active:
            return Draft.empty(len(rows), self.executor.device)
        if not self._lossless and not all(rows[b].greedy for b in active):
            raise ValueError(f"a draft level verified by {self.policy} has no known distribution above temperature 0")
        self._attach_below()  # if this level was not attached itself
        going, wanted = [rows[b] for b in active], [most[b] for b in active]
        spec = self.spec(going)
        self.runner.commit(rows)  # what was drafted last may still be cached, even for a fork of other tokens
        if self.draft is None or (spec.lookup is not None and self.executor.looks_up(going)):
            return drafted_of(len(rows), active, self._by_itself(going, wanted, spec))
        return drafted_of(len(rows), active, self._above_draft(going, wanted, spec))

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        spec = self.spec(rows)
        plain = unchanged(self, SingleDraft) and (self.draft is None or spec.lookup is not None) and not self.says
        known = all(row.greedy for row in rows) or self._lossless  # else ``propose`` refuses
        if not plain or not known:
            return None
        return Continuation(self.runner, [sys.maxsize if self.k is None else self.k] * len(rows), spec)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        self.runner.commit(rows)
        if self.draft is not None:
            self.draft.commit(rows)

    def release(self, row: Sequence) -> None:
        self.runner.release(row)
        if self.draft is not None:
            self.draft.release(row)

    @property
    def spare(self) -> int:  # type: ignore[override]  # that of the level below
        return 0 if self.draft is None else self.draft.spare

    def executors(self) -> list[Executor] | None:
        below = [] if self.draft is None else self.draft.executors()
        return None if below is None else [self.executor, *below]

    def allocators(self) -> list[BlockAllocator]:
        below = [] if self.draft is None else self.draft.allocators()
        return [self.runner.cache.allocator, *below]

    def _by_itself(self, rows: list[Sequence], most: list[int], spec: DraftSpec) -> Drafted:
        """What the model alone drafts, in one call of the executor."""
        seeds = [seed_of(row) for row in rows]
        sampling = None
        if spec.tree is None and not all(row.greedy for row in rows):
            sampling = BatchSampling.of([row.params for row in rows])
        return self.runner.extend(rows, spec, most, sampling, seeds)

    def _above_draft(self, rows: list[Sequence], most: list[int], spec: DraftSpec) -> Drafted:
        """Rounds of this level: the strategy below proposes, this model verifies, until each row has enough tokens."""
        scratch = [row.fork(self.policy, seed_of(row)) for row in rows]
        ends = [len(row.tokens) + n for row, n in zip(rows, most)]
        greedy = all(row.greedy for row in rows)
        said: list[list[Tensor]] = [[] for _ in rows]  # of each token, the distribution (or the logits) that it is from
        certainty = [Certainty(spec, reach) for reach in spec.reach]
        active = list(range(len(rows)))
        assert self.draft is not None
        while active:
            going = [scratch[b] for b in active]
            # A round emits one token beyond its draft.
            below = self.draft.propose(going, [ends[b] - len(row.tokens) - 1 for b, row in zip(active, going)])
            target, _ = self.runner.score(going, below)
            self.draft.observe(going, below, target)
            new = self._kept(going, target, below)
            goes_on = []
            for n, (b, row, (ids, places)) in enumerate(zip(active, going, new)):
                ids, sure = until_end(ids, row), True
                at_N = sent(torch.tensor([[n] * len(ids), places[: len(ids)]]), target.logits_BKV.device).unbind(0)
                if certainty[b].asks:
                    each = certainty[b].after(
                        target.logits_BKV[at_N].softmax(-1) if row.greedy else target.probs_at(*at_N)
                    )
                    sure = all(each)
                    ids = ids if sure else ids[: each.index(False) + 1]
                if not greedy or self.says:
                    said[b] += list(target.logits_BKV[at_N] if greedy else target.probs_at(*at_N))[: len(ids)]
                row.tokens += ids
                if sure and len(row.tokens) < ends[b] and ids[-1] not in row.stop_ids:
                    goes_on.append(b)
            self.runner.commit(going)
            self.draft.commit(going)
            active = goes_on
        chains = [made.tokens[len(row.tokens) :] for made, row in zip(scratch, rows)]
        if greedy and not self.says:
            return Drafted(chains)
        said_BKV = said[0][0].new_zeros(len(rows), max(map(len, chains)), len(said[0][0]))
        for b, each_V in enumerate(said):
            said_BKV[b, : len(each_V)] = torch.stack(each_V)
        return Drafted(chains, None, said_BKV) if greedy else Drafted(chains, said_BKV)

    def _kept(self, rows: list[Sequence], target: Target, below: Draft) -> list[tuple[list[int], list[int]]]:
        """What this level keeps of a draft, with a token of its own at the end, and the places that they are from.

        Above deterministic chains, under the exact rule, each place's token is the most likely one, or drawn by a
        number of that place alone, and a draft is kept as long as it is the same. So this level drafts the same tokens
        whatever is proposed to it.
        """
        if below.probs_BKV is None and below.trees is None and type(self.policy) is Exact:
            own = target.choices if target.all_greedy else _own_tokens(rows, target.probs_BKV)
            kept = [common_prefix(chain, tokens) for chain, tokens in zip(below.chains, own)]
            return [(tokens[: n + 1], list(range(n + 1))) for tokens, n in zip(own, kept)]
        decisions = self.runner.judge(rows, target, below, self.draft)
        return [
            ([*(found.drafted[node] for node in found.path), found.next_token], [0, *(node + 1 for node in found.path)])
            for found in decisions
        ]


def _own_tokens(rows: list[Sequence], probs_BJV: Tensor) -> list[list[int]]:
    """The model's own token at each place of each row."""
    places = probs_BJV.shape[1]
    lengths = [len(row.tokens) + at for row in rows for at in range(places)]
    tokens = draw_tokens(probs_BJV.flatten(0, 1), [row.seed for row in rows for _ in range(places)], lengths)
    return [tokens[b * places : (b + 1) * places] for b in range(len(rows))]


def seed_of(row: Sequence) -> int:
    """Of what is drawn for a row in this round."""
    return 0 if row.greedy else derive(row.seed, len(row.tokens))


class _Restricted(Wrapped):
    """A model that cannot say ids from ``size`` on: their logits are -inf, so every distribution made of them is one of
    the others."""

    def __init__(self, inner: Executor, size: int) -> None:
        super().__init__(inner)
        self._size = size

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        found = self.inner.score(batch, places, states)
        logits_NV = found.logits_NV.clone()
        logits_NV[:, self._size :] = -torch.inf
        return Scores(logits_NV, states_TF=found.states_TF)


class CascadeDraft(Wrapper):
    """Levels that draft for one another, cheapest first: ``CascadeDraft([NGramDraft(), SingleDraft(small)])`` is
    FLy's multi-level acceleration (arXiv 2511.22972, section 3.3), to any depth.

    The first level is any strategy; each further one is a ``SingleDraft``, which verifies the level below by its
    own policy (exact by default, so the cascade proposes just what its last level alone would).
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
        return self.top.continuation(rows) if unchanged(self, CascadeDraft) else None

    @property
    def last(self) -> DraftStrategy:
        return self.top
