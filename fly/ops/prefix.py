"""Comparing token lists."""

from __future__ import annotations

__all__ = ["common_prefix"]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix of two token lists."""
    shorter = min(len(a), len(b))
    # Usually one list is a prefix of the other. This test runs at C speed, and does not copy the shorter list.
    if (a if len(a) == shorter else a[:shorter]) == (b if len(b) == shorter else b[:shorter]):
        return shorter
    # Otherwise they usually differ near the end, and the part before is compared at C speed as well.
    start, window = shorter, 32
    while start and a[:start] != b[:start]:
        start, window = max(shorter - window, 0), 8 * window
    return next(i for i in range(start, shorter) if a[i] != b[i])
