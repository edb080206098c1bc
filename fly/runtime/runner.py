"""A model with its own paged cache: which tokens of each sequence are cached; feed, roll back. Knows no strategy.

Shape legend: B rows, K longest draft, J positions of a row (K+1), P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import sys
from array import array
from collections import abc
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fly.cache import BlockAllocator, OutOfBlocks, PagedBatch, PagedKVCache
from fly.models.tokenizer import Tokenizer
from fly.ops import depths, descend, sent, tree_mask, upload
from fly.policies.verification import priced
from fly.runtime.constraints import constrain
from fly.runtime.executor import Batch, Drafted, DraftSpec, Executor, Given, RoundPlan, RoundRow, Rounds, Spent
from fly.runtime.request import Sequence, common_prefix
from fly.runtime.sampling import BatchSampling
from fly.runtime.states import HiddenStates
from fly.types import Decision, Draft, Target

__all__ = ["Continuation", "Drafter", "OnPrompt", "Runner"]

OnPrompt = Callable[[Sequence, range, Tensor], None]  # numbers of prompt tokens, and the logits [P, V] they follow on

# How many tokens rounds of one call may emit beyond a round's own, which caches must have room for: so many, or else
# fewer; and of all rows together no more than this.
_AT_ONCE, _IN_ALL = (128, 32, 8, 1), 1024


class Drafter(Protocol):
    """The drafter in rounds that are taken in one call: a draft model with its cache, or a head of the target."""

    @property
    def executor(self) -> Executor: ...

    @property
    def states(self) -> HiddenStates | None:
        """The target's hidden states that it needs, if any."""

    def fits(self, rows: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> bool:
        """Whether there are free pages for so many tokens of each of ``rows``."""

    def after(self, rows: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> PagedBatch:
        """The batch of what is not cached of ``rows``, with room for so many tokens of each in all. Raises
        ``OutOfBlocks``; nothing was changed then."""

    def given(self, rows: abc.Sequence[Sequence], kv: PagedBatch) -> Given | None:
        """The hidden states that it needs for that batch."""

    def drafted(self, row: Sequence, text: list[int]) -> None:
        """This is cached of a row after the rounds."""


class Continuation(NamedTuple):
    """The proposal of a strategy that just continues each row with one model: token after token, most likely or drawn
    as ``SingleDraft`` draws, up to the first that it is not sure of. Without a model, what ``spec.lookup`` copies."""

    runner: Drafter | None
    most: list[int]  # tokens a round, of each row
    spec: DraftSpec = DraftSpec()
    rounds: int = sys.maxsize  # after which the strategy is to be asked again
    # Is told what the first round took, what the others did, and then what deciding an open block did.
    report: Callable[[abc.Sequence[Spent]], None] | None = None


class Runner:
    """An executor with its own paged cache. It knows which tokens of each sequence are cached, and feeds the rest.

    ``control_ids`` are the control tokens of its vocabulary (end-of-sequence, end-of-turn, other specials). Rows that
    begin with the same tokens and have the same ``cache_salt`` share their pages, unless ``share`` is false. ``cache``
    None is made later, when it is known how large all caches are to be (``reserve``).

    The one rule of bookkeeping: what is cached is a prefix of the row's tokens, and at times a speculation after it.
    ``commit`` restores the rule, whatever was speculated and by whom, by comparing tokens.
    """

    def __init__(
        self, executor: Executor, cache: PagedKVCache | None, control_ids: Iterable[int] = (), share: bool = True
    ) -> None:
        self.cache: PagedKVCache
        if cache is not None:
            self.cache = cache
        self.executor, self.share = executor, share
        self.tokenizer: Tokenizer | None = None  # of its model, where it is known
        self.control_V = torch.zeros(executor.config.vocab_size, dtype=torch.bool, device=executor.device)
        self.control_V[sorted(set(control_ids))] = True
        self._cached: dict[int, list[int]] = {}
        self._trees: dict[int, tuple[int, list[int]]] = {}  # where a row's cached tree starts, and its parents
        self.states: HiddenStates | None = None  # a model needs no hidden states of the target
        self._watches: list[HiddenStates] = []
        self._states: tuple[int, ...] = ()  # the layers that the executor is asked for, for all of them

    @property
    def bytes_per_token(self) -> int:
        """Bytes that its cache takes for one token."""
        return PagedKVCache.bytes_per_token(self.executor.config, self.executor.dtype)

    @property
    def context(self) -> int:
        """The most tokens of a text."""
        return self.executor.config.max_position_embeddings

    @property
    def allocator(self) -> BlockAllocator:
        """The allocator of its cache."""
        return self.cache.allocator

    def reserve(self, tokens: int | None = None, block_size: int | None = None) -> None:
        """Make its cache, of so many tokens over all rows (``PagedKVCache.for_model``)."""
        self.cache = PagedKVCache.for_model(self.executor, tokens, block_size)

    def watch(self, layers: abc.Sequence[int]) -> HiddenStates:
        """Keep hidden states of what is fed from now on, of rows that may be drafted for: after so many of the model's
        layers each (0 is the embedding).

        Raises ``ValueError`` if the executor gives none, or the model has not so many layers.
        """
        self.executor.check_states(layers)
        self._watches.append(HiddenStates(layers))
        several = len(self._watches) > 1
        union = {number for watch in self._watches for number in watch.layers}
        self._states = tuple(sorted(union)) if several else tuple(layers)
        return self._watches[-1]

    def pending(self, row: Sequence) -> int:
        """Tokens of ``row`` that are not cached yet."""
        return len(row.tokens) - len(self._cached.get(row.id, ()))

    def begin(self, row: Sequence) -> list[int]:
        """The tokens of ``row`` that are cached. A new row starts with the pages that others have filled with the
        beginning of its tokens (as far as these need not be fed: ``Sequence.shareable``)."""
        if (cached := self._cached.get(row.id)) is None:
            allocator = self.cache.allocator
            # another runner on the same cache may know it
            adopts = self.share and row.id not in allocator
            most = min([row.shareable, *(watch.begin(row) for watch in self._watches if row.k)])
            shared = allocator.adopt(row.id, row.tokens[:most], row.params.cache_salt) if adopts else 0
            cached = self._cached[row.id] = row.tokens[:shared]
        return cached

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, not seen before, start with all that ``parent`` has cached of its tokens; the last page is
        shared until one of them writes to it."""
        cached = self._cached[parent.id]
        shared = min(common_prefix(cached, child.tokens), len(child.tokens) - 1)
        if not shared:  # the parent lost its pages, and begins again
            return
        self.cache.allocator.fork(parent.id, child.id)
        self.cache.resize(child.id, shared)
        self._cached[child.id] = cached[:shared]
        for watch in self._watches:
            watch.fork(parent, child, shared)

    def score(
        self,
        rows: abc.Sequence[Sequence],
        draft: Draft,
        prefill: abc.Sequence[tuple[Sequence, int]] = (),
        note: OnPrompt | None = None,
    ) -> tuple[Target, Tensor]:
        """The target's view of a block, and the raw logits [B, J, V] it was made from; the rest as for ``feed``."""
        chains, trees = draft.chains, draft.trees
        raw_BJV, choices = self.feed(rows, chains, trees, prefill, note)
        if choices is not None and any(min(said) < 0 for said in choices):
            choices = None  # of NaN, which matters only where a block comes to it: ``verify`` looks
        missing = draft.shape[1] + 1 - raw_BJV.shape[1]  # a draft padded beyond its longest row
        if missing:
            raw_BJV, choices = torch.cat([raw_BJV, raw_BJV[:, -1:].expand(-1, missing, -1)], dim=1), None
        logits_BJV = constrain(raw_BJV, rows, chains, trees, self.executor.numbers)
        return self.view(rows, logits_BJV, choices if logits_BJV is raw_BJV else None), raw_BJV

    def view(self, rows: abc.Sequence[Sequence], logits_BJV: Tensor, choices: list[list[int]] | None = None) -> Target:
        """The target's view of a block, from its logits and, where they are known, the most likely tokens."""
        device = logits_BJV.device
        probs, greedy_B = None, None
        if not all(row.greedy for row in rows):
            sampling = BatchSampling.of([row.params for row in rows], device)
            probs, greedy_B = self.executor.process(sampling, logits_BJV), sampling.greedy_B
            greedy_B = greedy_B if sampling.some_greedy else None
        return Target(
            logits_BJV,
            probs,
            greedy_B=greedy_B,
            control_V=self.control_V,
            generated_B=lambda: upload([row.generated for row in rows], device),
            relaxed_B=lambda: upload([row.stats.relaxed for row in rows], device),
            nats_B=lambda: sent(torch.tensor([row.stats.nats for row in rows]), device),
            spent=lambda label: sent(torch.tensor([row.stats.spent.get(label, 0.0) for row in rows]), device),
            history=[row.tokens for row in rows],
            choices=choices,
        )

    def judge(self, rows: abc.Sequence[Sequence], target: Target, draft: Draft, strategy: object) -> list[Decision]:
        """``Executor.judge``, of what ``strategy`` drafted.

        Raises ``ValueError`` for a row that a NaN leaves ``UNDECIDED``: it names the model, the strategy or the policy
        that gave it.
        """
        decisions = self.executor.judge(rows, target, draft)
        for b, (row, decision) in enumerate(zip(rows, decisions)):
            if (relaxation := row.policy.relaxation) is not None and relaxation.budgets:
                decisions[b] = priced(relaxation.budgets, target, draft, b, decision)
            if decision.next_token >= 0:
                continue
            place = decision.path[-1] + 1 if len(decision.path) else 0
            if (target.logits_BKV[b, place] == -torch.inf).all():  # a form without a way on, as its matcher will say
                decisions[b] = decision._replace(next_token=0)
                continue
            if target.logits_BKV[b, place].isnan().any():
                said = f"the model {self.executor.model_name} gave NaN as logits"
            elif draft.probs_BKV is not None and draft.probs_BKV[b, : len(decision.drafted)].isnan().any():
                said = f"{type(strategy).__name__} proposed a distribution with NaN in it"
            else:
                said = f"the policy '{row.policy}' gave NaN for the draft {decision.drafted[:5]}"
            raise ValueError(f"{said}, after {len(row.tokens)} tokens of a text")
        return decisions

    def feed(
        self,
        rows: abc.Sequence[Sequence],
        drafts: abc.Sequence[list[int]],
        parents: abc.Sequence[list[int]] | None = None,
        prefill: abc.Sequence[tuple[Sequence, int]] = (),
        note: OnPrompt | None = None,
    ) -> tuple[Tensor, list[list[int]] | None]:
        """Run one forward over every row's uncached tokens and then its draft.

        ``parents`` makes trees of the drafts, as in ``Draft``: a token sees its ancestors, and stands at the position
        after them. ``prefill`` names other rows, and how many more of their tokens are cached in the same forward.
        ``note`` is given, for every row with prompt tokens to score, their numbers (``Sequence.scored``) and logits.
        Returns logits [B, J, V], J = 1 + the longest draft: position 0 follows the row's last token, position j its
        j-th drafted one; and the most likely token at each, if the backend found it anyway. Rows with shorter drafts
        repeat their last position.

        Raises:
            OutOfBlocks: the cache cannot hold the tokens of all rows; nothing was changed.
        """
        fed = [*rows, *(row for row, _ in prefill)]
        strange = self._strange(fed)
        starts = [len(self.begin(row)) for row in fed]
        new = [row.tokens[start:] + draft for row, start, draft in zip(rows, starts, drafts)]
        new += [row.tokens[start : start + n] for (row, n), start in zip(prefill, starts[len(rows) :])]
        counts = [len(tokens) for tokens in new]
        masks: list[Tensor | None] | None = None
        if parents is not None:
            trees = zip(rows, starts, parents)
            masks = [tree_mask(start, len(row.tokens), tree) if tree else None for row, start, tree in trees]
            masks += [None] * len(prefill)
        batch = Batch.of(new, self._reserve(fed, starts, counts, masks, counts, strange))
        longest = max(map(len, drafts), default=0)
        places: list[int] | None = None  # all
        prompts = [row.scored(start, count) for row, start, count in zip(fed, starts, counts)] if note else []
        even = all(len(draft) == longest == count - 1 for draft, count in zip(drafts, counts))
        if prefill or any(prompts) or not even:
            places, end = [], 0
            for draft, count in zip(drafts, counts):
                end += count
                first = end - 1 - len(draft)
                places += [min(first + j, end - 1) for j in range(longest + 1)]
            end = 0
            for start, count, scored in zip(starts, counts, prompts):
                places += range(end + scored.start - 1 - start, end + scored.stop - 1 - start)
                end += count
        if parents is not None:
            end = 0
            for row, count, tree in zip(rows, counts, parents):
                end += count
                batch.positions[end - len(tree) : end] = [len(row.tokens) + depth for depth in depths(tree)]
        scores = self.executor.score(batch, places, *([self._states] if self._states else []))
        logits_NV, argmax = scores.logits_NV, scores.argmax
        if scores.states_TF is not None:
            self._note(fed, starts, counts, scores.states_TF)
        for row, start, passed in zip(rows, starts, scores.layers or ()):
            if row.generated and start == len(row.tokens) - 1:  # a round, and no prompt's forward
                row.stats.layers += passed
        for b, (row, added) in enumerate(zip(fed, new)):
            self._cached[row.id].extend(added)
            if parents is not None and b < len(rows) and parents[b]:
                self._trees[row.id] = (len(row.tokens), parents[b])
        if note is not None and any(prompts):
            end = len(rows) * (longest + 1)
            for row, scored, logits_PV in zip(fed, prompts, logits_NV[end:].split([len(scored) for scored in prompts])):
                if scored:
                    note(row, scored, logits_PV)
            logits_NV, argmax = logits_NV[:end], None if argmax is None else argmax[:end]
        choices = (
            None if argmax is None else [argmax[at : at + longest + 1] for at in range(0, len(argmax), longest + 1)]
        )
        return logits_NV.unflatten(0, (len(rows), longest + 1)), choices

    def _note(self, rows: abc.Sequence[Sequence], starts: list[int], counts: list[int], states_TF: Tensor) -> None:
        """Hand hidden states of the fed tokens to the drafters that need them."""
        width = self.executor.config.hidden_size
        for watch in self._watches:
            own_TF = states_TF
            if watch.layers != self._states:
                places = [self._states.index(number) for number in watch.layers]
                own_TF = torch.cat([states_TF[:, at * width : (at + 1) * width] for at in places], -1)
            for row, start, states_NF in zip(rows, starts, own_TF.split(counts)):
                if row.k:
                    watch.add(row, start, states_NF)

    def extend(
        self,
        rows: abc.Sequence[Sequence],
        spec: DraftSpec,
        most: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted:
        """What the model generates for every row, token after token (``Executor.extend``), up to ``most[b]`` (at least
        1) or one that ends the row; all but that one are then cached. As ``feed`` and an argmax or a draw, again and
        again. Or a tree of so many levels, of which nothing is cached then.

        Raises ``OutOfBlocks`` where the cache has no room for all of it. Nothing was changed then.
        """
        if not rows:
            return Drafted([])
        strange = self._strange(rows)
        starts = [len(self.begin(row)) for row in rows]
        new = [row.tokens[start:] for row, start in zip(rows, starts)]
        counts = [len(tokens) for tokens in new]
        room = [count + (n - 1 if spec.tree is None else spec.tree.spare) for count, n in zip(counts, most)]
        batch = Batch.of(new, self._reserve(rows, starts, counts, None, room, strange))
        drafted = self.executor.extend(batch, spec, rows, most, sampling, seeds)
        for row, added, tokens, n in zip(rows, new, drafted.tokens, most):
            cached = self._cached[row.id]
            cached += added + (tokens[:-1] if spec.tree is None else [])
            if len(tokens) < n or spec.tree is not None:
                self.cache.resize(row.id, len(cached))
        return drafted

    def plan(
        self,
        rows: abc.Sequence[Sequence],
        left: abc.Sequence[int],
        drafting: Continuation | None,
        seconds: float = 0.0,
        hurry: array[int] | None = None,
    ) -> RoundPlan | None:
        """Rounds of ``rows``, cached but for their last tokens, with room for as many as there is (``_AT_ONCE``).

        Args:
            left: tokens that each row may still emit.
            drafting: who drafts, and how many tokens a round; None: nobody. A text too long for the drafter goes on
                without a draft.
            seconds, hurry: as of ``RoundPlan``.

        None where there is no room, or where executor and drafter do not go together (``Executor.joins``, vocabulary,
        hidden states); nothing was changed then.
        """
        drafting = drafting or Continuation(None, [0] * len(rows))
        k = [min(row.k, most) for row, most in zip(rows, drafting.most)]
        drafts = any(min(n, more - 1) > 0 for n, more in zip(k, left))
        drafter, spec = drafting.runner if drafts else None, drafting.spec
        if drafter is not None:
            config = drafter.executor.config
            if not self.executor.joins(drafter.executor, spec) or config.vocab_size != self.executor.config.vocab_size:
                return None
            if drafter.states is not None and drafter.states.layers != self._states:
                return None
            if any(len(row.tokens) >= config.max_position_embeddings for row in rows):
                if len(rows) > 1:
                    return None
                drafter, k = None, [0]
        if drafter is None and drafting.runner is not None:
            spec = DraftSpec()
        context = sys.maxsize if drafter is None else drafter.executor.config.max_position_embeddings
        spare = 0 if spec.tree is None else spec.tree.spare
        # Content that others may share is given up for it, but only once: what rounds do not use is free for the next.
        for ahead in (min(most, 1 + _IN_ALL // len(rows)) for most in _AT_ONCE):
            ends = [len(row.tokens) + min(more, n + ahead) for row, more, n in zip(rows, left, k)]
            rooms, draft_rooms = [end + spare for end in ends], [min(end, context) + spare for end in ends]
            if self.fits(rows, rooms) and (drafter is None or drafter.fits(rows, draft_rooms)):
                break
        else:
            return None
        try:
            kv, draft_kv, given = self.after(rows, rooms), None, None
            if drafter is not None:
                draft_kv = drafter.after(rows, draft_rooms)
                given = drafter.given(rows, draft_kv)
        except OutOfBlocks:
            self.commit(rows)
            return None
        return RoundPlan(
            [RoundRow.of(*each) for each in zip(rows, left, k)],
            kv,
            self.control_V,
            None if all(row.greedy for row in rows) else BatchSampling.of([row.params for row in rows]),
            spec,
            drafter=None if drafter is None else drafter.executor,
            draft_kv=draft_kv,
            draft_context=context,
            rounds=drafting.rounds,
            seconds=seconds,
            hurry=hurry,
            given=given,
            states=self._states,
        )

    def note_rounds(
        self, rows: abc.Sequence[Sequence], drafting: Continuation | None, plan: RoundPlan, ran: Rounds
    ) -> None:
        """Note what is cached after rounds that were taken in one call: all of each row's text, and the last draft. Of
        an open tree all tokens are, until ``commit`` knows which are kept."""
        for row, text, drafted in zip(rows, ran.texts, ran.draft_cached):
            self._cached[row.id] = text
            if drafting is not None and drafting.runner is not None and plan.drafter is not None:
                drafting.runner.drafted(row, text[:drafted])
        for row, (first, states_NF) in zip(rows, ran.states):
            self._note([row], [first], [len(states_NF)], states_NF)
        if ran.open is not None and ran.open.draft.trees is not None:
            for b, parents in zip(ran.open.rows, ran.open.draft.trees):
                self._trees[rows[b].id] = (len(ran.texts[b]) - len(parents), parents)

    def given(self, rows: abc.Sequence[Sequence], kv: PagedBatch) -> Given | None:
        """Nothing: a model drafts by itself."""
        return None

    def drafted(self, row: Sequence, text: list[int]) -> None:
        """This is cached of a row after rounds that were taken in one call."""
        self._cached[row.id] = text

    def fits(self, rows: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> bool:
        """Whether there are free pages for so many tokens of each of ``rows``."""
        allocator = self.cache.allocator
        return sum(allocator.missing(row.id, room) for row, room in zip(rows, rooms)) <= allocator.num_free

    def after(self, rows: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> PagedBatch:
        """The batch of what is not cached of ``rows``, with room for so many tokens of each in all. Raises
        ``OutOfBlocks``; nothing was changed then."""
        strange = self._strange(rows)
        starts = [len(self.begin(row)) for row in rows]
        counts = [len(row.tokens) - start for row, start in zip(rows, starts)]
        return self._reserve(rows, starts, counts, None, [room - start for room, start in zip(rooms, starts)], strange)

    def _strange(self, rows: abc.Sequence[Sequence]) -> list[Sequence]:
        return [row for row in rows if row.id not in self._cached]

    def _reserve(
        self,
        rows: abc.Sequence[Sequence],
        starts: list[int],
        counts: list[int],
        masks: list[Tensor | None] | None,
        room: list[int],
        strange: list[Sequence],
    ) -> PagedBatch:
        """The batch of every row's new tokens, with ``room`` for so many, or for none; ``strange`` rows were not known
        before."""
        try:
            for row, start, count in zip(rows, starts, room):
                self.cache.resize(row.id, start + count)
        except BaseException:
            self._give_back(rows, starts, strange)
            raise
        return self.cache.batch([row.id for row in rows], starts, counts, masks)

    def _give_back(self, rows: abc.Sequence[Sequence], starts: list[int], strange: list[Sequence]) -> None:
        for row, start in zip(rows, starts):
            self.cache.resize(row.id, start)
        for row in strange:
            self.release(row)

    def commit(self, rows: Iterable[Sequence]) -> None:
        """Roll the cache back to what is true of each row: a prefix of its tokens, all but the last at most."""
        for row in rows:
            if (cached := self._cached.get(row.id)) is None:
                continue
            if (tree := self._trees.pop(row.id, None)) is not None:
                start, parents = tree
                path = descend(cached[start:], parents, row.tokens[start:])
                cached[start:] = [cached[start + node] for node in path]
                self.cache.keep(row.id, start, path)
                for watch in self._watches:
                    watch.keep(row, start, path)
            keep = min(common_prefix(cached, row.tokens), len(row.tokens) - 1)
            if keep < len(cached) or keep != self.cache.allocator.length(row.id):
                del cached[keep:]
                self.cache.resize(row.id, keep)
                for watch in self._watches:
                    watch.cut(row, keep)
            if self.share:
                self.cache.allocator.publish(row.id, cached, keep, row.params.cache_salt)

    def release(self, row: Sequence) -> None:
        """Forget ``row`` and free its pages."""
        self._cached.pop(row.id, None)
        self._trees.pop(row.id, None)
        for watch in self._watches:
            watch.release(row)
        self.cache.allocator.release(row.id)
