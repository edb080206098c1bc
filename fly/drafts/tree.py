"""Drafting trees: several candidates for each place, verified in one forward."""

from __future__ import annotations

from collections import abc
from pathlib import Path
from typing import Any

import torch

from fly.drafts.base import Loaded
from fly.drafts.model import SingleDraft
from fly.runtime.drafting import DraftSpec, Growth
from fly.runtime.executor import Executor
from fly.runtime.request import Sequence

__all__ = ["TreeDraft"]


class TreeDraft(SingleDraft):
    """A draft model proposes a tree: its likeliest tokens after each place, level by level, with one forward for each.

    As in EAGLE-2 (arXiv 2406.16858, section 4), here with any draft model: the ``width`` likeliest tokens of the last
    level, by the probability of the whole path, get ``width`` candidates each, ``depth`` levels deep; the ``nodes``
    likeliest of all candidates are proposed.

    Which tokens are proposed depends on the text alone, so the draft counts as certain of each (``probs_BKV`` None),
    and a lossless rule stays lossless at any temperature. Other arguments as for ``SingleDraft``.
    """

    def __init__(
        self,
        model: str | Path | Executor | Loaded | torch.nn.Module,
        nodes: int = 16,
        depth: int = 12,
        width: int = 2,
        k: int | None = None,
        cache_tokens: int | None = None,
        block_size: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
    ) -> None:
        for name, value in (("nodes", nodes), ("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        options: dict[str, Any] = {"block_size": block_size, "dtype": dtype, "device": device}
        super().__init__(model, k=k, cache_tokens=cache_tokens, kernels=kernels, **options)
        self.growth = Growth.even(depth, width, nodes)
        levels = len(self.growth.widths)
        self.k = levels if k is None else min(k, levels)
        self.spare = self.growth.spare  # a row's longest path may be a single token
        self.worth = None  # other tokens than the likeliest may be kept where that one is not

    def spec(self, rows: abc.Sequence[Sequence]) -> DraftSpec:
        return DraftSpec(tree=self.growth)
