"""What the device knows of the rows of a batch, and a forward of a model over some of their tokens.

Shape legend: R rows (padding included), N new tokens of each row, W pages of a row, C columns of the state,
S tokens of the longest text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fly.backends.cuda.attention import PagedAttention, Slots, flash_takes, listed
from fly.backends.cuda.shape import Column, Model, Shape
from fly.cache import PagedBatch, PagedKVCache
from fly.request import common_prefix
from fly.sampling import BatchSampling

__all__ = ["Table"]


class Table:
    """The state of each row (``Column``), its pages, in the target's cache and then in the drafter's, and its text, if
    something reads it."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.state_RC = torch.zeros(shape.rows, Column.STOPS + shape.stops, dtype=torch.int64, device=device)
        self.pages_RW = torch.zeros(shape.rows, shape.pages + shape.draft_pages, dtype=torch.int32, device=device)
        self.text_RS = torch.zeros(shape.rows, shape.text, dtype=torch.int64, device=device) if shape.text else None
        self._texts: list[list[int]] = [[] for _ in range(shape.rows)]  # what is in it, as far as it counts
        self.loaded: list[list[int]] = []  # what is in ``pages_RW``

    def know(self, texts: Sequence[list[int]]) -> None:
        """Upload what the device does not know of the text in each place. It follows a text by itself, round by round;
        ``knows`` sets what it has reached."""
        if (text_RS := self.text_RS) is None:
            return
        for at, (text, known) in enumerate(zip(texts, self._texts)):
            if (start := common_prefix(known, text)) < len(text):
                text_RS[at, start : len(text)].copy_(torch.tensor(text[start:]).pin_memory(), non_blocking=True)
        self.knows(texts)

    def knows(self, texts: Sequence[list[int]]) -> None:
        """The device knows these texts."""
        self._texts = [list(text) for text in texts]

    def load(
        self, lines: Sequence[Sequence[int]], kv: PagedBatch | None, draft_kv: PagedBatch | None, order: list[int]
    ) -> None:
        """Upload the state of each row, and the pages that have changed since last time. ``order`` says which row of
        ``kv`` is in each place; -1 is padding."""
        self.state_RC.copy_(torch.tensor(lines).pin_memory(), non_blocking=True)
        shape, tables = self.shape, []
        for batch, width in ((kv, shape.pages), (draft_kv, shape.draft_pages)):
            if batch is not None:
                each = batch.tables()
                tables.append(listed([each[b] if b >= 0 else [] for b in order], width, batch.cache.nobody))
        joined = [[page for table in parts for page in table] for parts in zip(*tables)]
        if joined != self.loaded:
            self.pages_RW.copy_(torch.tensor(joined, dtype=torch.int32).pin_memory(), non_blocking=True)
            self.loaded = joined

    def column(self, which: Column) -> Tensor:
        """[R], of float64 from ``NATS`` on."""
        column_R = self.state_RC[:, which]
        return column_R.view(torch.float64) if which >= Column.NATS else column_R

    def sampling(self, rows: slice) -> BatchSampling:
        """How some rows above temperature 0 are drawn."""
        cuts = self.shape.cuts
        numbers = (self.column(which)[rows].float() for which in (Column.TEMPERATURE, Column.TOP_P, Column.MIN_P))
        temperature_B, top_p_B, min_p_B = numbers
        return BatchSampling(
            temperature_B, self.column(Column.TOP_K)[rows], top_p_B, min_p_B,
            greedy_B=torch.zeros_like(temperature_B, dtype=torch.bool), some_greedy=False,
            most_k=cuts.top_k, top_p=cuts.top_p, min_p=cuts.min_p,
        )  # fmt: skip

    def forward(
        self, model: Model, cache: PagedKVCache, table_RW: Tensor, tokens_RN: Tensor, start_R: Tensor, stored_RN: Tensor
    ) -> Tensor:
        """Final hidden states [R, N, C] of new tokens of every row from position ``start_R`` on."""
        slots = Slots.even_rows(table_RW, start_R, stored_RN, cache.allocator.block_size, cache.nobody)
        kv = PagedAttention(cache, slots, flash_takes(cache))
        at_RN = start_R.unsqueeze(1) + torch.arange(tokens_RN.shape[1], device=self.device)
        at_RN = at_RN.clamp(0, model.config.max_position_embeddings - 1)  # padding may stand beyond
        hidden_TC = model.hidden(tokens_RN.flatten(), at_RN.flatten(), kv, self.shape.compiled)
        return hidden_TC.unflatten(0, tokens_RN.shape)
