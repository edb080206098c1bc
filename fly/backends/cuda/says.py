"""What requests ask of single tokens, applied to logits on the device: penalties, biases and bans.

Shape legend: R rows (padding included), V vocabulary, S tokens of the longest text, I ids that a row biases, C columns,
P bad words of a row, L tokens of the longest before its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from fly.backends.cuda.shape import Asked, Asking, Column
from fly.backends.cuda.table import Table

__all__ = ["Says"]

_ANY, _NEVER = -2, -3  # in place of a token of a bad word: before its first, and in no word


class _Column(IntEnum):
    """The columns of a row's requests, float64, which holds ids exactly; then ids that are biased, and by how much."""

    PROMPT = 0  # tokens of its prompt
    ENOUGH = 1  # tokens of its text from which on it may end
    REPETITION = 2
    FREQUENCY = 3
    PRESENCE = 4
    IDS = 5


class Says:
    """What the rows of a batch say, at most as much as ``asked``."""

    def __init__(self, rows: int, asked: Asked, vocab_size: int, device: torch.device) -> None:
        self.ids, self.vocab_size = asked.ids, vocab_size
        self.asked_RC = torch.zeros(rows, _Column.IDS + 2 * asked.ids, dtype=torch.float64, device=device)
        # Each bad word backwards: its last token, and then those before it.
        self.words_RPL: Tensor | None = None
        self._loaded: list[tuple[tuple[int, ...], ...]] = []
        if asked.words:
            self.words_RPL = torch.zeros(rows, asked.words, asked.before + 1, dtype=torch.int64, device=device)
        # How often each token stands in a row's text, and whether in its prompt or text; the last is for padding.
        self.times_RV = torch.zeros(rows, vocab_size + 1, dtype=torch.float32, device=device)
        self.seen_RV = torch.zeros(rows, vocab_size + 1, dtype=torch.bool, device=device)

    def load(self, rows: Sequence[Asking | None]) -> None:
        """Upload what the rows say; None is padding."""
        lines = [self._line(row) for row in rows]
        self.asked_RC.copy_(torch.tensor(lines, dtype=torch.float64).pin_memory(), non_blocking=True)
        words = [() if row is None else row.bad.words for row in rows]
        if self.words_RPL is not None and words != self._loaded:  # there may be many
            self.words_RPL.copy_(torch.tensor(list(map(self._words, words))).pin_memory(), non_blocking=True)
            self._loaded = words

    def _words(self, words: Sequence[tuple[int, ...]]) -> list[list[int]]:
        assert self.words_RPL is not None
        _, most, width = self.words_RPL.shape
        found = [[*reversed(word), *[_ANY] * (width - len(word))] for word in words]
        return [*found, *[[0, *[_NEVER] * (width - 1)]] * (most - len(words))]

    def _line(self, row: Asking | None) -> list[float]:
        if row is None or row.params is None:
            return [0, 0, 1, 0, 0, *[0] * (2 * self.ids)]
        asked, fill = row.params, [0] * (self.ids - len(row.params.logit_bias or ()))
        biases = asked.logit_bias or {}
        numbers = [asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty]
        return [row.prompt_length, asked.min_tokens, *numbers, *biases, *fill, *biases.values(), *fill]

    def begin(self, text_RS: Tensor, length_R: Tensor) -> None:
        """Count the tokens of the texts."""
        at_S = torch.arange(text_RS.shape[1], device=text_RS.device)
        known_RS = at_S < length_R.unsqueeze(1)
        spoken_RS = known_RS & (at_S >= self.asked_RC[:, _Column.PROMPT].unsqueeze(1))
        self.seen_RV.fill_(False).scatter_(1, text_RS.masked_fill(~known_RS, self.vocab_size), True)
        ids_RS = text_RS.masked_fill(~spoken_RS, self.vocab_size)
        self.times_RV.zero_().scatter_add_(1, ids_RS, torch.ones_like(ids_RS, dtype=torch.float32))

    def on(self, logits_RV: Tensor, table: Table, drafted_R: Tensor | int) -> Tensor:
        """Logits after so many drafted tokens, as ``fly.constraints.constrain`` makes them."""

        def column(which: _Column) -> Tensor:
            return self.asked_RC[:, which].unsqueeze(1)

        times_RV, seen_RV = self.times_RV[:, :-1], self.seen_RV[:, :-1]
        repetition_R1 = column(_Column.REPETITION).float()
        repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
        logits_RV = torch.where(seen_RV, repeated_RV, logits_RV)
        less_RV = column(_Column.FREQUENCY).float() * times_RV + column(_Column.PRESENCE).float()
        logits_RV = torch.where(times_RV > 0, logits_RV - less_RV, logits_RV)
        if self.ids:
            ids_RI, values_RI = self.asked_RC[:, _Column.IDS :].chunk(2, 1)
            logits_RV = logits_RV.scatter_add(1, ids_RI.long(), values_RI.float())
        if self.words_RPL is not None:
            logits_RV = self._without_words(logits_RV, self.words_RPL, table, drafted_R)
        stops_RS = table.state_RC[:, Column.STOPS :]
        spoken_R1 = (table.column(Column.LENGTH) + drafted_R).unsqueeze(1) - column(_Column.PROMPT)
        banned_RS = (stops_RS >= 0) & (spoken_R1 < column(_Column.ENOUGH))
        bans_RS = torch.zeros_like(stops_RS, dtype=torch.float32).masked_fill(banned_RS, -torch.inf)
        return logits_RV.scatter_add(1, stops_RS.clamp_min(0), bans_RS)

    def _without_words(self, logits_RV: Tensor, words_RPL: Tensor, table: Table, drafted_R: Tensor | int) -> Tensor:
        """Without the tokens that would complete a bad word."""
        assert table.text_RS is not None
        last_RP, before_RPL = words_RPL[:, :, 0], words_RPL[:, :, 1:]
        end_R1 = (table.column(Column.LENGTH) + drafted_R).unsqueeze(1)
        at_RL = end_R1 - 1 - torch.arange(before_RPL.shape[2], device=logits_RV.device)
        text_RL = table.text_RS.gather(1, at_RL.clamp_min(0)).masked_fill(at_RL < 0, -1)
        ends_RP = ((before_RPL == text_RL.unsqueeze(1)) | (before_RPL == _ANY)).all(2)
        bans_RP = torch.zeros_like(last_RP, dtype=torch.float32).masked_fill(ends_RP, -torch.inf)
        return logits_RV.scatter_add(1, last_RP, bans_RP)

    def note(self, token_R1: Tensor, going_R: Tensor) -> None:
        """Count what was drafted for the rows that go on."""
        token_R1 = token_R1.masked_fill(~going_R.unsqueeze(1), self.vocab_size)
        self.seen_RV.scatter_(1, token_R1, True)
        self.times_RV.scatter_add_(1, token_R1, torch.ones_like(token_R1, dtype=torch.float32))
