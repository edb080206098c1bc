"""Accuracy and speed of decoding settings, side by side on the same problems."""

from fly.eval.compare import Result, Setting, compare

__all__ = ["Result", "Setting", "compare"]
