"""Accuracy and speed of decoding settings, side by side on the same problems."""

from fly.eval.compare import Result, Setting, compare, decode

__all__ = ["Result", "Setting", "compare", "decode"]
