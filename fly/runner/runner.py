"""A model with its own paged cache. The runner knows which tokens of each row are cached, feeds the others to the
executor, and rolls the cache back. It does not depend on draft strategies.

The engine's step calls it in this order: ``score`` (one forward over the last tokens and the drafts), ``decide`` (each
row's rule decides), ``commit`` (the cache is rolled back to what was decided). For several rounds in one call it calls
``plan`` and ``note_rounds`` instead. Every call either succeeds or leaves the cache as it was.

Shape legend: B rows, K longest draft, J positions of a row (K + 1), P prompt tokens, T packed tokens, N tokens of a
row, F hidden states side by side, V vocabulary.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections import abc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fly.cache import BlockAllocator, OutOfBlocks, PagedBatch, PagedKVCache
from fly.models.tokenizer import Tokenizer
from fly.ops import common_prefix, depths, descend, sent, tree_mask, upload
from fly.policies.verification import add_costs
from fly.runner.constraints import constrain
from fly.runner.continuation import Continuation, Drafter
from fly.runner.executor import Batch, Drafted, DraftSpec, Executor, HeadInput, RoundPlan, RoundRow, Rounds
from fly.runner.request import Row, most_drafted
from fly.runner.sampling import BatchSampling
from fly.runner.states import HiddenStates
from fly.types import IMPOSSIBLE, Decision, Draft, Target

__all__ = ["OnPrompt", "Runner"]

OnPrompt = Callable[[Row, range, Tensor], None]  # a row, some tokens of its prompt, logits [P, V] before each

# For several rounds in one call, each row gets cache room for one round and for this many more tokens: the first of
# these numbers that fits. All rows together get at most ``_MAX_EXTRA`` more tokens.
_EXTRA_TOKENS, _MAX_EXTRA = (128, 32, 8, 1), 1024


class Runner:
    """An executor with its own paged cache.

    Between two steps the cached tokens of a row are a prefix of its tokens. Between ``score`` and ``commit`` a draft
    may follow that prefix. ``commit`` compares tokens to restore the prefix, so it need not know who drafted.

    Args:
        executor: runs the model.
        cache: the model's keys and values. If None, ``reserve`` makes the cache later, once the sizes of all caches
            are known.
        control_ids: the control tokens of the model's vocabulary (end-of-sequence, end-of-turn and the like).
        share: whether rows that begin with the same tokens and have the same ``cache_salt`` share pages.
        tokenizer: the model's, if it is known.
    """

    def __init__(
        self,
        executor: Executor,
        cache: PagedKVCache | None,
        control_ids: Iterable[int] = (),
        share: bool = True,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.cache: PagedKVCache
        if cache is not None:
            self.cache = cache
        self.executor = executor
        self.share = share
        self.tokenizer = tokenizer
        control_V = torch.zeros(executor.config.vocab_size, dtype=torch.bool)
        control_V[sorted(set(control_ids))] = True
        self.control_V = sent(control_V, executor.device)
        self._cached: dict[int, list[int]] = {}
        self._trees: dict[int, tuple[int, list[int]]] = {}  # by row: the tree's start, its tokens' parents
        self.states: HiddenStates | None = None  # none: a draft model needs no hidden states of the target
        self._watches: list[HiddenStates] = []
        self._states: tuple[int, ...] = ()  # the layers whose states the executor is asked for

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache."""
        return PagedKVCache.bytes_per_token(self.executor.config, self.executor.dtype)

    @property
    def context(self) -> int:
        """The most tokens that a text may have."""
        return self.executor.config.max_position_embeddings

    @property
    def allocator(self) -> BlockAllocator:
        """The allocator of the cache's pages."""
        return self.cache.allocator

    def reserve(self, tokens: int | None = None, block_size: int | None = None) -> None:
        """Make the cache, with room for ``tokens`` tokens over all rows (``PagedKVCache.for_model``)."""
        self.cache = PagedKVCache.for_model(self.executor, tokens, block_size)

    def watch(self, layers: abc.Sequence[int], begin: Callable[[Row], int], end: Callable[[Row], None]) -> HiddenStates:
        """From now on, record the hidden states of every token that is fed for a row with a draft.

        Args:
            layers: the residual stream is recorded after each of these numbers of layers; 0 is the embedding.
            begin, end: the reader's functions that are called for a new row and a finished one (``HiddenStates``).

        Raises ``ValueError`` if the executor gives no hidden states, or if the model has fewer layers.
        """
        self.executor.check_states(layers)
        self._watches.append(HiddenStates(layers, begin, end))
        several = len(self._watches) > 1
        union = {number for watch in self._watches for number in watch.layers}
        self._states = tuple(sorted(union)) if several else tuple(layers)
        return self._watches[-1]

    def cached(self, row: Row) -> int:
        """Return how many tokens of ``row`` are cached."""
        return len(self._cached.get(row.id, ()))

    def begin(self, row: Row) -> list[int]:
        """Return the cached tokens of ``row``. A new row adopts pages that other rows filled with the same first
        tokens. It does not adopt tokens that must be fed again (``Row.shareable``)."""
        if (cached := self._cached.get(row.id)) is None:
            most = min([row.shareable, *(watch.begin(row) for watch in self._watches if row.k)])
            shared = self.cache.allocator.adopt(row.id, row.tokens[:most], row.params.cache_salt) if self.share else 0
            cached = self._cached[row.id] = row.tokens[:shared]
        return cached

    def fork(self, parent: Row, child: Row) -> None:
        """Start ``child``, a new row, with the tokens that ``parent`` has cached. Both share the last page until one of
        them writes to it."""
        cached = self._cached[parent.id]
        shared = min(common_prefix(cached, child.tokens), len(child.tokens) - 1)
        if not shared:  # the parent lost its pages and starts again
            return
        self.cache.allocator.fork(parent.id, child.id)
        self.cache.resize(child.id, shared)
        self._cached[child.id] = cached[:shared]
        for watch in self._watches:
            watch.fork(parent, child, shared)

    def score(
        self,
        rows: abc.Sequence[Row],
        draft: Draft,
        prefill: abc.Sequence[tuple[Row, int]] = (),
        on_prompt: OnPrompt | None = None,
    ) -> tuple[Target, Tensor]:
        """Verify: run one forward over each row's last token and its draft. Return a ``Target`` for the blocks, and the
        raw logits [B, J, V] that it was made from. The other arguments and the errors are those of ``feed``."""
        chains, trees = draft.chains, draft.trees
        _, longest = draft.shape
        raw_BJV, choices = self.feed(rows, chains, trees, prefill, on_prompt, longest)
        if choices is not None and any(min(row) < 0 for row in choices):
            choices = None  # there is a NaN; ``verify`` finds out whether the decision depends on it
        logits_BJV = constrain(raw_BJV, rows, chains, trees, self.executor.numbers)
        return self.view(rows, logits_BJV, choices if logits_BJV is raw_BJV else None), raw_BJV

    def view(self, rows: abc.Sequence[Row], logits_BJV: Tensor, choices: list[list[int]] | None = None) -> Target:
        """Return a ``Target`` for the blocks.

        Args:
            logits_BJV: the target's logits, with each row's penalties, bans and form applied.
            choices: the most likely token at each place, if the backend found it already.
        """
        device = logits_BJV.device
        sampling = None if all(row.greedy for row in rows) else BatchSampling.of([row.params for row in rows], device)
        return Target(
            logits_BJV,
            None if sampling is None else self.executor.process(sampling, logits_BJV),
            greedy_B=sampling.greedy_B if sampling is not None and sampling.some_greedy else None,
            control_V=self.control_V,
            generated_B=lambda: upload([row.generated for row in rows], device),
            relaxed_B=lambda: upload([row.stats.relaxed for row in rows], device),
            nats_B=lambda: sent(torch.tensor([row.stats.nats for row in rows]), device),
            spent=lambda label: sent(torch.tensor([row.stats.cost(label) for row in rows]), device),
            relaxed_at=lambda: [row.relaxed_at for row in rows],
            history=lambda: [row.tokens for row in rows],
            choices=choices,
        )

    def decide(self, rows: abc.Sequence[Row], target: Target, draft: Draft, strategy: object) -> list[Decision]:
        """Decide: let each row's own rule decide on its block (``Executor.decide``).

        Raises ``ValueError`` if a NaN leaves a row ``UNDECIDED``, or its policy decides what is ``IMPOSSIBLE``. The
        error names its source: the model, the ``strategy`` or the policy.
        """
        decisions = self.executor.decide(rows, target, draft)
        for b, (row, decision) in enumerate(zip(rows, decisions)):
            if decision.mismatches and row.policy.budgets:
                decisions[b] = add_costs(row.policy.budgets, target, draft, b, decision)
            if decision.next_token >= 0:
                continue
            logits_V = target.logits_BKV[b, decision.end]
            if (logits_V == -torch.inf).all():  # the form allows nothing, so its matcher will raise
                decisions[b] = decision._replace(next_token=0)
                continue
            drafted = decision.drafted[:5]
            if logits_V.isnan().any():
                fault = f"the model {self.executor.model_name} gave NaN as logits"
            elif draft.probs_BKV is not None and draft.probs_BKV[b, : len(decision.drafted)].isnan().any():
                fault = f"{type(strategy).__name__} proposed a distribution with NaN in it"
            elif decision.next_token == IMPOSSIBLE:
                keeps = "keeps more tokens than its draft has, or names a token outside of the vocabulary"
                fault = f"the verdict of the policy '{row.policy}' {keeps}, for the draft {drafted}"
            else:
                fault = f"the policy '{row.policy}' gave NaN for the draft {drafted} (a correction below 0 is one)"
            raise ValueError(f"{fault}, after {len(row.tokens)} tokens of a text")
        return decisions

    def feed(
        self,
        rows: abc.Sequence[Row],
        drafts: abc.Sequence[list[int]],
        parents: abc.Sequence[list[int]] | None = None,
        prefill: abc.Sequence[tuple[Row, int]] = (),
        on_prompt: OnPrompt | None = None,
        longest: int | None = None,
    ) -> tuple[Tensor, list[list[int]] | None]:
        """Run one forward over the uncached tokens of every row and its draft after them.

        Args:
            drafts: the drafted tokens of each row.
            parents: for drafts that are trees, the parents of the tokens, as in ``Draft``. A token sees only its
                ancestors, and stands at the position after them.
            prefill: further rows, each with the number of its tokens up to which the same forward caches them.
            on_prompt: called for every row that wants its prompt scored, with the numbers of the tokens
                (``Row.scored``) and their logits.
            longest: K, if drafts are padded beyond the longest.

        Returns logits [B, J, V] with J = K + 1. Position 0 follows the row's last token, position j follows the j-th
        drafted one. Rows with shorter drafts repeat their last position. Also returns the most likely token at each
        position, or None if the backend did not find it.

        Raises:
            OutOfBlocks: the cache cannot hold the tokens of all rows; nothing was changed.
        """
        longest = max(map(len, drafts), default=0) if longest is None else longest
        # Pack each row's uncached tokens and its draft, and after all rows the chunks of prompts.
        fed = [*rows, *(row for row, _ in prefill)]
        ends = [len(row.tokens) + len(draft) for row, draft in zip(rows, drafts)] + [end for _, end in prefill]
        kv = self._reserve(fed, ends, ends)
        new = [row.tokens[start:] + draft for row, start, draft in zip(rows, kv.starts, drafts)]
        new += [row.tokens[start:end] for (row, end), start in zip(prefill, kv.starts[len(rows) :])]
        batch = Batch.of(new, kv)
        if parents is not None:
            _arrange_trees(batch, rows, parents)
        # Run the forward. After it, all fed tokens are cached.
        prompts = []
        if on_prompt is not None:
            prompts = [row.scored(start, count) for row, start, count in zip(fed, kv.starts, kv.counts)]
        places = _places(kv, drafts, longest, prompts)
        scores = self.executor.score(batch, places, *([self._states] if self._states else []))
        for row, added in zip(fed, new):
            self._cached[row.id].extend(added)
        for row, tree in zip(rows, parents or ()):
            if tree:
                self._trees[row.id] = (len(row.tokens), tree)
        if scores.states_TF is not None:
            self._keep_states(fed, kv.starts, kv.counts, scores.states_TF)
        # The rounds' logits come first, [B, J, V]; then the scored prompts'.
        per_row = longest + 1
        logits_NV = scores.logits_NV
        argmax = scores.argmax
        end = len(rows) * per_row
        if on_prompt is not None and any(prompts):
            sizes = [len(scored) for scored in prompts]
            for row, scored, logits_PV in zip(fed, prompts, logits_NV[end:].split(sizes)):
                if scored:
                    on_prompt(row, scored, logits_PV)
        choices = None if argmax is None else [argmax[at : at + per_row] for at in range(0, end, per_row)]
        return logits_NV[:end].unflatten(0, (len(rows), per_row)), choices

    def _keep_states(
        self, rows: abc.Sequence[Row], starts: abc.Sequence[int], counts: abc.Sequence[int], states_TF: Tensor
    ) -> None:
        """Give the hidden states of the fed tokens to the drafters that need them."""
        width = self.executor.config.hidden_size
        for watch in self._watches:
            watched_TF = states_TF
            if watch.layers != self._states:
                places = [self._states.index(number) for number in watch.layers]
                watched_TF = torch.cat([states_TF[:, at * width : (at + 1) * width] for at in places], -1)
            for row, start, states_NF in zip(rows, starts, watched_TF.split([*counts])):
                if row.k:
                    watch.add(row, start, states_NF)

    def extend(
        self,
        rows: abc.Sequence[Row],
        spec: DraftSpec,
        max_len: abc.Sequence[int],
        sampling: BatchSampling | None = None,
        seeds: abc.Sequence[int] = (),
    ) -> Drafted:
        """Draft: let the model continue every row, token after token (``Executor.extend``). A draft ends after
        ``max_len[b]`` tokens (at least 1), or after a token that ends the row. All its tokens but the last are then
        cached. With ``spec.tree`` the model drafts a tree of ``max_len[b]`` levels, which is not cached.

        Raises ``OutOfBlocks``, and changes nothing, if the cache has no room for the whole draft.
        """
        if not rows:
            return Drafted([])
        rooms = [len(row.tokens) + (n - 1 if spec.tree is None else spec.tree.spare) for row, n in zip(rows, max_len)]
        kv = self.prepare(rows, rooms)
        new = [row.tokens[start:] for row, start in zip(rows, kv.starts)]
        drafted = self.executor.extend(Batch.of(new, kv), spec, rows, max_len, sampling, seeds)
        for row, added, tokens, n in zip(rows, new, drafted.tokens, max_len):
            cached = self._cached[row.id]
            cached += added + (tokens[:-1] if spec.tree is None else [])
            if len(tokens) < n or spec.tree is not None:
                self.cache.resize(row.id, len(cached))
        return drafted

    def plan(
        self,
        rows: abc.Sequence[Row],
        left: abc.Sequence[int],
        drafting: Continuation | None,
        seconds: float = 0.0,
        hurry: array[int] | None = None,
    ) -> RoundPlan | None:
        """Plan several rounds in one call, and reserve room in the caches for them (``_EXTRA_TOKENS``).

        Args:
            rows: rows with all tokens cached but the last.
            left: how many tokens each row may still emit.
            drafting: the drafter, and how many tokens it drafts in a round. None: there are no drafts. A text that is
                too long for the drafter goes on without a draft.
            seconds, hurry: when to stop (``RoundPlan``).

        Returns None, and changes nothing, if there is no room, or if this executor cannot run rounds with that drafter:
        it drafts trees, the two do not join (``Executor.joins``), or their vocabularies or hidden states differ.
        """
        # Who drafts? Nobody, if no row may draft any more, or if the text has become too long for the drafter.
        drafting = drafting or Continuation(None, [0] * len(rows))
        k = [min(row.k, most) for row, most in zip(rows, drafting.max_len)]
        drafts = any(map(most_drafted, k, left))
        drafter = drafting.runner if drafts else None
        if drafter is not None and not self._runs_with(drafter, drafting.spec):
            return None
        context = sys.maxsize if drafter is None else drafter.executor.config.max_position_embeddings
        if any(len(row.tokens) >= context for row in rows):
            if len(rows) > 1:
                return None
            drafter = None
            k = [0]
            context = sys.maxsize
        spec = DraftSpec() if drafter is None and drafting.runner is not None else drafting.spec
        # Reserve room for as many tokens as the pages allow. This may evict cached prefixes of ended rows, but only
        # once: the pages that these rounds leave unused are free for the next rounds.
        for most in _EXTRA_TOKENS:
            ahead = min(most, 1 + _MAX_EXTRA // len(rows))
            rooms = [len(row.tokens) + min(more, n + ahead) for row, more, n in zip(rows, left, k)]
            draft_rooms = [min(room, context) for room in rooms]
            if self.fits(rows, rooms) and (drafter is None or drafter.fits(rows, draft_rooms)):
                break
        else:
            return None
        try:
            kv = self.prepare(rows, rooms)
            draft_kv = None if drafter is None else drafter.prepare(rows, draft_rooms)
        except OutOfBlocks:
            self.commit(rows)
            return None
        return RoundPlan(
            [RoundRow.of(*each) for each in zip(rows, left, k)],
            kv,
            rooms,
            self.control_V,
            None if all(row.greedy for row in rows) else BatchSampling.of([row.params for row in rows]),
            spec,
            drafter=None if drafter is None else drafter.executor,
            draft_kv=draft_kv,
            draft_context=context,
            draft_longest=drafting.longest,
            rounds=drafting.rounds,
            seconds=seconds,
            hurry=hurry,
            head_input=None if drafter is None or draft_kv is None else drafter.read_states(rows, draft_kv),
            states=self._states,
        )

    def _runs_with(self, drafter: Drafter, spec: DraftSpec) -> bool:
        """Whether the executor can run rounds with this drafter: it drafts chains, the two join, the vocabulary is the
        same, and the drafter reads no hidden states but those that are recorded."""
        same_vocabulary = drafter.executor.config.vocab_size == self.executor.config.vocab_size
        states_match = drafter.states is None or drafter.states.layers == self._states
        return spec.tree is None and same_vocabulary and states_match and self.executor.joins(drafter.executor)

    def note_rounds(self, rows: abc.Sequence[Row], drafting: Continuation | None, plan: RoundPlan, ran: Rounds) -> None:
        """Note what is cached after several rounds in one call: each row's text, and the last draft."""
        for row, text, drafted in zip(rows, ran.texts, ran.draft_cached):
            self._cached[row.id] = text
            if drafting is not None and drafting.runner is not None and plan.drafter is not None:
                drafting.runner.note_cached(row, text[:drafted])
        for row, (first, states_NF) in zip(rows, ran.states):
            self._keep_states([row], [first], [len(states_NF)], states_NF)

    def read_states(self, rows: abc.Sequence[Row], kv: PagedBatch) -> HeadInput | None:
        """Return None, since a draft model needs no hidden states of the target."""
        return None

    def note_cached(self, row: Row, text: list[int]) -> None:
        """Note which tokens of a row are cached after several rounds in one call."""
        self._cached[row.id] = text

    def fits(self, rows: abc.Sequence[Row], rooms: abc.Sequence[int]) -> bool:
        """Whether the cache has pages for ``rooms[b]`` tokens of each row."""
        allocator = self.cache.allocator
        return sum(allocator.missing(row.id, room) for row, room in zip(rows, rooms)) <= allocator.num_free

    def prepare(self, rows: abc.Sequence[Row], rooms: abc.Sequence[int]) -> PagedBatch:
        """Make a batch of the uncached tokens of ``rows``, and reserve room for ``rooms[b]`` tokens of each row in all.
        Raises ``OutOfBlocks``, and changes nothing, if there is no room."""
        return self._reserve(rows, [len(row.tokens) for row in rows], rooms)

    def _reserve(self, rows: abc.Sequence[Row], ends: abc.Sequence[int], rooms: abc.Sequence[int]) -> PagedBatch:
        """Begin the rows (``begin``), and reserve room for ``rooms[b]`` tokens of each in all. Make a batch of each
        row's tokens from the cached ones up to number ``ends[b]``. After an error, the rows hold what they held
        before."""
        new = [row for row in rows if row.id not in self._cached]
        starts = [len(self.begin(row)) for row in rows]
        try:
            for row, room in zip(rows, rooms):
                self.cache.resize(row.id, room)
            counts = [end - start for start, end in zip(starts, ends)]
            return self.cache.batch([row.id for row in rows], starts, counts)
        except BaseException:
            for row, start in zip(rows, starts):
                self.cache.resize(row.id, start)
            for row in new:
                self.release(row)
            raise

    def commit(self, rows: Iterable[Row]) -> None:
        """Roll the cache back to each row's tokens: drafted tokens that were not kept leave it. At most all tokens but
        the last stay cached, since the next forward must feed one."""
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

    def release(self, row: Row) -> None:
        """Free all pages of ``row``."""
        self._cached.pop(row.id, None)
        self._trees.pop(row.id, None)
        for watch in self._watches:
            watch.release(row)
        self.cache.allocator.release(row.id)


def _arrange_trees(batch: Batch, rows: abc.Sequence[Row], parents: abc.Sequence[list[int]]) -> None:
    """Let each drafted token see only its ancestors in the tree, and give it the position after them."""
    kv = batch.kv
    end = 0
    masks: list[Tensor | None] = [None] * len(kv.counts)
    for b, (row, tree) in enumerate(zip(rows, parents)):
        end += kv.counts[b]
        if tree:
            masks[b] = tree_mask(kv.starts[b], len(row.tokens), tree)
            batch.positions[end - len(tree) : end] = [len(row.tokens) + depth for depth in depths(tree)]
    kv.masks = masks


def _places(
    kv: PagedBatch, drafts: abc.Sequence[list[int]], longest: int, prompts: abc.Sequence[range]
) -> list[int] | None:
    """Return the numbers of the packed tokens after which logits are wanted. First come each row's last token and its
    drafted ones; a row with fewer than ``longest`` repeats its last. Then comes the token before each token of
    ``prompts``. None means every packed token in order."""
    even = all(len(draft) == longest == count - 1 for draft, count in zip(drafts, kv.counts))
    if even and len(drafts) == len(kv.counts) and not any(prompts):
        return None
    ends = list(itertools.accumulate(kv.counts))
    places = [min(end - 1 - len(draft) + j, end - 1) for end, draft in zip(ends, drafts) for j in range(longest + 1)]
    for end, start, count, scored in zip(ends, kv.starts, kv.counts, prompts):
        before = end - count - start - 1  # the place of the token before the row's token 0
        places += range(before + scored.start, before + scored.stop)
    return places
