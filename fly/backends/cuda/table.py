"""What the device knows of the rows of a batch, and a forward of a model over some of their tokens.

Shape legend: R rows (padding included), N new tokens of each row, W pages of a row, C columns of the state,
S tokens of the longest text, J tokens of a row that are scored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fly.backends.cuda.attention import Branches, PagedAttention, Slots, flash_takes, listed
from fly.backends.cuda.shape import Column, Model, Shape, Taken
from fly.cache import PagedBatch, PagedKVCache
from fly.models.config import LlamaConfig
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
        self.sees_RJJ: Tensor | None = None  # of trees, which of the others each token sees, and
        self.further_RJ: Tensor | None = None  # how many positions after the first it stands
        if shape.trees:
            self.sees_RJJ = torch.zeros(shape.rows, shape.k + 1, shape.k + 1, dtype=torch.bool, device=device)
            self.further_RJ = torch.zeros(shape.rows, shape.k + 1, dtype=torch.int64, device=device)
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

    def branch(self, sees: Sequence[Tensor], further: Sequence[list[int]]) -> None:
        """Upload the trees: of each row, which of its tokens each sees [N, N], and how far after the first it is."""
        assert self.sees_RJJ is not None and self.further_RJ is not None
        rows, width, _ = self.sees_RJJ.shape
        sees_RJJ = torch.eye(width, dtype=torch.bool).repeat(rows, 1, 1)  # what sees nothing would be no number
        for own_JJ, sees_NN in zip(sees_RJJ, sees):
            own_JJ[: len(sees_NN), : len(sees_NN)] = sees_NN
        lines = [[*own, *[0] * (width - len(own))] for own in further] + [[0] * width] * (rows - len(further))
        self.sees_RJJ.copy_(sees_RJJ.pin_memory(), non_blocking=True)
        self.further_RJ.copy_(torch.tensor(lines).pin_memory(), non_blocking=True)

    def branches(self, start_R: Tensor) -> Branches | None:
        """Those trees, whose rows' first new tokens have these positions; None if there are none."""
        if self.sees_RJJ is None or self.further_RJ is None:
            return None
        return Branches(start_R, self.sees_RJJ, start_R.unsqueeze(1) + self.further_RJ)

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

    @property
    def draft_pages_RW(self) -> Tensor:
        """Those of the drafter's cache."""
        return self.pages_RW[:, self.shape.pages :]

    def after(self, count: int) -> Tensor:
        """[R, count] where the texts hold the tokens that follow."""
        at_RN = self.column(Column.LENGTH).unsqueeze(1) + torch.arange(count, device=self.device)
        return at_RN.clamp_max(self.shape.text - 1)

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
        self,
        model: Model,
        cache: PagedKVCache,
        table_RW: Tensor,
        tokens_RN: Tensor,
        start_R: Tensor,
        stored_RN: Tensor,
        branches: Branches | None = None,
        taken: Taken | None = None,
    ) -> Tensor:
        """Final hidden states [R, N, C] of new tokens of every row in the places from ``start_R`` on; others too, if
        they are ``taken``."""
        at_T, kv = self.places(model.config, cache, table_RW, start_R, stored_RN, branches)
        hidden_TC = model.hidden(tokens_RN.flatten(), at_T, kv, self.shape.compiled, taken)
        return hidden_TC.unflatten(0, tokens_RN.shape)

    def places(
        self,
        config: LlamaConfig,
        cache: PagedKVCache,
        table_RW: Tensor,
        start_R: Tensor,
        stored_RN: Tensor,
        branches: Branches | None = None,
    ) -> tuple[Tensor, PagedAttention]:
        """Positions [T] of such tokens, and where their keys and values go."""
        slots = Slots.even_rows(table_RW, start_R, stored_RN, cache.allocator.block_size, cache.nobody, branches)
        at_RN = start_R.unsqueeze(1) + torch.arange(stored_RN.shape[1], device=self.device)
        at_RN = at_RN if branches is None else branches.at_BN
        at_RN = at_RN.clamp(0, config.max_position_embeddings - 1)  # padding may stand beyond
        return at_RN.flatten(), PagedAttention(cache, slots, flash_takes(cache))
