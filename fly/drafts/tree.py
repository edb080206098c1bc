"""Drafting trees: several candidates for each place, verified in one forward.

Shape legend: B rows, J places of a row, V vocabulary, W candidates for a place.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections import abc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fly.constraints import constrain
from fly.drafts.base import Continuation, pad_trees
from fly.drafts.model import SingleDraft
from fly.executor import DraftSpec, Executor, Growth
from fly.ops import top
from fly.request import Sequence
from fly.types import Draft

__all__ = ["Tree", "TreeDraft"]


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
    """A draft model proposes a tree: its likeliest tokens after each place, level by level, with one forward for each.

    Dynamic (EAGLE-2, arXiv 2406.16858, section 4; here with any draft model): the ``width`` likeliest tokens of the
    last level, by the probability of the whole path, get ``width`` candidates each, ``depth`` levels deep; the
    ``nodes`` likeliest of all candidates are proposed. Static: ``branching`` says how many candidates follow every
    token of each level, such as (4, 2, 1, 1).

    Which tokens are proposed depends on the text alone, so the draft counts as certain of each (``probs_BKV`` None),
    and a lossless rule stays lossless at any temperature. Other arguments as for ``SingleDraft``.
    """

    knows_chances = False  # other tokens than the likeliest may be kept where that one is not

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
        if branching is None:
            self.growth = Growth.even(depth, width, nodes)
        else:
            nodes = sum(itertools.accumulate(branching, operator.mul))
            self.growth = Growth(tuple(branching), nodes, nodes)
        self.depth = len(self.growth.widths)

    @property
    def spare(self) -> int:  # type: ignore[override]  # a row's longest path may be a single token
        return self.growth.spare

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        if type(self) is not TreeDraft or not all(map(self.executor.may_extend, rows)):
            return None
        most = self.depth if self.k is None else min(self.k, self.depth)
        return Continuation(self.runner, [most] * len(rows), DraftSpec(tree=self.growth))

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        device, context = self.executor.device, self.executor.config.max_position_embeddings
        most = [
            max(0, min(n, self.depth, context - len(row.tokens), n if self.k is None else self.k))
            for row, n in zip(rows, max_len)
        ]
        active = [b for b, n in enumerate(most) if n]
        if active and self._one_call and all(map(self.executor.may_extend, rows)):
            proposal = self._at_once(rows, active, most, DraftSpec(tree=self.growth))
            if proposal is not None:
                return proposal
        trees = [Tree() for _ in rows]
        frontier: list[list[int]] = [[-1] for _ in rows]
        followed: list[list[int]] = [[] for _ in rows]  # the tokens that others may follow
        place: list[dict[int, int]] = [{-1: 0} for _ in rows]  # where they and the row itself are in a forward
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
            places = [(i, node) for i, b in enumerate(active) for node in frontier[b]]
            at_N = torch.tensor([(i, place[active[i]][node]) for i, node in places], device=device).unbind(1)
            log_NV = logits_BJV[at_N].log_softmax(-1)
            best_NW = top(log_NV, self.growth.widths[level])
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
                open_nodes = heapq.nlargest(self.growth.follow, open_nodes, key=trees[b].scores.__getitem__)
                frontier[b] = open_nodes
                for node in open_nodes:
                    followed[b].append(node)
                    place[b][node] = len(followed[b])
        return pad_trees([tree.best(self.growth.nodes) for tree in trees])
