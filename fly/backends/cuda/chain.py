"""Drafts made on the device: by prompt lookup alone (``copy_tokens``), or by a drafter (``Chain``), for which prompt
lookup may draft in turn.

A ``DeviceRound`` (device_round.py) calls one of them at the start of each round. drafter.py decides which tokens a
drafter is fed.

Shape legend: R rows (padding included), D of them above temperature 0, K longest draft, W tokens copied for a forward,
J = W + 1 places that a forward predicts, X = K + J columns, N new tokens of each row, C hidden width, V vocabulary,
S tokens of the longest text.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.backends.cuda.drafter import Drafter
from fly.backends.cuda.graphs import GraphPool, Part, Shared, Watch
from fly.backends.cuda.ops import draw, uniforms
from fly.backends.cuda.table import Column, Table
from fly.ops import Stream, argmax, derived
from fly.runner.executor import Lookup

__all__ = ["Chain", "Proposal", "copy_tokens", "look_up"]


class Proposal(NamedTuple):
    """The tokens drafted in a round, in memory that stays the same from round to round."""

    tokens_RK: Tensor
    count_R: Tensor
    probs_DKV: Tensor | None = None  # distributions of drawn tokens; None: copied
    logits_RKV: Tensor | None = None  # at each token's place, if a rule reads them (``DraftSpec.with_logits``)


def look_up(text_RS: Tensor, length_R: Tensor, lookup: Lookup, count: int) -> tuple[Tensor, Tensor]:
    """Look up prompts as ``fly.drafts.ngram.Index`` does, for all rows at once.

    It finds the longest n-gram that ends the first ``length_R`` tokens of a row and occurred before, and takes its
    latest occurrence. Returns the ``count`` tokens [R, count] that followed there, and whether there is such an n-gram
    [R]. A copy that reaches the end of the text continues with the tokens just copied.
    """
    width = text_RS.shape[1]
    at_S = torch.arange(width, device=text_RS.device)
    end_RN = text_RS.gather(1, (length_R.unsqueeze(1) - 1 - at_S[: lookup.longest]).clamp_min(0))
    # Pad the front of the text with -1, which is no token.
    padded_RS = F.pad(text_RS, (lookup.longest - 1, 0), value=-1)
    # For each earlier position, count how many tokens up to it match the end of the text.
    alike_RS = at_S < length_R.unsqueeze(1) - 1
    run_RS = torch.zeros_like(text_RS)
    for n in range(lookup.longest):
        first = lookup.longest - 1 - n
        alike_RS = alike_RS & (padded_RS[:, first : first + width] == end_RN[:, n : n + 1])
        run_RS = run_RS + alike_RS
    best_R = torch.where(run_RS >= lookup.shortest, run_RS * width + at_S, -1).amax(1)  # the longest, then the latest
    follows_R = best_R % width + 1
    period_R1 = (length_R - follows_R).clamp_min(1).unsqueeze(1)
    place_RN = follows_R.unsqueeze(1) + at_S[:count] % period_R1
    return text_RS.gather(1, place_RN.clamp(0, width - 1)), best_R >= 0


def count_wanted(table: Table) -> Tensor:
    """Return the most tokens to draft, [R]. A round emits one token beyond its draft, so this is one less than what is
    left."""
    most_R = torch.minimum(table.column(Column.K), table.column(Column.LEFT) - 1)
    return torch.minimum(most_R, table.column(Column.CONTEXT) - table.column(Column.LENGTH))


def copy_tokens(table: Table, proposal: Proposal) -> None:
    """Draft by prompt lookup alone: as many tokens as are wanted, but none after one that ends the row."""
    shape, length_R = table.shape, table.column(Column.LENGTH)
    assert shape.spec.lookup is not None
    copied_RK, found_R = look_up(table.text_RS, length_R, shape.spec.lookup, shape.k)
    ends_RK = table.is_end(copied_RK).long()
    until_end_R = (ends_RK.cumsum(1) - ends_RK == 0).sum(1)
    count_R = torch.minimum(until_end_R, count_wanted(table).clamp_min(0))
    proposal.tokens_RK.copy_(copied_RK)
    proposal.count_R.copy_(torch.where(found_R, count_R, 0))


class Chain:
    """Draft up to K tokens by repeated forwards of the drafter.

    If every draft has K tokens, its K forwards are one graph. If a draft may end earlier (``Shape.ends_early``), each
    forward is a graph, and the host decides whether to launch another. The host decides one forward late: while it
    waits for the number of tokens still wanted, the device already runs the next forward. So the device is never idle,
    and at most one forward is wasted.
    """

    def __init__(self, drafter: Drafter, pool: GraphPool, shared: Shared) -> None:
        self.drafter = drafter
        self.table = drafter.table
        self.pool = pool
        self.shape = shape = drafter.table.shape
        rows = shape.rows
        drawn = shape.drawn
        device = drafter.table.device
        columns = shape.k + shape.copies + 1  # the last forward may write beyond K
        self.tokens_RX = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self.most_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.count_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.drafting_R = torch.zeros(rows, dtype=torch.bool, device=device)
        self.reached_R = torch.ones(rows, dtype=torch.float32, device=device)  # product of the largest probabilities
        self.wanted_1 = torch.zeros(1, dtype=torch.int64, device=device)  # tokens that some row still wants
        self.coins_DX = torch.zeros(drawn, columns, device=device)
        self.probs_DXV = shared.lend("draft", (drawn, columns, drafter.vocab_size), torch.float32, device)
        wide = rows if shape.spec.with_logits else 0
        self.logits_RXV = shared.lend("draft logits", (wide, columns, drafter.vocab_size), torch.float32, device)
        self.whole = Part(self._draft_whole, pool)
        self.first, self.next = Part(self._begin, pool), Part(self._go_on, pool)
        self.forwards = 0  # how many the last draft took

    @property
    def proposal(self) -> Proposal:
        k = self.shape.k
        logits_RKV = self.logits_RXV[:, :k] if self.shape.spec.with_logits else None
        return Proposal(self.tokens_RX[:, :k], self.count_R, self.probs_DXV[:, :k], logits_RKV)

    @cached_property
    def watch(self) -> Watch:
        """Read how many tokens are still wanted, if a draft may end early."""
        return Watch(self.shape.k)

    def draft(self, longest: int) -> None:
        """Draft, at most ``longest`` tokens for any row."""
        if not self.shape.ends_early:
            self.whole()
            self.forwards = self.shape.k
            return
        self.first()
        self.forwards = 1
        while self.forwards < min(longest, self.shape.k):
            self.watch.begin(self.forwards - 1, self.wanted_1)
            # Read how many tokens were still wanted before the current forward. That forward drafts at least one more
            # for each row, so if fewer than two were wanted, nothing is left to draft.
            if self.forwards > 1:
                with self.pool.awaited():
                    wanted = self.watch.read(self.forwards - 2)
                if wanted < 2:
                    break
            self.next()
            self.forwards += 1

    def _draft_whole(self) -> None:
        self._begin()
        for _ in range(1, self.shape.k):
            self._go_on()

    def _begin(self) -> None:
        """Run the first forward of a draft. It is fed the tokens that the drafter lacks, up to the row's last one."""
        self.count_R.zero_()
        self.reached_R.fill_(1.0)
        self.most_R.copy_(count_wanted(self.table))
        self.drafting_R.copy_(self.most_R > 0)
        if self.shape.drawn:
            self.coins_DX.copy_(self._flip_coins())
        self._predict(*self.drafter.begin_draft(self.drafting_R), first=True)

    def _go_on(self) -> None:
        """Run a further forward, which is fed the token drafted last."""
        last_R1 = self.tokens_RX.gather(1, (self.count_R.unsqueeze(1) - 1).clamp_min(0))
        self._predict(last_R1, self.drafting_R.unsqueeze(1), first=False)

    def _flip_coins(self) -> Tensor:
        """Return the uniforms [D, X] for all tokens that may be drawn. Each is a hash of the row's seed, of the
        position where the round began, and of the token's position, as on every other device."""
        drawn, columns = self.coins_DX.shape
        length_D = self.table.column(Column.LENGTH)[:drawn]
        seed_D = derived(self.table.column(Column.SEED)[:drawn], length_D)
        position_DX = length_D.unsqueeze(1) + torch.arange(columns, device=self.table.device)
        seed_DX = seed_D.unsqueeze(1).expand_as(position_DX)
        return uniforms(seed_DX.flatten(), position_DX.flatten(), Stream.SAMPLE, 1).view(drawn, columns)

    def _predict(self, new_RN: Tensor, stored_RN: Tensor, first: bool) -> None:
        """Run one forward over ``new_RN``, the last tokens of each row, and draft the tokens that it predicts."""
        table = self.table
        copies = self.shape.copies
        device = table.device
        length_R = table.column(Column.LENGTH) + self.count_R  # drafted tokens included
        start_R = self.drafter.count_slots(length_R) - new_RN.shape[1]
        if copies:  # this forward also verifies tokens that prompt lookup copies
            assert self.shape.spec.lookup is not None
            copied_RW, found_R = look_up(table.text_RS, length_R, self.shape.spec.lookup, copies)
            room_R = torch.where(found_R & self.drafting_R, self.most_R - self.count_R - 1, 0)  # 1: its own token
            fed_RW = torch.arange(copies, device=device) < room_R.unsqueeze(1)
            new_RN, stored_RN = torch.cat([new_RN, copied_RW], 1), torch.cat([stored_RN, fed_RW], 1)
        hidden_RJC = self.drafter.forward(new_RN, start_R, stored_RN, first)[:, -copies - 1 :]
        # No float32 logits are written if only the likeliest tokens are needed.
        spec = self.shape.spec
        logits_RJV = self.drafter.logits(hidden_RJC, self.shape.drawn > 0 or spec.stops or spec.with_logits)

        # Choose the drafter's own token at each place, and whether drafting goes on after it.
        at_RJ = self.count_R.unsqueeze(1) + torch.arange(copies + 1, device=device)
        own_RJ, probs_DJV = self._choose(logits_RJV, at_RJ)
        if spec.with_logits:
            self.logits_RXV[torch.arange(len(at_RJ), device=device).unsqueeze(1), at_RJ] = logits_RJV.float()
        sure_RJ, reached_RJ = self._is_sure(own_RJ, logits_RJV, probs_DJV)

        # Keep copied tokens as long as the drafter chooses the same ones and is sure of them. Its own token follows.
        stands_R = torch.ones_like(self.count_R)
        if copies:
            stands_RW = (own_RJ[:, :-1] == copied_RW) & fed_RW & sure_RJ[:, :-1]
            stands_R = stands_R + stands_RW.cumprod(1).sum(1)
        last_R1 = stands_R.unsqueeze(1) - 1
        sure_R = sure_RJ.gather(1, last_R1).squeeze(1)

        # Write them down. The next forward overwrites whatever stands after the kept ones.
        self.tokens_RX.scatter_(1, at_RJ, own_RJ)
        table.write_text(length_R, own_RJ)
        if reached_RJ is not None:
            self.reached_R.copy_(reached_RJ.gather(1, last_R1).squeeze(1))
        self.count_R.add_(torch.where(self.drafting_R, stands_R, 0))
        self.drafting_R.copy_(self.drafting_R & sure_R & (self.count_R < self.most_R))
        if self.shape.ends_early:
            self.wanted_1.copy_(torch.where(self.drafting_R, self.most_R - self.count_R, 0).amax(0, keepdim=True))

    def _choose(self, logits_RJV: Tensor, at_RJ: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choose the drafter's token at each place [R, J]: the likeliest one, or one drawn from the distributions [D,
        J, V], which are kept."""
        own_RJ, drawn = argmax(logits_RJV), self.shape.drawn
        if not drawn:
            return own_RJ, None
        probs_DJV = self.table.process(slice(drawn), logits_RJV[:drawn]).dense()
        coins_DJ = self.coins_DX.gather(1, at_RJ[:drawn])
        own_DJ = draw(probs_DJV.flatten(0, 1), coins_DJ.flatten()).view(drawn, -1)
        row_D1 = torch.arange(drawn, device=self.table.device).unsqueeze(1)
        self.probs_DXV[row_D1, at_RJ[:drawn]] = probs_DJV
        return torch.cat([own_DJ, own_RJ[drawn:]]), probs_DJV

    def _is_sure(self, own_RJ: Tensor, logits_RJV: Tensor, probs_DJV: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return whether drafting goes on after each token [R, J], as ``fly.runner.drafting.Certainty`` decides it,
        and, if needed, the product of the largest probabilities up to there."""
        goes_on_RJ, spec = ~self.table.is_end(own_RJ), self.shape.spec
        if not spec.stops:
            return goes_on_RJ, None
        probs_RJV = logits_RJV[self.shape.drawn :].softmax(-1)
        probs_RJV = probs_RJV if probs_DJV is None else torch.cat([probs_DJV, probs_RJV])
        peak_RJ = probs_RJV.amax(-1)
        reached_RJ = self.reached_R.unsqueeze(1) * peak_RJ.cumprod(1)
        goes_on_RJ = goes_on_RJ & (peak_RJ >= spec.confidence)
        return goes_on_RJ & (reached_RJ >= self.table.column(Column.REACH).unsqueeze(1)), reached_RJ
