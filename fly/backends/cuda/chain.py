"""A chain drafted by a model, computed on the device alone: one forward after another, each of which may verify tokens
that prompt lookup copied.

Shape legend: R rows (padding included), D of them above temperature 0, K longest draft, W tokens copied for a forward,
J = W + 1 places of a forward, N new tokens of a row, X = K + J columns, V vocabulary, S tokens of the longest text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.backends.cuda.feed import Feed
from fly.backends.cuda.graphs import Captures, Part, Watch
from fly.backends.cuda.says import Says
from fly.backends.cuda.shape import Column
from fly.ops import Stream, argmax, derived, draw, entropy, uniforms

__all__ = ["Chain", "Proposal", "looked_up"]


class Proposal(NamedTuple):
    """What was drafted."""

    tokens_RK: Tensor
    count_R: Tensor
    probs_DKV: Tensor | None = None  # of the rows above temperature 0, where it was drawn from something
    parents_RK: Tensor | None = None  # of trees, as in ``Draft``


def looked_up(text_RS: Tensor, length_R: Tensor, longest: int, shortest: int, most: int) -> tuple[Tensor, Tensor]:
    """Prompt lookup as ``fly.drafts.ngram.Index`` does it, for all rows at once: [R, most] tokens that followed the
    longest n-gram that ends the first ``length_R`` tokens of each row and occurred before, at its latest place, and
    whether there is one. A copy that reaches the end goes on into itself."""
    width = text_RS.shape[1]
    at_S = torch.arange(width, device=text_RS.device)
    last_RN = text_RS.gather(1, (length_R.unsqueeze(1) - 1 - at_S[:longest]).clamp_min(0))
    before_RS = F.pad(text_RS, (longest - 1, 0), value=-1)  # no token is -1: nothing before the text is like it
    alike_RS = at_S < length_R.unsqueeze(1) - 1
    run_RS = torch.zeros_like(text_RS)
    for n in range(longest):
        shifted_RS = before_RS[:, longest - 1 - n : longest - 1 - n + width]
        alike_RS = alike_RS & (shifted_RS == last_RN[:, n : n + 1])
        run_RS = run_RS + alike_RS
    best_R = torch.where(run_RS >= shortest, run_RS * width + at_S, -1).amax(1)
    follows_R = best_R % width + 1
    place_RW = follows_R.unsqueeze(1) + at_S[:most] % (length_R - follows_R).clamp_min(1).unsqueeze(1)
    return text_RS.gather(1, place_RW.clamp(0, width - 1)), best_R >= 0


class Chain:
    """Drafts of up to K tokens for the rows of a ``Table``.

    If only K can end a draft, its K forwards are one graph. If it may end earlier (``DraftSpec.stops``, or because
    copied tokens were right), each forward is a graph, and the host decides whether to launch another. It decides one
    forward late, so that the device never waits for it: at most one forward is not needed.
    """

    def __init__(self, feed: Feed, says: Says | None, vocab_size: int, captures: Captures) -> None:
        self.feed, self.table, self.says = feed, feed.table, says
        shape, device = self.table.shape, self.table.device
        self.shape, self.copies = shape, shape.copies
        columns = shape.k + self.copies + 1  # the next forward overwrites what comes after the kept tokens
        self.tokens_RX = torch.zeros(shape.rows, columns, dtype=torch.int64, device=device)
        self.most_R = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.count_R = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.going_R = torch.zeros(shape.rows, dtype=torch.bool, device=device)
        self.reached_R = torch.ones(shape.rows, dtype=torch.float32, device=device)
        self.left_1 = torch.zeros(1, dtype=torch.int64, device=device)  # tokens that may still be drafted for a row
        self.probs_DXV: Tensor | None = None
        self.coins_DX: Tensor | None = None
        if shape.drawn:
            self.coins_DX = torch.zeros(shape.drawn, columns, device=device)
            self.probs_DXV = torch.zeros(shape.drawn, columns, vocab_size, device=device)
        self.watch = Watch(shape.k) if shape.paced else None
        self.all = Part(self._all, captures)
        self.first = Part(self._first, captures)
        self.more = Part(self._more, captures)
        self.captures, self.forwards = captures, 0  # forwards of the last draft

    def run(self, longest: int) -> Proposal:
        """Draft, at most ``longest`` tokens for any row."""
        if self.watch is None:
            self.all()
            self.forwards = self.shape.k
        else:
            self.first()
            self.forwards = 1
            while self.forwards < min(longest, self.shape.k):
                self.watch.leave(self.forwards - 1, self.left_1)
                # one forward is under way, and ends all that has one token left
                if self.forwards > 1 and self._seen(self.watch, self.forwards - 2) < 2:
                    break
                self.more()
                self.forwards += 1
        k = self.shape.k
        probs_DKV = None if self.probs_DXV is None else self.probs_DXV[:, :k]
        return Proposal(self.tokens_RX[:, :k], self.count_R, probs_DKV)

    def follow(self, part: Part[Any]) -> None:
        """``part`` reads what was drafted."""
        for own in (self.all, self.first, self.more):
            part.follow(own)

    def _seen(self, watch: Watch, forward: int) -> int:
        with self.captures.awaited():
            return watch.seen(forward)

    def _all(self) -> None:
        self._first()
        for _ in range(1, self.shape.k):
            self._step(False)

    def _first(self) -> None:
        self.count_R.zero_()
        self.reached_R.fill_(1.0)
        self.most_R.copy_(self._most())
        self.going_R.copy_(self.most_R > 0)
        if self.coins_DX is not None:
            self._draw_coins()
        if self.says is not None:
            self.says.begin(self.table)
        self._step(True)

    def _more(self) -> None:
        self._step(False)

    def _most(self) -> Tensor:
        """[R] tokens to draft at most."""
        column = self.table.column
        most_R = torch.minimum(column(Column.K), column(Column.LEFT) - 1)
        return torch.minimum(most_R, column(Column.CONTEXT) - column(Column.LENGTH))

    def _step(self, first: bool) -> None:
        """A forward, and the tokens that it predicts. It is fed a row's last token and what is copied after it, the
        first forward also what the drafter lacks before that."""
        table, feed, shape, copies, drawn = self.table, self.feed, self.shape, self.copies, self.shape.drawn
        most_R, count_R1 = self.most_R, self.count_R.unsqueeze(1)
        length_R = table.column(Column.LENGTH) + self.count_R  # with what is drafted so far
        if first:
            new_RN, stored_RN = feed.last(self.going_R)
        else:
            new_RN = self.tokens_RX.gather(1, (count_R1 - 1).clamp_min(0))
            stored_RN = self.going_R.unsqueeze(1)
        start_R = feed.places(length_R) - new_RN.shape[1]
        if copies:
            assert shape.spec.lookup is not None and table.text_RS is not None
            grams = shape.spec.lookup.longest, shape.spec.lookup.shortest
            copied_RW, found_R = looked_up(table.text_RS, length_R, *grams, copies)
            room_R = torch.where(found_R & self.going_R, most_R - self.count_R - 1, 0)  # one token is its own
            fed_RW = torch.arange(copies, device=table.device) < room_R.unsqueeze(1)
            new_RN, stored_RN = torch.cat([new_RN, copied_RW], 1), torch.cat([stored_RN, fed_RW], 1)
        hidden_RJC = feed.forward(new_RN, start_R, stored_RN, None if first else feed.x_R1C)[:, -copies - 1 :]
        if feed.x_R1C is not None:
            feed.x_R1C.copy_(hidden_RJC)
        logits_RJV = feed.logits(hidden_RJC)
        if self.says is not None:
            allowed_RJV = self.says.on(logits_RJV, table, self.count_R, first)
            # The vocabulary of a head may have nothing that is allowed: then the target refuses what it says.
            lost_RJ1 = allowed_RJV.amax(-1, keepdim=True) == -torch.inf
            logits_RJV = torch.where(lost_RJ1, logits_RJV, allowed_RJV)
        own_RJ, seen_RJV, at_RJ = argmax(logits_RJV), None, count_R1 + torch.arange(copies + 1, device=table.device)
        if drawn:
            assert self.probs_DXV is not None and self.coins_DX is not None
            seen_RJV = table.sampling(slice(drawn)).on(logits_RJV[:drawn]).dense()
            own_DJ = draw(seen_RJV.flatten(0, 1), self.coins_DX.gather(1, at_RJ[:drawn]).flatten()).view(drawn, -1)
            own_RJ = torch.cat([own_DJ, own_RJ[drawn:]])
            row_D1 = torch.arange(drawn, device=table.device).unsqueeze(1) * self.probs_DXV.shape[1]
            self.probs_DXV.flatten(0, 1).index_copy_(0, (row_D1 + at_RJ[:drawn]).flatten(), seen_RJV.flatten(0, 1))
        self.tokens_RX.scatter_(1, at_RJ, own_RJ)
        sure_RJ = ~(own_RJ.unsqueeze(2) == table.state_RC[:, Column.STOPS :].unsqueeze(1)).any(2)
        if shape.spec.stops:
            all_RJV = logits_RJV[drawn:].softmax(-1)
            all_RJV = all_RJV if seen_RJV is None else torch.cat([seen_RJV, all_RJV])
            peak_RJ = all_RJV.amax(-1)
            reached_RJ = self.reached_R.unsqueeze(1) * peak_RJ.cumprod(1)
            sure_RJ = sure_RJ & (peak_RJ >= shape.spec.confidence) & (entropy(all_RJV) <= shape.spec.entropy)
            sure_RJ = sure_RJ & (reached_RJ >= table.column(Column.REACH).unsqueeze(1))
        stands_R = torch.ones_like(self.count_R)
        if copies:
            stands_RW = (own_RJ[:, :-1] == copied_RW) & fed_RW & sure_RJ[:, :-1]
            stands_R = stands_R + stands_RW.cumprod(1).sum(1)
        last_R1 = stands_R.unsqueeze(1) - 1
        if shape.spec.stops:
            self.reached_R.copy_(reached_RJ.gather(1, last_R1).squeeze(1))
        if self.says is not None:
            self.says.note(own_RJ, self.going_R)
        if table.text_RS is not None:
            place_RJ = (length_R.unsqueeze(1) + torch.arange(copies + 1, device=table.device)).clamp_max(shape.text - 1)
            table.text_RS.scatter_(1, place_RJ, own_RJ)
        self.count_R.add_(torch.where(self.going_R, stands_R, 0))
        self.going_R.copy_(self.going_R & sure_RJ.gather(1, last_R1).squeeze(1) & (self.count_R < most_R))
        if self.watch is not None:
            self.left_1.copy_(torch.where(self.going_R, most_R - self.count_R, 0).amax(0, keepdim=True))

    def _draw_coins(self) -> None:
        """Uniforms of all tokens that may be drawn."""
        assert self.coins_DX is not None
        at_DX = torch.arange(self.coins_DX.shape[1], device=self.table.device).expand_as(self.coins_DX)
        length_D = self.table.column(Column.LENGTH)[: self.shape.drawn]
        seed_D = self.table.column(Column.SEED)[: self.shape.drawn]
        seed_D = seed_D if self.shape.alone else derived(seed_D, length_D)
        seed_DX, position_DX = seed_D.unsqueeze(1).expand_as(at_DX), length_D.unsqueeze(1) + at_DX
        self.coins_DX.copy_(
            uniforms(seed_DX.flatten(), position_DX.flatten(), Stream.SAMPLE, 1).view(self.coins_DX.shape)
        )
