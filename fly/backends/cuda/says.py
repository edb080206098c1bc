"""What requests ask of single tokens, applied to logits on the device: penalties, biases, bans, and what a form allows
next.

Shape legend: R rows (padding included), J places of a row, V vocabulary, W = V/8, S tokens of the longest text or that
end a row, I ids that a row biases, C columns, P bad words of a row, L tokens of the longest before its last, D tokens
on the path to a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.nn.functional as F
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
    """What the rows of a batch say, at most as much as ``asked`` (None: nothing), and with ``forms`` what the first
    token of each row may be."""

    def __init__(self, rows: int, asked: Asked | None, forms: bool, vocab_size: int, device: torch.device) -> None:
        self.ids, self.vocab_size = 0 if asked is None else asked.ids, vocab_size
        self.asked_RC: Tensor | None = None
        # Each bad word backwards: its last token, and then those before it.
        self.words_RPL: Tensor | None = None
        self._loaded: list[tuple[tuple[int, ...], ...]] = []
        if asked is not None:
            self.asked_RC = torch.zeros(rows, _Column.IDS + 2 * asked.ids, dtype=torch.float64, device=device)
            if asked.words:
                self.words_RPL = torch.zeros(rows, asked.words, asked.before + 1, dtype=torch.int64, device=device)
            # How often each token stands in a row's text, and whether in its prompt or text; the last is for padding.
            self.times_RV = torch.zeros(rows, vocab_size + 1, dtype=torch.float32, device=device)
            self.seen_RV = torch.zeros(rows, vocab_size + 1, dtype=torch.bool, device=device)
        self.allowed_RW: Tensor | None = None  # bytes, a bit for each token
        if forms:
            self.allowed_RW = torch.zeros(rows, -(-vocab_size // 8), dtype=torch.uint8, device=device)

    def load(self, rows: Sequence[Asking | None]) -> None:
        """Upload what the rows say; None is padding."""
        if self.asked_RC is None:
            return
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

    def allow(self, masks: Sequence[bytearray | None]) -> None:
        """What the first token of each row may be: a bit for each, or None where it may be any."""
        assert self.allowed_RW is not None
        width = self.allowed_RW.shape[1]
        joined = b"".join(b"\xff" * width if mask is None else mask[:width].ljust(width, b"\0") for mask in masks)
        bits_RW = torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(masks), width)
        self.allowed_RW.copy_(bits_RW.pin_memory(), non_blocking=True)

    def begin(self, table: Table) -> None:
        """Count the tokens of the texts."""
        if self.asked_RC is None:
            return
        text_RS, length_R = table.text_RS, table.column(Column.LENGTH)
        assert text_RS is not None
        at_S = torch.arange(text_RS.shape[1], device=text_RS.device)
        known_RS = at_S < length_R.unsqueeze(1)
        spoken_RS = known_RS & (at_S >= self.asked_RC[:, _Column.PROMPT].unsqueeze(1))
        self.seen_RV.fill_(False).scatter_(1, text_RS.masked_fill(~known_RS, self.vocab_size), True)
        ids_RS = text_RS.masked_fill(~spoken_RS, self.vocab_size)
        self.times_RV.zero_().scatter_add_(1, ids_RS, torch.ones_like(ids_RS, dtype=torch.float32))

    def on(
        self,
        logits_RJV: Tensor,
        table: Table,
        drafted_R: Tensor | int,
        first: bool,
        path_RJD: Tensor | None = None,
    ) -> Tensor:
        """Logits as ``fly.constraints.constrain`` makes them, after so many drafted tokens, which were ``note``d. In a
        tree the tokens before each place are ``path_RJD``, and ``drafted_R`` is not read. ``first``: these are of the
        first drafted token, which alone the form is applied to."""
        made_RJV = logits_RJV
        if self.asked_RC is not None:
            made_RJV = self._asked(logits_RJV, self.asked_RC, table, drafted_R, path_RJD)
        if not first or self.allowed_RW is None:
            return made_RJV
        bits_RW8 = self.allowed_RW.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=table.device)
        banned_R1V = ((bits_RW8 & 1) == 0).flatten(1)[:, : logits_RJV.shape[2]].unsqueeze(1)
        banned_RJV = F.pad(banned_R1V, (0, 0, 0, logits_RJV.shape[1] - 1))  # what is copied is none of it
        made_RJV = made_RJV.masked_fill(banned_RJV, -torch.inf)
        if self.asked_RC is not None:  # the form wins where both forbid everything
            lost_RJ1 = made_RJV.amax(-1, keepdim=True) == -torch.inf
            made_RJV = torch.where(lost_RJ1, logits_RJV.masked_fill(banned_RJV, -torch.inf), made_RJV)
        return made_RJV

    def _asked(
        self,
        logits_RJV: Tensor,
        asked_RC: Tensor,
        table: Table,
        drafted_R: Tensor | int,
        path_RJD: Tensor | None,
    ) -> Tensor:
        """Penalties, biases and bans."""
        places = logits_RJV.shape[1]

        def column(which: _Column) -> Tensor:
            return asked_RC[:, which].view(-1, 1, 1)

        def at_all(values_RX: Tensor) -> Tensor:
            return values_RX.unsqueeze(1).expand(-1, places, -1)

        times_RJV, seen_RJV, length_R = at_all(self.times_RV), at_all(self.seen_RV), table.column(Column.LENGTH)
        if path_RJD is not None:
            times_RJV = times_RJV.scatter_add(2, path_RJD, torch.ones_like(path_RJD, dtype=torch.float32))
            seen_RJV, drafted_R = seen_RJV.scatter(2, path_RJD, True), path_RJD.shape[2]
        times_RJV, seen_RJV = times_RJV[:, :, :-1], seen_RJV[:, :, :-1]
        repetition_R11 = column(_Column.REPETITION).float()
        repeated_RJV = torch.where(logits_RJV > 0, logits_RJV / repetition_R11, logits_RJV * repetition_R11)
        logits_RJV = torch.where(seen_RJV, repeated_RJV, logits_RJV)
        less_RJV = column(_Column.FREQUENCY).float() * times_RJV + column(_Column.PRESENCE).float()
        logits_RJV = torch.where(times_RJV > 0, logits_RJV - less_RJV, logits_RJV)
        if self.ids:
            ids_RI, values_RI = asked_RC[:, _Column.IDS :].chunk(2, 1)
            logits_RJV = logits_RJV.scatter_add(2, at_all(ids_RI.long()), at_all(values_RI.float()))
        if self.words_RPL is not None:
            before = self.words_RPL.shape[2] - 1
            text_RJL = at_all(self._ends(table, length_R if path_RJD is not None else length_R + drafted_R, before))
            if path_RJD is not None:
                text_RJL = torch.cat([path_RJD.flip(2), text_RJL], 2)[:, :, :before]
            logits_RJV = self._without_words(logits_RJV, self.words_RPL, text_RJL)
        stops_RS = table.state_RC[:, Column.STOPS :]
        spoken_R1 = (length_R + drafted_R).unsqueeze(1) - asked_RC[:, _Column.PROMPT : _Column.PROMPT + 1]
        banned_RS = (stops_RS >= 0) & (spoken_R1 < asked_RC[:, _Column.ENOUGH : _Column.ENOUGH + 1])
        bans_RS = torch.zeros_like(stops_RS, dtype=torch.float32).masked_fill(banned_RS, -torch.inf)
        return logits_RJV.scatter_add(2, at_all(stops_RS.clamp_min(0)), at_all(bans_RS))

    @staticmethod
    def _ends(table: Table, end_R: Tensor, count: int) -> Tensor:
        """[R, count] the last tokens of each text, backwards; -1 before its first."""
        assert table.text_RS is not None
        at_RL = end_R.unsqueeze(1) - 1 - torch.arange(count, device=table.device)
        return table.text_RS.gather(1, at_RL.clamp_min(0)).masked_fill(at_RL < 0, -1)

    @staticmethod
    def _without_words(logits_RJV: Tensor, words_RPL: Tensor, text_RJL: Tensor) -> Tensor:
        """Without the tokens that would complete a bad word after these, backwards."""
        last_RP, before_R1PL = words_RPL[:, :, 0], words_RPL[:, None, :, 1:]
        ends_RJP = ((before_R1PL == text_RJL.unsqueeze(2)) | (before_R1PL == _ANY)).all(3)
        bans_RJP = torch.zeros_like(ends_RJP, dtype=torch.float32).masked_fill(ends_RJP, -torch.inf)
        return logits_RJV.scatter_add(2, last_RP.unsqueeze(1).expand(-1, text_RJL.shape[1], -1), bans_RJP)

    def note(self, token_R1: Tensor, going_R: Tensor) -> None:
        """Count what was drafted for the rows that go on."""
        if self.asked_RC is None:
            return
        token_R1 = token_R1.masked_fill(~going_R.unsqueeze(1), self.vocab_size)
        self.seen_RV.scatter_(1, token_R1, True)
        self.times_RV.scatter_add_(1, token_R1, torch.ones_like(token_R1, dtype=torch.float32))
