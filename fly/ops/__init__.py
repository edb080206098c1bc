"""Pure tensor functions, one place a formula. Knows nothing of policies, models or caches."""

from fly.ops.divergence import entropy, jensen_shannon, kl, total_variation
from fly.ops.random import Stream, derive, draw, uniforms
from fly.ops.vocabulary import SMALL, Top, argmax, compiled, log_mass, pick, top, top_at

__all__ = [
    "SMALL",
    "Stream",
    "Top",
    "argmax",
    "compiled",
    "derive",
    "draw",
    "entropy",
    "jensen_shannon",
    "kl",
    "log_mass",
    "pick",
    "top",
    "top_at",
    "total_variation",
    "uniforms",
]
