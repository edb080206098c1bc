"""Token trees as lists of parents. Each token's parent is the number of the token that it follows, or -1 if it follows
the row's last token.

Shape legend: N new tokens of a row, S tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["depths", "descend", "first_branch", "leaf_paths", "tree_mask"]


def depths(parents: list[int]) -> list[int]:
    """Return the depth of each token. A token that follows the row's last token has depth 0."""
    depth_of: list[int] = []
    for parent in parents:
        depth_of.append(0 if parent < 0 else depth_of[parent] + 1)
    return depth_of


def descend(tokens: list[int], parents: list[int], text: list[int]) -> list[int]:
    """Return the numbers of the tree's tokens that spell the longest prefix of ``text``."""
    path: list[int] = []
    for wanted in text:
        at = path[-1] if path else -1
        after = (node for node, parent in enumerate(parents) if parent == at and tokens[node] == wanted)
        if (node := next(after, None)) is None:
            break
        path.append(node)
    return path


def first_branch(parents: list[int]) -> list[int]:
    """Return the numbers of the tokens along the path that takes the first child at every fork."""
    branch: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (branch[-1] if branch else -1):
            branch.append(node)
    return branch


def leaf_paths(parents: list[int]) -> list[list[int]]:
    """Return, for each leaf, the numbers of the tokens on the way to it."""
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths


def tree_mask(start: int, root: int, parents: list[int]) -> Tensor:
    """Build the attention mask, bool [N, S], for the new tokens of a row. The row has ``root`` tokens, the first
    ``start`` of which are cached, and then a tree. Each token sees all tokens before it in the row, and its ancestors
    in the tree."""
    count, total = len(parents), root + len(parents)
    # Start with one hop, from each token to its parent. Squaring doubles the number of hops, until they reach the root.
    within_NN = torch.eye(count)
    within_NN[[node for node, parent in enumerate(parents) if parent >= 0], [p for p in parents if p >= 0]] = 1
    hops, longest = 1, max(depths(parents), default=0)
    while hops < longest:
        within_NN, hops = (within_NN @ within_NN).clamp_max_(1), 2 * hops
    mask_NS = torch.ones(total - start, total, dtype=torch.bool).tril_(start)
    mask_NS[root - start :, root:] = within_NN > 0
    return mask_NS
