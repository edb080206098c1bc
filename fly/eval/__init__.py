"""Accuracy and speed of decoding settings, side by side on the same problems."""

from fly.eval.compare import Result, compare, decode
from fly.eval.timed import Setting

__all__ = ["Result", "Setting", "compare", "decode"]
