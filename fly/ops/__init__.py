"""Pure tensor functions, one place a formula. Knows nothing of policies, models or caches."""

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
    "log_mass",
    "pick",
    "top",
    "top_at",
    "uniforms",
]
