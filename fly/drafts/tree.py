"""Drafting trees: several candidates for a place, verified in one forward.

Shape legend: B rows, J places of a row, V vocabulary, W candidates for a place.
"""

from __future__ import annotations

import heapq
from collections import abc
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fly.constraints import constrain
from fly.drafts.base import DraftStrategy, pad_trees
from fly.drafts.model import SingleDraft
from fly.executor import Executor
from fly.ops import top
from fly.request import Sequence
from fly.types import Draft, Target

__all__ = ["RecyclingDraft", "Tree", "TreeDraft"]


@dataclass
class Tree:
    """A row's tree while it grows: tokens, parents, ln of the probability of the path to each."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, log_prob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(log_prob + (self.scores[parent] if parent >= 0 else 0.0))
        return len(self.tokens) - 1

    def best(self, most: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the ``most`` likeliest; no token is likelier than its parent."""
        chosen = sorted(sorted(range(len(self.tokens)), key=lambda node: -self.scores[node])[:most])
        number = {node: i for i, node in enumerate(chosen)} | {-1: -1}
        return [self.tokens[node] for node in chosen], [number[self.parents[node]] for node in chosen]


class TreeDraft(SingleDraft):
    """A draft model proposes a tree: its likeliest tokens after each place, level by level, one forward a level.

    Dynamic (EAGLE-2, arXiv 2406.16858, section 4; here with any draft model): the ``width`` likeliest tokens of the
    last level, by the probability of the whole path, are followed by ``width`` candidates each, ``depth`` levels deep;
    of all of them the ``nodes`` likeliest are proposed. Static: ``branching`` says how many candidates follow every
    token of each level, such as (4, 2, 1, 1).

    Which tokens are proposed depends on the text alone, so the draft counts as certain of each (``probs_BKV`` None),
    and a lossless rule stays lossless at any temperature. Other arguments as for ``SingleDraft``.
    """

    knows_chances = False  # a token beside the likeliest stands where that does not

    def __init__(
        self,
        model: str | Path | Executor | torch.nn.Module,
        nodes: int = 16,
        depth: int = 12,
        width: int = 2,
        branching: abc.Sequence[int] | None = None,
        k: int | None = None,
        cache_tokens: int | None = None,
        block_size: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
    ) -> None:
        for name, value in (("nodes", nodes), ("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        if branching is not None and (not branching or min(branching) < 1):
            raise ValueError(f"branching {branching} must name at least one candidate for each level")
        options: dict[str, Any] = {"block_size": block_size, "dtype": dtype, "device": device}
        super().__init__(model, k=k, cache_tokens=cache_tokens, kernels=kernels, **options)
        self.nodes, self.depth, self.width = nodes, depth, width
        self.branching = None if branching is None else tuple(branching)
        if self.branching is not None:
            self.depth, level, self.nodes = len(self.branching), 1, 0
            for candidates in self.branching:
                level *= candidates
                self.nodes += level

    @property
    def spare(self) -> int:  # type: ignore[override]  # a row's longest path may be a single token
        return max(self.nodes, self.depth * self.width) if self.branching is None else self.nodes

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        device, context = self.executor.device, self.executor.config.max_position_embeddings
        most = [
            max(0, min(n, self.depth, context - len(row.tokens), n if self.k is None else self.k))
            for row, n in zip(rows, max_len)
        ]
        trees = [Tree() for _ in rows]
        frontier: list[list[int]] = [[-1] for _ in rows]
        followed: list[list[int]] = [[] for _ in rows]  # the tokens that others may follow
        place: list[dict[int, int]] = [{-1: 0} for _ in rows]  # of each of them and of the row itself, in the forward
        for level in range(max(most, default=0)):
            active = [b for b, n in enumerate(most) if n > level and frontier[b]]
            if not active:
                break
            group = [rows[b] for b in active]
            tokens = [[trees[b].tokens[node] for node in followed[b]] for b in active]
            parents = [[place[b][trees[b].parents[node]] - 1 for node in followed[b]] for b in active]
            raw_BJV, _ = self.runner.feed(group, tokens, parents)
            logits_BJV = constrain(raw_BJV, group, tokens, parents, self.runner.executor.numbers)
            self.runner.commit(group)
            width = self.width if self.branching is None else self.branching[level]
            places = [(i, node) for i, b in enumerate(active) for node in frontier[b]]
            at_N = torch.tensor([(i, place[active[i]][node]) for i, node in places], device=device).unbind(1)
            log_NV = logits_BJV[at_N].log_softmax(-1)
            best_NW = top(log_NV, width)
            found = zip(places, best_NW.indices.tolist(), best_NW.values.tolist())
            grown: dict[int, list[int]] = {b: [] for b in active}
            for (i, node), ids, log_probs in found:
                b = active[i]
                for token, log_prob in zip(ids, log_probs):
                    if log_prob > -torch.inf:  # a banned token can never stand
                        grown[b].append(trees[b].add(token, node, log_prob))
            for b, nodes in grown.items():
                # nothing follows a token that ends the row
                open_nodes = [node for node in nodes if trees[b].tokens[node] not in rows[b].stop_ids]
                if self.branching is None:
                    open_nodes = heapq.nlargest(self.width, open_nodes, key=trees[b].scores.__getitem__)
                frontier[b] = open_nodes
                for node in open_nodes:
                    followed[b].append(node)
                    place[b][node] = len(followed[b])
        return pad_trees([tree.best(self.nodes) for tree in trees], device)


class RecyclingDraft(DraftStrategy):
    """Token Recycling (arXiv 2408.08696): remember which tokens the target found likeliest after each token, the last
    time it came up, and propose a static tree of them.

    A table of ``width`` successors for every token of the vocabulary is filled from all logits that verification
    computes anyway, and shared by all requests. The tree takes the ``nodes`` places that are likeliest if the r-th
    successor is right with a probability that falls by ``decay`` from one to the next, ``depth`` levels at most. (The
    paper gives one fixed tree of 80 nodes in 6 levels; this is the rule by which such trees are made.)

    Deterministic, and of the target's own making: needs no model, no prompt in common, and one look into a table.
    """

    learns = True

    def __init__(self, nodes: int = 40, depth: int = 6, width: int = 8, decay: float = 0.35) -> None:
        for name, value in (("nodes", nodes), ("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        if not 0 < decay < 1:
            raise ValueError(f"decay {decay} must be in (0, 1)")
        self.nodes, self.depth, self.width = nodes, depth, width
        self.spare = nodes
        self._shape = _static_tree(nodes, depth, width, decay)
        self._after: dict[int, list[int]] = {}

    def executors(self) -> list[Executor]:
        return []

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        return pad_trees([self._tree(row, most) for row, most in zip(rows, max_len)])

    def observe(self, rows: abc.Sequence[Sequence], draft: Draft, target: Target) -> None:
        likeliest_BJW = top(target.logits_BKV, self.width).indices.tolist()
        for row, drafted, likeliest in zip(rows, draft.chains, likeliest_BJW):
            for token, successors in zip([row.tokens[-1], *drafted], likeliest):
                self._after[token] = successors

    def _tree(self, row: Sequence, most: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        number = {-1: -1}  # of the shape's tokens that have one here
        depth = {-1: 0}
        for node, (parent, rank) in enumerate(self._shape):
            if parent not in number or depth[parent] >= most:
                continue
            before = row.tokens[-1] if parent < 0 else tokens[number[parent]]
            successors = self._after.get(before, ())
            if rank < len(successors) and (parent < 0 or before not in row.stop_ids):
                number[node], depth[node] = len(tokens), depth[parent] + 1
                tokens.append(successors[rank])
                parents.append(number[parent])
        return tokens, parents


def _static_tree(nodes: int, depth: int, width: int, decay: float) -> list[tuple[int, int]]:
    """The likeliest places of a tree, each as its parent's number and its rank among its siblings."""
    chance = [(1 - decay) * decay**rank for rank in range(width)]
    order = count()  # ties go to what was found first
    heap = [(-chance[0], next(order), -1, 0, 1)]  # chance of the path, parent, rank, level
    found: list[tuple[int, int]] = []
    reach: list[float] = []
    while heap and len(found) < nodes:
        negative, _, parent, rank, level = heapq.heappop(heap)
        number = len(found)
        found.append((parent, rank))
        reach.append(-negative)
        if rank + 1 < width:
            above = reach[parent] if parent >= 0 else 1.0
            heapq.heappush(heap, (-above * chance[rank + 1], next(order), parent, rank + 1, level))
        if level < depth:
            heapq.heappush(heap, (negative * chance[0], next(order), number, 0, level + 1))
    return found
