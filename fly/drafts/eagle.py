"""Drafting token after token by a trained head that reads the target's hidden states: EAGLE-3 (arXiv 2503.01840)."""

from __future__ import annotations

import sys
from collections import abc
from pathlib import Path

import torch

from fly.drafts.trained import HeadDraft
from fly.runner.executor import DraftSpec, Growth, Head, SerialHead
from fly.runner.request import Row

__all__ = ["Eagle3Draft"]


class Eagle3Draft(HeadDraft):
    """A trained EAGLE-3 head: one layer that continues from the target's hidden states, token after token.

    Args:
        head: the name or path of a head in either published layout (``fly.models.eagle``), or a loaded head.
        k: the most tokens along a path (None: as many as the caller asks for).
        nodes: 0 drafts chains. Any other number drafts trees of this many tokens, like ``TreeDraft``.
        depth, width: the size of trees.
        confidence, reach: where a chain stops, as for ``SingleDraft``.
        cache_tokens: how many tokens its cache holds over all rows (None: as many as the target's).
        block_size: tokens in a page of its cache (None: as suits the device).
        dtype, device, kernels: how to load and run a head, as for ``LLM``.

    Above temperature 0, the tokens of chains are drawn from the head's distribution after the row's sampling settings
    (``probs_BKV``). Trees depend on the text alone. So a lossless rule stays lossless with both.

    Raises ``ValueError`` if it is attached to a target that has another width or vocabulary, or gives no hidden states.
    """

    kind = SerialHead

    def __init__(
        self,
        head: str | Path | Head,
        k: int | None = None,
        nodes: int = 0,
        depth: int = 7,
        width: int = 4,
        confidence: float = 0.0,
        reach: float | None = 0.0,
        cache_tokens: int | None = None,
        block_size: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
    ) -> None:
        for name, value, least in (("nodes", nodes, 0), ("depth", depth, 1), ("width", width, 1)):
            if value < least:
                raise ValueError(f"{name} {value} must be at least {least}")
        super().__init__(head, k, confidence, reach, cache_tokens, block_size, dtype, device, kernels)
        self.nodes = nodes
        self.width = width
        self.stops = not nodes  # as for ``TreeDraft``
        self.gives_logits = not nodes
        self.growth = Growth.uniform(depth, width, nodes) if nodes else None
        self.depth = sys.maxsize if self.growth is None else len(self.growth.widths)  # of a path
        self.spare = 0 if self.growth is None else self.growth.spare

    @property
    def _longest(self) -> int:
        return min(super()._longest, self.depth)

    def _spec(self, rows: abc.Sequence[Row], worth: float) -> DraftSpec:
        if self.growth is None:
            return super()._spec(rows, worth)
        return DraftSpec(tree=self.growth, with_logits=self.with_logits)
