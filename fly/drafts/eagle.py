"""Drafting by a trained head that reads the target's hidden states: EAGLE-3 (arXiv 2503.01840).

Shape legend: B rows, N places, K longest draft, S cached tokens of a row, F hidden states side by side, C hidden width
of the head, U draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import heapq
import sys
from collections import abc
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from fly.bundled import find_checkpoint
from fly.cache import BlockAllocator, OutOfBlocks, PagedKVCache
from fly.constraints import constrain, constrains
from fly.drafts.base import Continuation, DraftStrategy, Load, drafted_of, pad, pad_trees
from fly.drafts.heads import HeadRunner
from fly.drafts.model import seed_of
from fly.drafts.stops import Certainty, check_chance, reach_of
from fly.drafts.tree import Tree
from fly.executor import DraftSpec, Executor, Growth, Head
from fly.models.config import LlamaConfig
from fly.models.loading import resolve_device, resolve_dtype
from fly.ops import Stream, draw, top, uniforms
from fly.request import Sequence
from fly.runner import Runner
from fly.sampling import BatchSampling
from fly.types import Draft

__all__ = ["Eagle3Draft"]

_BACKLOG = 256  # tokens that a row is behind at most before the head catches up with it


class Eagle3Draft(DraftStrategy):
    """A trained EAGLE-3 head: one layer that goes on from the target's own hidden states, token after token.

    Its keys and values are cached as a draft model's are. It knows nothing of tokens whose hidden states are gone
    (their pages came from another request's prompt, and the head's are no longer cached), and drafts by those after
    them.

    Args:
        head: the path, bundled name or hub name of a head in either published layout (``fly.models.eagle``), which
            ``LLM`` loads, or a loaded one.
        k: tokens of a path it proposes at most (None: as many as asked).
        nodes: 0 drafts chains. Else it drafts trees as in EAGLE-2 (arXiv 2406.16858, section 4): the ``width``
            likeliest tokens of each level, by the probability of the whole path, are followed by ``width`` candidates
            each, ``depth`` levels deep; the ``nodes`` likeliest of all are proposed.
        depth, width: of trees.
        confidence, reach: where a chain stops, as for ``SingleDraft``.
        cache_tokens: tokens its cache holds over all rows (None: as many as the target's).
        dtype, device, kernels: how a path is loaded and run, as for ``LLM``.

    Above temperature 0 chains are drawn from what the head says, processed as the row asks (``probs_BKV``), and trees
    go by the text alone, so both are lossless under a lossless rule.

    Raises ``ValueError`` when it is attached to a target of another width or vocabulary, or one that gives no hidden
    states.
    """

    def __init__(
        self,
        head: str | Path | Head,
        k: int | None = None,
        nodes: int = 0,
        depth: int = 7,
        width: int = 4,
        confidence: float = 0.0,
        reach: float | None = 0.0,
        cache_tokens: int | None = None,
        block_size: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
    ) -> None:
        for name, value, least in (("nodes", nodes, 0), ("depth", depth, 1), ("width", width, 1)):
            if value < least:
                raise ValueError(f"{name} {value} must be at least {least}")
        if k is not None and k < 1:
            raise ValueError(f"k {k} must be at least 1")
        check_chance("confidence", confidence)
        check_chance("reach", reach)
        self.k, self.nodes, self.width, self.confidence = k, nodes, width, confidence
        self.reach, self.knows_chances = reach, not nodes
        self.growth = Growth.even(depth, width, nodes) if nodes else None
        self.depth = depth if self.growth is None else len(self.growth.widths)
        self.spare = self.growth.spare if self.growth is not None else 0
        self._path: str | Path | None = None
        self._head: Head | None = None
        if isinstance(head, Head):
            self._take(head)
        else:
            found = find_checkpoint(head)
            self._path = found if isinstance(found, Path) else str(found)
            resolve_dtype(dtype, {})  # what names none is refused at once
            resolve_device(device)
        self._one_call = True  # whether the head drafts in one call, until it says no
        self._options = {"dtype": dtype, "device": device, "kernels": kernels}
        self._cache_tokens, self._block_size, self._own_size = cache_tokens, block_size, cache_tokens is not None

    def _take(self, head: Head) -> None:
        self._head, self.device = head, head.device
        self.context = head.config.max_position_embeddings

    def resolve(self, load: Load) -> None:
        if self._head is None:
            loaded = load(self._path, **self._options).executor
            if not isinstance(loaded, Head):
                raise ValueError(f"{str(self._path)!r} is a model, not a draft head; as a draft it is model(...) of it")
            self._take(loaded)

    @property
    def head(self) -> Head:
        """The loaded head. Raises ``ValueError`` while it is only a name."""
        if self._head is None:
            raise ValueError(f"the draft head {str(self._path)!r} is not loaded yet: LLM loads it (``resolve``)")
        return self._head

    @property
    def made_for(self) -> LlamaConfig | None:  # type: ignore[override]
        if self._head is None:
            return None
        options, states = self._head.options, self._head.options.states
        sizes = {"hidden_size": options.target_hidden_size, "num_attention_heads": 1, "num_key_value_heads": 1}
        return self._head.config.resized(8 if states is None else max(*states, 1), **sizes, head_dim=8)

    def attach(self, target: Runner) -> None:
        head, executor = self.head, target.executor
        options, sizes = head.options, executor.config
        pairs = [
            ("hidden_size", "target_hidden_size", sizes.hidden_size, options.target_hidden_size),
            ("vocab_size", "vocab_size", sizes.vocab_size, head.config.vocab_size),
        ]
        for name, own, theirs, wanted in pairs:
            if theirs != wanted:
                where = "" if self._path is None else f" {self._path}"
                raise ValueError(
                    f"the draft head{where} is for another target: its {own} is {wanted}, the target's {name} {theirs}"
                )
        states = target.watch(options.states_of(sizes.num_hidden_layers))
        if head.shares:
            head.share(executor.embedding())
        self.vocab_size = sizes.vocab_size
        cache = PagedKVCache.for_model(head, self._cache_tokens, self._block_size)
        self.runner = HeadRunner(head, cache, states, target.share)

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        context, most = self.head.config.max_position_embeddings, []
        for row, n in zip(rows, max_len):
            n = min(n, context - len(row.tokens), n if self.k is None else self.k, self.depth if self.nodes else n)
            most.append(n if n > 0 and self.runner.may_draft(row) else 0)
        active = [b for b, n in enumerate(most) if n]
        if not active:
            return Draft.empty(len(rows), self.device)
        try:
            if (found := self._at_once(rows, active, most)) is not None:
                return found
            return self._trees(rows, active, most) if self.nodes else self._chains(rows, active, most)
        finally:
            self.runner.roll_back([rows[b] for b in active])

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        if not all(self.head.may_extend(row) and self.runner.may_draft(row) for row in rows):
            return None
        longest = sys.maxsize if self.growth is None else self.depth
        most = longest if self.k is None else min(self.k, longest)
        return Continuation(self.runner, [most] * len(rows), self._spec(rows))

    def _spec(self, rows: abc.Sequence[Sequence]) -> DraftSpec:
        if self.growth is not None:
            return DraftSpec(tree=self.growth)
        return DraftSpec(self.confidence, reach=reach_of(rows, self.reach, self.worth))

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        """The target's hidden states of earlier chunks are here by now; those of this one come with it."""
        rows = [row for row, _ in parts if row.k and len(row.tokens) <= self.head.config.max_position_embeddings]
        with suppress(OutOfBlocks), torch.inference_mode():  # without room the row is caught up with when drafted for
            self.runner.catch_up(rows)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        self.runner.commit(rows)
        if late := [row for row in rows if row.k and self.runner.behind(row) > _BACKLOG]:
            self.prefill([(row, 0) for row in late])
            self.runner.commit(late)

    def release(self, row: Sequence) -> None:
        self.runner.release(row)

    def executors(self) -> list[Executor]:
        return [self.head]

    def allocators(self) -> list[BlockAllocator]:
        return [self.runner.cache.allocator]

    def bytes_per_token(self) -> int:
        return 0 if self._own_size else PagedKVCache.bytes_per_token(self.head.config, self.head.dtype)

    def reserve(self, tokens: int) -> None:
        if not self._own_size:
            self._cache_tokens = tokens

    def _at_once(self, rows: abc.Sequence[Sequence], active: list[int], most: list[int]) -> Draft | None:
        """The proposal in one call of the head, for rows ``active``; None where it has no such call."""
        going, sampling = [rows[b] for b in active], None
        if not self._one_call or not all(map(self.head.may_extend, going)):
            return None
        if not self.nodes and not all(row.greedy for row in going):
            sampling = BatchSampling.of([row.params for row in going])
        seeds = [seed_of(row) for row in going]
        found = self.runner.chains(going, self._spec(going), [most[b] for b in active], sampling, seeds)
        self._one_call = found is not None
        return None if found is None else drafted_of(len(rows), active, found)

    def _chains(self, rows: abc.Sequence[Sequence], active: list[int], most: list[int]) -> Draft:
        scratch = {b: rows[b].fork(rows[b].policy, seed_of(rows[b])) for b in active}
        starts = {b: len(rows[b].tokens) for b in active}
        probs: dict[int, list[Tensor]] = {b: [] for b in active}
        greedy = all(rows[b].greedy for b in active)
        spec = self._spec(rows)
        certainty = [Certainty(spec, reach) for reach in spec.reach]
        asks = any(certainty[b].asks for b in active)
        logits_NU, x_NC = self.runner.begin_drafts([rows[b] for b in active], [most[b] - 1 for b in active])
        while active:
            going = [scratch[b] for b in active]
            tokens, probs_NV, said_NV = self._next(logits_NU, going, greedy, asks)
            kept = []
            for i, (b, token) in enumerate(zip(active, tokens)):
                sure = said_NV is None or certainty[b].after(said_NV[i : i + 1])[0]
                scratch[b].tokens.append(token)
                if probs_NV is not None:
                    probs[b].append(probs_NV[i])
                if sure and len(scratch[b].tokens) - starts[b] < most[b] and token not in rows[b].stop_ids:
                    kept.append(i)
            active = [active[i] for i in kept]
            if active:
                x_NC = x_NC if len(kept) == len(x_NC) else x_NC[kept]
                logits_NU, x_NC = self.runner.go_on([scratch[b] for b in active], x_NC)
        chains = [scratch[b].tokens[starts[b] :] if b in scratch else [] for b in range(len(rows))]
        proposal = pad(chains, self.device)
        if greedy:
            return proposal
        probs_BKV = torch.zeros(*proposal.tokens_BK.shape, self.head.config.vocab_size, device=self.device)
        for b, row_probs in probs.items():
            if row_probs:
                probs_BKV[b, : len(row_probs)] = torch.stack(row_probs)
        return Draft(proposal.tokens_BK, proposal.lengths_B, probs_BKV)

    def _next(
        self, logits_NU: Tensor, rows: list[Sequence], greedy: bool, asks: bool
    ) -> tuple[list[int], Tensor | None, Tensor | None]:
        """The next token of each row, what it was drawn from [N, V] (sampling only), and if ``asks`` the distribution
        that says how sure the head is."""
        head = self.head
        bound = any(map(constrains, rows))
        if greedy and not bound:
            tokens: list[int] = head.to_target_U[logits_NU.argmax(-1)].tolist()
            return tokens, None, logits_NU.softmax(-1) if asks else None
        logits_N1V = self._spread(logits_NU).unsqueeze(1)
        if bound:
            allowed_N1V = constrain(logits_N1V, rows, [[]] * len(rows))
            # Its vocabulary may have nothing that is allowed: then the target refuses what it says.
            lost_N11 = allowed_N1V.amax(-1, keepdim=True) == -torch.inf
            logits_N1V = torch.where(lost_N11, logits_N1V, allowed_N1V)
        if greedy:
            raw_NV, probs_NV = logits_N1V.squeeze(1), None
        else:
            sampling = BatchSampling.of([row.params for row in rows], self.device)
            raw_NV, probs_NV = logits_N1V.squeeze(1), sampling.probs(logits_N1V).squeeze(1)
        said_NV: Tensor | None = None
        if asks:
            said_NV = raw_NV.softmax(-1)
            if probs_NV is not None:
                greedy_N1 = torch.tensor([[row.greedy] for row in rows], device=self.device)
                said_NV = torch.where(greedy_N1, said_NV, probs_NV)
        if probs_NV is None:
            return raw_NV.argmax(-1).tolist(), None, said_NV
        seed_N = torch.tensor([row.seed for row in rows], device=self.device)
        length_N = torch.tensor([len(row.tokens) for row in rows], device=self.device)
        uniform_N = uniforms(seed_N, length_N, Stream.SAMPLE, 1).squeeze(1)
        return draw(probs_NV, uniform_N).tolist(), probs_NV, said_NV

    def _spread(self, logits_NU: Tensor) -> Tensor:
        """Logits [N, V] over the target's vocabulary: what is not in the head's is never drafted."""
        ids_U, vocab = self.head.to_target_U, self.head.config.vocab_size
        spread_NV = logits_NU.new_full((len(logits_NU), vocab), -torch.inf)
        return spread_NV.index_copy_(1, ids_U, logits_NU)

    def _trees(self, rows: abc.Sequence[Sequence], active: list[int], most: list[int]) -> Draft:
        trees = {b: Tree() for b in active}
        room = [(min(most[b], self.depth) - 1) * self.width for b in active]
        logits_NU, x_NC = self.runner.begin_drafts([rows[b] for b in active], room)
        frontier = [(b, -1) for b in active]  # row and node that each line of logits follows
        for level in range(max(most)):
            grown: dict[int, list[tuple[int, int]]] = {}  # of each row, new nodes and the line that each follows
            for i, ((b, node), ids, log_probs) in enumerate(self._likeliest(rows, trees, frontier, logits_NU)):
                for token, log_prob in zip(ids, log_probs):
                    if log_prob > -torch.inf:  # a banned token can never stand
                        grown.setdefault(b, []).append((trees[b].add(token, node, log_prob), i))
            follow: list[tuple[int, int, int]] = []
            for b, new in grown.items():
                if most[b] > level + 1:
                    # nothing follows a token that ends the row
                    tree, ends = trees[b], rows[b].stop_ids
                    going = [(node, i) for node, i in new if tree.tokens[node] not in ends]
                    best = heapq.nlargest(self.width, going, key=lambda each: tree.scores[each[0]])
                    follow += [(b, node, i) for node, i in best]
            if not follow:
                break
            frontier = [(b, node) for b, node, _ in follow]
            by_row = {b: [node for other, node in frontier if other == b] for b, _ in frontier}
            lines = [i for _, _, i in follow]
            logits_NU, x_NC = self.runner.branch({b: rows[b] for b in by_row}, trees, by_row, x_NC[lines])
        found = [trees[b].best(self.nodes) if b in trees else ([], []) for b in range(len(rows))]
        return pad_trees(found)

    def _likeliest(
        self,
        rows: abc.Sequence[Sequence],
        trees: dict[int, Tree],
        frontier: list[tuple[int, int]],
        logits_NU: Tensor,
    ) -> list[tuple[tuple[int, int], list[int], list[float]]]:
        """The ``width`` likeliest tokens after each node of the frontier, and ln of their probabilities."""
        ids_U: Tensor | None = self.head.to_target_U
        if any(constrains(rows[b]) for b, _ in frontier):
            paths = []
            for b, node in frontier:
                scratch, path = rows[b].fork(rows[b].policy, 0), list[int]()
                while node >= 0:
                    path.append(trees[b].tokens[node])
                    node = trees[b].parents[node]
                scratch.tokens += path[::-1]
                paths.append(scratch)
            logits_NV = constrain(self._spread(logits_NU).unsqueeze(1), paths, [[]] * len(paths)).squeeze(1)
            log_N, ids_U = logits_NV.log_softmax(-1), None
        else:
            log_N = logits_NU.log_softmax(-1)
        best_NW = top(log_N, min(self.width, log_N.shape[-1]))
        found_NW = best_NW.indices if ids_U is None else ids_U[best_NW.indices]
        return list(zip(frontier, found_NW.tolist(), best_NW.values.tolist()))
