"""Pure functions of tensors and token lists. Each formula is written once. Knows nothing of policies, models or
caches."""

from fly.ops.divergence import entropy, jensen_shannon, kl, total_variation
from fly.ops.prefix import common_prefix
from fly.ops.random import Stream, derive, derived, draw, uniforms
from fly.ops.transfer import sent, upload
from fly.ops.trees import depths, descend, first_branch, leaf_paths, tree_mask
from fly.ops.vocabulary import Top, argmax, log_mass, nan_at, nothing_left, one_hot, pick, spread, top, vectors_at

__all__ = [
    "Stream",
    "Top",
    "argmax",
    "common_prefix",
    "depths",
    "derive",
    "derived",
    "descend",
    "draw",
    "entropy",
    "first_branch",
    "jensen_shannon",
    "kl",
    "leaf_paths",
    "log_mass",
    "nan_at",
    "nothing_left",
    "one_hot",
    "pick",
    "sent",
    "spread",
    "top",
    "total_variation",
    "tree_mask",
    "uniforms",
    "upload",
    "vectors_at",
]
