"""The step: propose, verify in one forward, commit. Knows nothing of HTTP, files or tokenizers.

Shape legend: B rows, K longest draft, J positions of a row (K+1), T packed tokens, V vocabulary.

Prefill, plain decoding and verification are the same step: a row feeds whatever it has that is not cached yet,
then its draft. Prefill is an empty draft over many new tokens, autoregression an empty draft over one.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fly.cache import OutOfBlocks, PagedBatch, PagedKVCache
from fly.constraints import constrain, constrains
from fly.models import LlamaConfig
from fly.models.llama import KV
from fly.ops import Stream, compiled, top_at, uniforms
from fly.policies import verify
from fly.policies.base import accepts_exactly, draws_exactly
from fly.policies.compiled import Clause, clauses_of
from fly.request import Sequence, Token
from fly.sampling import BatchSampling
from fly.types import Draft, ListedDraft, Noise, Target, Verdict, Why, depths

if TYPE_CHECKING:
    from fly.backends.cpu.library import Lookup, Sure
    from fly.backends.cpu.model import Asked, Ran, Round
    from fly.drafts.base import Continuation, DraftStrategy

__all__ = ["Engine", "Model", "Runner", "common_prefix", "judge"]


_WHY = tuple(Why)  # by its number
_RELAXED = int(Why.RELAXED)
# Tokens beside a round's own that rounds of one call may emit: what caches must have room for. So many, or else fewer;
# and of all rows together no more than a call would score.
_AT_ONCE, _IN_ALL = (128, 32, 8, 1), 1024
_SMALL = 2**20  # numbers of a block that one thread looks through sooner than several are woken


class Model(Protocol):
    """What the engine needs of a model; ``fly.models.Llama`` is one, a test's toy another."""

    config: LlamaConfig

    @property
    def device(self) -> torch.device: ...

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, kv: KV) -> Tensor: ...

    def logits(self, hidden_TC: Tensor) -> Tensor: ...


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix of two token lists."""
    shorter = min(len(a), len(b))
    # the usual case, at C speed, without a copy of the one that is a prefix
    if (a if len(a) == shorter else a[:shorter]) == (b if len(b) == shorter else b[:shorter]):
        return shorter
    # They differ near the end, as a rule: what comes before is compared at C speed as well.
    start, window = shorter, 32
    while start and a[:start] != b[:start]:
        start, window = max(shorter - window, 0), 8 * window
    return next(i for i in range(start, shorter) if a[i] != b[i])


class Runner:
    """A model with its own paged cache. It knows which tokens of each sequence are cached, and feeds the rest.

    ``control_ids`` are the control tokens of its vocabulary (end-of-sequence, end-of-turn, other specials). Rows that
    begin with the same tokens share their pages, unless ``share`` is false.

    The one rule of bookkeeping: what is cached is a prefix of the row's tokens, and at times a speculation behind it.
    ``commit`` restores the rule, whatever was speculated and by whom, by comparing tokens.
    """

    def __init__(self, model: Model, cache: PagedKVCache, control_ids: Iterable[int] = (), share: bool = True) -> None:
        self.model, self.cache, self.share = model, cache, share
        self.control_V = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=model.device)
        self.control_V[sorted(set(control_ids))] = True
        self._cached: dict[int, list[int]] = {}
        self._trees: dict[int, tuple[int, list[int]]] = {}  # where a row's cached tree starts, and its parents
        self._texts: dict[int, array[int]] = {}  # a beginning of what is cached, for a lookup in compiled code

    def pending(self, row: Sequence) -> int:
        """Tokens of ``row`` that are not cached yet."""
        return len(row.tokens) - len(self._cached.get(row.id, ()))

    def begin(self, row: Sequence) -> list[int]:
        """The tokens of ``row`` that are cached. A row not seen before starts with the pages that others have filled
        with the beginning of its tokens (all but the last, which has to be fed)."""
        if (cached := self._cached.get(row.id)) is None:
            allocator = self.cache.allocator
            # another runner on the same cache may know it
            adopts = self.share and row.id not in allocator
            shared = allocator.adopt(row.id, row.tokens[:-1]) if adopts else 0
            cached = self._cached[row.id] = row.tokens[:shared]
        return cached

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, not seen before, start with all that ``parent`` has cached of its tokens; the last page is
        shared until one of them writes to it."""
        cached = self._cached[parent.id]
        shared = min(common_prefix(cached, child.tokens), len(child.tokens) - 1)
        self.cache.allocator.fork(parent.id, child.id)
        self.cache.resize(child.id, shared)
        self._cached[child.id] = cached[:shared]

    def adopt(self, other: Runner, rows: abc.Sequence[Sequence]) -> None:
        """Take over what ``other`` has cached of ``rows``, in a cache that both share; until ``forget``."""
        for row in rows:
            self._cached[row.id] = list(other._cached.get(row.id, ()))
            self._texts.pop(row.id, None)

    def forget(self, rows: abc.Sequence[Sequence]) -> None:
        """Leave the cache of ``rows``, as it is after a ``commit``, to the runner it was adopted from."""
        for row in rows:
            self._cached.pop(row.id, None)
            self._texts.pop(row.id, None)

    def feed(
        self,
        rows: abc.Sequence[Sequence],
        drafts: abc.Sequence[list[int]],
        parents: abc.Sequence[list[int]] | None = None,
        prefill: abc.Sequence[tuple[Sequence, int]] = (),
    ) -> Tensor:
        """Run one forward over every row's uncached tokens and then its draft.

        ``parents`` makes trees of the drafts, as in ``Draft``: a token sees its ancestors, and stands at the position
        behind them. ``prefill`` names other rows, and how many more of their tokens are to be cached by the way.
        Returns logits [B, J, V], J = 1 + the longest draft: position 0 follows the row's last token, position j its
        j-th drafted one. Rows with shorter drafts repeat their last position.

        Raises:
            OutOfBlocks: the cache cannot hold the tokens of all rows; nothing was changed.
        """
        return self._feed(rows, drafts, parents, prefill)[0]

    def _feed(
        self,
        rows: abc.Sequence[Sequence],
        drafts: abc.Sequence[list[int]],
        parents: abc.Sequence[list[int]] | None,
        prefill: abc.Sequence[tuple[Sequence, int]],
    ) -> tuple[Tensor, list[list[int]] | None]:
        """``feed``, and the most likely token at each place where that was found by the way."""
        fed = [*rows, *(row for row, _ in prefill)]
        strange = [row for row in fed if row.id not in self._cached]
        starts = [len(self.begin(row)) for row in fed]
        new = [row.tokens[start:] + draft for row, start, draft in zip(rows, starts, drafts)]
        new += [row.tokens[start : start + n] for (row, n), start in zip(prefill, starts[len(rows) :])]
        counts = [len(tokens) for tokens in new]
        device = self.model.device
        tokens, positions = _packed(new, starts)
        masks: list[Tensor | None] | None = None
        if parents is not None:
            masks, end = [None] * len(fed), 0
            for b, (row, start, count, tree) in enumerate(zip(rows, starts, counts, parents)):
                end += count
                if tree:
                    positions[end - len(tree) : end] = [len(row.tokens) + depth for depth in depths(tree)]
                    masks[b] = _tree_mask(start, len(row.tokens), tree).to(device)
        kv = self._reserve(fed, starts, counts, masks, counts, strange)
        longest = max(map(len, drafts), default=0)
        kept: list[int] | None = None  # all
        if prefill or not all(len(draft) == longest == count - 1 for draft, count in zip(drafts, counts)):
            kept, end = [], 0
            for draft, count in zip(drafts, counts):
                end += count
                first = end - 1 - len(draft)
                kept += [min(first + j, end - 1) for j in range(longest + 1)]
        choices: list[list[int]] | None = None
        if (score := getattr(self.model, "score", None)) is not None:
            logits_NV, found = score(array("q", tokens), array("q", positions), kv, kept)
            choices = [found[at : at + longest + 1] for at in range(0, len(found), longest + 1)]
        else:
            hidden_TC = self.model(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), kv)
            if kept is not None:
                hidden_TC = hidden_TC[torch.tensor(kept, dtype=torch.int64, device=device)]
            vocabulary = self.model.config.vocab_size
            logits_NV = self.model.logits(hidden_TC) if rows else torch.zeros(0, vocabulary, device=device)
        for b, (row, added) in enumerate(zip(fed, new)):
            self._cached[row.id].extend(added)
            if parents is not None and b < len(rows) and parents[b]:
                self._trees[row.id] = (len(row.tokens), parents[b])
        return logits_NV.unflatten(0, (len(rows), longest + 1)), choices

    def draft(
        self,
        rows: abc.Sequence[Sequence],
        most: abc.Sequence[int],
        distribution: BatchSampling | None = None,
        uniform_BK: Tensor | None = None,
        lookup: Lookup | None = None,
        sure: Sure | None = None,
    ) -> tuple[list[list[int]], Tensor | None] | None:
        """What the model says of every row, token after token, up to ``most[b]`` (at least 1) or one that ends the row;
        all but that one are then cached. As ``feed`` and an argmax, or a draw by ``uniform_BK`` from the processed
        ``distribution``, again and again, in one call; the second is [B, K, V], what was drawn from, if there is a
        distribution. The same with a ``lookup``, by fewer forwards. A row stops before a token that the model is not
        ``sure`` of.

        None where the model has no such call, or the cache not the room for it; nothing was changed then.
        """
        if (draft := getattr(self.model, "draft", None)) is None:
            return None
        strange = [row for row in rows if row.id not in self._cached]
        starts = [len(self.begin(row)) for row in rows]
        new = [row.tokens[start:] for row, start in zip(rows, starts)]
        counts = [len(tokens) for tokens in new]
        try:
            kv = self._reserve(rows, starts, counts, None, [count + n - 1 for count, n in zip(counts, most)], strange)
        except OutOfBlocks:
            return None
        tokens, positions = _packed(new, starts)
        found: tuple[list[list[int]], Tensor | None]
        stop_ids = [row.stop_ids for row in rows]
        more: dict[str, Any] = {} if lookup is None else {"lookup": lookup, "texts": [self._text(row) for row in rows]}
        if sure is not None:
            more["sure"] = sure
        found = draft(array("q", tokens), array("q", positions), kv, most, stop_ids, distribution, uniform_BK, **more)
        for row, added, drafted, n in zip(rows, new, found[0], most):
            cached, ended = self._cached[row.id], len(drafted) == n or (drafted and drafted[-1] in row.stop_ids)
            cached += added + (drafted[:-1] if ended else drafted)
            if len(drafted) < n:
                self.cache.resize(row.id, len(cached))
        return found

    def rounds(
        self,
        rows: abc.Sequence[Sequence],
        left: abc.Sequence[int],
        drafting: Continuation | None,
        k: abc.Sequence[int],
        seconds: float,
        clauses: abc.Sequence[abc.Sequence[Clause]] = (),
        decide: Callable[[list[Round], Asked], tuple[int, int] | None] | None = None,
        hurry: array[int] | None = None,
    ) -> list[list[Round]] | None:
        """Rounds of ``rows``, cached but for their last tokens, in one call of the model (``CompiledLlama.rounds``): of
        each those that ``decide`` was not told of. Up to ``k`` tokens a round are drafted for each as ``drafting``
        says; each may emit ``left``. What excuses mismatches is ``clauses``, or, for a row alone, is asked of
        ``decide``, which alone may change it. A text too long for the drafter goes on without a draft. No further round
        begins after ``seconds``, or while ``hurry`` holds another number than 0.

        None where a model has no such call, the drafter another vocabulary, or a cache not the room; nothing was
        changed then. Raises what ``decide`` does, and an interrupt that came in its place.
        """
        if (run := getattr(self.model, "rounds", None)) is None:
            return None
        drafter = drafting.runner if drafting is not None and any(k) else None
        told: dict[str, Any] = {"clauses": clauses, "control_V": self.control_V} if clauses else {}
        if not all(row.greedy for row in rows):
            told |= {
                "distribution": BatchSampling.of([row.params for row in rows]),
                "seeds": [row.seed for row in rows],
            }
        if drafter is not None:
            config = drafter.model.config
            if config.vocab_size != self.model.config.vocab_size or getattr(drafter.model, "rounds", None) is None:
                return None
            if any(len(row.tokens) >= config.max_position_embeddings for row in rows):
                if len(rows) > 1:
                    return None
                drafter, k = None, [0]
        context = sys.maxsize if drafter is None else drafter.model.config.max_position_embeddings
        # Content that others may share is given up for it, but only once: what rounds do not use is free for the next.
        for ahead in (min(most, 1 + _IN_ALL // len(rows)) for most in _AT_ONCE):
            rooms = [len(row.tokens) + min(more, n + ahead) for row, more, n in zip(rows, left, k)]
            draft_rooms = [min(room, context) for room in rooms]
            if self._fits(rows, rooms) and (drafter is None or drafter._fits(rows, draft_rooms)):
                break
        else:
            return None
        try:
            kv = self._behind(rows, rooms)
            if drafter is not None:
                told |= {"drafter": drafter.model, "draft_kv": drafter._behind(rows, draft_rooms), "context": context}
        except OutOfBlocks:
            self.commit(rows)
            return None
        if drafting is not None:
            told |= {"k": k, "lookup": drafting.lookup if any(k) else None, "sure": drafting.sure}
            told |= {"rounds": drafting.rounds, "worth": drafting.worth, "spare": drafting.spare}
        texts, stop_ids = [row.tokens for row in rows], [row.stop_ids for row in rows]
        ran: Ran = run(texts, kv, left, stop_ids, decide=decide, seconds=seconds, hurry=hurry, **told)
        if drafting is not None and drafting.spent is not None:
            drafting.spent[:] = ran.spent
        for row, text, draft_start in zip(rows, ran.texts, ran.draft_starts):
            self._cached[row.id] = text
            if drafter is not None:
                drafter._cached[row.id] = text[:draft_start]
        if ran.error is not None:
            raise ran.error
        return ran.rounds

    def _fits(self, rows: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> bool:
        """Whether there are free pages for so many tokens of each of ``rows``."""
        allocator = self.cache.allocator
        return sum(allocator.missing(row.id, room) for row, room in zip(rows, rooms)) <= allocator.num_free

    def _behind(self, rows: abc.Sequence[Sequence], rooms: abc.Sequence[int]) -> PagedBatch:
        """The batch of what of ``rows`` is not cached, with room for so many tokens in all. Raises ``OutOfBlocks``."""
        strange = [row for row in rows if row.id not in self._cached]
        starts = [len(self.begin(row)) for row in rows]
        counts = [len(row.tokens) - start for row, start in zip(rows, starts)]
        return self._reserve(rows, starts, counts, None, [room - start for room, start in zip(rooms, starts)], strange)

    def _text(self, row: Sequence) -> array[int]:
        """What is cached of ``row``, as compiled code reads it."""
        text = self._texts.setdefault(row.id, array("i"))
        text.fromlist(self._cached[row.id][len(text) :])
        return text

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
            for row, start in zip(rows, starts):
                self.cache.resize(row.id, start)
            for row in strange:
                self.release(row)
            raise
        return self.cache.batch([row.id for row in rows], starts, counts, masks)

    def score(
        self, rows: abc.Sequence[Sequence], draft: Draft, prefill: abc.Sequence[tuple[Sequence, int]] = ()
    ) -> tuple[Target, Tensor]:
        """The target's view of a block, and the raw logits [B, J, V] it was made from; ``prefill`` as for ``feed``."""
        drafts, trees = draft.chains, draft.trees
        raw_BJV, choices = self._feed(rows, drafts, trees, prefill)
        missing = draft.shape[1] + 1 - raw_BJV.shape[1]  # a draft padded beyond its longest row
        if missing:
            raw_BJV, choices = torch.cat([raw_BJV, raw_BJV[:, -1:].expand(-1, missing, -1)], dim=1), None
        logits_BJV = constrain(raw_BJV, rows, drafts, trees)
        return self.view(rows, logits_BJV, choices if logits_BJV is raw_BJV else None), raw_BJV

    def view(self, rows: abc.Sequence[Sequence], logits_BJV: Tensor, choices: list[list[int]] | None) -> Target:
        """The target's view of a block, from its logits and, where they are known, the most likely tokens."""
        device = logits_BJV.device
        probs, greedy_B = None, None
        if not all(row.greedy for row in rows):
            distribution = BatchSampling.of([row.params for row in rows], device)
            probs, greedy_B = distribution.on(logits_BJV), distribution.greedy_B if distribution.some_greedy else None
        return Target(
            logits_BJV,
            probs,
            greedy_B=greedy_B,
            control_V=self.control_V,
            generated_B=lambda: torch.tensor([row.generated for row in rows], device=device),
            relaxed_B=lambda: torch.tensor([row.stats.relaxed for row in rows], device=device),
            nats_B=lambda: torch.tensor([row.stats.nats for row in rows], device=device),
            history=[row.tokens for row in rows],
            choices=choices,
        )

    def commit(self, rows: Iterable[Sequence]) -> None:
        """Roll the cache back to what is true of each row: a prefix of its tokens, all but the last at most."""
        for row in rows:
            if (cached := self._cached.get(row.id)) is None:
                continue
            if (tree := self._trees.pop(row.id, None)) is not None:
                start, parents = tree
                path = _descend(cached[start:], parents, row.tokens[start:])
                cached[start:] = [cached[start + node] for node in path]
                if (text := self._texts.get(row.id)) is not None:
                    del text[start:]
                self.cache.keep(row.id, start, path)
            keep = min(common_prefix(cached, row.tokens), len(row.tokens) - 1)
            if keep < len(cached) or keep != self.cache.allocator.length(row.id):
                del cached[keep:]
                if (text := self._texts.get(row.id)) is not None:
                    del text[keep:]
                self.cache.resize(row.id, keep)
            if self.share:
                self.cache.allocator.publish(row.id, cached, keep)

    def release(self, row: Sequence) -> None:
        """Forget ``row`` and free its pages."""
        self._cached.pop(row.id, None)
        self._trees.pop(row.id, None)
        self._texts.pop(row.id, None)
        self.cache.allocator.release(row.id)


def _packed(new: list[list[int]], starts: list[int]) -> tuple[list[int], list[int]]:
    """The rows' new tokens one behind the other, and where each stands in its row."""
    if len(new) == 1:
        return new[0], list(range(starts[0], starts[0] + len(new[0])))
    positions = [at for start, tokens in zip(starts, new) for at in range(start, start + len(tokens))]
    return [token for tokens in new for token in tokens], positions


def _descend(tokens: list[int], parents: list[int], text: list[int]) -> list[int]:
    """Numbers of the tree's tokens that spell the longest prefix of ``text``."""
    path: list[int] = []
    for wanted in text:
        at = path[-1] if path else -1
        after = (node for node, parent in enumerate(parents) if parent == at and tokens[node] == wanted)
        if (node := next(after, None)) is None:
            break
        path.append(node)
    return path


def _tree_mask(start: int, root: int, parents: list[int]) -> Tensor:
    """[N, S] bool: what each new token sees, for a row of ``root`` tokens (``start`` of them stored before), with a
    tree behind: causally all before it in the row, and its ancestors in the tree."""
    count, total = len(parents), root + len(parents)
    # itself and its parent; then, doubled in length again and again, the whole way to the root
    within_NN = torch.eye(count)
    within_NN[[node for node, parent in enumerate(parents) if parent >= 0], [p for p in parents if p >= 0]] = 1
    hops, longest = 1, max(depths(parents), default=0)
    while hops < longest:
        within_NN, hops = (within_NN @ within_NN).clamp_max_(1), 2 * hops
    mask_NS = torch.ones(total - start, total, dtype=torch.bool).tril_(start)
    mask_NS[root - start :, root:] = within_NN > 0
    return mask_NS


@contextmanager
def _on_one_thread(logits_BKV: Tensor) -> Iterator[None]:
    """Torch's operations on a block run on one thread meanwhile, if it is small: its other threads would look out for
    more to do for milliseconds, on the cores that a forward needs next."""
    threads = torch.get_num_threads()
    if threads == 1 or logits_BKV.device.type != "cpu" or logits_BKV.numel() > _SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def judge(rows: abc.Sequence[Sequence], target: Target, draft: Draft) -> list[tuple[list[int], Verdict]]:
    """Apply each row's own policy, rows of one policy together: ``(row numbers, verdict)`` of each group."""
    with _on_one_thread(target.logits_BKV):
        return _judge(rows, target, draft)


def _judge(rows: abc.Sequence[Sequence], target: Target, draft: Draft) -> list[tuple[list[int], Verdict]]:
    device = target.logits_BKV.device
    draft = draft.to(device)
    noise: Noise | None = None
    if not (target.all_greedy and all(accepts_exactly(row.policy) for row in rows)):
        seed_B = torch.tensor([row.seed for row in rows], device=device)
        round_B = torch.tensor([len(row.tokens) for row in rows], device=device)
        accept_BK = uniforms(seed_B, round_B, Stream.ACCEPT, draft.shape[1])
        noise = Noise(accept_BK, uniforms(seed_B, round_B, Stream.SAMPLE, 1).squeeze(1))
    if rows and all(row.policy is rows[0].policy or row.policy == rows[0].policy for row in rows):
        return [(list(range(len(rows))), verify(rows[0].policy, target, draft, noise))]
    groups: dict[object, list[int]] = {}
    for b, row in enumerate(rows):
        groups.setdefault(row.policy, []).append(b)
    verdicts = []
    for numbers in groups.values():
        index_B = torch.tensor(numbers, device=device)
        coins = None if noise is None else noise.rows(index_B)
        part = verify(rows[numbers[0]].policy, target.rows(index_B, numbers), draft.rows(index_B), coins)
        verdicts.append((numbers, part))
    return verdicts


class Engine:
    """Speculative decoding of many rows: a target, a draft strategy, and each row's own policy.

    Args:
        runner: the target with its cache.
        strategy: who proposes; None decodes autoregressively.
    """

    stretch = 0.05  # seconds after which a step begins no further round of rows that it takes several rounds with

    def __init__(self, runner: Runner, strategy: DraftStrategy | None = None) -> None:
        self.runner, self.strategy = runner, strategy
        if strategy is not None:
            strategy.attach(runner)
        self.context = runner.model.config.max_position_embeddings
        self._hurry = array("i", [0])

    @torch.inference_mode()
    def step(
        self,
        rows: abc.Sequence[Sequence],
        stopped: Callable[[Sequence, int], bool] | None = None,
        prefill: abc.Sequence[tuple[Sequence, int]] = (),
    ) -> list[list[Token]]:
        """One round for every row: each emits between one and K+1 tokens. Returns what each row emitted.

        Rows may be taken through several rounds, until ``stretch`` is over or one of them ends: where compiled kernels
        draft and verify, they do so in one call. The policy of a row alone is asked in it of what the exact rule does
        not keep, if it is none that compiled code knows (``clauses_of``). Tokens are the same; what a policy or
        ``stopped`` was told of before an error stands, as if there had been steps before.

        ``prefill`` names further rows that emit nothing yet, and how many more of their tokens are to be cached in the
        same forward (at most all but the last): a long prompt comes in by chunks, beside rows that decode.
        ``stopped(row, token)`` is told of every emitted token in order and may end the row there (stop strings).
        Rows that end get their ``finish_reason`` and keep their cache until ``release``.

        Raises:
            OutOfBlocks: the cache cannot hold this round; rows and caches are as they were before that round, as after
                any error of a strategy or a policy.
        """
        if prefill and self.strategy is not None:
            self.strategy.prefill([(row, len(self.runner.begin(row)) + n) for row, n in prefill])
        if not rows:
            self.runner.feed([], [], prefill=prefill)
            self.runner.commit(row for row, _ in prefill)
            return []
        prompts = [self.runner.pending(row) > 1 or not row.generated for row in rows]
        try:
            if not prefill and (several := self._several_rounds(rows, prompts, stopped)) is not None:
                self._commit(rows)
                return several
            draft = self._propose(rows, prompts)
            target, raw_BJV = self.runner.score(rows, draft, prefill)
            verdicts = judge(rows, target, draft)
            _check_grammars(rows, verdicts)
            if self.strategy is not None:
                self.strategy.observe(rows, draft, target)
        except BaseException:
            self._commit(rows)  # forget what was speculated
            raise
        self.runner.commit(row for row, _ in prefill)
        emitted: list[list[Token]] = [[] for _ in rows]
        places: list[list[int]] = [[] for _ in rows]  # of the logits that each emitted token was drawn from
        for numbers, verdict in verdicts:
            self._account(rows, numbers, verdict, target, draft, prompts, stopped, emitted, places)
        for b, (row, tokens, at) in enumerate(zip(rows, emitted, places)):
            if row.params.logprobs is None and not row.params.explain:
                continue
            log_JV = raw_BJV[b, at].log_softmax(-1)
            if row.params.logprobs is not None:
                row.logprobs += _logprobs(log_JV, tokens, row.params.logprobs)
            if row.params.explain:
                tokens[:] = row.provenance[-len(tokens) :] = _explained(log_JV, tokens)
        self._commit(rows)
        return emitted

    def hurry(self, now: bool) -> None:
        """Let steps, also one under way, take one round each while somebody waits for their end; from any thread."""
        self._hurry[0] = now

    def enter_thread(self) -> None:
        """Called once on the thread that will take all steps, before the first."""

    def release(self, row: Sequence) -> None:
        """Free everything ``row`` holds, in the target's cache and the strategy's."""
        self.runner.release(row)
        if self.strategy is not None:
            self.strategy.release(row)

    def _commit(self, rows: abc.Sequence[Sequence]) -> None:
        self.runner.commit(rows)
        if self.strategy is not None:
            self.strategy.commit(rows)

    def left(self, row: Sequence) -> int:
        """Tokens ``row`` may still emit: of its ``max_tokens`` and of the target's context."""
        return min(row.params.max_tokens - row.generated, self.context - len(row.tokens))

    def _several_rounds(
        self, rows: abc.Sequence[Sequence], prompts: list[bool], stopped: Callable[[Sequence, int], bool] | None
    ) -> list[list[Token]] | None:
        """Take rows through ``Runner.rounds``, and return what each emitted; None where something else is to be done
        between two rounds than to ask the policy of a row alone."""
        if any(prompts) or not self.stretch or getattr(self.runner.model, "rounds", None) is None:
            return None
        clauses: list[list[Clause]] = []
        for row in rows:
            watched = row.params.logprobs is not None or row.params.explain or constrains(row)
            if watched or not accepts_exactly(row.policy):
                return None
            if not row.greedy and not (draws_exactly(row.policy) and compiled("fly_follow")):
                return None
            known: list[Clause] | None = []
            if (relaxation := row.policy.relaxation) is not None:
                known = clauses_of(relaxation) if row.greedy and compiled("fly_top") else None
            if known is not None:
                clauses.append(known)
        asks = len(clauses) < len(rows)
        if asks and len(rows) > 1:
            return None
        drafting = None
        if self.strategy is not None and (drafting := self.strategy.continuation(rows)) is None:
            return None
        before, left = [len(row.provenance) for row in rows], [self.left(row) for row in rows]
        most = [0] * len(rows) if drafting is None else drafting.most
        k = [min(row.k, n, more - 1) for row, n, more in zip(rows, most, left)]

        def decide(settled: list[Round], asked: Asked) -> tuple[int, int] | None:
            (row,) = rows
            self._settle(row, settled, stopped)
            if row.finish_reason:
                return None
            draft, target = Draft.of([asked.drafted]), self.runner.view(rows, asked.logits_1JV, [asked.choices])
            if asked.probs_1KV is not None:
                draft = replace(draft, probs_BKV=asked.probs_1KV)
            ((_, verdict),) = judge(rows, target, draft)
            self._account(rows, [0], verdict, target, draft, prompts, stopped, [[]], [[]])
            told = verdict.told
            return None if row.finish_reason else (told.accepted[0], told.following[0])

        excused: dict[str, Any] = {"decide": decide} if asks else {"clauses": clauses} if any(clauses) else {}
        rest = self.runner.rounds(rows, left, drafting, k, self.stretch, hurry=self._hurry, **excused)
        if rest is None:
            return None
        for row, rounds in zip(rows, rest):
            self._settle(row, rounds, stopped)
        return [row.provenance[start:] for row, start in zip(rows, before)]

    def _settle(self, row: Sequence, rounds: list[Round], stopped: Callable[[Sequence, int], bool] | None) -> None:
        """Extend the row by rounds that were decided, up to its end, and count them."""
        stats, relaxation = row.stats, row.policy.relaxation
        if stopped is None and not any(drafted for drafted, *_ in rounds[:-1]):
            # Without a draft, many of the same kind at once; only the last may end the row.
            ids = [following for *_, following, _ in rounds[:-1]]
            choices = [choice for _, (choice,), *_ in rounds[:-1]]
            row.tokens += ids
            row.provenance += map(Token, ids, repeat(Why.BONUS), repeat(None), choices)
            stats.generated += len(ids)
            stats.emitted += len(ids)
            stats.rounds += len(ids)
            rounds = rounds[-1:]
        labels = [] if relaxation is None else [clause.label for clause in relaxation.clauses]
        heard: Counter[int] = Counter()  # what clauses said of a mismatch, a bit each

        def said(bits: int) -> dict[str, bool]:
            return {label: bool(bits >> bit & 1) for bit, label in enumerate(labels)}

        for number, (drafted, choices, n, following, asks) in enumerate(rounds, start=1):
            if row.finish_reason:
                break
            ids, stands = [*drafted[:n], following], n
            if stopped is None and number < len(rounds):  # of several rounds only the last may end a row by itself
                row.tokens += ids
            elif (count := self._extend(row, ids, stopped)) <= n:
                ids, stands = ids[:count], count
            block = list(map(Token, ids[:stands], repeat(Why.MATCH), repeat(None), choices))
            if stands < len(ids):
                why = Why.CORRECTION if n < len(drafted) else Why.BONUS
                block.append(Token(following, why, None, choices[n]))
            for ask in asks:
                if ask.position >= stands and stands == len(ids):  # it ended before the rest was tried
                    break
                heard[ask.held] += 1
                if ask.excused:
                    clause = " & ".join(label for label, held in said(ask.held).items() if held)
                    token = block[ask.position]
                    block[ask.position] = Token(token.id, Why.RELAXED, clause, token.target_choice)
                    stats.relaxed += 1
                    stats.nats += ask.nats
            row.provenance += block
            stats.generated += len(ids)
            stats.rounds += 1
            stats.emitted += len(ids)
            stats.drafted += len(drafted)
            stats.accepted += stands
            if drafted:
                row.drafts.append((len(drafted), stands))
        for bits, times in heard.items():
            if relaxation is not None:
                stats.count_gates(said(bits), *relaxation.deciding(said(bits)), times)

    def _propose(self, rows: abc.Sequence[Sequence], prompts: list[bool]) -> Draft:
        # A prompt's forward drafts nothing, so that its first token comes as soon as it can. A round emits one
        # token beyond its draft, hence one less than what is left.
        max_len = [0 if prompt else min(row.k, self.left(row) - 1) for row, prompt in zip(rows, prompts)]
        if self.strategy is None or not any(max_len):
            return Draft.empty(len(rows), self.runner.model.device)
        draft = self.strategy.propose(rows, max_len)
        self._check(draft, max_len)
        return draft

    def _check(self, draft: Draft, max_len: list[int]) -> None:
        """A strategy is somebody else's code: what it may not propose is named before anything is done with it."""
        name, vocabulary = type(self.strategy).__name__, self.runner.model.config.vocab_size
        if not isinstance(draft, Draft):
            raise ValueError(f"{name} proposed {draft!r}, not a Draft")
        if isinstance(draft, ListedDraft):
            rows, padded = draft.shape
            if rows != len(max_len):
                raise ValueError(f"{name} proposed tokens for {rows} rows, not for {len(max_len)}")
        else:
            if draft.tokens_BK.shape[:-1] != (len(max_len),) or draft.lengths_B.shape != (len(max_len),):
                shapes = tuple(draft.tokens_BK.shape), tuple(draft.lengths_B.shape)
                raise ValueError(f"{name} proposed tokens and lengths of shapes {shapes} for {len(max_len)} rows")
            padded = draft.tokens_BK.shape[1]
            for n in draft.lengths_B.tolist():
                if not 0 <= n <= padded:
                    raise ValueError(f"{name} proposed {padded} tokens and said that {n} count")
        if not padded:
            return
        for b, (tokens, most) in enumerate(zip(draft.chains, max_len)):
            n = len(tokens)
            if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
                bad = [token for token in tokens if not 0 <= token < vocabulary]
                raise ValueError(f"{name} proposed the ids {bad[:5]}, outside the vocabulary of {vocabulary}")
            tree = None if draft.trees is None else draft.trees[b]
            if tree is not None and not all(-1 <= parent < node for node, parent in enumerate(tree)):
                raise ValueError(f"{name} proposed a tree of parents {tree}, where each must come before its token")
            longest = n if tree is None else max((depth + 1 for depth in depths(tree)), default=0)
            if longest > most:
                raise ValueError(f"{name} proposed {longest} tokens where at most {most} were asked for")

    def _account(
        self,
        rows: abc.Sequence[Sequence],
        numbers: list[int],
        verdict: Verdict,
        target: Target,
        draft: Draft,
        prompts: list[bool],
        stopped: Callable[[Sequence, int], bool] | None,
        emitted: list[list[Token]],
        places: list[list[int]],
    ) -> None:
        """Extend the rows by what stands, ending exactly where each ends, and count it."""
        accepted, choices = verdict.paths(), target.choices
        _, following, whys, asked, held = verdict.told
        tokens, trees = draft.chains, draft.trees
        relaxation = rows[numbers[0]].policy.relaxation
        excused: list[tuple[int, int, int]] = []  # row, position, token
        for i, b in enumerate(numbers):
            row, path, stats, chain, why = rows[b], accepted[i], rows[b].stats, tokens[b], whys[i]
            tree = range(-1, len(chain) - 1) if trees is None else trees[b]
            end = path[-1] if path else -1
            # Position 0 follows the row's last token, position j + 1 the drafted token j.
            positions = [*(tree[node] + 1 for node in path), end + 1]
            count = self._extend(row, [*(chain[node] for node in path), following[i]], stopped)
            if (standing := min(count, len(path))) < len(path):
                path = path[:standing]
            block = [Token(chain[n], _WHY[why[n]], None, choices[b][at]) for n, at in zip(path, positions)]
            relaxed = [at for at, node in enumerate(path) if why[node] == _RELAXED]
            for at in relaxed:
                clause = " & ".join(name for name, held_BK in held.items() if held_BK[i][path[at]]) or str(row.policy)
                block[at] = block[at]._replace(clause=clause)
            stats.relaxed += len(relaxed)
            excused += [(b, positions[at], block[at].id) for at in relaxed]
            if count > standing:
                why_last = Why.CORRECTION if end in tree else Why.BONUS
                block.append(Token(following[i], why_last, None, choices[b][end + 1]))
            row.provenance += block
            emitted[b], places[b] = block, positions[:count]
            stats.generated += count
            if not prompts[b]:
                stats.rounds += 1
                stats.emitted += count
            stats.drafted += len(chain)
            stats.accepted += standing
            if chain:
                row.drafts.append((len(chain), standing))
            if relaxation is not None and held and True in asked[i]:
                told = {*path} if standing == count else range(len(chain))  # unless it ended before the rest was tried
                for node in (node for node, was in enumerate(asked[i]) if was and node in told):
                    said = {name: held_BK[i][node] for name, held_BK in held.items()}
                    stats.count_gates(said, *relaxation.deciding(said))
        if excused:
            for (b, _, _), cost in zip(excused, _nats(target, excused)):
                rows[b].stats.nats += cost

    def _extend(self, row: Sequence, ids: list[int], stopped: Callable[[Sequence, int], bool] | None) -> int:
        """Append ``ids`` to the row, as many as there are up to its end, and return how many."""
        left, count, before = self.left(row), 0, len(row.tokens)
        for count, token in enumerate(ids, start=1):
            row.tokens.append(token)
            try:
                ended = stopped is not None and stopped(row, token)  # it hears of every token, ends included
            except BaseException:
                del row.tokens[before:]  # no more than the provenance tells of
                raise
            if ended or token in row.stop_ids:
                row.finish_reason = "stop"
            elif count == left:
                row.finish_reason = "length"
            if row.finish_reason:
                break
        return count


def _nats(target: Target, tokens: list[tuple[int, int, int]]) -> list[float]:
    """-ln target(x), of the unprocessed distribution, of each token, given as its row, its position and its id."""
    logits_BJV = target.logits_BKV
    if logits_BJV.device.type == "cpu" and type(logits_BJV) is Tensor:
        return [top_at(logits_BJV, b, at, 1)[1] - logits_BJV[b, at, token].item() for b, at, token in tokens]
    b_N, at_N, token_N = torch.tensor(tokens, device=logits_BJV.device).unbind(1)
    log_NV = logits_BJV[b_N, at_N].log_softmax(-1)
    costs: list[float] = (-log_NV.gather(1, token_N.unsqueeze(1))).squeeze(1).tolist()
    return costs


def _check_grammars(rows: abc.Sequence[Sequence], verdicts: list[tuple[list[int], Verdict]]) -> None:
    """Raise ``ValueError`` if what stands of a row has come to where its grammar cannot go on."""
    for numbers, verdict in verdicts:
        if any(rows[b].matcher is not None for b in numbers):
            for b, path in zip(numbers, verdict.paths()):
                if (matcher := rows[b].matcher) is not None:
                    matcher.check(path[-1] + 1 if path else 0)


def _logprobs(log_JV: Tensor, tokens: list[Token], most: int) -> list[dict[int, float]]:
    """For each emitted token its own log-probability and those of the ``most`` likeliest, likeliest first."""
    top = log_JV.topk(min(most, log_JV.shape[-1]), dim=-1)
    entries = []
    for j, token in enumerate(tokens):
        entry = dict(zip(top.indices[j].tolist(), top.values[j].tolist()))
        entry.setdefault(token.id, float(log_JV[j, token.id]))
        entries.append(entry)
    return entries


def _explained(log_JV: Tensor, tokens: list[Token]) -> list[Token]:
    """The same tokens, with what the target thought of each."""
    probs_JV = log_JV.exp()
    entropy_J = -(probs_JV * log_JV.clamp_min(torch.finfo(log_JV.dtype).min)).sum(-1)  # 0 * -inf is 0 here
    ids = [[token.id, token.id if token.target_choice is None else token.target_choice] for token in tokens]
    own_J2 = probs_JV.gather(1, torch.tensor(ids, device=log_JV.device))
    return [
        token._replace(prob=own, choice_prob=choice, entropy=entropy)
        for token, (own, choice), entropy in zip(tokens, own_J2.tolist(), entropy_J.tolist())
    ]
