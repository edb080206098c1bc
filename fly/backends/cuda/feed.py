"""What a drafter is fed on the device: a draft model the tokens, a draft head also the target's hidden states.

Shape legend: R rows (padding included), N new tokens of each row, K longest draft, J = K + 1, T packed tokens, F hidden
states of the target side by side, C hidden width, U draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.backends.cuda.attention import Branches
from fly.backends.cuda.shape import Column, Model
from fly.backends.cuda.table import Table
from fly.backends.torch import TorchHead
from fly.cache import PagedBatch, PagedKVCache
from fly.executor import Batch
from fly.ops import upload

__all__ = ["Feed", "HeadFeed", "feed_of"]


class Feed:
    """A draft model. A draft begins with the last two tokens of each row, since the model lacks the last but one after
    a draft that was kept whole."""

    x_R1C: Tensor | None = None  # of a head, memory for its feature after the last token of a chain

    def __init__(self, table: Table, model: Model, cache: PagedKVCache) -> None:
        self.table, self.model = table, model
        self._cache = weakref.ref(cache)  # graphs hold addresses, so dropping the cache frees its memory

    @property
    def cache(self) -> PagedKVCache:
        cache = self._cache()
        assert cache is not None
        return cache

    def load(
        self,
        kv: PagedBatch,
        texts: Sequence[list[int]],
        states_TF: Tensor | None,
        going: Sequence[bool],
        order: Sequence[int],
    ) -> list[int]:
        """Feed what is missing of each row that is ``going``, but for what a draft begins with. Of that, how many
        tokens are missing besides the last. ``kv`` holds the new tokens of ``texts``, of which ``order`` says which is
        in each place (-1 is padding)."""
        late = [b for b, text in enumerate(texts) if going[b] and kv.starts[b] < len(text) - 2]
        if late:
            starts, new = [kv.starts[b] for b in late], [texts[b][kv.starts[b] : -2] for b in late]
            batch = kv.cache.batch([kv.seqs[b] for b in late], starts, list(map(len, new)))
            self.model.score(Batch.of(new, batch), ())
        # a target that shares the cache may have stored the last token but one
        return [int(start < len(text) - 1) for start, text in zip(kv.starts, texts)]

    def last(self, going_R: Tensor) -> tuple[Tensor, Tensor]:
        """What a draft begins with: tokens [R, N], the row's last at the end, and whether each is to be stored."""
        table = self.table
        lacks_R = going_R & (table.column(Column.LACKS) > 0)
        return table.state_RC[:, Column.BEFORE : Column.LAST + 1], torch.stack([lacks_R, going_R], 1)

    def places(self, length_R: Tensor) -> Tensor:
        """How many places of its cache so many tokens of each row take."""
        return length_R

    def forward(
        self,
        tokens_RN: Tensor,
        start_R: Tensor,
        stored_RN: Tensor,
        x_RNC: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        """Final hidden states [R, N, C] of tokens in the places from ``start_R`` on. A head is fed the feature before
        each too: with None, of what a draft begins with, those that it makes of the target's hidden states."""
        table, cache = self.table, self.cache
        return table.forward(self.model, cache, table.draft_pages_RW, tokens_RN, start_R, stored_RN, branches)

    def logits(self, hidden_RNC: Tensor) -> Tensor:
        """[R, N, V]"""
        return self.model.logits(hidden_RNC.flatten(0, 1)).unflatten(0, hidden_RNC.shape[:2])

    def go_on(self, tokens_RK: Tensor, accepted_R: Tensor, next_R: Tensor, states_RJF: Tensor | None) -> None:
        """So many drafted tokens stand, and are followed by ``next_R``."""
        self.table.column(Column.LACKS).fill_(1)  # the last drafted token was not fed


class HeadFeed(Feed):
    """A draft head (``fly.models.eagle``). A draft begins with the last J tokens of each row, each with the target's
    hidden states before it, as far as the head lacks them: the target has just worked them out. Drafted tokens are fed
    with the head's own features, and stored after those; the next draft writes over them."""

    def __init__(self, table: Table, head: TorchHead, cache: PagedKVCache) -> None:
        self.table, self.head, self._cache = table, head, weakref.ref(cache)
        rows, count = table.shape.rows, table.shape.k + 1
        self.x_R1C = torch.zeros(rows, 1, head.config.hidden_size, dtype=head.dtype, device=table.device)
        given = head.options.inputs * head.options.target_hidden_size
        self.tokens_RJ = torch.zeros(rows, count, dtype=torch.int64, device=table.device)
        self.states_RJF = torch.zeros(rows, count, given, dtype=head.dtype, device=table.device)

    def load(
        self,
        kv: PagedBatch,
        texts: Sequence[list[int]],
        states_TF: Tensor | None,
        going: Sequence[bool],
        order: Sequence[int],
    ) -> list[int]:
        assert states_TF is not None
        count, ends = self.tokens_RJ.shape[1], list(itertools.accumulate(kv.counts))
        late = [b for b, new in enumerate(kv.counts) if going[b] and new > count]
        if late:
            new = [texts[b][-kv.counts[b] : -count] for b in late]
            starts, counts = [kv.starts[b] for b in late], list(map(len, new))
            before = [states_TF[ends[b] - kv.counts[b] : ends[b] - count] for b in late]
            batch = kv.cache.batch([kv.seqs[b] for b in late], starts, counts)
            self.head.begin(Batch.of(new, batch), torch.cat(before), ())
        numbers = list[int]()
        for b in order:
            own = min(kv.counts[b], count) if b >= 0 else 0
            fill = [0] * (count - own)
            numbers += [*fill, *texts[b][len(texts[b]) - own :], *fill, *range(ends[b] - own, ends[b])]
        tokens_RJ, at_RJ = upload(numbers, self.table.device).view(len(order), 2, count).unbind(1)
        self.tokens_RJ.copy_(tokens_RJ)
        self.states_RJF.copy_(states_TF.to(self.table.device)[at_RJ])
        return [min(new, count) - 1 for new in kv.counts]

    def last(self, going_R: Tensor) -> tuple[Tensor, Tensor]:
        before_J = torch.arange(self.tokens_RJ.shape[1] - 1, -1, -1, device=self.table.device)
        stored_RJ = (before_J <= self.table.column(Column.LACKS).unsqueeze(1)) & going_R.unsqueeze(1)
        return self.tokens_RJ, stored_RJ

    def places(self, length_R: Tensor) -> Tensor:
        return length_R - self.table.column(Column.FIRST)

    def forward(
        self,
        tokens_RN: Tensor,
        start_R: Tensor,
        stored_RN: Tensor,
        x_RNC: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        head, table = self.head, self.table
        x_TC = head.head.fuse(self.states_RJF.flatten(0, 1)) if x_RNC is None else x_RNC.flatten(0, 1)
        at_T, kv = table.places(head.config, self.cache, table.draft_pages_RW, start_R, stored_RN, branches)
        return head.head(tokens_RN.flatten(), x_TC, at_T, kv).unflatten(0, tokens_RN.shape)

    def logits(self, hidden_RNC: Tensor) -> Tensor:
        """What is not in the head's vocabulary is never drafted."""
        logits_TU = self.head.head.logits(hidden_RNC.flatten(0, 1))
        logits_TV = logits_TU.new_full((len(logits_TU), self.head.config.vocab_size), -torch.inf)
        logits_TV.index_copy_(1, self.head.to_target_U, logits_TU)
        return logits_TV.unflatten(0, hidden_RNC.shape[:2])

    def go_on(self, tokens_RK: Tensor, accepted_R: Tensor, next_R: Tensor, states_RJF: Tensor | None) -> None:
        assert states_RJF is not None
        count, accepted_R1 = self.tokens_RJ.shape[1], accepted_R.unsqueeze(1)
        new_RJ = F.pad(tokens_RK, (0, 1)).scatter(1, accepted_R1, next_R.unsqueeze(1))
        at_RJ = (accepted_R1 - torch.arange(count - 1, -1, -1, device=new_RJ.device)).clamp_min(0)
        self.tokens_RJ.copy_(new_RJ.gather(1, at_RJ))
        self.states_RJF.copy_(states_RJF.gather(1, at_RJ.unsqueeze(2).expand(-1, -1, states_RJF.shape[2])))
        self.table.column(Column.LACKS).copy_(accepted_R)


def feed_of(table: Table, drafter: Model | TorchHead, cache: PagedKVCache) -> Feed:
    """What feeds ``drafter`` with the rows of ``table``."""
    return HeadFeed(table, drafter, cache) if isinstance(drafter, TorchHead) else Feed(table, drafter, cache)
