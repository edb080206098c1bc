"""Where every Triton kernel of this package is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["launch"]


def launch(kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
    """Queue ``kernel`` on the current stream of the current device, once for each point of ``grid``."""
    if all(grid):
        kernel[tuple(grid)](*args, **options)
