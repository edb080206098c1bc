"""What a drafter is fed on the device: tokens and, if it is a draft head, the target's hidden states too.

In order:

1. ``catch_up``, called by the host once a call (rounds.py), feeds the tokens that a row lacks, except for its last
   ones.
2. ``begin_draft`` returns those last tokens, which the first ``forward`` of a draft is fed (chain.py).
3. Each later ``forward`` is fed the token drafted last.
4. ``advance``, at the end of a round, notes which tokens were kept (device_round.py), for the next ``begin_draft``.

Shape legend: R rows (padding included), K longest draft, J = K + 1, N new tokens of each row, T packed tokens, W pages
of a row's table, F hidden states of the target side by side, C hidden width, U vocabulary of a head, V vocabulary.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fly.backends.cuda.attention import PagedAttention, place_tokens
from fly.backends.cuda.table import Column, Table
from fly.backends.heads import TorchHead
from fly.cache import PagedKVCache
from fly.models.config import LlamaConfig
from fly.ops import upload
from fly.runner.executor import Batch, RoundPlan, Scores

__all__ = ["Drafter", "HeadDrafter", "Model"]


class Model(Protocol):
    """What runs forwards (``fly.backends.cuda.executor.CudaExecutor``)."""

    config: LlamaConfig
    device: torch.device
    compiles_after: int
    compiles_layers: bool

    def score(self, batch: Batch, places: Sequence[int] | None = None) -> Scores: ...
    def hidden(self, *tokens_and_more: Any, **options: Any) -> Tensor: ...
    def logits(self, hidden_TC: Tensor, exact: bool = True) -> Tensor: ...


class Drafter:
    """A draft model with its KV cache. A draft begins with the last two tokens of each row. After a draft that was kept
    whole, the model has not cached the last drafted token, since no forward was fed it."""

    def __init__(self, table: Table, model: Model, cache: PagedKVCache) -> None:
        self.table = table
        self.model = model
        self.vocab_size = model.config.vocab_size
        # Graphs hold addresses, not this object, so dropping the cache frees its memory.
        self.cache: PagedKVCache = weakref.proxy(cache)

    def catch_up(self, plan: RoundPlan, drafts: Sequence[bool], order: Sequence[int]) -> list[int]:
        """Feed the tokens that are not cached, except for those that a draft begins with, of the rows that it
        ``drafts`` for. Returns how many tokens before its last one each row still lacks (``Column.LACKS``).

        Args:
            order: for each line of the table, the number of its row in the plan; -1 is padding.
        """
        kv, texts = plan.draft_kv, [row.tokens for row in plan.rows]
        assert kv is not None
        behind = [b for b, text in enumerate(texts) if drafts[b] and kv.starts[b] < len(text) - 2]
        if behind:
            starts, new = [kv.starts[b] for b in behind], [texts[b][kv.starts[b] : -2] for b in behind]
            batch = kv.cache.batch([kv.seqs[b] for b in behind], starts, list(map(len, new)))
            self.model.score(Batch.of(new, batch), ())
        return [int(start < len(text) - 1) for start, text in zip(kv.starts, texts)]

    def begin_draft(self, drafting_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens [R, N] that a draft begins with, up to each row's last, and which of them are to be
        cached."""
        lacks_R = drafting_R & (self.table.column(Column.LACKS) > 0)
        last_R2 = self.table.state_RC[:, Column.BEFORE : Column.LAST + 1]
        return last_R2, torch.stack([lacks_R, drafting_R], 1)

    def count_slots(self, length_R: Tensor) -> Tensor:
        """Return how many slots of the cache so many tokens of each row take, [R]."""
        return length_R

    def forward(self, tokens_RN: Tensor, start_R: Tensor, stored_RN: Tensor, first: bool) -> Tensor:
        """Return the final hidden states [R, N, C] of tokens that are cached from ``start_R`` on. ``first``: they begin
        a draft."""
        positions_T, kv = place_tokens(self.cache, self.table.draft_pages_RW, start_R, stored_RN)
        return self._run(tokens_RN.flatten(), positions_T, kv, first).unflatten(0, tokens_RN.shape)

    def _run(self, tokens_T: Tensor, positions_T: Tensor, kv: PagedAttention, first: bool) -> Tensor:
        return self.model.hidden(tokens_T, positions_T, kv, compiled=self.table.shape.compiled)

    def logits(self, hidden_RNC: Tensor, exact: bool) -> Tensor:
        """Return the logits [R, N, V], in float32 if they are to be ``exact``."""
        return self.model.logits(hidden_RNC.flatten(0, 1), exact).unflatten(0, hidden_RNC.shape[:2])

    def advance(self, emitted_RJ: Tensor, accepted_R: Tensor, states_RJF: Tensor | None) -> None:
        """Note that the round emits the first ``accepted_R`` + 1 of these tokens. ``states_RJF`` are the target's
        hidden states."""
        self.table.column(Column.LACKS).fill_(1)


class HeadDrafter(Drafter):
    """A draft head (``fly.models.eagle``). A draft begins with the tokens of the last round, up to K + 1 of each row.
    Each is fed with the target's hidden states before it, which that round has just computed. Drafted tokens are fed
    with the head's own feature before them, and the next draft overwrites their cached keys and values."""

    def __init__(self, table: Table, head: TorchHead, cache: PagedKVCache) -> None:
        self.table = table
        self.head = head
        self.vocab_size = head.config.vocab_size
        self.cache = weakref.proxy(cache)
        rows = table.shape.rows
        count = table.shape.k + 1
        device = table.device
        width = head.options.inputs * head.options.target_hidden_size
        self.tokens_RJ = torch.zeros(rows, count, dtype=torch.int64, device=device)
        self.states_RJF = torch.zeros(rows, count, width, dtype=head.dtype, device=device)
        self.feature_RC = torch.zeros(rows, head.config.hidden_size, dtype=head.dtype, device=device)

    def catch_up(self, plan: RoundPlan, drafts: Sequence[bool], order: Sequence[int]) -> list[int]:
        kv = plan.draft_kv
        head_input = plan.head_input
        texts = [row.tokens for row in plan.rows]
        count = self.tokens_RJ.shape[1]
        assert kv is not None and head_input is not None
        ends = list(itertools.accumulate(kv.counts))  # where each row's hidden states end among all
        behind = [b for b, lacks in enumerate(kv.counts) if drafts[b] and lacks > count]
        if behind:
            starts, new = [kv.starts[b] for b in behind], [texts[b][-kv.counts[b] : -count] for b in behind]
            batch = kv.cache.batch([kv.seqs[b] for b in behind], starts, list(map(len, new)))
            before = [head_input.states_TF[ends[b] - kv.counts[b] : ends[b] - count] for b in behind]
            self.head.begin(Batch.of(new, batch), torch.cat(before), ())
        # Each row's last tokens are aligned at the right, and so are the numbers of their hidden states.
        numbers = list[int]()
        for b in order:
            unread = min(kv.counts[b], count) if b >= 0 else 0
            fill = [0] * (count - unread)
            numbers += [*fill, *texts[b][len(texts[b]) - unread :], *fill, *range(ends[b] - unread, ends[b])]
        tokens_RJ, at_RJ = upload(numbers, self.table.device).view(len(order), 2, count).unbind(1)
        self.tokens_RJ.copy_(tokens_RJ)
        self.states_RJF.copy_(head_input.states_TF.to(self.table.device)[at_RJ])
        return [min(lacks, count) - 1 for lacks in kv.counts]

    def begin_draft(self, drafting_R: Tensor) -> tuple[Tensor, Tensor]:
        before_J = torch.arange(self.tokens_RJ.shape[1] - 1, -1, -1, device=self.table.device)
        lacks_RJ = before_J <= self.table.column(Column.LACKS).unsqueeze(1)
        return self.tokens_RJ, lacks_RJ & drafting_R.unsqueeze(1)

    def count_slots(self, length_R: Tensor) -> Tensor:
        return length_R - self.table.column(Column.FIRST)

    def _run(self, tokens_T: Tensor, positions_T: Tensor, kv: PagedAttention, first: bool) -> Tensor:
        x_TC = self.head.head.fuse(self.states_RJF.flatten(0, 1)) if first else self.feature_RC
        hidden_TC = self.head.head(tokens_T, x_TC, positions_T, kv)
        self.feature_RC.copy_(hidden_TC.unflatten(0, (len(self.feature_RC), -1))[:, -1])
        return hidden_TC

    def logits(self, hidden_RNC: Tensor, exact: bool) -> Tensor:
        # Tokens outside the head's vocabulary are never drafted.
        logits_TU = self.head.head.logits(hidden_RNC.flatten(0, 1))
        logits_TV = logits_TU.new_full((len(logits_TU), self.vocab_size), -torch.inf)
        logits_TV.index_copy_(1, self.head.to_target_U, logits_TU)
        return logits_TV.unflatten(0, hidden_RNC.shape[:2])

    def advance(self, emitted_RJ: Tensor, accepted_R: Tensor, states_RJF: Tensor | None) -> None:
        assert states_RJF is not None
        # Shift the emitted tokens so that the last one is at the right end.
        before_J = torch.arange(emitted_RJ.shape[1] - 1, -1, -1, device=self.table.device)
        at_RJ = (accepted_R.unsqueeze(1) - before_J).clamp_min(0)
        self.tokens_RJ.copy_(emitted_RJ.gather(1, at_RJ))
        self.states_RJF.copy_(states_RJF.gather(1, at_RJ.unsqueeze(2).expand(-1, -1, states_RJF.shape[2])))
        self.table.column(Column.LACKS).copy_(accepted_R)
