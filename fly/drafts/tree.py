"""Drafting trees, which have several candidates at each place and are verified in one forward."""

from __future__ import annotations

from collections import abc
from pathlib import Path
from typing import Any

import torch

from fly.drafts.base import Loaded
from fly.drafts.model import SingleDraft
from fly.runner.drafting import DraftSpec, Growth
from fly.runner.executor import Executor
from fly.runner.request import Row

__all__ = ["TreeDraft"]


class TreeDraft(SingleDraft):
    """A draft model that proposes a tree of its likeliest tokens, with one forward for each level.

    This is EAGLE-2's method (arXiv 2406.16858, section 4) for any draft model. Tokens are ranked by the probability of
    their whole path. At each of ``depth`` levels, each of the ``width`` likeliest tokens gets ``width`` candidates. The
    draft is the ``nodes`` likeliest of all candidates.

    The tokens depend on the text alone, so the draft is deterministic (``probs_BKV`` None), and a lossless rule stays
    lossless at any temperature. The other arguments are those of ``SingleDraft``.
    """

    stops = False  # reach counts only the likeliest token at each place, but a sibling may be kept instead
    gives_logits = False

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
        cache: dict[str, Any] = {"cache_tokens": cache_tokens, "block_size": block_size}
        super().__init__(model, k=k, dtype=dtype, device=device, kernels=kernels, **cache)
        self.growth = Growth.uniform(depth, width, nodes)
        levels = len(self.growth.widths)
        self.k = levels if k is None else min(k, levels)
        self.spare = self.growth.spare  # a row's longest path may be a single token

    def spec(self, rows: abc.Sequence[Row], worth: float = 0.0) -> DraftSpec:
        return DraftSpec(tree=self.growth)
