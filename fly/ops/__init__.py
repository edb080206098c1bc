"""Pure tensor functions, one place a formula. Knows nothing of policies, models or caches."""

from fly.ops.random import Stream, derive, draw, uniforms
from fly.ops.trees import depths, first_branch, leaf_paths, tree_mask
from fly.ops.vocabulary import Top, argmax, entropy, log_mass, pick, top

__all__ = [
    "Stream",
    "Top",
    "argmax",
    "depths",
    "derive",
    "draw",
    "entropy",
    "first_branch",
    "leaf_paths",
    "log_mass",
    "pick",
    "top",
    "tree_mask",
    "uniforms",
]
